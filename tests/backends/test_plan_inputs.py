# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors as the inputs of a plan: names, arithmetic of the scales, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from octavo.backends.onnx_ops import activation_exponent, emit, weight_scale_unit
from octavo.backends.plan_inputs import embedded_weights, gemm_scales, gemms, plan_weights
from octavo.encoders.clip import POSITIONS
from octavo.errors import QuantizationError
from octavo.recipes import load_recipe
from octavo.seeded import CLIP_G, CLIP_L, TINY
from samples import LAYER, quantized_tiny
from torch import Tensor

QKV = LAYER + "self_attn.qkv_proj"
SEPARATE = tuple(f"{LAYER}self_attn.{n}_proj" for n in "qkv")
FC1 = LAYER + "mlp.fc1"
E4M3 = torch.float8_e4m3fn
BODIES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def weights_with(body: str = "float16", fused: bool = True, **changes: Tensor) -> dict[str, Tensor]:
    quantized = quantized_tiny()
    tensors = {**quantized.tensors, **changes}
    return plan_weights(TINY, quantized.structure, tensors.__getitem__, body, fused=fused)


def test_gemms_of_a_block() -> None:
    structure = load_recipe("fp8").structure(CLIP_G.linears())
    fused, separate = (gemms(CLIP_G, structure, fused=f) for f in (True, False))
    assert len(fused) == 4 * CLIP_G.layers and len(separate) == 6 * CLIP_G.layers
    assert fused[QKV] == SEPARATE
    assert fused[FC1] == (FC1,)
    for groups in (fused, separate):  # each linear once, whichever way
        assert sorted(n for names in groups.values() for n in names) == sorted(CLIP_G.linears())


def test_q_k_and_v_of_different_precision_stay_apart() -> None:
    structure = {**load_recipe("fp8").structure(TINY.linears()), SEPARATE[2]: "16bit"}
    groups = gemms(TINY, structure, fused=True)
    assert QKV not in groups and all(groups[n] == (n,) for n in SEPARATE)
    assert TINY.block(1) + "self_attn.qkv_proj" in groups
    assert set(SEPARATE) <= {n.removesuffix(".weight") for n in emit(TINY, structure).weights}


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed", "bf16"])
@pytest.mark.parametrize("body", BODIES)
def test_they_are_what_the_graph_asks_for(recipe: str, body: str) -> None:
    quantized = quantized_tiny(recipe)
    weights = plan_weights(TINY, quantized.structure, quantized.tensors.__getitem__, body)
    wanted = emit(TINY, quantized.structure, body=body).weights
    assert weights.keys() == wanted.keys()
    names = {"float8e4m3fn": E4M3, **BODIES}
    for name, kind in wanted.items():
        assert weights[name].dtype == names[kind.dtype], name
        assert tuple(weights[name].shape) == kind.shape, name
        assert weights[name].is_contiguous()


def test_the_fused_weight_is_the_three_above_each_other() -> None:
    fused, separate = weights_with(), weights_with(fused=False)
    assert QKV + ".weight" not in separate
    for part in (".weight", ".bias", ".post_scale"):
        joined = torch.cat([separate[n + part].float() for n in SEPARATE])
        assert torch.equal(fused[QKV + part].float(), joined), part
    for name in SEPARATE:
        assert torch.equal(fused[QKV + ".pre_scale"], separate[name + ".pre_scale"])
    assert fused[QKV + ".post_scale"].unique().numel() == 3  # each part keeps its own scale
    others = fused.keys() & separate.keys()
    assert len(others) == len(fused) - 4 * TINY.layers
    for name in others:
        assert torch.equal(fused[name].float(), separate[name].float())


def test_fp8_weights_are_not_copied() -> None:
    quantized = quantized_tiny()
    tensors, weights = quantized.tensors, quantized.plan_weights(fused=False)
    for linear in TINY.linears():
        assert weights[linear + ".weight"].data_ptr() == tensors[linear + ".weight"].data_ptr()


@pytest.mark.parametrize("body", BODIES)
def test_the_scales_give_back_the_checkpoints(body: str) -> None:
    """x * pre -> Q/DQ at 2^-e, W at 2^-10, * post: together x and W at their own scales."""
    tensors, weights = quantized_tiny().tensors, weights_with(body, fused=False)
    ulp = torch.finfo(BODIES[body]).eps
    for linear, (_, inner) in TINY.linears().items():
        unit = 2.0 ** -activation_exponent(inner)
        input_scale, weight_scale = (
            tensors[f"{linear}.{n}_scale"].double() for n in ("input", "weight")
        )
        pre, post = (weights[f"{linear}.{n}_scale"].double() for n in ("pre", "post"))
        assert pre.item() == pytest.approx((unit / input_scale).item(), rel=ulp)
        # the post-scale undoes the pre-scale as it was rounded, so one rounding is left, not two
        exact = weight_scale / weight_scale_unit() / pre
        assert ((post - exact).abs() <= exact * ulp / 2 * 1.001).all()


def test_rounding_of_the_pre_scale_is_undone() -> None:
    scales = torch.linspace(0.01, 1, 999)
    for scale in scales:
        pre, post = gemm_scales(768, scale, torch.ones(1), "float16")
        product = pre.double() * post.double() * weight_scale_unit()
        assert product.item() == pytest.approx(1, rel=2**-11)


def test_differing_input_scales_cannot_share_a_gemm() -> None:
    name = SEPARATE[1] + ".input_scale"
    other = quantized_tiny().tensors[name] * 1.01
    with pytest.raises(QuantizationError, match="qkv_proj: its parts have different input scales"):
        weights_with(**{name: other})
    apart = weights_with(fused=False, **{name: other})  # each has its own GEMM there
    assert apart[SEPARATE[0] + ".pre_scale"] != apart[SEPARATE[1] + ".pre_scale"]


@pytest.mark.parametrize("part", ["weight_scale", "input_scale"])
@pytest.mark.parametrize("value", [0.0, -0.5, torch.nan, torch.inf])
def test_bad_scales_are_refused_by_name(part: str, value: float) -> None:
    with pytest.raises(QuantizationError, match=rf"fc1\.{part} is .*finite and positive"):
        weights_with(**{f"{FC1}.{part}": torch.tensor(value)})


@pytest.mark.parametrize("part", ["weight_scale", "input_scale"])
def test_missing_and_vector_scales_are_refused(part: str, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=rf"fc1\.{part} is \[.*must be one"):
        weights_with(**{f"{FC1}.{part}": torch.ones(256)})
    quantized = quantized_tiny()
    checkpoint = quantized.save(tmp_path / "c")
    tensors = dict(quantized.tensors)
    del tensors[f"{FC1}.{part}"]
    object.__setattr__(checkpoint, "names", frozenset(tensors))
    reads: list[Callable[[str], Tensor]] = [tensors.__getitem__, checkpoint.read]
    for read in reads:
        with pytest.raises(QuantizationError, match=rf"fc1\.{part} is missing"):
            plan_weights(TINY, quantized.structure, read, "float16")


OUTSIDE: Mapping[str, tuple[float, float]] = {  # of fp16, for K = 768: input and weight scale
    "pre-scale too large": (2.0**-21, 2.0**-10),
    "pre-scale subnormal": (2.0**12, 2.0**-10),
    "post-scale too large": (1.0, 2.0**5),
    "post-scale subnormal": (1.0, 2.0**-30),
}


@pytest.mark.parametrize(("input_scale", "weight_scale"), OUTSIDE.values(), ids=OUTSIDE)
def test_scales_outside_fp16_are_refused(input_scale: float, weight_scale: float) -> None:
    scales = torch.tensor(input_scale), torch.tensor([weight_scale, 2.0**-10])
    with pytest.raises(QuantizationError, match="outside the range of float16") as caught:
        gemm_scales(768, *scales, "float16")
    told = float(str(caught.value).partition("(")[2].partition(")")[0])
    assert told == torch.inf or told < 6.1e-5  # the bad one, not its good neighbour
    pre, post = gemm_scales(768, *scales, "bfloat16")  # holds them
    assert pre.dtype == post.dtype == torch.bfloat16
    both = {f"{FC1}.input_scale": scales[0], f"{FC1}.weight_scale": scales[1][0]}
    with pytest.raises(QuantizationError, match="outside the range of float16"):
        weights_with(**both)


@pytest.mark.parametrize(
    "name", [POSITIONS, LAYER + "layer_norm1.weight", FC1 + ".bias", SEPARATE[2] + ".bias"]
)
def test_values_that_the_body_cannot_hold_are_refused(name: str) -> None:
    big = quantized_tiny().tensors[name].float().clone()
    big.flatten()[0] = 7e4
    with pytest.raises(QuantizationError, match="holds values outside the range of float16"):
        weights_with(**{name: big})
    weights_with("bfloat16", **{name: big})


def test_a_16_bit_weight_that_the_body_cannot_hold_is_refused() -> None:
    quantized = quantized_tiny("fp8-mixed")
    name = LAYER + "self_attn.out_proj.weight"
    tensors = {**quantized.tensors, name: torch.full((128, 128), 1e5).bfloat16()}
    with pytest.raises(QuantizationError, match=r"out_proj\.weight holds values outside"):
        plan_weights(TINY, quantized.structure, tensors.__getitem__, "float16")


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed", "bf16"])
def test_embedded_weights_name_what_lies_in_the_file_as_it_is(recipe: str, tmp_path: Path) -> None:
    quantized = quantized_tiny(recipe)
    checkpoint = quantized.save(tmp_path / "c.safetensors")
    found = embedded_weights(checkpoint, quantized.body)
    assert found.file == "c.safetensors"
    linears = {n + ".weight" for n in TINY.linears()}
    # of a bf16 body no fp16 tensor can be used as it lies there
    assert found.external.keys() == (set() if recipe == "bf16" else linears)
    assert all(found.external[n] == n for n in found.external)
    weights = quantized.plan_weights(fused=False)
    assert found.external.keys() | found.values.keys() == weights.keys()
    assert not found.external.keys() & found.values.keys()
    for name, array in found.values.items():
        assert torch.equal(torch.from_numpy(array), weights[name].float()), name
    for name, (offset, size) in found.locations.items():
        assert found.place(name) == ("c.safetensors", offset, size)


def test_clip_l_has_no_scale_near_the_ends_of_fp16() -> None:
    """Inputs up to 1 to 300 and weights up to 0.1 to 5 are usual; far more fits."""
    for _, inner in set(CLIP_L.linears().values()):
        for amax in (0.02, 10.0, 3e3):
            for weight_amax in (0.1, 1.0, 100.0):
                scales = torch.tensor(amax / 448), torch.tensor([weight_amax / 448])
                gemm_scales(inner, *scales, "float16")
