# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The layer list against the real builder, and against lines it printed for other graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.trt.build import build_plan
from octavo.trt.layers import layer_report
from trt_graphs import BLOCK, LINEARS, Graph, request_of


@pytest.mark.parametrize("sms", [(89,), (120,), (89, 120)])
def test_every_linear_is_fp8_and_attention_is_fused(sms: tuple[int, ...], tmp_path: Path) -> None:
    report = build_plan(request_of(BLOCK, *sms), target=tmp_path / "plan").layers
    assert report is not None
    assert report.not_fp8(LINEARS) == ()
    assert len(report.fp8_gemms) == len(LINEARS)
    assert report.other_gemms == ()
    (attention,) = report.attentions
    assert {"scores", "context"} <= set(attention.onnx)
    assert (attention.operands, attention.result) == (("Half",) * 3, "Half")
    assert all(layer.operands == ("FP8", "FP8") for layer in report.fp8_gemms)
    assert len(report.layers) == len(LINEARS) + 1 + len(report.others)


def test_weight_only_quantization_is_not_taken_for_fp8(tmp_path: Path) -> None:
    graph = Graph(activations=False).model()
    report = build_plan(request_of(graph, 89), target=tmp_path / "plan").layers
    assert report is not None
    assert report.fp8_gemms == ()
    assert report.not_fp8(LINEARS) == LINEARS
    assert {node for layer in report.other_gemms for node in layer.onnx} >= set(LINEARS)


def tensor(dims: str, dtype: str) -> str:
    return (
        f"{{ Name: t, Dimensions: [{dims}], Strides: [1], Datatype: {dtype}, Format: (Linear) x }}"
    )


def line(name: str, kind: str, inputs: str, constants: str, outputs: str, *nodes: str) -> str:
    tensors = (
        ", ".join(tensor(*t.split(":")) for t in text.split())
        for text in (inputs, constants, outputs)
    )
    a, b, c = (f"[ {text}]" for text in tensors)
    metadata = "".join(f"[ONNX Layer: {node}]" for node in nodes)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: {a}, Constants: {b}, Outputs: {c}"
        f", TacticName: {name}_0x1, StreamId: 0, Metadata: {metadata}"
    )


@pytest.mark.parametrize(
    ("printed", "kind", "operands"),
    [
        # embedded weights, q, k and v merged, with the scalars of the epilogue
        (
            line("a+b+c_myl0_2", "gemm", "-1,768:FP8", "768,2304:FP8 1:Float", "-1,2304:Half", "a"),
            "gemm",
            ("FP8", "FP8"),
        ),
        # fp16 with the residual and the bias fused in: neither is a factor
        (
            line(
                "__myl_FcAddAdd_myl0_8",
                "runtime_fusion",
                "-1,768:Half -1,768:Half",
                "1,768:BFloat16 768,768:Half",
                "-1,768:Half",
            ),
            "gemm",
            ("Half", "Half"),
        ),
        # FP8 weight, 16-bit activations
        (
            line(
                "__myl_CastMulFc_myl0_3",
                "runtime_fusion",
                "-1,768:Half",
                "768,64:FP8",
                "-1,64:Half",
            ),
            "gemm",
            ("Half", "FP8"),
        ),
        # batched attention product that was not fused
        (
            line("m_myl0_7", "gemm", "-1,77,64:FP8 -1,64,78:FP8", "", "-1,77,78:Float"),
            "gemm",
            ("FP8", "FP8"),
        ),
        # NVFP4 with its block scales
        (
            line("m_myl0_8", "gemm", "-1,768:FP4E2M1 -1,4,12:FP8", "768,96:FP4E2M1", "-1,96:Half"),
            "gemm",
            ("FP4E2M1", "FP4E2M1"),
        ),
        (
            line(
                "_gemm_mha_v2_myl0_7",
                "kgen",
                "-1,77,64:Half -1,64,77:Half -1,1,77,77:Bool -1,77,64:Half",
                "",
                "-1,77,64:FP8",
            ),
            "attention",
            ("Half", "Half", "Bool", "Half"),
        ),
        (
            line("__myl_MulAdd_myl0_3", "kgen", "-1,8:Half", "1,8:Half", "-1,8:Half"),
            "other",
            ("Half",),
        ),
        (line("__mye37_0_myl0_0", "shape_call", "", "", ""), "other", ()),
    ],
)
def test_line(printed: str, kind: str, operands: tuple[str, ...]) -> None:
    report = layer_report(
        "Layers:\n" + printed + "\n\nI/O Tensors:\n Name: embeds, IOMode: Input\n"
    )
    assert report is not None
    (layer,) = report.layers
    assert (layer.kind, layer.operands) == (kind, operands)


def test_a_node_that_is_also_in_another_gemm_is_not_fp8() -> None:
    fp8 = line("a_myl0_1", "gemm", "-1,8:FP8", "8,8:FP8", "-1,8:Half", "fc1", "text.0/fc2")
    half = line("b_myl0_2", "gemm", "-1,8:Half", "8,8:Half", "-1,8:Half", "fc1")
    report = layer_report(fp8 + "\n" + half)
    assert report is not None
    assert report.not_fp8(["fc1", "text.0/fc2", "absent"]) == ("fc1", "absent")
    assert [layer.name for layer in report.other_gemms] == ["b_myl0_2"]


@pytest.mark.parametrize("message", ["", "Layers:\n", "Layers:\nsomething new\n"])
def test_unknown_form_is_no_report(message: str) -> None:
    assert layer_report(message) is None
