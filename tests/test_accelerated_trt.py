# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""AcceleratedEncoder over the strict double of TensorRT: build, load, serve, LoRA, faults."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from double import HostPlace, World, plan_from_graph
from octavo import accelerated as module
from octavo import compile as compiler
from octavo import trt
from octavo.accelerated import AcceleratedEncoder, Patched
from octavo.backends.onnx_ops import emit
from octavo.bench import LiveHost
from octavo.choose import Packages
from octavo.device import Device
from octavo.engine_cache import EngineCache
from octavo.recipes import load_recipe
from octavo.seeded import TINY, seeded_tensors
from octavo.trt import session as session_module
from octavo.trt.build import BuiltPlan
from torch import Tensor

ADA = Device("cuda", 0, "NVIDIA GeForce RTX 4090", 89, driver="580.10")
RTX_ONLY = Packages(
    trt.Installed("1.7.1.116", "cu13"), trt.Missing("it is not here", "get it"), True
)
FC1 = "text_model.encoder.layers.1.mlp.fc1.weight"


class Machine:
    """One simulated machine with TensorRT-RTX: builds are counted, faults are in `world.faults`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: EngineCache) -> None:
        self.world, self.cache, self.builds = World(), cache, 0
        self.place: HostPlace = self.world.place()
        self.damage: Callable[[bytes], bytes] = lambda plan: plan
        monkeypatch.setattr(trt, "load", lambda _: self.world.module)
        monkeypatch.setattr(compiler, "installed", lambda _: RTX_ONLY.tensorrt_rtx)
        monkeypatch.setattr(compiler, "build_plan", self.build)
        real = session_module.session_from_plan

        def opened(plan: Any, *, weights: dict[str, Tensor], **options: Any) -> Any:
            session = real(plan, weights=self.moved(weights), place=self.place, **options)
            swap = session.swap_weights
            session.swap_weights = lambda new: swap(self.moved(new))
            return session

        monkeypatch.setattr(session_module, "session_from_plan", opened)

    def moved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.place.copied(tensor) for name, tensor in tensors.items()}

    def build(self, request: Any, *, target: Path, **_: Any) -> BuiltPlan:
        self.builds += 1
        by_model = {}
        for kept in ("fp8", "16bit"):
            structure = {n: kept if n.endswith("out_proj") else "fp8" for n in TINY.linears()}
            by_model[emit(TINY, structure).model] = (emit(TINY, structure), None)
        structure = dict.fromkeys(TINY.linears(), "16bit")
        bf16 = emit(TINY, structure, body="bfloat16")
        by_model[bf16.model] = (bf16, emit(TINY, structure, body="float32"))
        graph, twin = by_model[request.onnx]
        target.write_bytes(self.damage(plan_from_graph(graph, twin, sms=request.sms)))
        size = target.stat().st_size
        return BuiltPlan(target, size, "", 0.1, 0, request.sms, "tensorrt_rtx", "1.7.1.116", None)


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_failed", {})


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return dict(seeded_tensors(TINY, outliers=False))


@pytest.fixture(scope="module")
def checkpoints(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the FP8 checkpoint, made once."""
    cache = EngineCache(tmp_path_factory.mktemp("made"))
    host = LiveHost("clip_l", TINY, tensors, torch.device("cpu"))
    compiler.make_checkpoint(host, compiler.fingerprint_of(host), load_recipe("fp8"), cache)
    return cache.root


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: Path
) -> Iterator[Machine]:
    shutil.copytree(checkpoints, tmp_path / "cache")
    made = Machine(monkeypatch, EngineCache(tmp_path / "cache"))
    yield made
    assert made.world.violations == []


@pytest.fixture
def host(tensors: dict[str, Tensor]) -> LiveHost:
    return LiveHost("clip_l", TINY, tensors, torch.device("cpu"))


def encoder_of(host: LiveHost, machine: Machine, **options: Any) -> AcceleratedEncoder:
    options = {"cache": machine.cache, "device": ADA, "packages": RTX_ONLY, **options}
    return AcceleratedEncoder(host, **options)


def prompt(seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randn(batch, 77, TINY.width, generator=torch.Generator().manual_seed(seed)) * 0.02


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).mean())


def test_tensorrt_serves_builds_once_and_frees_everything(host: LiveHost, machine: Machine) -> None:
    for _ in range(2):
        with encoder_of(host, machine) as encoder:
            for batch in (1, 3, 17):
                _, last = encoder.encode(prompt(batch=batch))
                assert cosine(last, host.encode(prompt(batch=batch))[1]) > 0.99
            report = encoder.report()
            assert (report.engine, report.recipe) == ("tensorrt_rtx", "fp8")
            assert report.plan and machine.cache.get("plan", report.plan)
    assert machine.builds == 1
    assert machine.world.count("engine") == machine.world.count("context") == 0


def test_lora_is_another_set_of_inputs_under_the_same_plan(
    host: LiveHost, machine: Machine, tensors: dict[str, Tensor]
) -> None:
    changed = {**tensors, FC1: tensors[FC1] * 1.7}
    lora = Patched("lora", changed.__getitem__)
    with encoder_of(host, machine) as encoder:
        base = encoder.encode(prompt())[1].clone()
        got = encoder.encode(prompt(), None, lora)[1].clone()
        want = LiveHost("x", TINY, changed, torch.device("cpu")).encode(prompt())[1]
        assert cosine(got, want) > 0.99 and cosine(got, want) > cosine(base, want)
        assert torch.equal(encoder.encode(prompt())[1], base)
        assert torch.equal(encoder.encode(prompt(), None, lora)[1], got)
    assert machine.builds == 1


def test_a_real_mask_goes_to_the_host_and_ones_do_not(host: LiveHost, machine: Machine) -> None:
    with encoder_of(host, machine) as encoder:
        mask = torch.ones(1, 77)
        assert torch.equal(encoder.encode(prompt(), mask)[1], encoder.encode(prompt())[1])
        mask[0, 9:] = 0
        assert torch.equal(encoder.encode(prompt(), mask)[1], host.encode(prompt(), mask)[1])
        assert encoder.report().engine == "tensorrt_rtx"


FAULTS: list[tuple[str, Any]] = [
    ("runtime", "none"),
    ("runtime", "null"),
    ("runtime", RuntimeError("CUDA error 35")),
    ("validity", 4),
    ("deserialize", None),
    ("config", None),
    ("context", None),
    ("context", RuntimeError("out of memory")),
    ("oom", 0),
    ("truncated", None),
]


@pytest.mark.parametrize(("fault", "value"), FAULTS, ids=[f"{f} {v}" for f, v in FAULTS])
def test_every_fault_at_load_leads_to_the_next_engine(
    host: LiveHost, machine: Machine, fault: str, value: Any
) -> None:
    """Whatever the double can do wrong at load, torch_fp8 answers, and nothing stays behind."""
    if fault == "truncated":
        machine.damage = lambda plan: plan[: len(plan) // 2]
    else:
        machine.world.faults[fault] = value
    with encoder_of(host, machine) as encoder:
        _, last = encoder.encode(prompt())
        assert cosine(last, host.encode(prompt())[1]) > 0.99
        report = encoder.report()
        assert report.engine == "torch_fp8"
        assert any(r.engine == "tensorrt_rtx" for r in report.refusals)
    assert machine.world.count("engine") == machine.world.count("context") == 0


@pytest.mark.parametrize(
    "changes",
    [{"sms": (120,)}, {"version": "1.6.1.120"}],
    ids=["another GPU", "another version"],
)
def test_a_plan_that_is_not_for_this_machine_is_not_run(
    host: LiveHost, machine: Machine, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    structure = dict.fromkeys(TINY.linears(), "fp8")
    foreign = plan_from_graph(emit(TINY, structure), **changes)
    machine.damage = lambda _: foreign
    with encoder_of(host, machine) as encoder:
        encoder.encode(prompt())
        assert encoder.report().engine == "torch_fp8"


def test_a_flipped_byte_in_the_cache_is_built_again(host: LiveHost, machine: Machine) -> None:
    with encoder_of(host, machine) as encoder:
        plan = encoder.prepare().plan
    entry = machine.cache.get("plan", plan)
    data = bytearray(entry.path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.path.write_bytes(data)
    with encoder_of(host, machine) as encoder:
        assert encoder.prepare().engine == "tensorrt_rtx"
    assert machine.builds == 2


def test_a_plan_replaced_on_disk_while_loaded_changes_nothing(
    host: LiveHost, machine: Machine
) -> None:
    with encoder_of(host, machine) as encoder:
        want = encoder.encode(prompt())[1].clone()
        entry = machine.cache.get("plan", encoder.report().plan)
        entry.path.write_bytes(b"something else")
        assert torch.equal(encoder.encode(prompt())[1], want)


def test_a_session_that_fails_in_a_call_is_replaced_with_one_log_line(
    host: LiveHost, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with encoder_of(host, machine) as encoder:
        encoder.prepare()
        machine.world.faults["execute"] = 1
        with caplog.at_level(logging.WARNING, logger="octavo.accelerated"):
            _, last = encoder.encode(prompt())
        assert cosine(last, host.encode(prompt())[1]) > 0.99
        assert encoder.report().engine == "torch_fp8"
        assert sum("is not used again" in r.message for r in caplog.records) == 1


def test_a_wrong_answer_is_found_before_it_serves(
    host: LiveHost, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = session_module.Session.encode

    def shuffled(self: Any, embeds: Tensor, mask: Tensor | None = None) -> Any:
        hidden, last = real(self, embeds, mask)
        return hidden, last.roll(1, dims=-1)

    monkeypatch.setattr(session_module.Session, "encode", shuffled)
    with encoder_of(host, machine) as encoder:
        report = encoder.prepare()
    assert report.engine == "torch_fp8"
    reason = next(r.reason for r in report.refusals if r.engine == "tensorrt_rtx")
    assert "not close enough to FP32" in reason


def test_tensorrt_that_raises_on_import_leads_to_the_next_engine(
    host: LiveHost, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> Any:
        raise module.EngineUnavailable("tensorrt_rtx", "libcudart is missing", "reinstall it")

    monkeypatch.setattr(trt, "load", broken)
    with encoder_of(host, machine) as encoder:
        report = encoder.prepare()
    assert report.engine == "torch_fp8"
    assert any("libcudart" in r.reason for r in report.refusals)


def test_a_failing_build_leads_to_the_next_engine(
    host: LiveHost, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise compiler.BuildError("plan", "the builder was killed", "close other programs")

    monkeypatch.setattr(compiler, "build_plan", broken)
    with encoder_of(host, machine) as encoder:
        report = encoder.prepare()
    assert report.engine == "torch_fp8"
    assert any("the builder was killed" in r.reason for r in report.refusals)
