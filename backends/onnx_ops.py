# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The ONNX emitter: an encoder's program as a graph with FP8 Quantize/DequantizeLinear pairs.

Nothing is traced, so no torch or transformers version shapes the graph; the mathematics is
`encoders.encode`. Two forms come out of the same code:

* shared: weights, scales, biases and norms are graph *inputs*; the plan made from it holds no
  weights and serves every checkpoint and LoRA of the architecture. TensorRT keeps the FP8 x FP8
  GEMM only if the scales of Q and DQ are constants, so these are fixed powers of two and the real
  scales are `Mul`s around them.
* embedded: the same graph with initializers; the large ones stay in the checkpoint file and are
  named by offset (`Graph.external`), never copied into the graph.

`onnx` is imported by `emit` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoints.quantized import FP8_MAX, Precision, Structure
from ..encoders import ClipSpec, Ops, encode

if TYPE_CHECKING:
    import numpy as np

# Part of every plan key: raise it with any change to the emitted graph.
PROGRAM_VERSION = 1

Body = Literal["float16", "bfloat16", "float32"]

_MASKED = -30000.0  # two of them add up to a finite fp16, and exp() of one is 0
_OPSET = 20
_HALF_LIMIT = 65504.0
_WEIGHT_EXPONENT = 10


def activation_exponent(inner: int) -> int:
    """e of the fixed activation scale 2^-e for a GEMM over `inner` elements.

    The FP8 product leaves the GEMM as fp16 before the post-scale, so 448 * 448 * inner * 2^-(e+10)
    must stay under 65504: e = 4 up to 5347, one more for each doubling.
    """
    worst = FP8_MAX * FP8_MAX * inner / _HALF_LIMIT
    return max(14, math.ceil(math.log2(worst))) - _WEIGHT_EXPONENT


def weight_scale_unit() -> float:
    """The fixed scale of FP8 weights inside a shared plan."""
    return 2.0**-_WEIGHT_EXPONENT


@dataclass(frozen=True)
class TensorType:
    """`dtype` is an ONNX name in lower case ("float16", "float8e4m3fn", ...)."""

    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ExternalTensor:
    """An initializer whose bytes lie in a checkpoint file: `tensor` there, already of this type."""

    tensor: str
    type: TensorType


@dataclass
class Graph:
    """An emitted graph: serialized ONNX and what a caller must know to feed it."""

    model: bytes
    body: Body
    embeds: TensorType
    mask: bool
    weights: dict[str, TensorType] = field(default_factory=dict)  # inputs of a shared graph
    external: dict[str, ExternalTensor] = field(default_factory=dict)  # of an embedded graph
    outputs: tuple[str, ...] = ()


class OnnxOps(Ops[str]):
    """`Ops` on ONNX value names. `small` gives initializer values where weights are embedded."""

    def __init__(
        self,
        structure: Structure,
        sizes: Mapping[str, tuple[int, int]],
        width: int,
        body: Body,
        positions: int,
        mask: bool,
        embed: EmbeddedWeights | None,
    ) -> None:
        import onnx

        self._onnx = onnx
        self._types = onnx.TensorProto
        self._structure, self._sizes, self._width = structure, sizes, width
        self._positions, self._embed, self.body = positions, embed, body
        self._dtype = self._code(body)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        self.weights: dict[str, TensorType] = {}
        self.external: dict[str, ExternalTensor] = {}
        self._constants: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._additive_mask = self._mask_value(mask)

    # -- pieces ---------------------------------------------------------------------------------

    def _code(self, dtype: str) -> int:
        """ONNX's element type for a `TensorType.dtype`; numpy and torch say float32, ONNX FLOAT."""
        return int(getattr(self._types, "FLOAT" if dtype == "float32" else dtype.upper()))

    def _node(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> Any:
        count = self._counts[op] = self._counts.get(op, -1) + 1
        names = [f"{op}_{count}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(
            self._onnx.helper.make_node(op, list(inputs), names, name=names[0], **attributes)
        )
        return names[0] if outputs == 1 else tuple(names)

    def _tensor(self, name: str, dtype: int, shape: Sequence[int], raw: bytes) -> str:
        tensor = self._types(name=name, data_type=dtype, dims=list(shape), raw_data=raw)
        self.initializers.append(tensor)
        return name

    def _constant(self, value: Any, dtype: str) -> str:
        """A named constant, shared between equal ones; `dtype` as in `TensorType`."""
        import numpy as np

        array = np.asarray(value)
        key = (dtype, f"{array.shape}{array.tobytes().hex()}")
        if key not in self._constants:
            code = self._code(dtype)
            as_numpy = self._onnx.helper.tensor_dtype_to_np_dtype(code)
            name = f"constant_{len(self._constants)}"
            self._tensor(name, code, array.shape, array.astype(as_numpy).tobytes())
            self._constants[key] = name
        return self._constants[key]

    def _weight(self, name: str, dtype: str, shape: tuple[int, ...]) -> str:
        """A weight under its own name: a graph input, or an initializer where embedded."""
        if self._embed is None:
            if name not in self.weights:
                self.weights[name] = TensorType(dtype, shape)
                code = self._code(dtype)
                self.inputs.append(
                    self._onnx.helper.make_tensor_value_info(name, code, list(shape))
                )
        elif name in self._embed.external:
            external = self._embed.external[name]
            tensor = self._types(name=name, dims=list(shape))
            tensor.data_type = self._code(dtype)
            tensor.data_location = self._types.EXTERNAL
            for key, value in zip(
                ("location", "offset", "length"), self._embed.place(external), strict=True
            ):
                tensor.external_data.add(key=key, value=str(value))
            self.initializers.append(tensor)
            self.external[name] = ExternalTensor(external, TensorType(dtype, shape))
        else:
            code = self._code(dtype)
            array = self._embed.small(name)
            as_numpy = self._onnx.helper.tensor_dtype_to_np_dtype(code)
            self._tensor(name, code, shape, array.reshape(shape).astype(as_numpy).tobytes())
        return name

    def _mask_value(self, mask: bool) -> str:
        import numpy as np

        s = self._positions
        causal = self._constant(np.triu(np.full((s, s), _MASKED), 1)[None, None], self.body)
        if not mask:
            return causal
        self.inputs.append(
            self._onnx.helper.make_tensor_value_info("mask", self._types.BOOL, ["B", s])
        )
        keys = self._node("Unsqueeze", ["mask", self._constant(np.array([1, 2]), "int64")])
        zero, masked = self._constant(0.0, self.body), self._constant(_MASKED, self.body)
        padding = self._node("Where", [keys, zero, masked])  # [B, 1, 1, S]
        return str(self._node("Add", [causal, padding]))

    # -- Ops ------------------------------------------------------------------------------------

    def add(self, a: str, b: str) -> str:
        return str(self._node("Add", [a, b]))

    def add_positions(self, x: str, name: str) -> str:
        table = self._weight(name, self.body, (self._positions, self._width))
        return str(self._node("Add", [x, table]))

    def _gemm(self, x: str, name: str, inner: int, out: int, precision: Precision) -> str:
        """One GEMM with scales and bias under `name`; x [B, S, inner] -> [B, S, out]."""
        if precision == "16bit":
            weight = self._weight(name + ".weight", self.body, (out, inner))
            y = self._node("MatMul", [x, self._node("Transpose", [weight], perm=[1, 0])])
        else:
            zero = self._constant(0, "float8e4m3fn")
            pre = self._weight(name + ".pre_scale", self.body, (1,))
            unit = self._constant(2.0 ** -activation_exponent(inner), self.body)
            q = self._node("QuantizeLinear", [self._node("Mul", [x, pre]), unit, zero])
            x = self._node("DequantizeLinear", [q, unit, zero])
            weight = self._weight(name + ".weight", "float8e4m3fn", (out, inner))
            unit = self._constant(weight_scale_unit(), self.body)
            w = self._node("DequantizeLinear", [weight, unit, zero])
            y = self._node("MatMul", [x, self._node("Transpose", [w], perm=[1, 0])])
            y = self._node("Mul", [y, self._weight(name + ".post_scale", self.body, (out,))])
        return str(self._node("Add", [y, self._weight(name + ".bias", self.body, (out,))]))

    def linear(self, x: str, name: str) -> str:
        out, inner = self._sizes[name]
        return self._gemm(x, name, inner, out, self._structure[name])

    def linears(self, x: str, names: Sequence[str]) -> tuple[str, ...]:
        # A file holds q, k and v apart, so an embedded plan leaves their merging to the builder.
        if self._embed is not None or len({self._structure[n] for n in names}) > 1:
            return super().linears(x, names)
        outs = [self._sizes[n][0] for n in names]
        inner = self._sizes[names[0]][1]
        y = self._gemm(x, fused_name(names), inner, sum(outs), self._structure[names[0]])
        sizes = self._constant(outs, "int64")
        return tuple(self._node("Split", [y, sizes], outputs=len(names), axis=-1))

    def layer_norm(self, x: str, name: str, eps: float) -> str:
        scale = self._weight(name + ".weight", self.body, (self._width,))
        bias = self._weight(name + ".bias", self.body, (self._width,))
        return str(self._node("LayerNormalization", [x, scale, bias], axis=-1, epsilon=eps))

    def attention(self, q: str, k: str, v: str, *, heads: int, mask: str | None) -> str:
        # MatMul/Softmax/MatMul, not the Attention op: TensorRT fuses it and writes FP8 directly.
        size = self._width // heads
        split = self._constant([0, 0, heads, size], "int64")
        q, k, v = (
            self._node("Transpose", [self._node("Reshape", [t, split])], perm=perm)
            for t, perm in ((q, [0, 2, 1, 3]), (k, [0, 2, 3, 1]), (v, [0, 2, 1, 3]))
        )  # [B, H, S, D], k as [B, H, D, S]
        q = self._node("Mul", [q, self._constant(size**-0.5, self.body)])
        scores = self._node("Add", [self._node("MatMul", [q, k]), self._additive_mask])
        y = self._node("MatMul", [self._node("Softmax", [scores], axis=-1), v])
        y = self._node("Transpose", [y], perm=[0, 2, 1, 3])  # [B, S, H, D]
        return str(self._node("Reshape", [y, self._constant([0, 0, self._width], "int64")]))

    def quick_gelu(self, x: str) -> str:
        gate = self._node("Sigmoid", [self._node("Mul", [x, self._constant(1.702, self.body)])])
        return str(self._node("Mul", [x, gate]))

    def gelu(self, x: str) -> str:
        return str(self._node("Gelu", [x]))


@dataclass(frozen=True)
class EmbeddedWeights:
    """Where an embedded graph takes its weights from.

    `external`: graph name -> tensor of the checkpoint file whose bytes are used as they are;
    `locations`: that tensor -> (offset, bytes) in `file`; `values`: every other weight by name.
    """

    file: str
    external: Mapping[str, str]
    locations: Mapping[str, tuple[int, int]]
    values: Mapping[str, np.ndarray[Any, Any]]

    def place(self, tensor: str) -> tuple[str, int, int]:
        return (self.file, *self.locations[tensor])

    def small(self, name: str) -> np.ndarray[Any, Any]:
        return self.values[name]


def fused_name(names: Sequence[str]) -> str:
    """q_proj, k_proj, v_proj of a block -> the name of their one GEMM."""
    return names[0].rsplit(".", 1)[0] + ".qkv_proj"


def emit(
    spec: ClipSpec,
    structure: Structure,
    *,
    body: Body = "float16",
    mask: bool = False,
    embed: EmbeddedWeights | None = None,
) -> Graph:
    """The graph of `spec` with dynamic batch at S = positions; outputs `hidden_0..L` and `last`.

    Inputs: `embeds` [B, S, C] in `body`, `mask` [B, S] bool if asked for, then every weight unless
    `embed` is given. `body="float32"` is the twin that ONNX Runtime runs where `body` is bfloat16.
    """
    ops = OnnxOps(structure, spec.linears(), spec.width, body, spec.positions, mask, embed)
    make = ops._onnx.helper
    shape: tuple[int | str, ...] = ("B", spec.positions, spec.width)
    hidden, last = encode(ops, spec, "embeds", "mask" if mask else None)
    outputs = {**{f"hidden_{i}": value for i, value in enumerate(hidden)}, "last": last}
    nodes = ops.nodes + [make.make_node("Identity", [v], [n]) for n, v in outputs.items()]

    def value(name: str) -> Any:
        return make.make_tensor_value_info(name, ops._dtype, list(shape))

    graph = make.make_graph(
        nodes, "encoder", [value("embeds"), *ops.inputs], [value(n) for n in outputs],
        ops.initializers,
    )  # fmt: skip
    model = make.make_model(
        graph, opset_imports=[make.make_opsetid("", _OPSET)], ir_version=10, producer_name="octavo"
    )
    return Graph(
        model.SerializeToString(),
        body,
        TensorType(body, shape),
        mask,
        ops.weights,
        ops.external,
        tuple(outputs),
    )
