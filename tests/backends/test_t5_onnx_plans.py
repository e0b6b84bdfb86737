# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5 graphs in the real builder, without a GPU: which precision each GEMM got, and sizes.

Full width; two blocks tell what each kind of block becomes, and one test builds all 24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from octavo.backends.onnx_ops import Graph, emit
from octavo.backends.plan_inputs import gemms
from octavo.compile import T5_BATCHES, T5_LENGTHS, _profile
from octavo.encoders import T5Spec
from octavo.recipes import load_recipe
from octavo.seeded import T5_XXL, UMT5_XXL
from octavo.trt.build import BuildRequest, BuiltPlan, build_plan
from octavo.trt.layers import LayerReport

pytestmark = pytest.mark.slow

TWO = replace(T5_XXL, layers=2)
SHAPES = {
    "v1.1": TWO,
    "umt5": replace(UMT5_XXL, layers=2),
    "v1.0": replace(TWO, gated=False, activation="relu", feed_forward=16384),
}


def graph_of(spec: T5Spec, recipe: str, mask: bool = False) -> Graph:
    rules = load_recipe(recipe).of(spec)
    return emit(spec, rules.structure(spec.linears()), body=rules.body, mask=mask)


def build(spec: T5Spec, graph: Graph, sms: tuple[int, ...], target: Path) -> BuiltPlan:
    request = BuildRequest("tensorrt_rtx", graph.model, sms, _profile(spec, graph))
    return build_plan(request, target=target)


def matmuls(graph: Graph) -> Mapping[str, str]:
    """Name of the GEMM -> name of its MatMul node; attention's two products are not in it."""
    nodes = list(onnx.load_from_string(graph.model).graph.node)
    producer = {output: node for node in nodes for output in node.output}
    found = {}
    for node in nodes:
        factor = producer.get(node.input[1]) if node.op_type == "MatMul" else None
        if factor is not None and factor.op_type == "Transpose":
            source = factor.input[0]
            if source in producer and producer[source].op_type == "DequantizeLinear":
                source = producer[source].input[0]
            if source.endswith(".weight"):
                found[source.removesuffix(".weight")] = node.name
    return found


def check_layers(spec: T5Spec, recipe: str, graph: Graph, layers: LayerReport) -> None:
    structure = load_recipe(recipe).of(spec).structure(spec.linears())
    groups, nodes = gemms(spec, structure, fused=True), matmuls(graph)
    assert nodes.keys() == groups.keys()
    lowered = {nodes[n] for n, linears in groups.items() if structure[linears[0]] == "fp8"}
    assert layers.not_fp8(lowered) == ()
    others = {node for layer in layers.other_gemms for node in layer.onnx}
    assert set(nodes.values()) - lowered <= others
    assert not lowered & others
    assert len(layers.fp8_gemms) == len(lowered)
    assert len(layers.other_gemms) == len(groups) - len(lowered)
    assert {layer.operands for layer in layers.other_gemms} <= {("BFloat16", "BFloat16")}
    # A kernel that casts FP8 up and multiplies in 16 bit lists FP8 inputs too: `CastMulCastMulFc`.
    assert not [la.name for la in layers.fp8_gemms if "Cast" in la.name.partition("Fc")[0]]
    assert len(layers.attentions) == spec.layers
    assert {layer.operands for layer in layers.attentions} == {("BFloat16",) * 4}  # q, k, bias, v
    # What is neither a GEMM nor an attention computes in FP32 or hands on what they need.
    assert "Half" not in {layer.result for layer in layers.others}


@pytest.mark.parametrize(
    ("name", "recipe", "sm", "mask"),
    [
        ("v1.1", "fp8", 89, False),
        ("v1.1", "fp8", 120, True),
        ("v1.1", "fp8-mixed", 89, False),
        ("v1.1", "fp8-mixed", 120, False),
        ("v1.1", "bf16", 89, False),
        ("v1.1", "bf16", 120, True),
        ("umt5", "fp8", 89, True),
        ("umt5", "fp8", 120, False),
        ("v1.0", "fp8", 89, False),
        ("v1.0", "fp8", 120, False),
    ],
)
def test_precision_of_every_gemm(
    name: str, recipe: str, sm: int, mask: bool, tmp_path: Path
) -> None:
    spec = SHAPES[name]
    graph = graph_of(spec, recipe, mask)
    built = build(spec, graph, (sm,), tmp_path / "plan")
    assert built.layers is not None
    check_layers(spec, recipe, graph, built.layers)


@pytest.mark.parametrize("spec", [T5_XXL, UMT5_XXL], ids=["t5", "umt5"])
def test_the_whole_encoder(spec: T5Spec, tmp_path: Path) -> None:
    """One plan for both generations; the targets are 5 s and 1.5 GB on two idle cores."""
    graph = graph_of(spec, "fp8")
    built = build(spec, graph, (89, 120), tmp_path / "plan")
    assert built.layers is not None
    check_layers(spec, "fp8", graph, built.layers)
    assert len(built.layers.fp8_gemms) == 96
    assert built.bytes < 20e6  # no weights: 4.6 GB of them are inputs
    assert built.peak_rss_bytes < 1.5e9
    assert built.seconds < 60


def test_the_profile() -> None:
    graph = graph_of(TWO, "fp8", mask=True)
    assert _profile(TWO, graph) == {
        "embeds": ((1, 1, 4096), (1, 256, 4096), (4, 1024, 4096)),
        "mask": ((1, 1), (1, 256), (4, 1024)),
    }
    assert (T5_BATCHES, T5_LENGTHS) == ((1, 1, 4), (1, 256, 1024))
