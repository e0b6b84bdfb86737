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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..encoders import ClipSpec, Ops
from ..encoders.clip import POSITIONS, TOKENS
from ..encoders.ops import Activation
from ..errors import OctavoBug, QuantizationError
from .torch_ops import causal_attention

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below, 1 / scale overflows

Tensors = Mapping[str, Tensor]


# Quantization. Weights, activations and checkpoints share these lines, so they round alike.


def scale_from_amax(amax: Tensor) -> Tensor:
    """`amax / 448` in FP32, any shape; 1.0 where that is zero, so that zeros stay exact zeros."""
    scale = amax.float() / E4M3_MAX
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_input(x: Tensor, scale: Tensor) -> Tensor:
    """Float [...] -> E4M3 [...] of `x / scale`: divided in FP32, saturated at 448, ties to even.

    NaN stays NaN. `scale` is FP32 [].
    """
    # One dimension, because torch would let a [] scale take the dtype of x: this way the division
    # is FP32's in one kernel. The clamp: a plain cast turns what is too large into NaN.
    return (x / scale.reshape(1)).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


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
    bias: Tensor
    weight_scale: Tensor
    input_scale: Tensor


@dataclass(frozen=True)
class HalfLinear:
    """A linear kept in 16 bit: `weight` [out, in] and `bias` [out] of the body's dtype."""

    weight: Tensor
    bias: Tensor


Linear = Fp8Linear | HalfLinear


@dataclass(frozen=True)
class Fp8Weights:
    """A quantized encoder without its token table: canonical name (no `.weight`) -> values.

    `body` is the dtype of everything outside the FP8 products: float16, or bfloat16.
    """

    spec: ClipSpec
    body: torch.dtype
    linears: Mapping[str, Linear]
    norms: Mapping[str, tuple[Tensor, Tensor]]  # weight [C], bias [C]
    positions: Tensor  # [P, C]

    @classmethod
    def from_tensors(
        cls, spec: ClipSpec, tensors: Tensors, body: torch.dtype = torch.float16
    ) -> Fp8Weights:
        """From a checkpoint's tensors (`L.weight`, `L.weight_scale`, `L.input_scale`, `L.bias`).

        A linear whose weight is not E4M3 is kept in 16 bit. Raises QuantizationError for a scale
        that is missing or no positive, normal number, and for values that `body` cannot hold.
        """
        half = {
            name: _tensor(tensors, name, shape).to(body)
            for name, shape in spec.tensors().items()
            if _is_body(name, tensors)
        }
        _amaxes(half)
        linears: dict[str, Linear] = {}
        scales: dict[str, Tensor] = {}
        for name, shape in spec.linears().items():
            weight, bias = name + ".weight", name + ".bias"
            if weight in half:
                linears[name] = HalfLinear(half[weight], half[bias])
                continue
            for scale in (name + ".weight_scale", name + ".input_scale"):
                scales[scale] = _tensor(tensors, scale, None).float().reshape(())
            linears[name] = Fp8Linear(
                _tensor(tensors, weight, shape),
                half[bias],
                scales[name + ".weight_scale"],
                scales[name + ".input_scale"],
            )
        _check_scales(scales)
        norms = {name: (half[name + ".weight"], half[name + ".bias"]) for name in spec.norms()}
        return cls(spec, body, linears, norms, half[POSITIONS])

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
            if name not in codes and _is_body(name, tensors)
        }
        _amaxes(half)
        linears: dict[str, Linear] = {}
        for name, old in self.linears.items():
            bias = half[name + ".bias"]
            if isinstance(old, Fp8Linear):
                weight, scale = codes[name + ".weight"]
                linears[name] = Fp8Linear(weight, bias, scale, old.input_scale)
            else:
                linears[name] = HalfLinear(half[name + ".weight"], bias)
        norms = {name: (half[name + ".weight"], half[name + ".bias"]) for name in spec.norms()}
        return Fp8Weights(spec, self.body, linears, norms, half[POSITIONS])


def _is_body(name: str, tensors: Tensors) -> bool:
    """Whether `name` is held in the body's dtype; the token table is not held at all."""
    return name != TOKENS and (name not in tensors or tensors[name].dtype != E4M3)


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
    product of the two per output column, so stacking never requantizes anything.
    """

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    input_scale: Tensor | None
    weight_scales: tuple[Tensor, ...]
    column_scale: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        scales = [t for t in (self.input_scale, self.column_scale) if t is not None]
        return [self.weight, self.bias, *scales, *self.weight_scales]

    def parts(self) -> list[slice]:
        """The rows of each stacked linear."""
        rows = self.weight.shape[0] // len(self.names)
        return [slice(i * rows, (i + 1) * rows) for i in range(len(self.names))]


class DeviceWeights:
    """`Fp8Weights` on one device, q/k/v stacked where they share an input scale.

    `copy_from` puts other values into the same storage, so captured CUDA graphs stay valid.
    """

    def __init__(self, weights: Fp8Weights, device: torch.device) -> None:
        self.spec, self.body, self.device = weights.spec, weights.body, device
        self._layout = _layout(weights)
        self.matrices: dict[tuple[str, ...], Matrix] = {}
        for names, dtype in self._layout:
            out, inner = weights.linears[names[0]].weight.shape
            out *= len(names)
            scales = len(names) if dtype == E4M3 else 0
            self.matrices[names] = Matrix(
                names,
                torch.empty(out, inner, dtype=dtype, device=device),
                torch.empty(out, dtype=self.body, device=device),
                torch.empty((), device=device) if scales else None,
                tuple(torch.empty((), device=device) for _ in range(scales)),
                torch.empty(out, device=device) if scales else None,
            )
        self.norms = {
            name: (torch.empty_like(w, device=device), torch.empty_like(b, device=device))
            for name, (w, b) in weights.norms.items()
        }
        self.positions = torch.empty_like(weights.positions, device=device)
        self.copy_from(weights)

    @property
    def size_bytes(self) -> int:
        """Bytes of every tensor held."""
        matrices = [t for m in self.matrices.values() for t in m.tensors]
        norms = [t for pair in self.norms.values() for t in pair]
        return sum(t.nbytes for t in [*matrices, *norms, self.positions])

    @torch.no_grad()
    def copy_from(self, weights: Fp8Weights) -> None:
        """Take over other values; raises QuantizationError if their structure is another one."""
        if (weights.spec, weights.body, _layout(weights)) != (self.spec, self.body, self._layout):
            raise QuantizationError(
                "the new weights differ in structure from the loaded ones (encoder, dtype, which "
                "linears are FP8, which share an input scale); load them as an engine of their own."
            )
        for names, matrix in self.matrices.items():
            for i, rows in enumerate(matrix.parts()):
                source = weights.linears[names[i]]
                matrix.weight[rows].copy_(source.weight)
                matrix.bias[rows].copy_(source.bias)
                if isinstance(source, Fp8Linear):
                    assert matrix.input_scale is not None and matrix.column_scale is not None
                    matrix.input_scale.copy_(source.input_scale)
                    matrix.weight_scales[i].copy_(source.weight_scale)
                    matrix.column_scale[rows] = matrix.input_scale * matrix.weight_scales[i]
        for name, pair in self.norms.items():
            for mine, other in zip(pair, weights.norms[name], strict=True):
                mine.copy_(other)
        self.positions.copy_(weights.positions)


def _layout(weights: Fp8Weights) -> tuple[tuple[tuple[str, ...], torch.dtype], ...]:
    """(names, weight dtype) of each matrix, in program order."""
    linears = weights.linears
    scales = {n: v.input_scale for n, v in linears.items() if isinstance(v, Fp8Linear)}
    values: dict[str, float] = {}
    if scales:  # one transfer for all: on a GPU each comparison alone would wait for the device
        values = dict(zip(scales, torch.stack(list(scales.values())).tolist(), strict=True))
    groups: list[tuple[str, ...]] = []
    for index in range(weights.spec.layers):
        block = weights.spec.block(index)
        qkv = tuple(f"{block}self_attn.{n}_proj" for n in "qkv")
        alike = len({(linears[n].weight.dtype, values.get(n)) for n in qkv}) == 1
        groups += [qkv] if alike else [(n,) for n in qkv]
        groups += [(block + n,) for n in ("self_attn.out_proj", "mlp.fc1", "mlp.fc2")]
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
    """The layer norm of `x`, to be computed in the form its consumer wants."""

    x: Tensor | Sum
    name: str
    eps: float


@dataclass(eq=False)
class Attention:
    """Causal attention over q, k, v [B, S, C], to be computed in the form its consumer wants."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    mask: Tensor | None


@dataclass(eq=False)
class Activated:
    """The activation of a product, to be computed in the form its consumer wants."""

    product: Product
    kind: Activation


Value = Tensor | Product | Sum | Norm | Attention | Activated


class Fp8Ops(Ops[Value]):
    """`Ops` over `DeviceWeights`; every stored intermediate is E4M3 or in the body's dtype.

    `simulated` multiplies dequantized codes in FP32 instead of using `torch._scaled_mm`: what the
    FP8 tensor cores are compared with, and the path of devices without them.
    `places` maps the name of a weight to the tensor [B, S, C] which the state that it completes is
    written to: the position table, a block's `mlp.fc2`, the final norm.
    """

    def __init__(
        self, weights: DeviceWeights, *, simulated: bool, places: Tensors | None = None
    ) -> None:
        self.weights, self.simulated = weights, simulated
        self.places: Tensors = places or {}
        self._matrices = {n: m for m in weights.matrices.values() for n in m.names}

    # What an encoder calls.

    def add(self, a: Value, b: Value) -> Value:
        if isinstance(b, Product):
            return Sum(self.tensor(a), b)
        return self.tensor(a) + self.tensor(b)

    def add_positions(self, x: Value, name: str) -> Value:
        if name != POSITIONS:
            raise OctavoBug(f"the FP8 weights hold no position table {name}")
        x = self.tensor(x)
        return Sum(x, self.weights.positions[: x.shape[1]])

    def layer_norm(self, x: Value, name: str, eps: float) -> Value:
        return Norm(x if isinstance(x, Sum) else self.tensor(x), name, eps)

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
        return Attention(self.tensor(q), self.tensor(k), self.tensor(v), heads, allowed)

    def activation(self, x: Value, kind: Activation) -> Value:
        if not isinstance(x, Product):
            raise OctavoBug("an activation of something that is no linear")
        return Activated(x, kind)

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
        y = F.layer_norm(self.tensor(value.x), weight.shape, weight, bias, value.eps)
        place = self.place(value) if consumer is None else None
        return _quantized(y, consumer) if place is None else place.copy_(y)

    def attend(self, value: Attention, consumer: Matrix | None) -> Tensor:
        y = causal_attention(value.q, value.k, value.v, value.heads, value.mask)
        return _quantized(y, consumer)

    def activate(self, value: Activated, consumer: Matrix | None) -> Tensor:
        y = self.multiply(value.product)
        if value.kind == "gelu":
            return _quantized(F.gelu(y), consumer)
        wide = y.float()
        return _quantized((wide * torch.sigmoid(1.702 * wide)).to(y.dtype), consumer)

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
        if self.simulated:
            y = (a.float() @ matrix.weight.float().T) * matrix.column_scale + matrix.bias
            y = y.to(self.weights.body).view(*x.shape[:-1], -1)
            return list(y.chunk(len(matrix.names), dim=-1))
        # One GEMM per part: a scale per column would need one per row as well, bfloat16 results and
        # some GPUs only. Fast accumulation is as close to FP32 as the slow one (measured, H200).
        return [
            torch._scaled_mm(
                a,
                matrix.weight[rows].T,
                scale_a=matrix.input_scale,
                scale_b=scale,
                bias=matrix.bias[rows],
                out_dtype=self.weights.body,
                use_fast_accum=True,
            ).view(*x.shape[:-1], -1)
            for rows, scale in zip(matrix.parts(), matrix.weight_scales, strict=True)
        ]


def _quantized(x: Tensor, consumer: Matrix | None) -> Tensor:
    if consumer is None or consumer.input_scale is None:
        return x
    return quantize_input(x, consumer.input_scale)
