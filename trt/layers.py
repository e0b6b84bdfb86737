# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The layers TensorRT fused a network into, read from the builder's own verbose log.

With profiling verbosity DETAILED the builder logs one message that starts with `Layers:`, a line
per layer with the dtypes of all it reads and writes. It tells without a GPU which precision each
GEMM was given, not what a GPU then does. Format observed on TensorRT for RTX 1.7.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gemm", "attention", "other"]

_LAYER = re.compile(
    r"Name: (?P<name>.+?), LayerType: (?P<type>\w+), Inputs: \[(?P<inputs>.*)\]"
    r", Constants: \[(?P<constants>.*)\], Outputs: \[(?P<outputs>.*)\], TacticName: (?P<rest>.*)"
)
_TENSOR = re.compile(r"Dimensions: \[([-\d,]*)\].*?Datatype: (\w+)")
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
# A GEMM with a fused epilogue is no `gemm` but a `runtime_fusion`, as `__myl_CastMulFc_myl0_3`.
_FUSED_GEMM = re.compile(r"_myl_\w*?Fc([A-Z_]|$)")
_Tensor = tuple[tuple[int, ...], str]  # shape, -1 where dynamic, and dtype


@dataclass(frozen=True)
class Layer:
    """One fused layer; dtypes in the builder's words (`FP8`, `Half`, `BFloat16`, `Float`).

    `operands`: the two factors of a GEMM; q, k, (a mask that is no constant,) v of an attention;
    otherwise every input. `onnx`: the names of the graph's nodes it was made from.
    """

    name: str
    kind: Kind
    operands: tuple[str, ...]
    result: str
    onnx: tuple[str, ...]

    @property
    def is_fp8_gemm(self) -> bool:
        """Both factors are FP8, not only the weight."""
        return self.kind == "gemm" and self.operands == ("FP8", "FP8")


@dataclass(frozen=True)
class LayerReport:
    """Every layer of a plan, in the builder's order. A plan for several SMs is listed once."""

    layers: tuple[Layer, ...]

    @property
    def fp8_gemms(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.is_fp8_gemm)

    @property
    def other_gemms(self) -> tuple[Layer, ...]:
        """GEMMs in any other precision, also those with an FP8 weight and 16-bit activations."""
        return tuple(la for la in self.layers if la.kind == "gemm" and not la.is_fp8_gemm)

    @property
    def attentions(self) -> tuple[Layer, ...]:
        """Fused attentions: both products and the softmax in one layer."""
        return tuple(layer for layer in self.layers if layer.kind == "attention")

    @property
    def others(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind == "other")

    def not_fp8(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Those of the graph's MatMul `nodes` that are in no FP8 x FP8 GEMM; () is success."""
        lowered = {node for layer in self.fp8_gemms for node in layer.onnx}
        kept = {node for layer in self.other_gemms for node in layer.onnx}
        return tuple(node for node in nodes if node not in lowered or node in kept)


def layer_report(message: str) -> LayerReport | None:
    """Parse the builder's `Layers:` message; None where it holds no layer in the known form."""
    layers = tuple(_layer(m) for line in message.splitlines() if (m := _LAYER.fullmatch(line)))
    return LayerReport(layers) if layers else None


def _layer(match: re.Match[str]) -> Layer:
    name, inputs = match["name"], _tensors(match["inputs"])
    outputs = _tensors(match["outputs"])
    kind: Kind = "other"
    operands = tuple(dtype for _, dtype in inputs)
    if "mha" in name.lower():
        kind = "attention"
    elif match["type"] == "gemm" or _FUSED_GEMM.search(name):
        kind = "gemm"
        operands = _factors([*inputs, *_tensors(match["constants"])], outputs)
    result = outputs[0][1] if outputs else ""
    return Layer(name, kind, operands, result, tuple(_ONNX_NODE.findall(match["rest"])))


def _factors(tensors: list[_Tensor], outputs: list[_Tensor]) -> tuple[str, ...]:
    """Dtypes of the pair [.., K] and [.., K, N] that gives [.., N]; not of a bias or residual."""
    width = outputs[0][0][-1:] if outputs else ()
    matrices = [tensor for tensor in tensors if len(tensor[0]) >= 2]
    for i, (a, a_dtype) in enumerate(matrices):
        for b, b_dtype in matrices[i + 1 :] + matrices[:i]:
            if a[-1] == b[-2] and b[-1:] == width:
                return a_dtype, b_dtype
    return tuple(dtype for _, dtype in matrices)


def _tensors(section: str) -> list[_Tensor]:
    return [
        (tuple(int(size) for size in dims.split(",") if size), dtype)
        for dims, dtype in _TENSOR.findall(section)
    ]
