# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""AcceleratedEncoder on a CPU: the device is invented, so that torch_fp8 (simulated) serves."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import accelerated as module
from octavo.accelerated import AcceleratedEncoder, Patched
from octavo.backends.torch_fp8 import TorchFp8Engine
from octavo.bench import LiveHost
from octavo.checkpoints import detect, fingerprint
from octavo.choose import Packages
from octavo.compile import fingerprint_of
from octavo.device import Device
from octavo.engine_cache import EngineCache
from octavo.errors import EngineUnavailable, FileError, OctavoBug, OctavoError
from octavo.seeded import TINY, seeded_tensors
from octavo.trt import Missing
from safetensors import SafetensorError
from together import in_threads
from torch import Tensor

ADA = Device("cuda", 0, "NVIDIA GeForce RTX 4090", 89, driver="580.10")
NO_TENSORRT = Packages(Missing("it is not here", "get it"), Missing("nor is it", "get it"), True)
FC1 = "text_model.encoder.layers.0.mlp.fc1.weight"


class CountingHost(LiveHost):
    """A host that counts how often its own PyTorch answered."""

    calls = 0

    def encode(self, embeds: Tensor, mask: Tensor | None) -> Any:
        self.calls += 1
        return super().encode(embeds, mask)


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_failed", {})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrates without ModelOpt, whose import and search take seconds."""
    monkeypatch.setattr("octavo.calibrate.has_modelopt", lambda: False)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return dict(seeded_tensors(TINY, outliers=False))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> EngineCache:
    return EngineCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def host(tensors: dict[str, Tensor]) -> CountingHost:
    return CountingHost("clip_l", TINY, tensors, torch.device("cpu"))


@pytest.fixture
def make(host: CountingHost, cache: EngineCache) -> Iterator[Callable[..., AcceleratedEncoder]]:
    made: list[AcceleratedEncoder] = []

    def build(**options: Any) -> AcceleratedEncoder:
        options = {"cache": cache, "device": ADA, "packages": NO_TENSORRT, **options}
        made.append(AcceleratedEncoder(options.pop("host", host), **options))
        return made[-1]

    yield build
    for encoder in made:
        encoder.close()


def prompt(seed: int = 0, batch: int = 1, tokens: int = 77) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, TINY.width, generator=generator) * 0.02


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).mean())


def test_nothing_happens_before_the_first_prompt(make, monkeypatch) -> None:
    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("heavy work at construction")

    monkeypatch.setattr(module, "make_checkpoint", touched)
    monkeypatch.setattr(module, "probe", touched)
    make()


def test_fp8_serves_and_is_close_to_the_host(make, host) -> None:
    encoder = make()
    hidden, last = encoder.encode(prompt())
    assert host.calls == 0
    report = encoder.report()
    assert (report.engine, report.recipe) == ("torch_fp8", "fp8")
    assert report.similarity is not None and report.similarity.token_mean > 0.99
    want_hidden, want_last = host.encode(prompt(), None)
    assert len(hidden) == TINY.layers + 1 == len(want_hidden)
    assert cosine(last, want_last) > 0.99
    for got, want in zip(hidden, want_hidden, strict=True):
        assert got.shape == want.shape and cosine(got, want) > 0.99
    assert not torch.equal(last.float(), want_last.float()), "FP8 was not used"
    assert encoder.vram_bytes > 0
    assert (
        "torch_fp8" in report.text()
        and "not tensorrt_rtx with fp8: it is not here" in report.text()
    )


def test_results_are_fresh_and_repeatable(make) -> None:
    encoder = make()
    _, first = encoder.encode(prompt(1))
    kept = first.clone()
    _, second = encoder.encode(prompt(2))
    assert torch.equal(first, kept) and not torch.equal(first, second)
    assert torch.equal(encoder.encode(prompt(1))[1], kept)


@pytest.mark.parametrize(
    "embeds",
    [
        torch.zeros(77, TINY.width),
        torch.zeros(1, 78, TINY.width),
        torch.zeros(1, 77, TINY.width + 1),
        torch.zeros(1, 77, TINY.width, dtype=torch.float64),
        torch.zeros(0, 77, TINY.width),
        torch.zeros(1, 77, TINY.width, requires_grad=True),
    ],
    ids=["2-D", "too long", "too wide", "float64", "no rows", "grad"],
)
def test_what_no_engine_was_built_for_goes_to_the_host(make, host, monkeypatch, embeds) -> None:
    encoder = make()
    encoder.prepare()
    answer = (("host",), torch.ones(()))
    monkeypatch.setattr(host, "encode", lambda *_: answer)
    assert encoder.encode(embeds) is answer
    assert encoder.report().engine == "torch_fp8", "an odd request must not demote the engine"


def test_masks(make, host) -> None:
    encoder = make()
    mask = torch.ones(2, 77, dtype=torch.long)
    mask[1, 5:] = 0
    _, got = encoder.encode(prompt(batch=2), mask)
    assert host.calls == 0
    assert cosine(got, host.encode(prompt(batch=2), mask)[1]) > 0.99
    mask[0, 0] = 0  # a query with nothing to attend to: hosts differ, so the host answers
    calls = host.calls
    encoder.encode(prompt(batch=2), mask)
    assert host.calls == calls + 1


def test_cpu_is_served_by_the_host_with_the_reason(make, host) -> None:
    encoder = make(device=Device("cpu"))
    got = encoder.encode(prompt())[1]
    assert torch.equal(got, host.encode(prompt(), None)[1])
    report = encoder.report()
    assert report.engine == "host" and report.vram_bytes == 0
    assert {r.engine for r in report.refusals} == {"tensorrt_rtx", "tensorrt", "torch_fp8"}
    assert all("cpu" in r.reason for r in report.refusals)


def test_ampere_gets_16_bit_and_turing_the_host(make) -> None:
    encoder = make(device=Device("cuda", 0, "NVIDIA GeForce RTX 3060", 86))
    assert encoder.prepare().recipe == "bf16"
    assert make(device=Device("cuda", 0, "Tesla T4", 75)).prepare().engine == "host"


def test_a_forced_engine_that_cannot_serve_raises(make, monkeypatch) -> None:
    with pytest.raises(EngineUnavailable, match="it is not here"):
        make(engine="tensorrt_rtx").encode(prompt())
    monkeypatch.setenv("OCTAVO_ENGINE", "tensorrt")
    with pytest.raises(EngineUnavailable, match="nor is it"):
        make().encode(prompt())
    with pytest.raises(OctavoError, match="choose one of"):
        make(engine="warp").encode(prompt())
    monkeypatch.setenv("OCTAVO_ENGINE", "warp")
    with pytest.raises(OctavoError, match=r"^OCTAVO_ENGINE: the engine 'warp' does not exist; uns"):
        make().encode(prompt())
    monkeypatch.delenv("OCTAVO_ENGINE")
    with pytest.raises(EngineUnavailable) as caught:  # one sentence, made of another
        make(engine="torch_fp8", cache=EngineCache(Path(__file__) / "cache")).encode(prompt())
    assert re.search(r"[^.]; use engine 'auto' to let Octavo choose\.$", str(caught.value))
    assert make(engine="torch_fp8").prepare().engine == "torch_fp8"
    monkeypatch.setenv("OCTAVO_ENGINE", "")  # as good as unset
    make().encode(prompt())


def test_the_environment_forces_the_host(make, host, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_ENGINE", "host")
    make().encode(prompt())
    assert host.calls == 1


def test_demotion_through_recipes_with_reasons(make, monkeypatch) -> None:
    real = module._check_engine

    def poor(engine: Any, *arguments: Any, **options: Any) -> Any:
        found = real(engine, *arguments, **options)
        fp8 = any(w.weight.dtype == torch.float8_e4m3fn for w in engine.test_linears)
        return module.replace(found, token_mean=0.5) if fp8 else found

    start = TorchFp8Engine.__init__

    def noted(self: Any, spec: Any, weights: Any, *arguments: Any, **options: Any) -> None:
        start(self, spec, weights, *arguments, **options)
        self.test_linears = list(weights.linears.values())

    monkeypatch.setattr(TorchFp8Engine, "__init__", noted)
    monkeypatch.setattr(module, "_check_engine", poor)
    report = make().prepare()
    assert report.recipe == "bf16"
    reasons = {r.recipe: r.reason for r in report.refusals if r.engine == "torch_fp8"}
    assert set(reasons) == {"fp8", "fp8-mixed"}
    assert "token_mean 0.5 is under the floor" in reasons["fp8"]


@pytest.mark.parametrize("answer", [float("nan"), 1.0], ids=["not finite", "constant"])
def test_an_engine_that_answers_nonsense_never_serves(make, host, monkeypatch, answer) -> None:
    real = TorchFp8Engine.encode

    def nonsense(self: Any, embeds: Tensor, mask: Tensor | None = None) -> Any:
        hidden, last = real(self, embeds, mask)
        return tuple(torch.full_like(h, answer) for h in hidden), torch.full_like(last, answer)

    monkeypatch.setattr(TorchFp8Engine, "encode", nonsense)
    encoder = make()
    encoder.encode(prompt())
    assert encoder.report().engine == "host" and host.calls == 1


@pytest.mark.parametrize(
    "error",
    [
        EngineUnavailable("torch_fp8", "it broke", "use another"),
        torch.cuda.OutOfMemoryError("full"),
    ],
    ids=["typed", "out of memory"],
)
def test_failure_in_a_call_is_answered_by_the_next_engine(
    make, host, monkeypatch, caplog, error
) -> None:
    encoder = make()
    encoder.prepare()

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(TorchFp8Engine, "encode", broken)
    with caplog.at_level(logging.WARNING, logger="octavo.accelerated"):
        got = encoder.encode(prompt())[1]
    assert torch.equal(got, host.encode(prompt(), None)[1])
    assert sum("is not used again" in r.message for r in caplog.records) == 1
    caplog.clear()
    encoder.encode(prompt())
    assert not [r for r in caplog.records if "is not used again" in r.message], "it was tried again"


def test_failures_are_remembered_for_the_process(make, monkeypatch) -> None:
    starts = []

    def broken(self: Any, *_: Any, **__: Any) -> None:
        starts.append(1)
        raise EngineUnavailable("torch_fp8", "no luck", "use another")

    monkeypatch.setattr(TorchFp8Engine, "__init__", broken)
    assert make().prepare().engine == "host"
    tried = len(starts)
    assert tried == 3  # fp8, fp8-mixed, bf16
    report = make().prepare()
    assert report.engine == "host" and len(starts) == tried
    assert any("no luck" in r.reason for r in report.refusals)


def test_bad_weights_leave_the_host_serving(make, tensors) -> None:
    broken = {**tensors, FC1: torch.full_like(tensors[FC1], float("nan"))}
    host = CountingHost("clip_l", TINY, broken, torch.device("cpu"))
    encoder = make(host=host)
    encoder.encode(prompt())
    assert host.calls == 1 and encoder.report().engine == "host"
    assert any("NaN" in r.reason for r in encoder.report().refusals)


def test_a_cache_that_cannot_be_written_leaves_the_host_serving(make, host, tmp_path) -> None:
    (tmp_path / "file").write_text("not a folder")
    encoder = make(cache=EngineCache(tmp_path / "file" / "cache"))
    encoder.encode(prompt())
    assert host.calls == 1
    assert any("cache" in r.reason for r in encoder.report().refusals)


def test_live_weights_and_their_file_have_one_key(host, tensors, tmp_path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "clip.safetensors")
    (found,) = detect(tmp_path / "clip.safetensors").encoders
    assert fingerprint_of(host) == fingerprint(found)


def test_the_checkpoint_is_shared_through_the_cache(make, cache, monkeypatch) -> None:
    make().prepare()

    def again(*_: Any) -> None:
        raise AssertionError("calibrated twice")

    monkeypatch.setattr("octavo.calibrate.calibrate", again)
    assert make().prepare().engine == "torch_fp8"


# Whatever fails, somebody answers

FAULTS = [
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasLtMatmul"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
    RuntimeError("can't start new thread"),
    MemoryError(),
    OSError(errno.EIO, "Input/output error"),
    OctavoBug("nothing was written for it"),
    SafetensorError("No such file or directory: gone.safetensors"),
]


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", FAULTS, ids=lambda e: f"{type(e).__name__} {e}"[:40])
@pytest.mark.parametrize(
    "where",
    ["fingerprint_of", "make_checkpoint", "open_quantized", "probe_packages", "load", "check"],
)
def test_a_fault_while_preparing_is_a_refusal(make, host, monkeypatch, where, error) -> None:
    if where in ("load", "check"):
        attribute = "__init__" if where == "load" else "encode"
        monkeypatch.setattr(TorchFp8Engine, attribute, raising(error))
    else:
        monkeypatch.setattr(module, where, raising(error))
    encoder = make(packages=None if where == "probe_packages" else NO_TENSORRT)
    got = encoder.encode(prompt())[1]
    assert torch.equal(got, host.encode(prompt(), None)[1])
    reasons = [r.reason for r in encoder.report().refusals]
    said = str(error).rstrip(".") or type(error).__name__
    assert any(type(error).__name__ in reason and said in reason for reason in reasons), reasons
    assert encoder._serving is None and encoder.vram_bytes == 0


@pytest.mark.parametrize("error", FAULTS, ids=lambda e: f"{type(e).__name__} {e}"[:40])
@pytest.mark.parametrize("where", ["call", "set"])
def test_a_fault_in_a_request_is_answered_all_the_same(
    make, host, tensors, monkeypatch, where, error
) -> None:
    encoder = make()
    encoder.prepare()
    engine = encoder._serving.engine
    wanted = None
    if where == "call":
        engine.encode = raising(error)
    else:
        wanted = patched(tensors, 1.0)
        encoder._serving.load = raising(error)
    got = encoder.encode(prompt(), None, wanted)[1]
    assert cosine(got, host.encode(prompt(), None)[1]) > 0.99
    assert engine._weights is None, "the failed engine was left loaded"
    assert encoder.report().engine == "torch_fp8" and encoder.report().recipe == "fp8-mixed"
    said = str(error).rstrip(".") or type(error).__name__
    assert any(said in r.reason for r in encoder.report().refusals)


@pytest.mark.parametrize(
    "error", [*FAULTS[1:5], FAULTS[6]], ids=lambda e: f"{type(e).__name__} {e}"[:40]
)
def test_a_shortage_is_not_remembered_for_the_process(make, monkeypatch, error) -> None:
    if isinstance(error, SafetensorError):
        error = FileError("gone.safetensors", "cannot be opened", "start again")
    with monkeypatch.context() as patch:
        patch.setattr(TorchFp8Engine, "__init__", raising(error))
        assert make().prepare().engine == "host"
    assert make().prepare().recipe == "fp8"


def test_an_engine_that_cannot_even_be_closed(make, host) -> None:
    encoder = make()
    encoder.prepare()
    serving = encoder._serving
    serving.engine.encode = raising(RuntimeError("CUDA error: an illegal memory access"))
    serving.engine.close = raising(RuntimeError("CUDA error: an illegal memory access"))
    got = encoder.encode(prompt())[1]
    assert cosine(got, host.encode(prompt(), None)[1]) > 0.99
    encoder._serving.engine.close = raising(RuntimeError("CUDA error"))
    encoder.close()


def test_no_thread_to_build_in_the_background(make, host, monkeypatch) -> None:
    there = module.trt.Installed("11.4.0", "cu13")
    packages = Packages(Missing("it is not here", "get it"), there, True)
    encoder = make(background=True, packages=packages)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        encoder.encode(prompt())
        assert encoder.wait(1)
    assert encoder.report().engine == "torch_fp8" and host.calls == 0
    assert any("start new thread" in r.reason for r in encoder.report().refusals)


class Stop(Exception):  # noqa: N818 - as ComfyUI's InterruptProcessingException
    pass


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "error",
    [Stop("stop"), KeyboardInterrupt(), RuntimeError("out of memory"), OctavoError("mine"),
     BrokenPipeError("gone"), torch.cuda.OutOfMemoryError("mine")],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
@pytest.mark.parametrize("phase", ["reading", "calibrating", "writing the FP8 checkpoint"])
def test_what_the_caller_raises_to_cancel_comes_out(make, host, tmp_path, error, phase) -> None:
    stops = [True]

    def report(progress: Any) -> None:
        if stops and progress.phase == phase:
            stops.clear()
            raise error

    encoder = make(cache=EngineCache(tmp_path / "own"), report=report)
    with pytest.raises(type(error)) as caught:
        encoder.encode(prompt())
    assert caught.value is error and encoder._serving is None
    assert encoder.encode(prompt()) and encoder.report().engine == "torch_fp8", "tried again"


def test_what_the_host_answers_with_comes_out(make, host, monkeypatch) -> None:
    encoder = make(device=Device("cpu"))
    monkeypatch.setattr(host, "encode", raising(RuntimeError("the host's own")))
    with pytest.raises(RuntimeError, match="the host's own"):
        encoder.encode(prompt())


def test_a_reading_that_is_interrupted_comes_out(make, host, monkeypatch) -> None:
    encoder = make()
    with monkeypatch.context() as patch:
        patch.setattr(host, "read", raising(Stop("stop")))
        with pytest.raises(Stop):
            encoder.encode(prompt())
    encoder.encode(prompt())
    assert encoder.report().engine == "torch_fp8"


def test_an_interrupt_between_two_engines_leaves_neither(make, monkeypatch) -> None:
    both = Background(monkeypatch)
    both.go.set()
    encoder = make(engine="fastest", packages=both.packages)
    monkeypatch.setattr(module, "_milliseconds", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(prompt())
    assert len(both.engines) == 2 and both.left() == []


def test_a_set_that_cannot_be_read_goes_to_the_host(make, host) -> None:
    encoder = make()
    encoder.prepare()
    broken = Patched("broken", raising(RuntimeError("Cannot copy out of meta tensor; no data!")))
    encoder.encode(prompt(), None, broken)
    assert host.calls == 1 and encoder.report().recipe == "fp8"
    encoder.encode(prompt())
    assert host.calls == 1


# The cache goes while it is used


def own_cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "own")


def spoil(cache: EngineCache) -> None:
    (path,) = (cache.root / "checkpoints").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.usefixtures("quick")
@pytest.mark.skipif(os.name == "nt", reason="Windows keeps an open file from being deleted")
def test_a_cache_deleted_while_the_reference_runs(make, host, tmp_path, monkeypatch) -> None:
    cache, real = own_cache(tmp_path), AcceleratedEncoder.expect

    def during(self: Any, *arguments: Any) -> Any:
        found = real(self, *arguments)
        shutil.rmtree(cache.root)
        return found

    monkeypatch.setattr(AcceleratedEncoder, "expect", during)
    encoder = make(cache=cache)
    encoder.encode(prompt())
    assert encoder.report().recipe == "fp8" and host.calls == 0


@pytest.mark.usefixtures("quick")
def test_a_cache_deleted_before_it_is_opened(make, host, tmp_path, monkeypatch) -> None:
    cache, real = own_cache(tmp_path), module.make_checkpoint

    def gone(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        shutil.rmtree(cache.root)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(module, "make_checkpoint", gone)
        encoder = make(cache=cache)
        encoder.encode(prompt())
        assert host.calls == 1 and encoder.report().engine == "host"
        assert any(".safetensors: " in r.reason for r in encoder.report().refusals)
    assert make(cache=cache).prepare().recipe == "fp8"


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_written_over_while_the_reference_runs(
    make, host, tmp_path, monkeypatch
) -> None:
    cache, real = own_cache(tmp_path), AcceleratedEncoder.expect

    def during(self: Any, *arguments: Any) -> Any:
        found = real(self, *arguments)
        spoil(cache)
        monkeypatch.setattr(AcceleratedEncoder, "expect", real)
        return found

    monkeypatch.setattr(AcceleratedEncoder, "expect", during)
    encoder = make(cache=cache)
    got = encoder.encode(prompt())[1]
    assert cosine(got, host.encode(prompt(), None)[1]) > 0.99
    assert any("changed while it was being read" in r.reason for r in encoder.report().refusals)
    assert make(cache=cache).prepare().recipe == "fp8"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("when", ["set", "base", "rest"])
def test_a_checkpoint_written_over_later(make, host, tensors, tmp_path, when) -> None:
    """The base's weights are pages of the file: another set is never made of what lies there."""
    cache = own_cache(tmp_path)
    encoder = make(cache=cache)
    base = encoder.encode(prompt())[1]
    lora = patched(tensors, 1.5)
    if when == "base":
        encoder.encode(prompt(), None, lora)
    elif when == "rest":
        encoder.rest()
    spoil(cache)
    if when == "set":
        got = encoder.encode(prompt(), None, lora)[1]
        changed = {**tensors, FC1: tensors[FC1] * 1.5}
        want = LiveHost("x", TINY, changed, torch.device("cpu")).encode(prompt(), None)[1]
        assert cosine(got, want) > 0.99
    assert torch.equal(encoder.encode(prompt())[1], base)
    assert encoder.report().recipe == "fp8" and host.calls == 0


# Patched weights


def patched(tensors: dict[str, Tensor], factor: float) -> Patched:
    changed = {**tensors, FC1: tensors[FC1] * factor}
    return Patched(("lora", factor), changed.__getitem__)


def test_lora_a_b_a_none(make, tensors) -> None:
    encoder = make()
    base = encoder.encode(prompt())[1]
    a, b = patched(tensors, 1.5), patched(tensors, -1.0)
    first = encoder.encode(prompt(), None, a)[1]
    second = encoder.encode(prompt(), None, b)[1]
    assert torch.equal(encoder.encode(prompt(), None, a)[1], first)
    assert torch.equal(encoder.encode(prompt())[1], base)
    for result, factor in ((first, 1.5), (second, -1.0)):
        changed = {**tensors, FC1: tensors[FC1] * factor}
        want = LiveHost("x", TINY, changed, torch.device("cpu")).encode(prompt(), None)[1]
        assert cosine(result, want) > 0.99
        assert cosine(result, want) > cosine(base, want), "the LoRA had no effect"


def test_lora_ranges_are_only_ever_widened(make, tensors) -> None:
    encoder = make()
    encoder.encode(prompt())
    loaded: list[Any] = []
    serving = encoder._serving
    load = serving.load
    serving.load = lambda weights: (loaded.append(weights), load(weights))
    encoder.encode(prompt(), None, patched(tensors, 30.0))
    base, widened = serving.weights.linears, loaded[0].linears
    fc2 = FC1.replace("fc1.weight", "fc2")
    assert widened[fc2].input_scale > base[fc2].input_scale
    assert all(widened[n].input_scale >= base[n].input_scale for n in base)


def test_patched_weights_that_fp8_cannot_hold_go_to_the_host(make, tensors, host) -> None:
    encoder = make()
    base = encoder.encode(prompt())[1]
    broken = patched(tensors, float("nan"))
    for _ in range(2):
        calls = host.calls
        encoder.encode(prompt(), None, broken)
        assert host.calls == calls + 1
    assert torch.equal(encoder.encode(prompt())[1], base)


def test_patched_sets_are_bounded(make, tensors) -> None:
    encoder = make()
    for factor in range(1, 8):
        encoder.encode(prompt(), None, patched(tensors, 1 + factor / 10))
    assert len(encoder._sets) == module.KEPT_WEIGHT_SETS


# Fastest, background, threads, end


def test_fastest_is_noted_and_found_again(make, cache, monkeypatch) -> None:
    encoder = make(engine="fastest")
    report = encoder.prepare()
    assert report.engine == "torch_fp8" and report.milliseconds["torch_fp8"] > 0

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("timed twice")

    monkeypatch.setattr(module, "_milliseconds", again)
    assert make(engine="fastest").prepare().milliseconds == report.milliseconds


@pytest.mark.parametrize(
    "noted",
    [None, [], "x", 5, {ADA.name: None}, {ADA.name: ["torch_fp8"]}, {ADA.name: "torch_fp8"},
     *({ADA.name: {"torch_fp8": v}} for v in (None, "x", [1], {}, True, 0, -1, 10**400))],
    ids=str,
)  # fmt: skip
def test_times_that_are_none_are_measured_again(make, tmp_path, noted) -> None:
    cache = EngineCache(tmp_path / "own")
    make(cache=cache, recipe="bf16").prepare()
    (entry,) = cache.entries()
    cache.update_facts(entry, {"fastest": noted})
    report = make(cache=cache, recipe="bf16", engine="fastest").prepare()
    assert report.engine == "torch_fp8" and 0 < report.milliseconds["torch_fp8"] < 1e5
    (entry,) = cache.entries()
    assert entry.manifest.facts["fastest"][ADA.name] == report.milliseconds


def test_times_beyond_numbers_are_none() -> None:
    for ms in (float("nan"), float("inf")):
        assert module._sound_times({"torch_fp8": ms}, {"torch_fp8"}) is None
    assert module._sound_times({"torch_fp8": 3}, {"torch_fp8"}) == {"torch_fp8": 3.0}


def test_an_engine_that_fails_while_it_is_timed(make, monkeypatch) -> None:
    both = Background(monkeypatch)
    both.go.set()
    real = module._milliseconds

    def timed(engine: Any, embeds: Tensor) -> float:
        if engine.name == "tensorrt":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
        return real(engine, embeds)

    monkeypatch.setattr(module, "_milliseconds", timed)
    report = make(engine="fastest", packages=both.packages).prepare()
    assert report.engine == "torch_fp8" and both.left() == ["torch_fp8"]
    assert any("CUBLAS" in r.reason for r in report.refusals)


def test_background_switches_between_requests(make, host, monkeypatch) -> None:
    go = threading.Event()
    packages = Packages(
        Missing("it is not here", "get it"), module.trt.Installed("11.4.0", "cu13"), True
    )

    def slow(
        self: Any, name: str, checkpoint: Any, entry: Any, recipe: Any, weights: Any, facts: Any
    ):
        assert go.wait(30)
        engine = TorchFp8Engine(TINY, weights, "cpu")
        return engine, engine.swap_weights, "plan"

    monkeypatch.setattr(AcceleratedEncoder, "_start_trt", slow)
    encoder = make(background=True, packages=packages)
    encoder.encode(prompt())
    assert encoder.report().engine == "torch_fp8"
    go.set()
    assert encoder.wait(30)
    assert encoder.report().engine == "torch_fp8", "switched outside a request"
    encoder.encode(prompt())
    assert encoder.report().engine == "tensorrt"


def test_closing_during_a_background_build_leaves_nothing(make, monkeypatch) -> None:
    go, closed = threading.Event(), []
    packages = Packages(
        Missing("it is not here", "get it"), module.trt.Installed("11.4.0", "cu13"), True
    )

    def slow(
        self: Any, name: str, checkpoint: Any, entry: Any, recipe: Any, weights: Any, facts: Any
    ):
        assert go.wait(30)
        engine = TorchFp8Engine(TINY, weights, "cpu")
        close = engine.close
        engine.close = lambda: (closed.append(1), close())
        return engine, engine.swap_weights, "plan"

    monkeypatch.setattr(AcceleratedEncoder, "_start_trt", slow)
    encoder = make(background=True, packages=packages)
    encoder.encode(prompt())
    encoder.close()
    go.set()
    assert encoder.wait(30) and closed


class Background:
    """TensorRT that starts when `go` is set; every engine, with whether it was closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.engines, self.no_memory = threading.Event(), [], False
        start = AcceleratedEncoder._start

        def started(encoder: Any, name: str, *arguments: Any) -> Any:
            if name == "tensorrt":
                assert self.go.wait(30)
            elif self.no_memory:
                raise torch.cuda.OutOfMemoryError("invented")
            serving = start(encoder, "torch_fp8", *arguments)
            serving.engine_name = name
            engine, close = serving.engine, serving.engine.close
            engine.name, engine.closed = name, False
            engine.close = lambda: (setattr(engine, "closed", True), close())
            self.engines.append(engine)
            return serving

        monkeypatch.setattr(AcceleratedEncoder, "_start", started)
        there = module.trt.Installed("11.4.0", "cu13")
        self.packages = Packages(Missing("it is not here", "get it"), there, True)

    def left(self) -> list[str]:
        return [engine.name for engine in self.engines if not engine.closed]


def test_out_of_memory_during_a_background_build_starts_no_second(make, monkeypatch) -> None:
    background = Background(monkeypatch)
    encoder = make(background=True, packages=background.packages)
    encoder.encode(prompt())

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("invented")

    background.engines[0].encode = full
    encoder.encode(prompt())  # the host's answer, and the next engine is chosen
    assert [t.name for t in threading.enumerate()].count("octavo-build") == 1
    background.go.set()
    assert encoder.wait(30)
    encoder.encode(prompt())
    assert encoder.report().engine == "tensorrt" and background.left() == ["tensorrt"]
    encoder.close()
    assert background.left() == []


@pytest.mark.parametrize("built", ["before the rest", "during it"])
def test_a_rest_beside_a_background_build_holds_nothing(make, monkeypatch, built: str) -> None:
    background = Background(monkeypatch)
    encoder = make(background=True, packages=background.packages)
    encoder.encode(prompt())
    if built == "before the rest":
        background.go.set()
        assert encoder.wait(30)
    encoder.rest()
    background.go.set()
    assert encoder.wait(30)
    assert background.left() == [] and encoder.vram_bytes == 0
    background.no_memory = True  # of torch_fp8, which no longer matters
    encoder.encode(prompt())
    assert encoder.report().engine == "tensorrt" and background.left() == ["tensorrt"]
    encoder.close()
    assert background.left() == []


def test_an_end_of_python_during_a_background_build(tmp_path) -> None:
    """The build is ended first: native code in a thread that vanishes aborts the process."""
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, test_accelerated as t
from octavo.engine_cache import EngineCache
def slow(self, *_):
    for _ in range(1000):
        time.sleep(0.02)
        self._report_build(None)
t.AcceleratedEncoder._start_trt = slow
packages = t.Packages(t.Missing("x", "y"), t.module.trt.Installed("11.4.0", "cu13"), True)
host = t.LiveHost("clip_l", t.TINY, dict(t.seeded_tensors(t.TINY)), torch.device("cpu"))
encoder = t.AcceleratedEncoder(
    host, cache=EngineCache(t.Path(sys.argv[1])), device=t.ADA, packages=packages,
    background=True, report=lambda event: None, recipe="bf16",
)
encoder.encode(t.prompt())
print(encoder.report().engine)
"""
    start = time.monotonic()
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "torch_fp8\n"), done.stderr
    assert time.monotonic() - start < 60


def test_weights_that_outgrow_fp16_are_served_in_bf16(make, tensors) -> None:
    """FP8's body is FP16; an infinite state is a reason to demote and not a bug."""
    grown = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    for name in grown:
        if name.endswith("mlp.fc2.bias"):
            grown[name][0] = 6e4  # which FP16 holds, and not the sum of two
    host = CountingHost("clip_l", TINY, grown, torch.device("cpu"))
    encoder = make(host=host)
    _, last = encoder.encode(prompt())
    report = encoder.report()
    assert report.recipe == "bf16" and bool(last.isfinite().all()), report.text()
    assert {r.recipe for r in report.refusals if r.engine == "torch_fp8"} == {"fp8", "fp8-mixed"}
    assert cosine(last, host.encode(prompt(), None)[1]) > 0.99


def test_a_mask_of_another_shape_is_the_hosts(make, host) -> None:
    encoder = make()
    assert encoder.attempt(prompt(), torch.ones(77)) is None
    assert encoder.attempt(prompt(), torch.ones(1, 77)) is not None


def test_four_threads_hundred_rounds(make) -> None:
    encoder = make()
    want = [encoder.encode(prompt(i))[1] for i in range(4)]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(25):
            if not torch.equal(encoder.encode(prompt(index))[1], want[index]):
                wrong.append(index)

    in_threads(work)
    assert not wrong


def test_nan_in_the_input_does_not_poison_later_calls(make) -> None:
    encoder = make()
    want = encoder.encode(prompt())[1]
    encoder.encode(torch.full_like(prompt(), float("nan")))
    assert torch.equal(encoder.encode(prompt())[1], want)


def test_nothing_is_built_after_close(make) -> None:
    encoder = make()
    encoder.close()
    assert encoder.prepare().engine == "host" and encoder.vram_bytes == 0


def test_close_is_final_and_harmless_twice(make) -> None:
    encoder = make()
    encoder.encode(prompt())
    encoder.close()
    encoder.close()
    assert encoder.vram_bytes == 0
    with pytest.raises(OctavoError, match="closed"):
        encoder.encode(prompt())


def test_prepare_is_done_once_by_many_threads(make, monkeypatch) -> None:
    real, count = module.make_checkpoint, []

    def counted(*arguments: Any, **options: Any) -> Any:
        count.append(1)
        time.sleep(0.05)
        return real(*arguments, **options)

    monkeypatch.setattr(module, "make_checkpoint", counted)
    encoder = make()
    in_threads(lambda i: encoder.encode(prompt(i)))
    assert len(count) == 1


def test_weights_that_change_during_the_build_are_not_stored(make, tensors, tmp_path) -> None:
    """Under the key of what they were they would be served to others."""
    changing = dict(tensors)
    host = CountingHost("clip_l", TINY, changing, torch.device("cpu"))

    def report(progress: Any) -> None:
        if progress.phase == "calibrating":
            changing[FC1] = tensors[FC1] * 2

    cache = EngineCache(tmp_path / "own")
    encoder = make(host=host, cache=cache, report=report)
    encoder.encode(prompt())
    assert any("changed while" in r.reason for r in encoder.report().refusals)
    for entry in cache.entries():
        assert "source" not in entry.manifest.facts or entry.manifest.facts["recipe"] != "fp8"


def test_a_host_that_changed_while_resting_is_measured_again(make, tensors, tmp_path) -> None:
    changing = dict(tensors)
    host = CountingHost("clip_l", TINY, changing, torch.device("cpu"))
    cache = EngineCache(tmp_path / "own")
    encoder = make(host=host, cache=cache)
    encoder.encode(prompt())
    changing.update(dict(seeded_tensors(TINY, seed=1, outliers=False)))
    encoder.rest()
    want = host.encode(prompt(), None)[1]
    assert cosine(encoder.encode(prompt())[1], want) > 0.99
    bodies = {e.manifest.key_facts["body"] for e in cache.entries()}
    assert len(bodies) == 2, "two contents, two keys"


def test_a_patched_set_needs_a_name(tensors) -> None:
    with pytest.raises(ValueError, match="base"):
        Patched(None, tensors.__getitem__)


def test_an_interrupt_after_loading_a_set_leaves_no_wrong_label(make, tensors) -> None:
    encoder = make()
    base = encoder.encode(prompt())[1]
    lora = patched(tensors, 1.5)
    want = encoder.encode(prompt(), None, lora)[1]
    serving = encoder._serving
    load = serving.load

    def interrupted(weights: Any) -> None:
        load(weights)
        serving.load = load
        raise KeyboardInterrupt

    serving.load = interrupted
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(prompt())  # back to the base
    assert torch.equal(encoder.encode(prompt(), None, lora)[1], want)
    assert torch.equal(encoder.encode(prompt())[1], base)


def test_patched_sets_do_not_outlive_a_demotion(make, tensors, monkeypatch) -> None:
    encoder = make()
    lora = patched(tensors, 1.5)
    encoder.encode(prompt(), None, lora)
    real, broken = TorchFp8Engine.encode, [True]

    def once(self: Any, *arguments: Any) -> Any:
        if broken:
            broken.clear()
            raise EngineUnavailable("torch_fp8", "it broke", "use another")
        return real(self, *arguments)

    monkeypatch.setattr(TorchFp8Engine, "encode", once)
    encoder.encode(prompt())
    assert encoder.report().recipe == "fp8-mixed"
    changed = {**tensors, FC1: tensors[FC1] * 1.5}
    want = LiveHost("x", TINY, changed, torch.device("cpu")).encode(prompt())[1]
    assert cosine(encoder.encode(prompt(), None, lora)[1], want) > 0.99


def test_an_interrupt_while_waking_is_tried_again(make, monkeypatch) -> None:
    encoder = make()
    want = encoder.encode(prompt())[1]
    encoder.rest()
    real, interrupted = AcceleratedEncoder._start, [True]

    def start(self: Any, *arguments: Any) -> Any:
        if interrupted:
            interrupted.clear()
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(AcceleratedEncoder, "_start", start)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(prompt())
    assert torch.equal(encoder.encode(prompt())[1], want)


def test_sets_too_large_to_keep_are_made_again(make, host, tensors, monkeypatch) -> None:
    monkeypatch.setattr(AcceleratedEncoder, "_sets_bytes", lambda self: module.KEPT_BYTES + 1)
    encoder = make()
    base = encoder.encode(prompt())[1]
    sets = [{**tensors, FC1: tensors[FC1] * factor} for factor in (1.5, 2.0)]
    results = {}
    for number in (0, 1, 0):
        patched = Patched(number, sets[number].__getitem__)
        got = encoder.encode(prompt(), None, patched)[1]
        assert torch.equal(encoder.encode(prompt(), None, patched)[1], got)
        assert torch.equal(results.setdefault(number, got), got)
        assert not encoder._sets
    assert not torch.equal(results[0], results[1]) and host.calls == 0
    assert torch.equal(encoder.encode(prompt())[1], base)
