# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5's emitted graph in ONNX Runtime against FP32 and against FP8 arithmetic in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from octavo.backends.onnx_ops import (
    Graph,
    bucket_table,
    emit,
    emit_block,
    fused_name,
)
from octavo.backends.plan_inputs import gemms, plan_weights
from octavo.backends.relative_bias import relative_buckets
from octavo.backends.torch_ops import ReferenceEncoder, StreamedOps
from octavo.checkpoints.quantized import quantized_tensors, to_fp8
from octavo.encoders import T5Spec, encode
from octavo.encoders.t5 import LONGEST
from octavo.errors import OctavoBug, QuantizationError
from octavo.recipes import load_recipe
from octavo.seeded import OVERFLOW, T5_TINY, seeded_tensors
from octavo.verify import graph_by_blocks, graph_run, reference_by_blocks, twin_weights
from torch import Tensor
from torch.nn.functional import cosine_similarity

SMALL = T5Spec(3, 256, 512, 3, 64, 1000)
SHAPES = {
    "v1.1": SMALL,
    "umt5": replace(SMALL, bias_per_layer=True),
    "v1.0": replace(SMALL, gated=False, activation="relu"),
}
RECIPES = ["fp8", "fp8-mixed", "bf16"]


def weights_of(spec: T5Spec, **options) -> dict[str, Tensor]:
    return dict(seeded_tensors(spec, **options))


def embeds_of(spec: T5Spec, length: int, batch: int = 2, scale: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, spec.width, generator=random) * scale


def structure_of(spec: T5Spec, recipe: str):
    return load_recipe(recipe).of(spec).structure(spec.linears())


def quantized(spec: T5Spec, weights: Mapping[str, Tensor], recipe: str, embeds: Tensor):
    found: dict[str, Tensor] = {}

    def observe(name: str, x: Tensor) -> None:
        found[name] = x.abs().amax()

    with torch.no_grad():
        encode(ReferenceEncoder(spec, weights.get).ops(observe), spec, embeds)
    return quantized_tensors(spec, weights.__getitem__, structure_of(spec, recipe), found)


class FakeQuantized(StreamedOps):
    """The reference, each FP8 linear's input and weight rounded to FP8 as its checkpoint says."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors.__getitem__, "cpu", biased=False)
        self.tensors = tensors

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[name + ".weight"].float()
        if name + ".weight_scale" in self.tensors:
            scale = self.tensors[name + ".input_scale"]
            x, weight = (
                to_fp8(x, scale).float() * scale,
                weight * self.tensors[name + ".weight_scale"],
            )
        return torch.nn.functional.linear(x, weight)


def run(graph: Graph, weights: Mapping[str, Tensor], embeds: Tensor, mask: Tensor | None = None):
    import onnxruntime as ort

    session = ort.InferenceSession(graph.model, providers=["CPUExecutionProvider"])
    feeds = {"embeds": embeds.numpy()}
    if mask is not None:
        feeds["mask"] = mask.numpy()
    assert not any(w.dtype.itemsize == 1 for w in weights.values())
    feeds |= {name: w.numpy() for name, w in weights.items()}
    return torch.from_numpy(session.run(["last"], feeds)[0])


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape and got.isfinite().all()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_graphs_are_valid(spec: T5Spec, recipe: str, mask: bool) -> None:
    graph = emit(spec, structure_of(spec, recipe), body="bfloat16", mask=mask)
    onnx.checker.check_model(graph.model, full_check=True)
    model = onnx.load_from_string(graph.model)
    inputs = {i.name: i.type.tensor_type for i in model.graph.input}
    assert list(inputs) == ["embeds", *(["mask"] if mask else []), *graph.weights]
    (last,) = model.graph.output
    assert (last.name,) == graph.outputs == ("last",)
    assert last.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    assert inputs["embeds"].elem_type == onnx.TensorProto.FLOAT
    for kind in (last.type.tensor_type, inputs["embeds"]):
        dims = [d.dim_param or d.dim_value for d in kind.shape.dim]
        assert dims == ["B", "S", spec.width] == list(graph.embeds.shape) == list(graph.state.shape)
    assert (graph.embeds.dtype, graph.state.dtype) == ("float32", "bfloat16")
    if mask:
        dims = [d.dim_param for d in inputs["mask"].shape.dim]
        assert (inputs["mask"].elem_type, dims) == (onnx.TensorProto.BOOL, ["B", "S"])


def test_nothing_that_overflows_is_in_fp16() -> None:
    """fp16 is only what leaves an FP8 GEMM, whose fixed scales keep it under 65504."""
    model = onnx.load_from_string(emit(SMALL, structure_of(SMALL, "fp8"), body="bfloat16").model)
    typed = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    half = {v.name for v in typed.graph.value_info
            if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}  # fmt: skip
    producers = {out: node.op_type for node in model.graph.node for out in node.output}
    assert {producers[name] for name in half} == {"DequantizeLinear", "Transpose", "MatMul"}
    consumers = {name: [n.op_type for n in model.graph.node if name in n.input] for name in half}
    assert all(consumers[n] == ["Cast"] for n in half if producers[n] == "MatMul")
    adds = [n for n in typed.graph.node if n.op_type == "Add"]
    kinds = {v.name: v.type.tensor_type.elem_type for v in typed.graph.value_info}
    scores = [n for n in adds if kinds[n.output[0]] == onnx.TensorProto.BFLOAT16]
    assert len(scores) == SMALL.layers
    assert {kinds[n.output[0]] for n in adds if n not in scores} == {onnx.TensorProto.FLOAT}


def test_fp16_is_refused() -> None:
    with pytest.raises(OctavoBug, match="overflows fp16"):
        emit(SMALL, structure_of(SMALL, "fp8"), body="float16")


@pytest.mark.parametrize("length", [1, 2, 77, 300])
@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_without_fp8_it_is_the_reference(spec: T5Spec, length: int) -> None:
    weights, embeds = weights_of(spec), embeds_of(spec, length)
    structure = structure_of(spec, "bf16")
    named = plan_weights(spec, structure, weights.__getitem__, "float32")
    reference = ReferenceEncoder(spec, weights.get)
    expected = reference(embeds)[1]
    got = run(emit(spec, structure, body="float32"), named, embeds)
    assert error(got, expected) < 1e-5
    mask = torch.ones(embeds.shape[:2], dtype=torch.bool)
    mask[0, max(1, length // 2) :] = False
    mask[1] = False  # no key at all: the mean of all values, and finite
    masked = run(emit(spec, structure, body="float32", mask=True), named, embeds, mask)
    assert error(masked, reference(embeds, mask)[1]) < 1e-5
    assert length == 1 or error(masked, expected) > 0.01


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed"])
@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_fp8_is_what_the_checkpoint_says(spec: T5Spec, recipe: str) -> None:
    spec = replace(spec, layers=1)  # more of them would spread what moves below
    weights, embeds = weights_of(spec, outliers=False), embeds_of(spec, 40)
    tensors = quantized(spec, weights, recipe, embeds)
    structure = structure_of(spec, recipe)
    named = plan_weights(spec, structure, tensors.__getitem__, "float32")
    _, got = graph_run(emit(spec, structure, body="float32"), named)(embeds)
    expected = encode(FakeQuantized(tensors), spec, embeds)[1]
    exact = ReferenceEncoder(spec, weights.get)(embeds)[1]
    # Sums in another order move a few inputs to the FP8 value beside.
    assert error(got, expected) < 0.2 * error(expected, exact)
    assert 0 < error(expected, exact) < 0.2


@torch.no_grad()
def test_by_blocks_is_the_whole_graph() -> None:
    for spec in SHAPES.values():
        weights, embeds = weights_of(spec), embeds_of(spec, 20, batch=3)
        structure = structure_of(spec, "fp8")
        tensors = quantized(spec, weights, "fp8", embeds)
        named = twin_weights(plan_weights(spec, structure, tensors.__getitem__, "bfloat16"))
        _, whole = graph_run(emit(spec, structure, body="float32"), named)(embeds)
        steps: list[tuple[int, int]] = []
        got = graph_by_blocks(
            spec, structure, tensors.__getitem__, "bfloat16", embeds, batch=3,
            progress=lambda *at, steps=steps: steps.append(at),
        )  # fmt: skip
        assert error(got, whole) < 1e-5
        assert steps == [(1, 3), (2, 3), (3, 3)]
        reference = ReferenceEncoder(spec, weights.get)(embeds)[1]
        assert torch.equal(
            reference_by_blocks(spec, weights.__getitem__, embeds, batch=3), reference
        )


def test_a_block_is_alone() -> None:
    structure = structure_of(SMALL, "fp8")
    graph = emit_block(SMALL, structure, 1, body="bfloat16")
    others = {n for n in graph.weights if not n.startswith(SMALL.block(1))}
    assert others == {SMALL.bias_table(0)}
    assert graph.state.dtype == graph.embeds.dtype == "float32"
    tensors = quantized(SMALL, weights_of(SMALL), "fp8", embeds_of(SMALL, 5))
    named = plan_weights(SMALL, structure, tensors.__getitem__, "bfloat16", block=1)
    assert named.keys() == graph.weights.keys()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_weights_are_what_the_graph_takes(spec: T5Spec, recipe: str) -> None:
    tensors = quantized(spec, weights_of(spec), recipe, embeds_of(spec, 5))
    structure = structure_of(spec, recipe)
    graph = emit(spec, structure, body="bfloat16")
    named = plan_weights(spec, structure, tensors.__getitem__, "bfloat16")
    dtypes = {"float8e4m3fn": torch.float8_e4m3fn, "float32": torch.float32,
              "bfloat16": torch.bfloat16}  # fmt: skip
    assert {n: (t.dtype, tuple(t.shape)) for n, t in named.items()} == {
        n: (dtypes[t.dtype], t.shape) for n, t in graph.weights.items()
    }
    kinds = {n.rsplit(".", 1)[1]: t.dtype for n, t in named.items() if "norm" in n}
    assert kinds == {"weight": torch.float32}
    groups = gemms(spec, structure, fused=True)
    assert fused_name(spec.groups(0)[0]) in groups
    assert len(groups) == 4 * spec.layers  # q, k, v and both gates are one each, in every recipe


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 64), (8, 20), (64, 256)])
def test_the_constant_buckets_are_the_references(buckets: int, distance: int) -> None:
    table = bucket_table(LONGEST, buckets, distance)
    assert table.dtype == np.int32
    assert torch.equal(torch.from_numpy(table).long(), relative_buckets(LONGEST, buckets, distance))


@torch.no_grad()
def test_activations_beyond_fp16_stay_finite_and_similar() -> None:
    spec = replace(T5_TINY, width=1024, feed_forward=1024, vocabulary=50)
    wo = "encoder.block.1.layer.1.DenseReluDense.wo.input_scale"
    found = []
    for overflow in (False, True):
        weights = weights_of(spec, overflow=overflow)
        embeds = embeds_of(spec, 40, scale=OVERFLOW if overflow else 1.0)
        tensors = quantized(spec, weights, "fp8", embeds)
        structure = structure_of(spec, "fp8")
        got = graph_by_blocks(spec, structure, tensors.__getitem__, "bfloat16", embeds)
        expected = ReferenceEncoder(spec, weights.get)(embeds)[1]
        assert got.isfinite().all()
        assert cosine_similarity(got, expected, dim=-1).mean() > 0.99
        found.append((got, tensors[wo] * 448))
    (plain, small), (large, beyond) = found
    assert small < 65504 < beyond
    assert cosine_similarity(plain, large, dim=-1).min() > 0.999


def test_unequal_input_scales_are_refused() -> None:
    tensors = quantized(SMALL, weights_of(SMALL), "fp8", embeds_of(SMALL, 5))
    name = "encoder.block.2.layer.1.DenseReluDense.wi_1.input_scale"
    tensors[name] = tensors[name] * 2
    with pytest.raises(QuantizationError, match=r"DenseReluDense\.wi: its parts have different"):
        plan_weights(SMALL, structure_of(SMALL, "fp8"), tensors.__getitem__, "bfloat16")
