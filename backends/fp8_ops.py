# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 through PyTorch alone: quantization, the weights of a quantized checkpoint, `Ops` over them.

One number format: E4M3 with one static scale per tensor, value = code * scale, scale = amax / 448
(Micikevicius et al. 2022, arXiv:2209.05433; the layout of ComfyUI's `comfy_quant` checkpoints).
The products run on the FP8 tensor cores through `torch._scaled_mm` where the device has them
(SM 8.9 and later) and are simulated elsewhere from the same codes, so that a CPU computes the same.

`Fp8Ops` is lazy on purpose: a layer norm or an activation is not computed until a linear asks for
it, because only the linear knows the scale its input must be quantized with. The subclass in
`triton_kernels.py` turns each such pair into one kernel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints.quantized import FP8_MAX, scales_of, to_fp8
from ..checkpoints.scales import SMALLEST_SCALE
from ..encoders import ClipSpec, EncoderSpec, Ops, T5Spec
from ..encoders.clip import POSITIONS
from ..encoders.ops import Activation
from ..errors import OctavoBug, QuantizationError
from ..staging import upload
from .relative_bias import shifted_offsets
from .torch_ops import biased_attention, causal_attention, tables

E4M3 = torch.float8_e4m3fn
E4M3_MAX = FP8_MAX

# The tensor cores of SM 8.9 and 9.0 add FP8 products up in some 14 bits (Zhang et al. 2024,
# arXiv:2411.10958). What a block loses there passes through every block after it, so the first ones
# multiply their codes as FP16, which holds each of them and is added up in FP32: block 0 always,
# block 1 where rows are few and the tensor cores idle. Measured on an H200 against FP32 products of
# the same codes, last state of CLIP-L / CLIP-G: 0.9980 / 0.9977 with no such block, 0.9986 / 0.9982
# with one, 0.9989 / 0.9984 with two, 0.9993 / 0.9987 with all; at one prompt a block costs 3 %.
FEW_ROWS = 320
EXACT_ROWS = (sys.maxsize, FEW_ROWS)  # block -> rows up to which its products are exact

Tensors = Mapping[str, Tensor]
Lines = dict[tuple[str, int], Tensor]  # (table, tokens) -> T5's `bias_line`


# Quantization. Weights, activations and checkpoints share these, so they round alike.


scale_from_amax = scales_of
quantize_input = to_fp8


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float [out, in] -> (E4M3 [out, in], FP32 scale []). Raises QuantizationError on NaN, inf."""
    return quantize_weights({"weight": weight})["weight"]


def quantize_weights(weights: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """`quantize_weight` for many tensors of one device, with one host synchronisation for all."""
    if not weights:
        return {}
    amaxes = _amaxes(weights)
    scales = scale_from_amax(amaxes)
    return {
        name: (quantize_input(weight, scale), scale)
        for (name, weight), scale in zip(weights.items(), scales.unbind(), strict=True)
    }


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """E4M3 [...] -> FP32 [...]."""
    return codes.float() * scale


def _amaxes(tensors: Tensors) -> Tensor:
    """Largest magnitude of each tensor, FP32 [count]; raises QuantizationError on NaN or inf."""
    norms = torch._foreach_norm([t.flatten() for t in tensors.values()], float("inf"))
    amaxes = torch.stack([n.float() for n in norms])
    for name, amax in zip(tensors, amaxes.tolist(), strict=True):
        if not amax < float("inf"):  # NaN fails this too
            raise QuantizationError(
                f"{name} holds NaN or infinite values and cannot be quantized; use another file."
            )
    return amaxes


# The weights of a quantized checkpoint.


@dataclass(frozen=True)
class Fp8Linear:
    """A linear in FP8: `weight` E4M3 [out, in], `bias` [out] in the body dtype, scales FP32 []."""

    weight: Tensor
    bias: Tensor | None
    weight_scale: Tensor
    input_scale: Tensor


@dataclass(frozen=True)
class HalfLinear:
    """A linear kept in 16 bit: `weight` [out, in] and `bias` [out] of the body's dtype."""

    weight: Tensor
    bias: Tensor | None


Linear = Fp8Linear | HalfLinear


@dataclass(frozen=True)
class Fp8Weights:
    """A quantized encoder without its token table: canonical name (no `.weight`) -> values.

    `body` is the dtype of everything outside the FP8 products: float16, or bfloat16. `tables` are
    CLIP's positions [P, C] and T5's relative biases [buckets, H], under their whole names.
    """

    spec: EncoderSpec
    body: torch.dtype
    linears: Mapping[str, Linear]
    norms: Mapping[str, tuple[Tensor, Tensor | None]]  # weight [C], bias [C]
    tables: Mapping[str, Tensor]

    @classmethod
    def from_tensors(
        cls, spec: EncoderSpec, tensors: Tensors, body: torch.dtype = torch.float16
    ) -> Fp8Weights:
        """From a checkpoint's tensors (`L.weight`, `L.weight_scale`, `L.input_scale`, `L.bias`).

        A linear whose weight is not E4M3 is kept in 16 bit. Raises QuantizationError for a scale
        that is missing or no positive, normal number, and for values that `body` cannot hold.
        """
        half = {
            name: _tensor(tensors, name, shape).to(body)
            for name, shape in spec.tensors().items()
            if _is_body(spec, name, tensors)
        }
        _amaxes(half)
        linears: dict[str, Linear] = {}
        scales: dict[str, Tensor] = {}
        for name, shape in spec.linears().items():
            weight, bias = name + ".weight", name + ".bias"
            if weight in half:
                linears[name] = HalfLinear(half[weight], half.get(bias))
                continue
            for scale in (name + ".weight_scale", name + ".input_scale"):
                scales[scale] = _tensor(tensors, scale, None).float().reshape(())
            linears[name] = Fp8Linear(
                _tensor(tensors, weight, shape),
                half.get(bias),
                scales[name + ".weight_scale"],
                scales[name + ".input_scale"],
            )
        _check_scales(scales)
        return cls(spec, body, linears, _norms(spec, half), {n: half[n] for n in tables(spec)})

    def requantized(self, tensors: Tensors) -> Fp8Weights:
        """The same recipe and input scales over other weights: a host's live ones, LoRA applied.

        `tensors` maps canonical names to float tensors on any one device; the result lives there.
        """
        spec = self.spec
        in_fp8 = {n: v for n, v in self.linears.items() if isinstance(v, Fp8Linear)}
        codes = quantize_weights(
            {n + ".weight": _tensor(tensors, n + ".weight", spec.linears()[n]) for n in in_fp8}
        )
        half = {
            name: _tensor(tensors, name, shape).to(self.body)
            for name, shape in spec.tensors().items()
            if name not in codes and _is_body(spec, name, tensors)
        }
        _amaxes(half)
        linears: dict[str, Linear] = {}
        for name, old in self.linears.items():
            bias = half.get(name + ".bias")
            if isinstance(old, Fp8Linear):
                weight, scale = codes[name + ".weight"]
                linears[name] = Fp8Linear(weight, bias, scale, old.input_scale)
            else:
                linears[name] = HalfLinear(half[name + ".weight"], bias)
        held = {name: half[name] for name in tables(spec)}
        return Fp8Weights(spec, self.body, linears, _norms(spec, half), held)


def _norms(spec: EncoderSpec, half: Tensors) -> dict[str, tuple[Tensor, Tensor | None]]:
    return {name: (half[name + ".weight"], half.get(name + ".bias")) for name in spec.norms()}


def _is_body(spec: EncoderSpec, name: str, tensors: Tensors) -> bool:
    """Whether `name` is held in the body's dtype; the token table is not held at all."""
    return name != spec.token_table and (name not in tensors or tensors[name].dtype != E4M3)


def _tensor(tensors: Tensors, name: str, shape: tuple[int, ...] | None) -> Tensor:
    if name not in tensors:
        raise QuantizationError(f"{name} is missing from the quantized checkpoint; build it again.")
    tensor = tensors[name]
    if shape is None:
        if tensor.numel() != 1:
            raise QuantizationError(
                f"{name} has {tensor.numel()} values where one is needed; build it again."
            )
    elif tuple(tensor.shape) != shape:
        raise QuantizationError(
            f"{name} has shape {tuple(tensor.shape)} where {shape} is needed; build it again."
        )
    return tensor


def _check_scales(scales: Tensors) -> None:
    if not scales:
        return
    device = next(iter(scales.values())).device
    values = torch.stack([s.to(device) for s in scales.values()]).tolist()
    for name, value in zip(scales, values, strict=True):
        if not SMALLEST_SCALE <= value < float("inf"):
            raise QuantizationError(
                f"{name} is {value} where a positive, normal number is needed; build it again."
            )


# The same weights as the device wants them: one matrix per GEMM.


@dataclass(frozen=True)
class Matrix:
    """One GEMM: a linear, or several linears of one input stacked along the output.

    `weight` [N, K] is E4M3 or in the body's dtype, `bias` [N] in the body's. In FP8, `input_scale`
    [] is shared, `weight_scales` holds one [] per stacked linear, and `column_scale` [N] is the
    product of the two per output column, so stacking never requantizes anything. Products of up to
    `exact_rows` rows are to be added up in full FP32 (EXACT_ROWS).
    """

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    weight_scales: tuple[Tensor, ...]
    column_scale: Tensor | None
    exact_rows: int = 0
    raw_scales: tuple[Tensor, ...] = ()  # per stacked linear, FP32 []; see `raw_unit`

    def is_exact(self, rows: int) -> bool:
        """Whether a product of `rows` rows is to be added up in full FP32."""
        return rows <= self.exact_rows

    @property
    def raw_unit(self) -> float:
        """A power of 2; codes times codes times this fit FP16 whatever they are.

        So several linears of one input are one GEMM with one scale, and nothing is lost or
        overflows: `raw_scales` makes of its results what each linear gives.
        """
        largest = E4M3_MAX**2 * self.weight.shape[1]
        return 2.0 ** -math.ceil(math.log2(largest / torch.finfo(torch.float16).max))

    @property
    def tensors(self) -> list[Tensor]:
        some = [t for t in (self.bias, self.input_scale, self.column_scale) if t is not None]
        return [self.weight, *some, *self.weight_scales, *self.raw_scales]

    def parts(self) -> list[slice]:
        """The rows of each stacked linear."""
        rows = self.weight.shape[0] // len(self.names)
        return [slice(i * rows, (i + 1) * rows) for i in range(len(self.names))]


class DeviceWeights:
    """`Fp8Weights` on one device, linears of one input stacked where they share an input scale.

    `copy_from` puts other values into the same storage, so captured CUDA graphs stay valid.
    """

    def __init__(self, weights: Fp8Weights, device: torch.device) -> None:
        self.spec, self.body, self.device = weights.spec, weights.body, device
        spec = weights.spec
        self._layout = _layout(weights)
        self.matrices: dict[tuple[str, ...], Matrix] = {}
        # T5's products are too large to be had twice as slow, and it does not need it (measured).
        limits = EXACT_ROWS if isinstance(spec, ClipSpec) else ()
        exact = {spec.block(i): rows for i, rows in enumerate(limits)}
        for names, dtype in self._layout:
            out, inner = weights.linears[names[0]].weight.shape
            out *= len(names)
            scales = len(names) if dtype == E4M3 else 0
            self.matrices[names] = Matrix(
                names,
                torch.empty(out, inner, dtype=dtype, device=device),
                torch.empty(out, dtype=self.body, device=device) if spec.biased else None,
                torch.empty((), device=device) if scales else None,
                tuple(torch.empty((), device=device) for _ in range(scales)),
                torch.empty(out, device=device) if scales else None,
                next((r for b, r in exact.items() if scales and names[0].startswith(b)), 0),
                tuple(torch.empty((), device=device) for _ in range(0 if spec.biased else scales)),
            )
        self.norms = {
            name: (
                torch.empty_like(weight, device=device),
                None if bias is None else torch.empty_like(bias, device=device),
            )
            for name, (weight, bias) in weights.norms.items()
        }
        self._units: dict[float, Tensor] = {}
        self.tables = {n: torch.empty_like(t, device=device) for n, t in weights.tables.items()}
        self.copy_from(weights)

    @property
    def size_bytes(self) -> int:
        """Bytes of every tensor held."""
        matrices = [t for m in self.matrices.values() for t in m.tensors]
        norms = [t for pair in self.norms.values() for t in pair if t is not None]
        return sum(t.nbytes for t in [*matrices, *norms, *self.tables.values()])

    def unit(self, matrix: Matrix) -> tuple[Tensor, Tensor]:
        """(`matrix.raw_unit`, 1) on the device, FP32 [] each."""
        for value in (matrix.raw_unit, 1.0):
            if value not in self._units:
                self._units[value] = torch.full((), value, device=self.device)
        return self._units[matrix.raw_unit], self._units[1.0]

    def bias_line(self, name: str, tokens: int) -> Tensor:
        """T5's bias out of the table `name` by key minus query, as `shifted_offsets` has it."""
        assert isinstance(self.spec, T5Spec)
        return shifted_offsets(self.tables[name], tokens, self.spec.max_distance)

    @torch.no_grad()
    def copy_from(self, weights: Fp8Weights) -> None:
        """Take over other values; raises QuantizationError if their structure is another one."""
        if (weights.spec, weights.body, _layout(weights)) != (self.spec, self.body, self._layout):
            raise QuantizationError(
                "the new weights differ in structure from the loaded ones (encoder, dtype, which "
                "linears are FP8, which share an input scale); load them as an engine of their own."
            )
        # The codes are nearly all of it: they go ahead through page-locked memory, in one pass.
        codes = [weights.linears[n].weight for names in self.matrices for n in names]
        arrived = upload(codes, self.device)
        for names, matrix in self.matrices.items():
            for i, rows in enumerate(matrix.parts()):
                source = weights.linears[names[i]]
                matrix.weight[rows].copy_(next(arrived))
                if matrix.bias is not None and source.bias is not None:
                    matrix.bias[rows].copy_(source.bias)
                if isinstance(source, Fp8Linear):
                    assert matrix.input_scale is not None and matrix.column_scale is not None
                    matrix.input_scale.copy_(source.input_scale)
                    matrix.weight_scales[i].copy_(source.weight_scale)
                    scale = matrix.input_scale * matrix.weight_scales[i]
                    matrix.column_scale[rows] = scale
                    if matrix.raw_scales:
                        matrix.raw_scales[i].copy_(scale / matrix.raw_unit)
        for name, pair in self.norms.items():
            for mine, other in zip(pair, weights.norms[name], strict=True):
                if mine is not None and other is not None:
                    mine.copy_(other)
        for name, table in self.tables.items():
            table.copy_(weights.tables[name])


def _layout(weights: Fp8Weights) -> tuple[tuple[tuple[str, ...], torch.dtype], ...]:
    """(names, weight dtype) of each matrix, in program order."""
    linears = weights.linears
    scales = {n: v.input_scale for n, v in linears.items() if isinstance(v, Fp8Linear)}
    values: dict[str, float] = {}
    if scales:  # one transfer for all: on a GPU each comparison alone would wait for the device
        values = dict(zip(scales, torch.stack(list(scales.values())).tolist(), strict=True))
    groups: list[tuple[str, ...]] = []
    for index in range(weights.spec.layers):
        for names in weights.spec.groups(index):
            alike = len({(linears[n].weight.dtype, values.get(n)) for n in names}) == 1
            groups += [names] if alike else [(n,) for n in names]
    return tuple((names, linears[names[0]].weight.dtype) for names in groups)


# The interpreter.


@dataclass(eq=False)
class Product:
    """A matrix times `operand` [B, S, K], which is quantized already; not multiplied yet."""

    operand: Tensor
    matrix: Matrix


@dataclass(eq=False)
class Sum:
    """`x` [B, S, C] plus a product, or plus position rows [S, C]; `tensor` once it is computed."""

    x: Tensor
    addend: Product | Tensor
    tensor: Tensor | None = None


@dataclass(eq=False)
class Norm:
    """The layer or RMS norm of `x`, to be computed in the form its consumer wants."""

    x: Tensor | Sum
    name: str
    eps: float
    rms: bool = False


@dataclass(eq=False)
class Bias:
    """T5's relative bias out of the table `name`, for any number of tokens."""

    name: str


@dataclass(eq=False)
class Attention:
    """Attention over q, k, v [B, S, C], to be computed in the form its consumer wants.

    Causal and scaled by the root of the head's size; with a `bias` neither.
    """

    q: Value
    k: Value
    v: Value
    heads: int
    mask: Tensor | None
    bias: Bias | None = None


@dataclass(eq=False)
class Activated:
    """The activation of a product, to be computed in the form its consumer wants.

    `up`: it is multiplied by that, as in T5's gated feed-forward.
    """

    product: Value
    kind: Activation
    up: Value | None = None


@dataclass(eq=False)
class Part:
    """One linear of a stacked product: `raw` [B, S, N] times `scale` [] is its result."""

    raw: Tensor
    scale: Tensor


Value = Tensor | Product | Sum | Norm | Bias | Attention | Activated | Part


class Fp8Ops(Ops[Value]):
    """`Ops` over `DeviceWeights`; every stored intermediate is E4M3 or in the body's dtype.

    `simulated` multiplies dequantized codes in FP32 instead of using `torch._scaled_mm`: what the
    FP8 tensor cores are compared with, and the path of devices without them.
    `places` maps the name of a weight to the tensor [B, S, C] which the state that it completes is
    written to: the position table, a block's `mlp.fc2`, the final norm. T5's residual stream is of
    the dtype of the embeddings that it starts with. `lines` keeps what `bias_line` makes.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        *,
        simulated: bool,
        places: Tensors | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.weights, self.simulated = weights, simulated
        self.places: Tensors = places or {}
        self.lines: Lines = {} if lines is None else lines
        self._matrices = {n: m for m in weights.matrices.values() for n in m.names}

    # What an encoder calls.

    def add(self, a: Value, b: Value) -> Value:
        if isinstance(b, Product):
            return Sum(self.tensor(a), b)
        return self.tensor(a) + self.tensor(b)

    def add_positions(self, x: Value, name: str) -> Value:
        if name not in self.weights.tables:
            raise OctavoBug(f"the FP8 weights hold no position table {name}")
        x = self.tensor(x)
        return Sum(x, self.weights.tables[name][: x.shape[1]])

    def layer_norm(self, x: Value, name: str, eps: float) -> Value:
        return Norm(x if isinstance(x, Sum) else self.tensor(x), name, eps)

    def rms_norm(self, x: Value, name: str, eps: float) -> Value:
        return Norm(x if isinstance(x, Sum) else self.tensor(x), name, eps, rms=True)

    def linear(self, x: Value, name: str) -> Value:
        matrix = self._matrices[name]
        if len(matrix.names) > 1:  # one of a stack, asked for alone
            return self.linears(x, matrix.names)[matrix.names.index(name)]
        return Product(self.operand(x, matrix), matrix)

    def linears(self, x: Value, names: Sequence[str]) -> tuple[Value, ...]:
        matrix = self.weights.matrices.get(tuple(names))
        if matrix is None or len(names) == 1:
            return tuple(self.linear(x, name) for name in names)
        return tuple(self.multiply_parts(Product(self.operand(x, matrix), matrix)))

    def attention(self, q: Value, k: Value, v: Value, *, heads: int, mask: Value | None) -> Value:
        allowed = None if mask is None else self.tensor(mask)
        return Attention(q, k, v, heads, allowed)

    def relative_bias(self, x: Value, name: str, buckets: int, max_distance: int) -> Value:
        return Bias(name)

    def biased_attention(
        self, q: Value, k: Value, v: Value, bias: Value, *, heads: int, mask: Value | None
    ) -> Value:
        if not isinstance(bias, Bias):
            raise OctavoBug("a relative bias that is none of the encoder's own")
        allowed = None if mask is None else self.tensor(mask)
        return Attention(q, k, v, heads, allowed, bias)

    def activation(self, x: Value, kind: Activation) -> Value:
        if not isinstance(x, Product | Part):
            raise OctavoBug("an activation of something that is no linear")
        return Activated(x, kind)

    def gated(self, gate: Value, up: Value, kind: Activation) -> Value:
        return Activated(gate, kind, up)

    def bias_line(self, bias: Bias, tokens: int) -> Tensor:
        """The bias of `tokens` tokens as `shifted_offsets` has it, made once per length."""
        if (bias.name, tokens) not in self.lines:
            self.lines[bias.name, tokens] = self.weights.bias_line(bias.name, tokens)
        return self.lines[bias.name, tokens]

    def quick_gelu(self, x: Value) -> Value:
        return self.activation(x, "quick_gelu")

    def gelu(self, x: Value) -> Value:
        return self.activation(x, "gelu")

    # Deferred values become tensors.

    def tensor(self, value: Value) -> Tensor:
        """Any value as a tensor in the body's dtype."""
        if isinstance(value, Sum):
            if value.tensor is None:
                value.tensor = self.sum(value)
            return value.tensor
        if isinstance(value, Product):
            return self.multiply(value)
        if isinstance(value, Part):
            return (value.raw * value.scale).to(self.weights.body)
        if isinstance(value, Bias):
            raise OctavoBug("a relative bias has no values before its attention")
        return value if isinstance(value, Tensor) else self.compute(value, None)

    def operand(self, value: Value, matrix: Matrix) -> Tensor:
        """Any value as the input of `matrix`: E4M3 by its input scale, or in the body's dtype."""
        if isinstance(value, Norm | Attention | Activated):
            return self.compute(value, matrix)
        return _quantized(self.tensor(value), matrix)

    def compute(self, value: Norm | Attention | Activated, consumer: Matrix | None) -> Tensor:
        """A deferred value as `consumer` wants it, or in the body's dtype."""
        if isinstance(value, Norm):
            return self.norm(value, consumer)
        if isinstance(value, Attention):
            return self.attend(value, consumer)
        return self.activate(value, consumer)

    def place(self, value: Sum | Norm) -> Tensor | None:
        """Where a state has to be written, if it is one that the caller wants."""
        if isinstance(value, Norm):
            return self.places.get(value.name)
        name = value.addend.matrix.names[0] if isinstance(value.addend, Product) else POSITIONS
        return self.places.get(name)

    # The steps that a subclass fuses. Each stored result is rounded to the body's dtype once.

    def sum(self, value: Sum) -> Tensor:
        addend = value.addend
        addend = self.multiply(addend) if isinstance(addend, Product) else addend
        return torch.add(value.x, addend, out=self.place(value))

    def norm(self, value: Norm, consumer: Matrix | None) -> Tensor:
        weight, bias = self.weights.norms[value.name]
        x = self.tensor(value.x)
        if value.rms:
            y = F.rms_norm(x.float(), weight.shape, weight.float(), value.eps)
            y = y if consumer is None or consumer.input_scale is not None else y.to(weight.dtype)
        else:
            y = F.layer_norm(x, weight.shape, weight, bias, value.eps)
        place = self.place(value) if consumer is None else None
        return _quantized(y, consumer) if place is None else place.copy_(y)

    def attend(self, value: Attention, consumer: Matrix | None) -> Tensor:
        q, k, v = (self.tensor(x) for x in (value.q, value.k, value.v))
        if value.bias is None:
            return _quantized(causal_attention(q, k, v, value.heads, value.mask), consumer)
        s = q.shape[1]
        line = self.bias_line(value.bias, s)[0]  # [H, 2 R], by key minus query from -R
        place = torch.arange(s, device=q.device)
        offset = place[None, :] - place[:, None] + line.shape[1] // 2
        bias = line[:, offset][None].to(q.dtype)  # [1, H, S, S]
        y = biased_attention(q, k, v, bias, value.heads, value.mask)
        return _quantized(y, consumer)

    def activate(self, value: Activated, consumer: Matrix | None) -> Tensor:
        y = self.tensor(value.product)
        if value.up is not None:  # unrounded between the two: the product is what is quantized
            wide = _activated(y.float(), value.kind) * self.tensor(value.up).float()
            in_fp8 = consumer is not None and consumer.input_scale is not None
            return _quantized(wide if in_fp8 else wide.to(y.dtype), consumer)
        if value.kind == "quick_gelu":
            return _quantized(_activated(y.float(), value.kind).to(y.dtype), consumer)
        return _quantized(_activated(y, value.kind), consumer)

    def multiply(self, product: Product) -> Tensor:
        """[B, S, K] -> [B, S, N] in the body's dtype."""
        parts = self.multiply_parts(product)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def multiply_parts(self, product: Product) -> list[Tensor]:
        """The stacked linears of a product, each [B, S, N / parts]."""
        x, matrix = product.operand, product.matrix
        if matrix.input_scale is None or matrix.column_scale is None:
            y = F.linear(x, matrix.weight, matrix.bias)
            return list(y.chunk(len(matrix.names), dim=-1))
        a = x.view(-1, x.shape[-1])  # [M, K]
        wide: Tensor | None = None
        if self.simulated:
            wide = a.float() @ matrix.weight.float().T
        elif matrix.is_exact(a.shape[0]):
            wide = _exact_product(a, matrix.weight)
        if wide is not None:
            y = wide * matrix.column_scale
            y = (y if matrix.bias is None else y + matrix.bias).to(self.weights.body)
            return list(y.view(*x.shape[:-1], -1).chunk(len(matrix.names), dim=-1))
        a = a.to(E4M3)
        # One GEMM per part: a scale per column would need one per row as well, bfloat16 results and
        # some GPUs only. Fast accumulation is as close to FP32 as the slow one (measured, H200).
        return [
            torch._scaled_mm(
                a,
                matrix.weight[rows].T,
                scale_a=matrix.input_scale,
                scale_b=scale,
                bias=None if matrix.bias is None else matrix.bias[rows],
                out_dtype=self.weights.body,
                use_fast_accum=True,
            ).view(*x.shape[:-1], -1)
            for rows, scale in zip(matrix.parts(), matrix.weight_scales, strict=True)
        ]


def _activated(x: Tensor, kind: Activation) -> Tensor:
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _exact_product(a: Tensor, weight: Tensor) -> Tensor | None:
    """[M, K] times [N, K] transposed, both codes, in FP32; None where PyTorch is older than 2.8."""
    try:
        return torch.mm(a.half(), weight.half().T, out_dtype=torch.float32)
    except TypeError:
        return None


def _quantized(x: Tensor, consumer: Matrix | None) -> Tensor:
    if consumer is None or consumer.input_scale is None:
        return x
    return quantize_input(x, consumer.input_scale)
