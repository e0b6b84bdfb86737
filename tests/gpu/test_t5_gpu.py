# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5-XXL through `torch_fp8` on a GPU: close, exact at any length, fast, small, soon back.

Full size, seeded, with outlier channels; the values are drawn on the GPU, which is quick.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from measured import cosine, milliseconds
from octavo.backends.amax import AmaxRecorder
from octavo.backends.fp8_ops import (
    DeviceWeights,
    Fp8Linear,
    Fp8Ops,
    Fp8Weights,
    quantize_weight,
    scale_from_amax,
)
from octavo.backends.torch_fp8 import TorchFp8Engine
from octavo.backends.torch_ops import ReferenceEncoder, StreamedEncoder, tables
from octavo.encoders import encode
from octavo.seeded import T5_XXL, seeded_tensors
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CUDA = torch.device("cuda")
H200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
needs_h200 = pytest.mark.skipif(not H200, reason="the times are promised for an H200")


@pytest.fixture(scope="module")
def tensors() -> Iterator[dict[str, Tensor]]:
    made = dict(seeded_tensors(T5_XXL, dtype=torch.bfloat16, device=CUDA))
    yield made
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()


def embeds_of(tensors: dict[str, Tensor], batch: int, tokens: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 32000, (batch, tokens), generator=random)
    return tensors[T5_XXL.token_table][ids.to(CUDA)].float()


@pytest.fixture(scope="module")
def weights(tensors: dict[str, Tensor]) -> Fp8Weights:
    recorder = AmaxRecorder()
    ops = StreamedEncoder(T5_XXL, tensors.__getitem__, CUDA).ops(recorder)
    with torch.no_grad():
        for seed in range(6):
            encode(ops, T5_XXL, embeds_of(tensors, 4, 16 + 40 * seed, 100 + seed))
    linears: dict[str, Any] = {}
    for name in T5_XXL.linears():
        codes, scale = quantize_weight(tensors[name + ".weight"])
        amax = recorder.amax[name].to(CUDA)
        linears[name] = Fp8Linear(codes, None, scale, scale_from_amax(amax))
    norms = {name: (tensors[name + ".weight"], None) for name in T5_XXL.norms()}
    held = {name: tensors[name] for name in tables(T5_XXL)}
    return Fp8Weights(T5_XXL, torch.bfloat16, linears, norms, held)


@pytest.fixture(scope="module")
def engine(weights: Fp8Weights) -> Iterator[TorchFp8Engine]:
    made = TorchFp8Engine(T5_XXL, weights, CUDA)
    yield made
    made.close()


@pytest.mark.parametrize("tokens", [1, 20, 77, 256, 512])
def test_close_to_fp32(
    engine: TorchFp8Engine, weights: Fp8Weights, tensors: dict[str, Tensor], tokens: int
) -> None:
    embeds = embeds_of(tensors, 2, tokens)
    with torch.no_grad():
        want = StreamedEncoder(T5_XXL, tensors.__getitem__, CUDA)(embeds)[1]
        ops = Fp8Ops(DeviceWeights(weights, CUDA), simulated=True)
        emulated = ops.tensor(encode(ops, T5_XXL, embeds)[1])
    got = engine.encode(embeds)[1]
    assert engine._kernels is not None
    similarity = cosine(got, want)
    print(
        f"\n2x{tokens} to FP32: mean {similarity.mean():.5f} min {similarity.min():.5f}; "
        f"emulation {cosine(emulated, want).mean():.5f} {cosine(emulated, want).min():.5f}; "
        f"to the emulation {cosine(got, emulated).mean():.5f}"
    )
    assert similarity.mean() >= 0.998 and similarity.min() >= 0.99
    assert cosine(got, emulated).mean() >= 0.998


@pytest.mark.parametrize("tokens", [1, 13, 64, 65, 300])
def test_graph_is_eager_and_masks_hide_keys(
    engine: TorchFp8Engine, weights: Fp8Weights, tensors: dict[str, Tensor], tokens: int
) -> None:
    embeds = embeds_of(tensors, 2, tokens)
    mask = torch.ones(2, tokens, dtype=torch.bool, device=CUDA)
    mask[0, (tokens + 1) // 2 :] = False
    eager = TorchFp8Engine(T5_XXL, weights, CUDA, graphs=False)
    for m in (None, mask):
        expected = eager.encode(embeds, m)[1]
        for _ in range(5):
            assert torch.equal(engine.encode(embeds, m)[1], expected)
    eager.close()
    changed = embeds.clone()
    changed[0, (tokens + 1) // 2 :] += 1
    got = engine.encode(changed, mask)[1]
    assert torch.equal(got[0, : (tokens + 1) // 2], expected[0, : (tokens + 1) // 2])
    mask[0] = False
    assert engine.encode(embeds, mask)[1].isfinite().all()


def test_without_triton(
    engine: TorchFp8Engine, weights: Fp8Weights, tensors: dict[str, Tensor]
) -> None:
    embeds = embeds_of(tensors, 2, 50)
    mask = torch.ones(2, 50, dtype=torch.bool, device=CUDA)
    mask[0, 30:] = False
    plain = TorchFp8Engine(T5_XXL, weights, CUDA, triton=False)
    for m in (None, mask):
        similarity = cosine(plain.encode(embeds, m)[1], engine.encode(embeds, m)[1])
        assert similarity.mean() >= 0.998
    plain.close()


@needs_h200
def test_times_and_memory(engine: TorchFp8Engine, tensors: dict[str, Tensor]) -> None:
    half = ReferenceEncoder(T5_XXL, tensors.__getitem__, dtype=torch.bfloat16, device=CUDA)
    found: dict[int, tuple[float, float]] = {}
    for tokens in (256, 512):
        embeds = embeds_of(tensors, 1, tokens)
        narrow, graph = embeds.bfloat16(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.no_grad():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                half(narrow)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                half(narrow)
        ours = milliseconds(lambda embeds=embeds: engine.encode(embeds))
        found[tokens] = ours, milliseconds(graph.replay)
        print(f"\n1x{tokens}: {ours:.2f} ms, bf16 in a CUDA graph {found[tokens][1]:.2f} ms")
    sixteen_bit = 2 * sum(out * inner for out, inner in T5_XXL.linears().values())
    print(f"memory {engine.bytes / sixteen_bit:.3f} of {sixteen_bit / 1e9:.2f} GB in bf16")
    assert engine.bytes <= 0.53 * sixteen_bit
    # 4.8 and 2.6 ms are aimed at and reached on a cool GPU; under load machines differ by 7 %.
    assert found[512][0] <= 5.4 and found[256][0] <= 2.9
    assert found[512][1] >= 1.65 * found[512][0] and found[256][1] >= 1.8 * found[256][0]


@needs_h200
def test_given_back_and_ready_again_in_a_second(weights: Fp8Weights) -> None:
    """From ordinary host memory, through page-locked buffers, to the first result."""
    linears = {
        name: Fp8Linear(v.weight.cpu(), None, v.weight_scale.cpu(), v.input_scale.cpu())
        for name, v in weights.linears.items()
        if isinstance(v, Fp8Linear)
    }
    norms = {name: (weight.cpu(), None) for name, (weight, _) in weights.norms.items()}
    held = {name: table.cpu() for name, table in weights.tables.items()}
    waiting = Fp8Weights(T5_XXL, torch.bfloat16, linears, norms, held)
    embeds = torch.randn(1, 512, T5_XXL.width, device=CUDA)
    expected, times, used = None, [], []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine = TorchFp8Engine(T5_XXL, waiting, CUDA)
        got = engine.encode(embeds)[1]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        expected = got if expected is None else expected
        assert torch.equal(got, expected)
        engine.close()
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append((total - free) / 1e6)
    print(f"\nready in {times} s; MB in use after each end {used}")
    assert times[-1] < 1.0
    assert used[-1] - used[0] < 50
