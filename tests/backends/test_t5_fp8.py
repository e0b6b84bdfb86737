# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5 through `torch_fp8`, simulated on the CPU: against FP32, any length, masks, sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from fp8_weights import t5_embeds, t5_weights
from octavo.backends.fp8_ops import DeviceWeights, Fp8Linear, Fp8Weights
from octavo.backends.relative_bias import relative_bias, relative_offsets
from octavo.backends.torch_fp8 import TorchFp8Engine
from octavo.backends.torch_ops import ReferenceEncoder
from octavo.encoders import T5Spec
from octavo.seeded import T5_TINY, seeded_tensors
from torch import Tensor, nn

SMALL = T5Spec(3, 256, 640, 4, 64, 32128)
UMT5 = replace(SMALL, layers=2, bias_per_layer=True)
PLAIN = replace(SMALL, layers=2, gated=False, activation="relu")


@cache
def tensors(spec: T5Spec, overflow: bool = False) -> dict[str, Tensor]:
    dtype = torch.bfloat16 if overflow else torch.float16
    return dict(seeded_tensors(spec, overflow=overflow, dtype=dtype))


@cache
def weights_of(spec: T5Spec, recipe: str = "fp8", overflow: bool = False) -> Fp8Weights:
    return t5_weights(spec, tensors(spec, overflow), recipe)


def engine(spec: T5Spec, recipe: str = "fp8", overflow: bool = False) -> TorchFp8Engine:
    return TorchFp8Engine(spec, weights_of(spec, recipe, overflow), "cpu")


@cache
def reference(spec: T5Spec, overflow: bool = False) -> ReferenceEncoder:
    return ReferenceEncoder(spec, tensors(spec, overflow).__getitem__)


@cache
def emulation(spec: T5Spec, recipe: str = "fp8", overflow: bool = False) -> ReferenceEncoder:
    """The FP32 reference over the values that the codes stand for, its inputs rounded to codes.

    Encoders this narrow lie far from FP32 in FP8, one token in a hundred very far: there is nothing
    to average over. What is tested here is that the engine computes what its codes say, but for the
    BF16 between its products: attention without a scale makes much of that.
    """
    held = weights_of(spec, recipe, overflow).linears
    own = dict(tensors(spec, overflow))
    for name, linear in held.items():
        wide = linear.weight.float()
        own[name + ".weight"] = (
            wide * linear.weight_scale if isinstance(linear, Fp8Linear) else wide
        )
    module = ReferenceEncoder(spec, own.__getitem__)

    def rounded(scale: Tensor, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        codes = (inputs[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes.float() * scale,)

    for name, linear in held.items():
        if isinstance(linear, Fp8Linear):
            hook = partial(rounded, linear.input_scale)
            module.get_submodule(name).register_forward_pre_hook(hook)
    return module


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a.double(), b.double(), dim=-1)


@pytest.mark.parametrize("spec", [SMALL, UMT5, PLAIN], ids=["gated", "umt5", "plain"])
@pytest.mark.parametrize("tokens", [1, 20, 77, 300])
def test_close_to_fp32_at_any_length(spec: T5Spec, tokens: int) -> None:
    embeds = t5_embeds(spec, tensors(spec), 2, tokens)
    hidden, last = engine(spec).encode(embeds)
    assert hidden == () and last.dtype == torch.float32 and last.shape == embeds.shape
    assert cosine(last, emulation(spec)(embeds)[1]).mean() >= 0.98
    assert cosine(last, reference(spec)(embeds)[1]).mean() >= 0.95


@pytest.mark.parametrize("recipe", ["fp8-mixed", "bf16"])
def test_other_recipes(recipe: str) -> None:
    embeds = t5_embeds(SMALL, tensors(SMALL), 2, 40)
    last = engine(SMALL, recipe).encode(embeds)[1]
    assert cosine(last, emulation(SMALL, recipe)(embeds)[1]).mean() >= 0.98
    assert cosine(last, reference(SMALL)(embeds)[1]).mean() >= (0.999 if recipe == "bf16" else 0.95)


def test_finite_where_fp16_overflows() -> None:
    found = tensors(SMALL, overflow=True)
    embeds = t5_embeds(SMALL, found, 2, 60)
    module = reference(SMALL, True)
    largest: list[float] = []
    wo = module.get_submodule(SMALL.block(1) + "layer.1.DenseReluDense.wo")
    wo.register_forward_hook(lambda m, inputs, out: largest.append(float(out.abs().max())))
    module(embeds)
    assert largest[0] > 65504  # so it is such a case
    last = engine(SMALL, overflow=True).encode(embeds)[1]
    assert last.isfinite().all()
    assert cosine(last, emulation(SMALL, "fp8", True)(embeds)[1]).mean() >= 0.98


def test_masked_keys_do_not_matter() -> None:
    embeds = t5_embeds(SMALL, tensors(SMALL), 2, 40)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 25:] = False
    served = engine(SMALL)
    expected = served.encode(embeds, mask)[1]
    changed = embeds.clone()
    changed[0, 25:] += 3
    got = served.encode(changed, mask)[1]
    assert torch.equal(got[0, :25], expected[0, :25]) and torch.equal(got[1], expected[1])
    assert not torch.equal(got[0, 25:], expected[0, 25:])
    assert cosine(expected, emulation(SMALL)(embeds, mask)[1]).mean() >= 0.98
    # Whole rows too: the mean of all values, finite.
    mask[0] = False
    got = served.encode(embeds, mask)[1]
    assert got.isfinite().all()
    assert cosine(got, emulation(SMALL)(embeds, mask)[1]).mean() >= 0.98


def test_too_long_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=f"1 to {T5_TINY.longest} tokens, 128"):
        engine(T5_TINY).encode(torch.zeros(1, T5_TINY.longest + 1, 128))
    assert engine(T5_TINY).encode(torch.randn(1, 500, 128))[1].shape == (1, 500, 128)


def test_weights_are_stacked_without_requantizing() -> None:
    weights = weights_of(SMALL)
    held = DeviceWeights(weights, torch.device("cpu"))
    assert len(held.matrices) == 4 * SMALL.layers
    for names, matrix in held.matrices.items():
        assert matrix.bias is None and matrix.exact_rows == 0
        for name, rows in zip(names, matrix.parts(), strict=True):
            linear = weights.linears[name]
            assert isinstance(linear, Fp8Linear)
            assert torch.equal(matrix.weight[rows].float(), linear.weight.float())
    assert held.size_bytes < 1.1 * sum(out * inner for out, inner in SMALL.linears().values())


def test_other_weights_of_the_same_structure() -> None:
    embeds = t5_embeds(SMALL, tensors(SMALL), 1, 30)
    served, weights = engine(SMALL), weights_of(SMALL)
    before = served.encode(embeds)[1]
    other = dict(seeded_tensors(SMALL, seed=5))
    served.swap_weights(weights.requantized(other))
    changed = served.encode(embeds)[1]
    assert torch.equal(
        changed, TorchFp8Engine(SMALL, weights.requantized(other), "cpu").encode(embeds)[1]
    )
    assert not torch.equal(changed, before)
    served.swap_weights(weights)
    assert torch.equal(served.encode(embeds)[1], before)


def test_a_checkpoint_without_its_bias_table_is_refused() -> None:
    from fp8_weights import t5_checkpoint_tensors
    from octavo.errors import QuantizationError

    made = t5_checkpoint_tensors(T5_TINY, tensors(T5_TINY), "fp8")
    del made[T5_TINY.bias_table(0)]
    with pytest.raises(QuantizationError, match="relative_attention_bias"):
        Fp8Weights.from_tensors(T5_TINY, made, torch.bfloat16)


@pytest.mark.parametrize("length", [1, 2, 7, 130])
def test_offsets_are_the_whole_bias(length: int) -> None:
    table = torch.randn(32, 4)
    line, whole = relative_offsets(table, length, 128), relative_bias(table, length, 128)
    assert line.shape == (4, 2 * length - 1)
    for query in range(length):
        for key in range(length):
            assert torch.equal(line[:, key - query + length - 1], whole[0, :, query, key])
