# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""`torch_fp8` on the FP8 tensor cores: right, reproducible, bounded, fast. Needs SM 8.9 or up."""

from __future__ import annotations

import gc
import hashlib
import importlib
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_weights import fp8_weights, prompt_embeds, random_embeds, random_weights, seeded
from measured import cosine, equal, milliseconds
from octavo.backends.fp8_ops import DeviceWeights, Fp8Ops, Fp8Weights, quantize_input
from octavo.backends.torch_fp8 import TorchFp8Engine
from octavo.backends.torch_ops import ReferenceEncoder
from octavo.encoders import encode
from octavo.encoders.clip import POSITIONS, ClipSpec
from octavo.seeded import CLIP_G, CLIP_L, LONG_CLIP_L, TINY
from together import in_threads
from torch import Tensor

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
H200 = "H200"  # where the times were promised
ROOT = Path(__file__).resolve().parents[2]


class Encoder:
    """CLIP-L with outliers, quantized by `recipe`, with its FP32 reference on the GPU."""

    def __init__(self, spec: ClipSpec = CLIP_L, recipe: str = "fp8") -> None:
        self.spec, self.tensors = spec, seeded(spec)
        self.weights = fp8_weights(spec, self.tensors, recipe, count=8)
        self.reference = ReferenceEncoder(spec, self.tensors.__getitem__, device=CUDA)

    def embeds(self, count: int) -> Tensor:
        return prompt_embeds(self.spec, self.tensors, count).to(CUDA)

    def engine(self, **options) -> TorchFp8Engine:
        return TorchFp8Engine(self.spec, self.weights, CUDA, **options)


@pytest.fixture(scope="module")
def clip_l() -> Encoder:
    return Encoder()


@pytest.fixture(scope="module")
def engine(clip_l: Encoder):
    made = clip_l.engine(max_graphs=32)
    yield made
    assert made._kernels is not None  # it was the kernels that were tested
    made.close()


def digest(states) -> str:
    hidden, last = states
    return hashlib.sha256(torch.stack([*hidden, last]).cpu().numpy().tobytes()).hexdigest()


# Right


def test_the_kernels_quantize_every_half_as_pytorch_does() -> None:
    triton = pytest.importorskip("triton")
    from octavo.backends import triton_kernels

    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16).to(CUDA)
    amaxes = values[values.isfinite() & (values > 1e-3)].float()[::97]
    for scale in [*(amaxes / 448).unbind(), *torch.rand(40, device=CUDA).unbind()]:
        out = torch.empty(65536, dtype=torch.float8_e4m3fn, device=CUDA)
        quantize_kernel(triton, triton_kernels)[(64,)](values, scale, out, BLOCK=1024)
        expected = quantize_input(values, scale)
        same = out.view(torch.uint8) == expected.view(torch.uint8)
        both_nan = out.float().isnan() & expected.float().isnan()
        assert (same | both_nan).all(), (scale.item(), values[~(same | both_nan)][:5])


_KERNEL: list = []


def quantize_kernel(triton, kernels):
    """The quantization alone, as a kernel (Triton reads the source of a function in a file)."""
    if not _KERNEL:
        global tl, _quantize
        tl, _quantize = triton.language, kernels._quantize
        _KERNEL.append(triton.jit(_quantize_all))
    return _KERNEL[0]


def _quantize_all(x, scale, out, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, _quantize(tl.load(x + at).to(tl.float32), tl.load(scale)))


def test_close_to_fp32(clip_l: Encoder, engine: TorchFp8Engine) -> None:
    embeds = clip_l.embeds(16)
    with torch.no_grad():
        hidden, last = clip_l.reference(embeds)
    states, final = engine.encode(embeds)
    for mine, expected in ((final, last), (states[-2], hidden[-2])):
        similarity = cosine(mine, expected)
        assert similarity.mean() >= 0.993 and similarity.min() >= 0.98


def one_block(encoder: Encoder, index: int) -> tuple[ClipSpec, Fp8Weights]:
    """Block `index` alone, as an encoder of one layer without positions."""
    spec = replace(encoder.spec, layers=1)
    old, new = encoder.spec.block(index), spec.block(0)
    weights = encoder.weights
    tables = {POSITIONS: weights.tables[POSITIONS] * 0}
    linears = {n: weights.linears[n.replace(new, old)] for n in spec.linears()}
    norms = {n: weights.norms[n.replace(new, old)] for n in spec.norms()}
    return spec, replace(weights, spec=spec, linears=linears, norms=norms, tables=tables)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed"])
@pytest.mark.parametrize("batch", [1, 2, 8, 32])  # each takes other kernels for its GEMMs
@pytest.mark.parametrize("triton", [True, False])
def test_each_block_is_its_emulation(
    clip_l: Encoder, recipe: str, batch: int, triton: bool, mixed: Encoder
) -> None:
    """On the emulation's own input, so that no earlier rounding is amplified on the way."""
    encoder = clip_l if recipe == "fp8" else mixed
    ops = Fp8Ops(DeviceWeights(encoder.weights, CUDA), simulated=True)
    with torch.no_grad():
        hidden = [ops.tensor(x) for x in encode(ops, CLIP_L, encoder.embeds(batch).half())[0]]
    for index in (0, 5, 11):
        spec, weights = one_block(encoder, index)
        engine = TorchFp8Engine(spec, weights, CUDA, triton=triton)
        state = engine.encode(hidden[index])[0][1]
        assert (engine._kernels is not None) == triton
        engine.close()
        similarity = cosine(state, hidden[index + 1])
        assert similarity.mean() > 0.9995, (index, similarity.mean())
        assert similarity.min() > 0.997, (index, similarity.min())


@pytest.fixture(scope="module")
def mixed() -> Encoder:
    return Encoder(recipe="fp8-mixed")


@pytest.fixture(scope="module")
def clip_g() -> Encoder:
    return Encoder(CLIP_G)


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("name", ["clip_l", "clip_g"])
def test_the_emulation_of_the_same_arithmetic(
    name: str, batch: int, triton: bool, request: pytest.FixtureRequest
) -> None:
    """The tensor cores' shorter accumulators cost nothing that FP8 has not cost already."""
    encoder: Encoder = request.getfixturevalue(name)
    embeds = encoder.embeds(16)
    ops = Fp8Ops(DeviceWeights(encoder.weights, CUDA), simulated=True)
    with torch.no_grad():
        exact, last = encoder.reference(embeds)
        states, final = encode(ops, encoder.spec, embeds.half())
        emulated = ops.tensor(final), ops.tensor(states[-2])
    engine = encoder.engine(triton=triton)
    got = [engine.encode(part) for part in embeds.split(batch)]
    engine.close()
    mine = torch.cat([g[1] for g in got]), torch.cat([g[0][-2] for g in got])
    for one, other, want in zip(mine, emulated, (last, exact[-2]), strict=True):
        similarity = cosine(one, other).mean()
        print(f"{name} batch {batch} triton {triton}: {similarity:.5f}")
        assert similarity >= 0.998
        assert cosine(one, want).mean() > cosine(other, want).mean() - 0.001


@pytest.mark.parametrize("recipe", ["fp8-mixed", "bf16"])
def test_other_recipes(recipe: str, mixed: Encoder) -> None:
    encoder = mixed if recipe == "fp8-mixed" else Encoder(recipe=recipe)
    engine = encoder.engine()
    embeds = encoder.embeds(3)
    with torch.no_grad():
        _, last = encoder.reference(embeds)
    got = engine.encode(embeds)[1]
    engine.close()
    assert got.dtype == encoder.weights.body
    assert cosine(got, last).mean() > (0.999 if recipe == "bf16" else 0.993)


def test_without_triton_within_rounding(clip_l: Encoder, engine: TorchFp8Engine) -> None:
    plain = clip_l.engine(triton=False)
    embeds = clip_l.embeds(4)
    a, b = engine.encode(embeds), plain.encode(embeds)
    plain.close()
    for mine, other in zip(a[0][:3], b[0][:3], strict=True):
        assert cosine(mine, other).mean() > 0.999
    assert cosine(a[1], b[1]).mean() > 0.9965


@pytest.mark.parametrize("tokens", [1, 2, 16, 20, 76, 77])
@pytest.mark.parametrize("batch", [1, 3])
def test_graph_is_eager_bit_by_bit(
    clip_l: Encoder, engine: TorchFp8Engine, batch: int, tokens: int
) -> None:
    """Any length, nothing padded; and replays overlap launches where the eager run does not."""
    embeds = clip_l.embeds(batch)[:, :tokens]
    mask = torch.arange(tokens, device=CUDA) < torch.tensor([[tokens], [5], [1]], device=CUDA)
    eager = clip_l.engine(graphs=False)
    for m in (None, mask[:batch]):
        expected = eager.encode(embeds, m)
        for _ in range(20):
            assert equal(engine.encode(embeds, m), expected)
    eager.close()


def test_prefix_and_batch_agree(clip_l: Encoder, engine: TorchFp8Engine) -> None:
    embeds = clip_l.embeds(8)
    whole = engine.encode(embeds)[1]
    assert cosine(engine.encode(embeds[:, :20])[1], whole[:, :20]).mean() > 0.997
    for i in range(8):
        assert cosine(engine.encode(embeds[i : i + 1])[1][0], whole[i]).mean() > 0.996


@pytest.mark.parametrize("batch", [1, 40, 128])
def test_masks_hide_keys(clip_l: Encoder, engine: TorchFp8Engine, batch: int) -> None:
    embeds = random_embeds(CLIP_L, batch).to(CUDA)
    mask = torch.ones(batch, 77, dtype=torch.bool, device=CUDA)
    mask[:, 30:] = False
    expected = engine.encode(embeds, mask)[1]
    changed = embeds.clone()
    changed[:, 30:40] += 1  # hidden keys: only their own rows may change
    got = engine.encode(changed, mask)[1]
    assert torch.equal(got[:, :30], expected[:, :30])
    assert torch.equal(got[:, 40:], expected[:, 40:])
    assert not torch.equal(got[:, 30:40], expected[:, 30:40])


def test_long_clip() -> None:
    encoder = Encoder(LONG_CLIP_L)
    engine = encoder.engine()
    embeds = encoder.embeds(2)
    with torch.no_grad():
        _, last = encoder.reference(embeds)
    similarity = cosine(engine.encode(embeds)[1], last)
    engine.close()
    assert similarity.mean() > 0.993 and similarity.min() > 0.98


# Reproducible


def test_every_engine_and_process_gives_the_same_bits(
    clip_l: Encoder, engine: TorchFp8Engine
) -> None:
    embeds = random_embeds(CLIP_L, 2).to(CUDA)
    expected = digest(engine.encode(embeds))
    again = clip_l.engine()
    assert digest(again.encode(embeds)) == expected
    again.close()
    script = (
        "import sys; sys.path[:0] = [r'{tests}', r'{gpu}'];"
        "import conftest, test_torch_fp8_gpu as t;"
        "e = t.Encoder(); x = t.random_embeds(t.CLIP_L, 2).to(t.CUDA); "
        "print(t.digest(e.engine().encode(x)))"
    ).format(tests=ROOT / "tests", gpu=ROOT / "tests" / "gpu")
    run = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, cwd=ROOT
    )
    assert run.stdout.strip() == expected, run.stderr[-2000:]


def test_threads_and_streams_get_their_own_answers(clip_l: Encoder, engine: TorchFp8Engine) -> None:
    inputs = [random_embeds(CLIP_L, 1, seed=i).to(CUDA) for i in range(4)]
    expected = [engine.encode(x) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        stream = torch.cuda.Stream() if index % 2 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for _ in range(100):
                got = engine.encode(inputs[index])
                if not equal(got, expected[index]):
                    wrong.append(index)

    in_threads(work)
    assert wrong == []


def test_first_calls_from_threads(clip_l: Encoder) -> None:
    """Four threads that each meet a new shape at once: captures wait for each other."""
    engine, eager = clip_l.engine(), clip_l.engine(graphs=False)
    inputs = [random_embeds(CLIP_L, 1, seed=i)[:, : 20 + i].to(CUDA) for i in range(4)]
    expected = [eager.encode(x) for x in inputs]
    torch.cuda.synchronize()
    results: dict[int, bool] = {}

    def work(index: int) -> None:
        busy = torch.randn(512, 512, device=CUDA)  # the host's own work, during captures too
        for _ in range(5):
            busy = torch.tanh(busy @ busy)
            results[index] = equal(engine.encode(inputs[index]), expected[index])

    in_threads(work)
    assert results == dict.fromkeys(range(4), True)
    engine.close()
    eager.close()


def test_results_are_new_tensors(clip_l: Encoder, engine: TorchFp8Engine) -> None:
    a, b = (random_embeds(CLIP_L, 1, seed=i).to(CUDA) for i in range(2))
    first = engine.encode(a)
    kept = first[1].clone()
    engine.encode(b)[1].zero_()
    engine.encode(b)
    assert torch.equal(first[1], kept)


def test_nan_does_not_outlive_its_call(clip_l: Encoder, engine: TorchFp8Engine) -> None:
    for batch in (1, 8, 40):
        embeds = random_embeds(CLIP_L, batch).to(CUDA)
        expected = engine.encode(embeds)
        poisoned = embeds.clone()
        poisoned[0, 3, 7] = float("nan")
        poisoned[0, 5, 9] = float("inf")
        assert engine.encode(poisoned)[1].isnan().any()
        assert equal(engine.encode(embeds), expected)


def test_embeds_from_anywhere(clip_l: Encoder, engine: TorchFp8Engine) -> None:
    embeds = random_embeds(CLIP_L, 2).half()
    expected = engine.encode(embeds.to(CUDA))
    assert equal(engine.encode(embeds), expected)  # from the CPU
    spread = torch.zeros(2, 77, 2 * 768, dtype=torch.float32, device=CUDA)
    spread[..., ::2] = embeds.to(CUDA)
    assert equal(engine.encode(spread[..., ::2]), expected)  # strided
    with torch.inference_mode():
        assert equal(engine.encode(embeds.to(CUDA) * 1), expected)


# Weights that change


def test_swapped_weights_under_captured_graphs(clip_l: Encoder) -> None:
    engine = clip_l.engine()
    embeds = random_embeds(CLIP_L, 1).to(CUDA)
    before = engine.encode(embeds)
    live = {n: t.to(CUDA) for n, t in seeded(CLIP_L, 7).items()}
    other = clip_l.weights.requantized(live)
    fresh = TorchFp8Engine(CLIP_L, other, CUDA)
    engine.swap_weights(other)
    assert equal(engine.encode(embeds), fresh.encode(embeds))
    assert not equal(engine.encode(embeds), before)
    engine.swap_weights(clip_l.weights)
    assert equal(engine.encode(embeds), before)
    engine.close()
    fresh.close()


def test_live_weights_are_served_in_100_ms(clip_l: Encoder) -> None:
    engine = clip_l.engine()
    embeds = random_embeds(CLIP_L, 1).to(CUDA)
    engine.encode(embeds)
    live = {n: t.to(CUDA) for n, t in clip_l.tensors.items()}
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.swap_weights(clip_l.weights.requantized(live))
        engine.encode(embeds)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    engine.close()
    assert sorted(times)[2] < 0.1, times


# Bounded


@pytest.mark.parametrize("limit", [1, 2])
def test_the_graph_store_is_bounded(clip_l: Encoder, limit: int) -> None:
    engine, eager = clip_l.engine(max_graphs=limit), clip_l.engine(graphs=False)
    held = []
    for tokens in (10, 20, 30, 10, 40, 30, 77):
        embeds = random_embeds(CLIP_L, 1)[:, :tokens].to(CUDA)
        assert equal(engine.encode(embeds), eager.encode(embeds))
        held.append(engine.bytes)
        assert len(engine._captured) <= limit
    assert max(held) - min(held) < 64 << 20
    engine.close()
    eager.close()


def test_out_of_memory_while_capturing(
    clip_l: Encoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, eager = clip_l.engine(), clip_l.engine(graphs=False)
    embeds = random_embeds(CLIP_L, 1).to(CUDA)
    expected = eager.encode(embeds)
    run = TorchFp8Engine._run

    def fails(self, *args, **options) -> Tensor:
        states = run(self, *args, **options)
        if torch.cuda.is_current_stream_capturing() and args[1].shape[1] == 77:
            torch.empty(1 << 50, dtype=torch.uint8, device=CUDA)  # a real one, in mid-capture
        return states

    monkeypatch.setattr(TorchFp8Engine, "_run", fails)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert equal(engine.encode(embeds), expected)
    assert len(caplog.records) == 1 and "without a CUDA graph" in caplog.text
    short = random_embeds(CLIP_L, 1)[:, :20].to(CUDA)
    assert equal(engine.encode(short), eager.encode(short))
    assert list(engine._captured) == [(1, 20, False)]
    engine.close()
    eager.close()


def test_a_triton_that_fails(
    clip_l: Encoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    embeds = random_embeds(CLIP_L, 1).to(CUDA)
    plain = clip_l.engine(triton=False)
    expected = plain.encode(embeds)
    plain.close()

    def missing(name: str, package: str | None = None) -> object:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with caplog.at_level(logging.INFO):
        engine = clip_l.engine()
    assert "without Triton" in caplog.text
    assert equal(engine.encode(embeds), expected)
    engine.close()
    monkeypatch.undo()

    kernels = pytest.importorskip("octavo.backends.triton_kernels")

    def too_large(*args: object) -> None:
        raise kernels.KernelError("out of resource: shared memory")

    engine = clip_l.engine()
    monkeypatch.setattr(kernels.FusedOps, "attend", too_large)
    caplog.clear()
    for _ in range(2):
        assert equal(engine.encode(embeds), expected)
    assert [r.getMessage() for r in caplog.records if "fails" in r.getMessage()] == [
        "torch_fp8 goes on without Triton, which fails: out of resource: shared memory"
    ]
    engine.close()


def test_memory_held_and_given_back() -> None:
    weights = random_weights(CLIP_L, CUDA)
    linears16 = 2 * sum(out * inner for out, inner in CLIP_L.linears().values())
    embeds = random_embeds(CLIP_L, 1).to(CUDA)

    def cycle() -> tuple[int, int]:
        before = torch.cuda.memory_reserved()
        engine = TorchFp8Engine(CLIP_L, weights, CUDA)
        engine.encode(embeds)
        told, taken = engine.bytes, torch.cuda.memory_reserved() - before
        engine.close()
        return told, taken

    cycle()  # cuBLAS and Triton take what the process keeps
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    told, taken = cycle()
    assert told <= 0.6 * linears16
    assert taken <= told + (32 << 20), (told, taken)  # the allocator rounds up by its segments
    for _ in range(19):
        cycle()
    assert free - torch.cuda.mem_get_info()[0] < 50e6


# Fast

needs_h200 = pytest.mark.skipif(
    not torch.cuda.is_available() or H200 not in torch.cuda.get_device_name(),
    reason="the times are promised for an H200",
)


@needs_h200
@pytest.mark.parametrize(("spec", "limit"), [(CLIP_L, 0.34), (CLIP_G, 1.05)], ids=["L", "G"])
def test_one_prompt(spec: ClipSpec, limit: float) -> None:
    engine = TorchFp8Engine(spec, random_weights(spec, CUDA), CUDA)
    embeds = random_embeds(spec, 1).half().to(CUDA)
    measured = milliseconds(lambda: engine.encode(embeds), 60)
    engine.close()
    assert measured <= limit


@needs_h200
def test_128_prompts_against_a_half_precision_graph(clip_l: Encoder, engine) -> None:
    embeds = random_embeds(CLIP_L, 128).half().to(CUDA)
    half = ReferenceEncoder(CLIP_L, clip_l.tensors.__getitem__, dtype=torch.float16, device=CUDA)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            half(embeds)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            half(embeds)
    ours = milliseconds(lambda: engine.encode(embeds), 20)
    assert milliseconds(graph.replay, 20) >= 1.6 * ours


def test_ready_without_triton_in_a_second(clip_l: Encoder) -> None:
    embeds = random_embeds(CLIP_L, 1).to(CUDA)
    clip_l.engine(triton=False).close()
    start = time.perf_counter()
    engine = clip_l.engine(triton=False)
    engine.encode(embeds)
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    engine.close()
    assert taken < 1.0


def test_ready_with_a_cold_triton_cache(tmp_path: Path) -> None:
    script = (
        "import sys, time; sys.path[:0] = [r'{tests}', r'{gpu}'];"
        "import conftest, test_torch_fp8_gpu as t;"
        "w = t.random_weights(t.CLIP_L, t.CUDA); x = t.random_embeds(t.CLIP_L, 1).to(t.CUDA);"
        "t.torch.cuda.synchronize(); s = time.perf_counter();"
        "e = t.TorchFp8Engine(t.CLIP_L, w, t.CUDA); e.encode(x); t.torch.cuda.synchronize();"
        "assert e._kernels is not None; print(time.perf_counter() - s)"
    ).format(tests=ROOT / "tests", gpu=ROOT / "tests" / "gpu")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout.strip()) < 10
    assert any(tmp_path.iterdir())  # it was this cache


def test_tiny_runs_too() -> None:
    """Sizes that no kernel was measured on: heads of 64, K of one tile."""
    encoder = Encoder(TINY)
    engine = encoder.engine()
    embeds = encoder.embeds(2)
    ops = Fp8Ops(DeviceWeights(encoder.weights, CUDA), simulated=True)
    with torch.no_grad():
        emulated = ops.tensor(encode(ops, TINY, embeds.half())[1])
    assert cosine(engine.encode(embeds)[1], emulated).mean() > 0.99
    assert encoder.weights.tables[POSITIONS].shape == (77, 128) and POSITIONS in TINY.tensors()
    engine.close()
