# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The session against the strict double of the runtime (double.py), end to end on CPU tensors.

What a GPU computes is not tested here, only what the session asks of it.
"""

from __future__ import annotations

import gc
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from double import (
    VERSION,
    Allocation,
    Context,
    CudaGraphStrategy,
    HostPlace,
    Specialization,
    Stream,
    World,
    plan_from_graph,
    runner_of,
)
from octavo.backends.onnx_ops import Body, Graph, emit
from octavo.backends.plan_inputs import plan_weights
from octavo.checkpoints.quantized import quantized_tensors
from octavo.errors import EngineUnavailable
from octavo.seeded import TINY, seeded_tensors
from octavo.trt import session as session_module
from octavo.trt.session import MAX_CONTEXTS, Session, session_from_plan
from torch import Tensor

POSITIONS, WIDTH = TINY.positions, TINY.width
STRUCTURE = dict.fromkeys(TINY.linears(), "fp8") | {f"{TINY.block(1)}mlp.fc2": "16bit"}


@dataclass(frozen=True, eq=False)
class Model:
    """A tiny encoder: its graph, the one that ONNX Runtime runs, and two sets of weights."""

    graph: Graph
    twin: Graph | None
    plan: bytes
    weights: tuple[dict[str, Tensor], dict[str, Tensor]]
    runner: ort.InferenceSession

    def states(self, embeds: Tensor, mask: Tensor | None = None, *, which: int = 0) -> list[Tensor]:
        """Every output of ONNX Runtime, run directly and by itself."""
        body = getattr(torch, self.graph.body)
        feeds = {"embeds": self._value(embeds.to(body))}
        if self.graph.mask:
            full = torch.ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask
            feeds["mask"] = self._value(full)
        feeds |= {name: self._value(t) for name, t in self.weights[which].items()}
        held = [(t, v) for t, v in feeds.values()]
        found = self.runner.run_with_ort_values(None, {n: v for n, (_, v) in feeds.items()})
        del held
        return [torch.from_numpy(v.numpy()).to(body) for v in found]

    def _value(self, tensor: Tensor) -> tuple[Any, Any]:
        if tensor.dtype == torch.float8_e4m3fn:
            array = tensor.contiguous().view(torch.uint8).numpy()
            float8 = onnx.TensorProto.FLOAT8E4M3FN
            return array, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, float8)
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        array = np.ascontiguousarray(tensor.numpy())
        return array, ort.OrtValue.ortvalue_from_numpy(array)


@cache
def model_of(body: Body = "float16", mask: bool = False) -> Model:
    graph = emit(TINY, STRUCTURE, body=body, mask=mask)  # type: ignore[arg-type]
    twin = emit(TINY, STRUCTURE, body="float32", mask=mask) if body == "bfloat16" else None  # type: ignore[arg-type]
    amax = dict.fromkeys(TINY.linears(), torch.tensor(8.0))

    def weights(seed: int) -> dict[str, Tensor]:
        source = dict(seeded_tensors(TINY, seed=seed))
        tensors = quantized_tensors(TINY, source.__getitem__, STRUCTURE, amax)
        return plan_weights(TINY, STRUCTURE, tensors.__getitem__, body)  # type: ignore[arg-type]

    runner = runner_of((twin or graph).model)
    return Model(graph, twin, plan_from_graph(graph, twin), (weights(0), weights(1)), runner)


@pytest.fixture
def world() -> Iterator[World]:
    """A machine on which, in the end, no rule was broken."""
    made = World()
    yield made
    made.check()
    assert made.violations == []


def on(place: HostPlace, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: place.copied(tensor) for name, tensor in weights.items()}


def opened(
    world: World, model: Model | None = None, place: HostPlace | None = None, **options: Any
) -> Session:
    model, place = model or model_of(), place or world.place()
    return session_from_plan(
        options.pop("plan", model.plan),
        module=world.module,
        graph=options.pop("graph", model.graph),
        weights=options.pop("weights", None) or on(place, model.weights[0]),
        device=place.device,
        place=place,
        **options,
    )


def prompts(batch: int, length: int = POSITIONS, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def encoded(session: Session, embeds: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    hidden, last = session.encode(embeds, mask)
    return [*hidden, last]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Bit for bit, in number, shape and dtype."""
    return len(found) == len(expected) and all(
        f.dtype == e.dtype and torch.equal(f, e) for f, e in zip(found, expected, strict=True)
    )


def clean(world: World) -> None:
    """Nothing of TensorRT's is left alive, even before the garbage collector runs."""
    kinds = ("context", "cache", "config", "engine", "runtime")
    assert {kind: world.count(kind) for kind in kinds} == dict.fromkeys(kinds, 0)


# Results


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("body", ["float16", "bfloat16"])
def test_results_are_those_of_onnx_runtime_bit_for_bit(
    world: World, body: Body, mask: bool
) -> None:
    model = model_of(body, mask)
    with opened(world, model) as session:
        for batch in (1, 2, 16, 17, 40) if body == "float16" else (1, 17):
            embeds = prompts(batch)
            rows = torch.ones(batch, POSITIONS, dtype=torch.bool) if mask else None
            if rows is not None:
                rows[:, 40:] = torch.arange(batch)[:, None] % 2 == 0
            expected = [
                model.states(e, None if rows is None else rows[16 * i : 16 * (i + 1)])
                for i, e in enumerate(embeds.split(16))
            ]
            found = encoded(session, embeds, rows)
            assert same(found, [torch.cat(parts) for parts in zip(*expected, strict=True)])
            assert len(found) == TINY.layers + 2
            assert all(t.is_contiguous() and t.isfinite().all() for t in found)


def test_rows_shorter_than_the_plan_are_padded_exactly(world: World) -> None:
    with opened(world) as session:
        for length in (1, 20, 76):
            embeds = prompts(3, length)
            other = torch.cat([embeds, prompts(3, POSITIONS - length, seed=9)], dim=1)
            expected = [t[:, :length] for t in model_of().states(other)]
            found = encoded(session, embeds)
            assert same(found, expected)
            assert all(t.is_contiguous() for t in found)


def test_a_mask_reaches_the_plan_padded_with_false(world: World) -> None:
    model, embeds = model_of(mask=True), prompts(18, 50)
    rows = torch.ones(18, 50, dtype=torch.bool)
    rows[:, 10:30] = False
    with opened(world, model) as session:
        masked, unmasked = encoded(session, embeds, rows), encoded(session, embeds)
        ones = torch.ones(18, 50, dtype=torch.bool)
        assert same(unmasked, encoded(session, embeds, ones))
    full = torch.zeros(18, POSITIONS, dtype=torch.bool)
    full[:, :50] = rows
    padded = torch.cat([embeds, torch.zeros(18, POSITIONS - 50, WIDTH)], dim=1)
    parts = [model.states(padded[:16], full[:16]), model.states(padded[16:], full[16:])]
    assert same(masked, [torch.cat(p)[:, :50] for p in zip(*parts, strict=True)])
    assert not torch.equal(masked[-1], unmasked[-1])


def test_results_never_change_later(world: World) -> None:
    with opened(world) as session:
        first = encoded(session, prompts(2))
        copies = [t.clone() for t in first]
        later = [encoded(session, prompts(2, seed=seed)) for seed in range(1, 5)]
        assert same(first, copies)
        storages = [t.untyped_storage().data_ptr() for ts in (first, *later) for t in ts]
        assert len(set(storages)) == len(storages)
    assert same(first, copies)


def test_any_form_of_the_input_gives_the_same_result(world: World) -> None:
    place, half = world.place(), prompts(2).half()
    wide = torch.zeros(2, POSITIONS, 2 * WIDTH, dtype=torch.float16)
    wide[:, :, ::2] = half
    forms = {
        "fp32": half.float(),
        "fp64": half.double(),
        "strided": wide[:, :, ::2],
        "transposed": half.transpose(0, 1).contiguous().transpose(0, 1),
        "on the device": place.copied(half),
        "misaligned": place.copied(half, shift=2),
        "needs gradients": half.float().requires_grad_(),
    }
    expected = model_of().states(half)
    with opened(world, place=place) as session:
        for name, form in forms.items():
            found = encoded(session, form)
            assert same(found, expected), name
            assert not any(t.requires_grad for t in found)
        one = place.copied(half[:1])
        expanded = encoded(session, one.expand(3, -1, -1))
        assert all(torch.equal(t[0], t[2]) for t in expanded)
        assert same([t[:1] for t in expanded], [t[:1] for t in model_of().states(half[[0, 0, 0]])])


def test_bfloat16_input_is_taken_by_a_float16_plan(world: World) -> None:
    embeds = prompts(1).bfloat16()
    with opened(world) as session:
        assert same(encoded(session, embeds), model_of().states(embeds.half()))


def test_nan_stays_with_its_call(world: World) -> None:
    with opened(world) as session:
        before = encoded(session, prompts(2))
        broken = prompts(2)
        broken[0, 5] = float("nan")
        assert encoded(session, broken)[-1].isnan().any()
        assert same(encoded(session, prompts(2)), before)


# What a call may not ask


@pytest.mark.parametrize(
    ("embeds", "mask", "words"),
    [
        (torch.zeros(0, POSITIONS, WIDTH), None, "batch is empty"),
        (torch.zeros(1, 0, WIDTH), None, r"\[1, 0, 128\].*1 to 77"),
        (torch.zeros(1, POSITIONS + 1, WIDTH), None, r"\[1, 78, 128\].*1 to 77"),
        (torch.zeros(1, POSITIONS, WIDTH + 1), None, r"\[1, 77, 129\]"),
        (torch.zeros(POSITIONS, WIDTH), None, r"\[77, 128\]"),
        (torch.zeros(1, POSITIONS, WIDTH, dtype=torch.int64), None, "torch.int64"),
        (torch.zeros(1, POSITIONS, WIDTH, device="meta"), None, "on meta.*on cpu"),
        (torch.zeros(1, 9, WIDTH), torch.ones(1, 9, dtype=torch.bool), "without a mask"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_and_the_next_is_served(
    world: World, embeds: Tensor, mask: Tensor | None, words: str
) -> None:
    with opened(world) as session:
        with pytest.raises(EngineUnavailable, match=words):
            session.encode(embeds, mask)
        assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))
        assert world.calls["context"] == 1


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 9),
        torch.ones(2, 9, dtype=torch.bool),
        torch.ones(1, 8, dtype=torch.bool),
        torch.ones(1, 9, dtype=torch.bool, device="meta"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(world: World, mask: Tensor) -> None:
    session = opened(world, model_of(mask=True))
    with session, pytest.raises(EngineUnavailable, match="the mask is"):
        session.encode(torch.zeros(1, 9, WIDTH), mask)


# Weights


def test_weights_are_bound_and_not_copied(world: World) -> None:
    place = world.place()
    weights = on(place, model_of().weights[0])
    blocks = world.memory
    with opened(world, place=place, weights=weights) as session:
        assert world.memory == blocks
        expected = sum(t.nbytes for t in weights.values())
        assert session.bytes == expected + len(model_of().plan) + 1024  # scratch of one row
        session.encode(prompts(40))
        assert session.bytes == expected + len(model_of().plan) + 8 * 1024
        assert session.max_scratch_bytes == 16 * 1024
    assert session.bytes == session.max_scratch_bytes == 0


def test_weights_stay_alive_without_their_owner(world: World) -> None:
    place = world.place()
    weights = on(place, model_of().weights[0])
    with opened(world, place=place, weights=weights) as session:
        for tensor in weights.values():  # as a host that moves a module to the CPU
            tensor.data = torch.full_like(tensor.float(), 7.0).to(tensor.dtype)
        del weights, tensor
        assert same(encoded(session, prompts(2)), model_of().states(prompts(2)))


def test_a_misaligned_weight_is_copied_once(world: World) -> None:
    place = world.place()
    weights = {n: place.copied(t, shift=16) for n, t in model_of().weights[0].items()}
    with opened(world, place=place, weights=weights) as session:
        blocks = world.memory
        assert same(encoded(session, prompts(2)), model_of().states(prompts(2)))
        assert world.memory == blocks
        assert place.synchronizations  # the copies are there before another stream reads them


NAME = f"{TINY.block(0)}mlp.fc1.weight"
BIAS = f"{TINY.block(0)}mlp.fc1.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({NAME: None}, f"lack {NAME}"),
        ({"lora": torch.zeros(1)}, "unknown lora"),
        ({BIAS: torch.zeros(TINY.feed_forward)}, "torch.float32.*not torch.float16"),
        ({BIAS: torch.zeros(9, dtype=torch.float16)}, r"\[9\].*not torch.float16 \[256\]"),
        ({BIAS: torch.zeros(1, dtype=torch.float16).expand(256)}, "not contiguous"),
        ({BIAS: torch.zeros(256, dtype=torch.float16, device="meta")}, "on meta"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    world: World, change: dict[str, Tensor | None], words: str
) -> None:
    place = world.place()
    good = on(place, model_of().weights[0])
    bad = {name: t for name, t in {**good, **change}.items() if t is not None}
    with pytest.raises(EngineUnavailable, match=words):
        opened(world, place=place, weights=bad)
    clean(world)
    with opened(world, place=place, weights=good) as session:
        with pytest.raises(EngineUnavailable, match=words):
            session.swap_weights(bad)
        assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))


def test_swapping_weights_there_and_back_is_exact_and_holds_one_set(world: World) -> None:
    place, model = world.place(), model_of()
    base = on(place, model.weights[0])
    with opened(world, place=place, weights=base) as session:
        side = Stream(0x9000)
        with place.on(side):
            session.encode(prompts(1))  # a second context, idle when the weights are swapped
        before, size = encoded(session, prompts(2)), session.bytes
        blocks = world.memory
        session.swap_weights(on(place, model.weights[1]))
        assert session.bytes == size
        assert same(encoded(session, prompts(2)), model.states(prompts(2), which=1))
        with place.on(side):
            assert same(encoded(session, prompts(2)), model.states(prompts(2), which=1))
        session.swap_weights(base)
        assert world.memory == blocks  # the LoRA's set is gone; its streams were told (`record`)
        assert same(encoded(session, prompts(2)), before)
        assert world.calls["engine"] == 1


def test_a_call_never_mixes_two_sets_of_weights(world: World) -> None:
    place, model = world.place(), model_of()
    sets = [on(place, weights) for weights in model.weights]
    embeds = prompts(20)
    parts = [[model.states(e, which=w) for e in embeds.split(16)] for w in (0, 1)]
    expected = [[torch.cat(p) for p in zip(*part, strict=True)] for part in parts]
    with opened(world, place=place, weights=sets[0]) as session:
        done = threading.Event()

        def swap() -> None:
            turn = 0
            while not done.is_set():
                turn += 1
                session.swap_weights(sets[turn % 2])

        with ThreadPoolExecutor(3) as pool:
            swapping = pool.submit(swap)
            calls = [pool.submit(encoded, session, embeds) for _ in range(15)]
            try:
                found = [call.result() for call in calls]
            finally:
                done.set()
            swapping.result()
    assert all(same(f, expected[0]) or same(f, expected[1]) for f in found)


# Threads, streams, devices


def test_four_threads_with_distinct_prompts(world: World) -> None:
    place = world.place()
    batches = [prompts(1 + i, seed=i) for i in range(4)]
    expected = [model_of().states(embeds) for embeds in batches]

    def work(index: int) -> bool:
        with place.on(Stream(0x9000 + index)):
            return all(same(encoded(session, batches[index]), expected[index]) for _ in range(100))

    with opened(world, place=place) as session, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
        assert world.count("context") <= MAX_CONTEXTS


def test_threads_of_one_stream_share_contexts_and_do_not_collect_them(world: World) -> None:
    with opened(world) as session:
        for _ in range(3 * MAX_CONTEXTS):  # hosts start a thread per request
            thread = threading.Thread(target=session.encode, args=(prompts(1),))
            thread.start()
            thread.join()
        assert world.calls["context"] == 1


def test_more_streams_than_contexts(world: World) -> None:
    place = world.place()
    with opened(world, place=place) as session:
        for turn in range(3 * MAX_CONTEXTS):
            with place.on(Stream(0x9000 + turn)):
                assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))
        assert world.calls["context"] == MAX_CONTEXTS
        assert place.synchronizations  # a context changes streams only when the old one is done


def test_the_callers_memory_is_safe_on_another_stream(world: World) -> None:
    place = world.place()
    with opened(world, place=place) as session:
        embeds = place.copied(prompts(1).half())  # of the default stream, bound as it is
        with place.on(Stream(0x9000)):
            session.encode(embeds)
        del embeds
        world.check()


def test_each_session_runs_on_its_own_device(world: World) -> None:
    first, second = world.place(0), world.place(1)
    with opened(world, place=first) as a, opened(world, place=second) as b:
        with first.guard():
            assert same(encoded(b, prompts(1)), model_of().states(prompts(1)))
            assert same(encoded(a, prompts(1)), model_of().states(prompts(1)))
        assert getattr(world.local, "device", None) is None


# Loading


def test_a_plan_may_be_replaced_or_deleted_while_it_is_loaded(world: World, tmp_path: Path) -> None:
    path = tmp_path / "tiny.plan"
    path.write_bytes(model_of().plan)
    with opened(world, plan=path) as session:
        path.write_bytes(b"something else")
        assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))
        path.unlink()
        assert same(encoded(session, prompts(2)), model_of().states(prompts(2)))


def flipped(plan: bytes, at: int) -> bytes:
    return plan[:at] + bytes([plan[at] ^ 1]) + plan[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda plan: b"", "not a plan of this TensorRT"),
        (lambda plan: plan[:63], "not a plan of this TensorRT"),
        (lambda plan: plan[:5000], "5000 of"),
        (lambda plan: plan + b"x", "damaged"),
        (lambda plan: flipped(plan, 0), "not a plan of this TensorRT"),
        (lambda plan: flipped(plan, 0x18), f"version 0.7.1.116, installed is {VERSION}"),
        (lambda plan: flipped(plan, len(plan) // 2), "could not load the plan .*magicTag failed"),
        (lambda plan: plan_from_graph(model_of().graph, sms=(120,)), "SM 12.0 .* SM 8.9"),
        (lambda plan: plan_from_graph(model_of().graph, version="1.6.1.9"), "version 1.6.1.9"),
        (lambda plan: plan_from_graph(model_of().graph, rtx=False), "not a plan of this"),
    ],
)
def test_a_damaged_or_foreign_plan_is_refused(
    world: World, damage: Callable[[bytes], bytes], words: str
) -> None:
    with pytest.raises(EngineUnavailable, match=words) as caught:
        opened(world, plan=damage(model_of().plan))
    assert caught.value.engine == world.module.__name__
    assert str(caught.value).count(". ") == 0  # one sentence
    clean(world)


def test_the_checksum_is_checked_on_what_is_loaded(world: World, tmp_path: Path) -> None:
    plan = model_of().plan
    digest, path = hashlib.sha256(plan).hexdigest(), tmp_path / "tiny.plan"
    path.write_bytes(plan)
    opened(world, plan=path, sha256=digest).close()
    path.write_bytes(flipped(plan, len(plan) - 1))
    with pytest.raises(EngineUnavailable, match="checksum"):
        opened(world, plan=path, sha256=digest)
    path.unlink()
    with pytest.raises(EngineUnavailable, match=r"cannot be read .No such file"):
        opened(world, plan=path, sha256=digest)
    assert world.calls["engine"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"last": None}, "lacks the tensor last"),
        ({"extra": ["OUTPUT", "float16", ["B", 77, 128]]}, "unknown tensor extra"),
        ({"embeds": ["INPUT", "float32", ["B", 77, 128]]}, "embeds as DataType.FLOAT"),
        ({"embeds": ["INPUT", "float16", ["B", 64, 128]]}, r"\[-1, 64, 128\]"),
        ({"hidden_1": ["INPUT", "float16", ["B", 77, 128]]}, "has hidden_1 as"),
        ({NAME: ["INPUT", "float16", [256, 128]]}, f"{NAME} as DataType.HALF"),
        ({BIAS: ["INPUT", "float16", [255]]}, r"\[255\], not float16 \[256\]"),
        ({"mask": ["INPUT", "bool", ["B", 77]]}, "unknown tensor mask"),
    ],
)
def test_a_plan_of_another_graph_is_refused(
    world: World, changes: dict[str, Any], words: str
) -> None:
    model = model_of()
    with pytest.raises(EngineUnavailable, match=words):
        opened(world, plan=plan_from_graph(model.graph, changes=changes))
    clean(world)


def test_a_plan_with_another_profile_is_refused(world: World) -> None:
    plan = plan_from_graph(model_of().graph, batches=(1, 2, 8))
    with pytest.raises(EngineUnavailable, match=r"to \[8, 77, 128\].*not batches \[1, 2, 16\]"):
        opened(world, plan=plan)
    with opened(world, plan=plan, batches=(1, 2, 8)) as session:
        assert encoded(session, prompts(20))[-1].shape == (20, POSITIONS, WIDTH)


LOAD_FAULTS: dict[str, tuple[Any, str]] = {
    "runtime": ("null", "start its runtime .*returned nullptr"),
    "runtime ": ("none", "start its runtime .*no reason"),
    "runtime  ": (RuntimeError("CUDA error 35"), "start its runtime .*CUDA error 35"),
    "validity": (0, "could not use the plan"),
    "deserialize": (None, "could not load the plan .*OutOfMemory.*free some GPU memory"),
    "deserialize ": (MemoryError(), "could not load the plan .MemoryError.; free some"),
    "config": (None, "configure the plan"),
    "cache": (None, "create a runtime cache"),
    "context": (None, "create an execution context .*out of memory.*free some GPU memory"),
    "context ": (RuntimeError("no"), "create an execution context .no."),
    "rejects": ("embeds", r"could not take embeds \[1, 77, 128\]"),
    "lies": ("last", r"gives last as \[2, 77, 128\]"),
    "oom": (3, "GPU memory ran out while loading the plan"),
}


@pytest.mark.parametrize("name", LOAD_FAULTS)
def test_every_fault_at_load_is_one_sentence_and_leaves_nothing(
    world: World, name: str, tmp_path: Path
) -> None:
    fault, words = LOAD_FAULTS[name]
    place = world.place()
    weights = {n: place.copied(t, shift=16) for n, t in model_of().weights[0].items()}
    blocks = world.memory
    options = {"weights": weights, "runtime_cache": tmp_path / "tiny.plan"}
    gc.disable()  # whatever is freed must not have needed it
    try:
        world.faults[name.strip()] = fault
        with pytest.raises(EngineUnavailable, match=words) as caught:
            opened(world, place=place, **options)
        clean(world)
        assert world.memory == blocks
        assert caught.value.__context__ is None
    finally:
        gc.enable()
    world.faults.clear()
    with opened(world, place=place, **options) as session:
        assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))


def test_a_runtime_around_a_null_pointer_is_never_touched(world: World) -> None:
    world.faults["runtime"] = "wrapped"
    with pytest.raises(EngineUnavailable, match=r"start its runtime .createInferRuntime: CUDA"):
        opened(world)
    gc.collect()
    assert world.count("runtime") == 1  # kept for ever: destroying it is a crash too
    assert world.violations == []
    world.faults.clear()
    with opened(world) as session:
        assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (1, "another version of TensorRT; build the plan again"),
        (2, "does not support this GPU; the next engine is used"),
        (4, "the NVIDIA driver is too old; update the NVIDIA driver"),
        (8, "the CUDA runtime is too old"),
        (16, "not enough GPU memory; free some"),
        (32, "damaged, or not a plan; build"),
        (64, "CUDA does not work; check GPU and driver"),
        (6, "does not support this GPU and the NVIDIA driver is too old|too old and"),
        (128, "diagnostics 0x80"),
    ],
)
def test_validity_is_told_in_words(world: World, bits: int, words: str) -> None:
    world.faults["validity"] = bits
    with pytest.raises(EngineUnavailable, match=words):
        opened(world)
    assert world.calls["engine"] == 0
    clean(world)


# Faults in a call


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("execute", None, "could not run the plan .*CUDA error 700"),
        ("execute", RuntimeError("gone"), r"could not run the plan \(gone\)"),
        ("rejects", "last", "could not bind last"),
        ("rejects", "embeds", r"could not take embeds \[3, 77, 128\]"),
        ("lies", "hidden_0", r"gives hidden_0 as \[4, 77, 128\]"),
        ("context", None, "create an execution context"),
        *(("oom", left, r"ran out while encoding \[3, 70, 128\]") for left in range(6)),
    ],
)
def test_a_fault_in_a_call_does_not_poison_the_next(
    world: World, name: str, fault: Any, words: str
) -> None:
    place = world.place()
    with opened(world, place=place) as session:
        blocks = world.memory
        world.faults[name] = fault
        stream = Stream(0x9000) if name == "context" else place.stream()
        gc.disable()
        try:
            with place.on(stream), pytest.raises(EngineUnavailable, match=words) as caught:
                session.encode(prompts(3, 70))
            assert caught.value.__context__ is None
            assert world.memory == blocks
            assert world.count("context") == (1 if name == "context" else 0)
        finally:
            gc.enable()
        world.faults.clear()
        for batch in (1, 3, 17):
            assert encoded(session, prompts(batch))[-1].isfinite().all()
        assert same(encoded(session, prompts(3)), model_of().states(prompts(3)))
    clean(world)


def test_an_interrupted_call_gives_its_context_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(world) as session:
        monkeypatch.setattr(
            Context, "_compute", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            session.encode(prompts(1))
        monkeypatch.undo()
        assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))
        assert world.calls["context"] == 2


# Closing


def test_closing_is_final_and_repeatable(world: World) -> None:
    session = opened(world)
    hidden = encoded(session, prompts(2))
    session.close()
    clean(world)
    session.close()
    with pytest.raises(EngineUnavailable, match="was closed"):
        session.encode(prompts(2))
    with pytest.raises(EngineUnavailable, match="was closed"):
        session.swap_weights(on(world.place(), model_of().weights[0]))
    assert same(hidden, model_of().states(prompts(2)))


def test_close_waits_for_running_calls(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    place = world.place()
    weights = on(place, model_of().weights[0])
    session = opened(world, place=place, weights=weights)
    running, go_on = threading.Event(), threading.Event()
    compute = Context._compute

    def slow(self: Context, *arguments: Any) -> None:
        running.set()
        assert go_on.wait(10)
        compute(self, *arguments)

    monkeypatch.setattr(Context, "_compute", slow)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(encoded, session, prompts(1))
        assert running.wait(10)
        closing = pool.submit(session.close)
        try:
            with pytest.raises(EngineUnavailable, match="was closed"):
                while True:  # until close has begun
                    session.swap_weights(weights)
            assert not closing.done() and world.count("context") == 1
        finally:
            go_on.set()
        assert same(call.result(), model_of().states(prompts(1)))
        closing.result()
    clean(world)


def test_twenty_loads_leave_nothing(world: World) -> None:
    place = world.place()
    weights = on(place, model_of().weights[0])
    blocks = world.memory
    for turn in range(20):
        session = opened(world, place=place, weights=weights)
        session.encode(prompts(1 + turn % 3))
        if turn % 2:
            session.close()
        del session
        clean(world)
    assert world.memory == blocks
    assert world.calls["engine"] == 20


# What only TensorRT for RTX has, and the full TensorRT without it


def kernels(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kernels"))


def test_strategies_are_set_on_purpose(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Context] = []
    init = Context.__init__
    monkeypatch.setattr(
        Context, "__init__", lambda self, *a: (init(self, *a), made.append(self))[0]
    )
    with opened(world):
        (context,) = made
        assert context.strategy is Allocation.USER_MANAGED
        assert context.graphs is CudaGraphStrategy.DISABLED
        assert context.specialization is Specialization.EAGER
        made.clear()
        del context


def test_kernels_are_compiled_once_per_machine(world: World, tmp_path: Path) -> None:
    options = {"runtime_cache": tmp_path / "tiny.plan"}
    with opened(world, **options) as session:
        session.encode(prompts(1))
        session.encode(prompts(17))
        (path,) = kernels(tmp_path)  # kept before anything is closed
        assert path.name.startswith("tiny.plan.") and "rtx-4090" in path.name
        assert "580.1" in path.name and VERSION in path.name
        stored = path.read_bytes()
        session.encode(prompts(16))
    assert world.compiled == [1, 16]
    assert path.read_bytes() == stored
    with opened(world, **options) as session:
        session.encode(prompts(16))
        assert world.compiled == [1, 16]
        session.encode(prompts(2))
    assert world.compiled == [1, 16, 2]
    newer = world.place(name="RTX 4090 (Double) 590.2")
    with opened(world, place=newer, **options) as session:
        session.encode(prompts(1))
    assert world.compiled == [1, 16, 2, 1]
    assert len(kernels(tmp_path)) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_kernels_are_kept_by_one_thread_at_a_time(world: World, tmp_path: Path) -> None:
    place = world.place()

    def work(index: int) -> None:
        with place.on(Stream(0x9000 + index)):
            for turn in range(4):
                session.encode(prompts(1 + index + 4 * turn))

    options = {"runtime_cache": tmp_path / "tiny.plan"}
    with opened(world, place=place, **options) as session, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    with opened(world, place=place, **options) as session:
        session.encode(prompts(16))
    assert sorted(world.compiled) == list(range(1, 17))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: flipped(data, len(data) - 1),
        lambda data: data.replace(b'"kernels": [1]', b'"kernels": [3]'),  # still readable
        lambda data: hashlib.sha256(b"{").digest() + b"{",  # whole, but refused by TensorRT
    ],
)
def test_a_damaged_runtime_cache_is_ignored_and_replaced(
    world: World, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    options = {"runtime_cache": tmp_path / "tiny.plan"}
    with opened(world, **options) as session:
        session.encode(prompts(1))
    (path,) = kernels(tmp_path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    with opened(world, **options) as session:
        assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))
    assert world.compiled == [1, 1]
    assert path.read_bytes() == good


def test_a_runtime_cache_is_bounded_and_never_needed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "RUNTIME_CACHE_LIMIT_BYTES", 10)
    with opened(world, runtime_cache=tmp_path / "tiny.plan") as session:
        session.encode(prompts(1))
    assert not kernels(tmp_path)
    monkeypatch.undo()
    gone = tmp_path / "no" / "folder" / "tiny.plan"
    with opened(world, runtime_cache=gone) as session:
        assert same(encoded(session, prompts(1)), model_of().states(prompts(1)))


def test_the_full_tensorrt_goes_through_the_same_code(tmp_path: Path) -> None:
    world = World(rtx=False)
    assert not hasattr(world.module.Runtime, "get_engine_validity")
    plan = plan_from_graph(model_of().graph, rtx=False)
    place = world.place(sm=90)
    with opened(world, place=place, plan=plan, runtime_cache=tmp_path / "tiny.plan") as session:
        for batch in (1, 17):
            assert encoded(session, prompts(batch))[-1].isfinite().all()
        assert same(encoded(session, prompts(2)), model_of().states(prompts(2)))
    with pytest.raises(EngineUnavailable, match="not a plan of this TensorRT"):
        opened(world, place=place)  # one of TensorRT for RTX
    with pytest.raises(EngineUnavailable, match="could not load the plan"):
        opened(world, place=place, plan=flipped(plan, 5000))
    assert not list(tmp_path.iterdir())
    assert world.violations == []
    clean(world)
