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

CLIP computes everything in the body's dtype. T5 leaves FP32 only where nothing can overflow: its
residual stream, norms, scales and gates are FP32, an FP8 product leaves its GEMM as fp16 (which the
fixed scales make safe, see `activation_exponent`), attention and 16-bit linears are in the body's
bfloat16. Its relative bias is gathered in the graph from the checkpoint's own small table.

`onnx` is imported by `emit` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoints.quantized import FP8_MAX, Precision, Structure
from ..encoders import EncoderSpec, Ops, T5Spec, block, encode
from ..errors import OctavoBug

if TYPE_CHECKING:
    import numpy as np

# Part of every plan key: raise it with any change to the emitted graph.
PROGRAM_VERSION = 1

Body = Literal["float16", "bfloat16", "float32"]

_MASKED = -30000.0  # two of them add up to a finite fp16, and exp() of one is 0
# T5 has no fp16 there. Any score disappears in it, so a row without keys is the mean of all values;
# far from the end of bfloat16, for a kernel that scales scores by log2(e).
_NO_KEY = -1e30
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
    """An emitted graph: serialized ONNX and what a caller must know to feed it.

    `embeds` [B, S, C] is the input and `state` the type of every output; a size that is a string is
    dynamic. T5 has one output, CLIP its hidden states before it.
    """

    model: bytes
    body: Body
    embeds: TensorType
    mask: bool
    state: TensorType
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
        self._positions, self._embed, self.body, self.mask = positions, embed, body, mask
        self._dtype = self._code(body)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        self.weights: dict[str, TensorType] = {}
        self.external: dict[str, ExternalTensor] = {}
        self._constants: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._prepare(mask)

    def _prepare(self, mask: bool) -> None:
        """What comes before the first operation."""
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
        alike = len({self._structure[n] for n in names}) == 1
        if self._embed is not None or len(names) == 1 or not alike:
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


class T5OnnxOps(OnnxOps):
    """As `OnnxOps`; every value that an operation takes or gives is FP32, see the module."""

    WIDE: Body = "float32"

    def __init__(
        self,
        spec: T5Spec,
        structure: Structure,
        body: Body,
        mask: bool,
        embed: EmbeddedWeights | None,
    ) -> None:
        self._heads, self._head_dim = spec.heads, spec.head_dim
        super().__init__(structure, spec.linears(), spec.width, body, spec.longest, mask, embed)

    def _prepare(self, mask: bool) -> None:
        # What leaves an FP8 GEMM. The twin that ONNX Runtime runs rounds nothing.
        self._product = "float32" if self.body == "float32" else "float16"
        self._keys: str | None = None
        self._places: str | None = None
        self._biases: dict[str, str] = {}
        if mask:
            self.inputs.append(
                self._onnx.helper.make_tensor_value_info("mask", self._types.BOOL, ["B", "S"])
            )
            self._keys = self._node("Unsqueeze", ["mask", self._constant([1, 2], "int64")])

    def cast(self, x: str, source: str, target: str) -> str:
        return x if source == target else str(self._node("Cast", [x], to=self._code(target)))

    def _gemm(self, x: str, name: str, inner: int, out: int, precision: Precision) -> str:
        if precision == "16bit":
            x = self.cast(x, self.WIDE, self.body)
            weight = self._weight(name + ".weight", self.body, (out, inner))
            y = self._node("MatMul", [x, self._node("Transpose", [weight], perm=[1, 0])])
            return self.cast(y, self.body, self.WIDE)
        zero = self._constant(0, "float8e4m3fn")
        scaled = self._node("Mul", [x, self._weight(name + ".pre_scale", self.WIDE, (1,))])
        unit = 2.0 ** -activation_exponent(inner)
        q = self._node("QuantizeLinear", [scaled, self._constant(unit, self.WIDE), zero])
        x = self._node("DequantizeLinear", [q, self._constant(unit, self._product), zero])
        weight = self._weight(name + ".weight", "float8e4m3fn", (out, inner))
        unit = weight_scale_unit()
        w = self._node("DequantizeLinear", [weight, self._constant(unit, self._product), zero])
        y = self._node("MatMul", [x, self._node("Transpose", [w], perm=[1, 0])])
        y = self.cast(y, self._product, self.WIDE)
        return str(self._node("Mul", [y, self._weight(name + ".post_scale", self.WIDE, (out,))]))

    def rms_norm(self, x: str, name: str, eps: float) -> str:
        last = self._constant([-1], "int64")
        mean = self._node("ReduceMean", [self._node("Mul", [x, x]), last])
        root = self._node("Sqrt", [self._node("Add", [mean, self._constant(eps, self.WIDE)])])
        weight = self._weight(name + ".weight", self.WIDE, (self._width,))
        return str(self._node("Mul", [self._node("Div", [x, root]), weight]))

    def relative_bias(self, x: str, name: str, buckets: int, max_distance: int) -> str:
        if name not in self._biases:
            table = self._weight(name, self.body, (buckets, self._heads))
            by_head = self._node("Transpose", [table], perm=[1, 0])
            places = self._bucket_places(x, buckets, max_distance)
            bias = self._node("Gather", [by_head, places], axis=1)  # [H, S, S]
            bias = self._node("Unsqueeze", [bias, self._constant([0], "int64")])
            if self._keys is not None:
                bias = self._node("Where", [self._keys, bias, self._constant(_NO_KEY, self.body)])
            self._biases[name] = str(bias)
        return self._biases[name]

    def _bucket_places(self, x: str, buckets: int, max_distance: int) -> str:
        """The bucket [S, S] of every query and key: a corner of a constant table."""
        if self._places is None:
            table = bucket_table(self._positions, buckets, max_distance)
            self._tensor("buckets", self._types.INT32, table.shape, table.tobytes())
            size = self._node("Shape", [x], start=1, end=2)
            ends = self._node("Concat", [size, size], axis=0)
            zeros, axes = self._constant([0, 0], "int64"), self._constant([0, 1], "int64")
            self._places = str(self._node("Slice", ["buckets", zeros, ends, axes]))
        return self._places

    def biased_attention(
        self, q: str, k: str, v: str, bias: str, *, heads: int, mask: str | None
    ) -> str:
        split = self._constant([0, 0, heads, self._head_dim], "int64")
        q, k, v = (
            self._node(
                "Transpose",
                [self._node("Reshape", [self.cast(t, self.WIDE, self.body), split])],
                perm=perm,
            )
            for t, perm in ((q, [0, 2, 1, 3]), (k, [0, 2, 3, 1]), (v, [0, 2, 1, 3]))
        )
        scores = self._node("Add", [self._node("MatMul", [q, k]), bias])
        y = self._node("MatMul", [self._node("Softmax", [scores], axis=-1), v])
        y = self._node("Transpose", [y], perm=[0, 2, 1, 3])  # [B, S, H, D]
        y = self._node("Reshape", [y, self._constant([0, 0, heads * self._head_dim], "int64")])
        return self.cast(y, self.body, self.WIDE)

    def mul(self, a: str, b: str) -> str:
        return str(self._node("Mul", [a, b]))

    def gelu_tanh(self, x: str) -> str:
        return str(self._node("Gelu", [x], approximate="tanh"))

    def relu(self, x: str) -> str:
        return str(self._node("Relu", [x]))


def bucket_table(length: int, buckets: int, max_distance: int) -> np.ndarray[Any, Any]:
    """As `relative_bias.relative_buckets`, int32, without torch."""
    import numpy as np

    half = buckets // 2
    exact = half // 2
    distance = np.arange(length)
    with np.errstate(divide="ignore"):
        grown = np.log(distance.astype(np.float32) / np.float32(exact))
    grown = grown / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    far = np.minimum(exact + np.maximum(grown, 0).astype(np.int64), half - 1)
    bucket = np.where(distance < exact, distance, far)
    offset = distance[None, :] - distance[:, None]  # key minus query
    table: np.ndarray[Any, Any] = bucket[np.abs(offset)] + (offset > 0) * half
    return table.astype(np.int32)


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


_FUSED = {"q_proj": "qkv_proj", "q": "qkv", "wi_0": "wi"}


def fused_name(names: Sequence[str]) -> str:
    """The linears of one input (q, k, v of a block) -> the name of their one GEMM."""
    prefix, leaf = names[0].rsplit(".", 1)
    return f"{prefix}.{_FUSED[leaf]}"


def wide(spec: EncoderSpec, body: Body) -> Body:
    """The dtype of scales, norms and the residual stream in a graph of `body`."""
    return T5OnnxOps.WIDE if isinstance(spec, T5Spec) else body


def emit(
    spec: EncoderSpec,
    structure: Structure,
    *,
    body: Body = "float16",
    mask: bool = False,
    embed: EmbeddedWeights | None = None,
) -> Graph:
    """The graph of `spec` with dynamic batch; outputs `hidden_0..L` and `last`, T5 `last` alone.

    Inputs: `embeds` [B, S, C], `mask` [B, S] bool if asked for, then every weight unless `embed` is
    given. CLIP has S = positions, T5 any S up to `spec.longest`; CLIP's `embeds` are in `body`,
    T5's FP32. `body="float32"` is the twin that ONNX Runtime runs where `body` is bfloat16.
    """
    ops = _ops(spec, structure, body, mask, embed)
    hidden, last = encode(ops, spec, "embeds", "mask" if mask else None)
    if isinstance(ops, T5OnnxOps):
        last = ops.cast(last, wide(spec, body), body)
    return _graph(spec, ops, {**{f"hidden_{i}": h for i, h in enumerate(hidden)}, "last": last})


def emit_block(spec: T5Spec, structure: Structure, index: int, *, body: Body) -> Graph:
    """Block `index` alone, as it is in `emit`: the residual stream `embeds` -> `last`, in FP32.

    For encoders that are verified block by block, because they are larger than memory.
    """
    ops = _ops(spec, structure, body, False, None)
    return _graph(spec, ops, {"last": block(ops, spec, index, "embeds")}, wide(spec, body))


def _ops(
    spec: EncoderSpec, structure: Structure, body: Body, mask: bool, embed: EmbeddedWeights | None
) -> OnnxOps:
    if isinstance(spec, T5Spec):
        if body == "float16":
            raise OctavoBug("T5 overflows fp16; its body is bfloat16")
        return T5OnnxOps(spec, structure, body, mask, embed)
    return OnnxOps(structure, spec.linears(), spec.width, body, spec.positions, mask, embed)


def _graph(
    spec: EncoderSpec, ops: OnnxOps, outputs: Mapping[str, str], state: str | None = None
) -> Graph:
    make, state = ops._onnx.helper, state or ops.body
    length: int | str = "S" if isinstance(spec, T5Spec) else spec.positions
    embeds = TensorType(wide(spec, ops.body), ("B", length, spec.width))
    nodes = ops.nodes + [make.make_node("Identity", [v], [n]) for n, v in outputs.items()]

    def value(name: str, dtype: str) -> Any:
        return make.make_tensor_value_info(name, ops._code(dtype), list(embeds.shape))

    graph = make.make_graph(
        nodes, "encoder", [value("embeds", embeds.dtype), *ops.inputs],
        [value(n, state) for n in outputs], ops.initializers,
    )  # fmt: skip
    model = make.make_model(
        graph, opset_imports=[make.make_opsetid("", _OPSET)], ir_version=10, producer_name="octavo"
    )
    return Graph(
        model.SerializeToString(),
        ops.body,
        embeds,
        ops.mask,
        TensorType(state, embeds.shape),
        ops.weights,
        ops.external,
        tuple(outputs),
    )
