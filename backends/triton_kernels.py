# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The steps of `Fp8Ops` as Triton kernels, each writing what the next one reads.

At batch 1 a text encoder is bound by launches and latency, not by arithmetic, so a block is seven
of these: [add + layer norm + quantize], q/k/v, [causal attention + quantize], out_proj,
[add + layer norm + quantize], [fc1 + activation + quantize], fc2. Only the GEMMs of many rows go to
cuBLASLt, which is then faster (`_tile` has the measured rule).

Nothing is tuned at run time and no sum depends on the order in which programs finish: equal inputs
give equal bits, in every process. Nothing needs more than 99 KB of shared memory (RTX 40 and 50)
or an instruction of one architecture alone. From SM 9.0 on, inside a CUDA graph, a kernel may
start while the one before it ends (programmatic dependent launch); each then fetches its own
weights into L2 first and waits before it touches anything that another kernel wrote.

Importing this module needs Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803, N806 - kernels: constants are capitals, as everywhere in Triton

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from ..encoders.ops import Activation
from .fp8_ops import (
    E4M3,
    FEW_ROWS,
    Activated,
    Attention,
    Bias,
    DeviceWeights,
    Fp8Ops,
    Lines,
    Matrix,
    Norm,
    Part,
    Product,
    Sum,
    Tensors,
    Value,
)

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4

    @triton.jit
    def gdc_launch_dependents():
        pass

    @triton.jit
    def gdc_wait():
        pass

    HAS_PDL = False
else:
    HAS_PDL = True

KernelError = TritonError  # a kernel that cannot be compiled for a device, or does not fit it

PDL_SM = (9, 0)
LINE = 128  # bytes of a line of L2
LOG2_E = 1.4426950408889634
# Queries, keys, warps and stages of T5's attention: of up to 128 tokens; of more; of heads of 128.
BIASED_SHORT, BIASED, BIASED_WIDE = (64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 2)


@triton.jit
def _quantize(x, scale):
    """FP32 -> E4M3 of x / scale as fp8_ops.quantize_input: correctly rounded, saturated, NaN kept.

    One Newton step on x * (1 / scale) gives the IEEE quotient (Markstein 1990) without the slow
    path of a division, which costs as much as the rest of an epilogue. The signs keep -0.0.
    """
    inverse = tl.div_rn(1.0, scale)
    y = tl.clamp(x * inverse, -512.0, 512.0)  # so that no inf - inf arises below
    y = tl.fma(tl.fma(y, scale, -x), -inverse, y)
    return tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    # A reciprocal is the square of rsqrt, which is one instruction; a division is eight.
    if KIND == "quick_gelu":
        root = tl.rsqrt(1.0 + tl.exp2(x * -2.4554669595930157))  # 1.702 log2(e)
        y = x * root * root
    elif KIND == "gelu_tanh":  # 0.5 (1 + tanh(u)) is sigmoid(2 u)
        u = x * (1.0 + 0.044715 * x * x)
        root = tl.rsqrt(1.0 + tl.exp2(u * -2.302208198144325))  # 2 sqrt(2 / pi) log2(e)
        y = x * root * root
    elif KIND == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # NaN stays
    else:
        # max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2, with the erfc of Abramowitz and Stegun, 7.1.26,
        # which is off by at most 1.5e-7; |x| is bounded so that an infinite x gives no NaN.
        size = tl.minimum(tl.abs(x), 64.0)
        root = tl.rsqrt(1.0 + 0.23164188 * size)
        t = root * root
        tail = tl.fma(t, 0.5307027145, -0.7265760135)
        tail = tl.fma(t, tl.fma(t, tl.fma(t, tail, 0.7107068705), -0.142248368), 0.127414796) * t
        y = tl.maximum(x, 0.0) - size * tail * tl.exp2(x * x * -0.7213475204444817)
    return y


@triton.jit
def _plus(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["period", "rows"])
def _add_norm(
    x, addend, column_scale, addend_bias, weight, bias, scale, total, normed, period, rows, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, PARTS: tl.constexpr,
    NORMED: tl.constexpr, RMS: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of total = x + addend and of normed = norm(total), layer or RMS, quantized or not.

    `addend` is [period, C] in the body's dtype, or the FP32 partial products [PARTS, rows, C] of a
    GEMM, which are summed in order, scaled per column and biased.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    body = total.dtype.element_ty
    if NORMED:
        gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
        if not RMS:
            shift = tl.load(bias + column, inside, 0.0).to(tl.float32)
    if PARTS > 0:
        factor = tl.load(column_scale + column, inside, 0.0)
        offset = tl.load(addend_bias + column, inside, 0.0).to(tl.float32)
    step = 1.0
    if QUANTIZED:
        step = tl.load(scale)
    if PDL:
        gdc_wait()
    value = tl.load(x + row * C + column, inside, 0.0).to(tl.float32)
    if ADDED:
        at = addend + (row % period) * C + column
        more = tl.load(at, inside, 0.0).to(tl.float32)
        if PARTS > 0:
            for part in tl.static_range(1, PARTS):
                more += tl.load(at + part * rows * C, inside, 0.0)
            more = (more * factor + offset).to(body).to(tl.float32)
        value = (value + more).to(body)
        tl.store(total + row * C + column, value, inside)
        value = value.to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    if NORMED:
        # Both sums in one exchange between the warps; FP32 is wide enough for the difference.
        first, second = tl.reduce((value, value * value), 0, _plus)
        if RMS:
            y = (value * tl.rsqrt(second / C + eps) * gain).to(body)
        else:
            mean = first / C
            variance = tl.maximum(second / C - mean * mean, 0.0)
            y = ((value - mean) * tl.rsqrt(variance + eps) * gain + shift).to(body)
        if QUANTIZED:
            y = _quantize(y.to(tl.float32), step).to(normed.dtype.element_ty)
        tl.store(normed + row * C + column, y, inside)


@triton.jit
def _place(tokens, heads, QUERIES: tl.constexpr):
    """(block of queries, head, row of the prompt's token 0) of this program."""
    blocks = tl.cdiv(tokens, QUERIES)
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks) % heads
    first = (tl.program_id(0) // blocks // heads).to(tl.int64) * tokens
    return block, head, first


@triton.jit
def _weighed(score, value, unit, top, total, acc, FUSED: tl.constexpr):
    """(top, total, acc) with one more block of keys; its scores are [QUERIES, KEYS] (Dao 2023).

    A key weighs 2 to the power of its score times `unit`. FUSED takes an instruction less for it,
    but equal scores no longer cancel out exactly: not where every score may be -1e30, and not
    beyond 1e8, where the rounding of a product of scores is a large exponent (T5's are below 1e4).
    """
    higher = tl.maximum(top, tl.max(score, 1))
    if FUSED:
        weight = tl.exp2(tl.fma(score, unit, -(higher * unit)[:, None]))
    else:
        weight = tl.exp2((score - higher[:, None]) * unit)
    shrink = tl.exp2((top - higher) * unit)
    total = total * shrink + tl.sum(weight, 1)
    return higher, total, tl.dot(weight.to(value.dtype), value, acc * shrink[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _attention(
    q, k, v, mask, scale, out, tokens, heads, stride, softmax_scale,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`QUERIES` rows of a head of softmax(q k' scale) v, causal; rows lie `stride` apart.

    Dao 2023, arXiv:2307.08691, the forward half. `softmax_scale` holds log2(e) as well.
    """
    step = 1.0
    if QUANTIZED:
        step = tl.load(scale)
    if PDL:
        gdc_wait()
    block, head, first = _place(tokens, heads, QUERIES)
    row = block * QUERIES + tl.arange(0, QUERIES)
    depth = tl.arange(0, D)
    at = q + (first + row)[:, None] * stride + head * D + depth[None, :]
    query = tl.load(at, (row < tokens)[:, None], 0.0)
    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, D), tl.float32)
    for start in range(0, tl.minimum(tokens, (block + 1) * QUERIES), KEYS):
        key_row = start + tl.arange(0, KEYS)
        inside = key_row < tokens
        begin = (first + key_row) * stride + head * D
        key = tl.load(k + begin[None, :] + depth[:, None], inside[None, :], 0.0)
        value = tl.load(v + begin[:, None] + depth[None, :], inside[:, None], 0.0)
        score = tl.dot(query, key) * softmax_scale
        allowed = (key_row[None, :] <= row[:, None]) & inside[None, :]
        if MASKED:
            allowed = allowed & (tl.load(mask + first + key_row, inside, 0) != 0)[None, :]
        # Finite, so that a block of keys without an allowed one leaves no NaN behind.
        score = tl.where(allowed, score, -1e30)
        top, total, acc = _weighed(score, value, 1.0, top, total, acc, False)
    if PDL:
        gdc_launch_dependents()
    y = (acc / total[:, None]).to(query.dtype)
    if QUANTIZED:
        y = _quantize(y.to(tl.float32), step).to(out.dtype.element_ty)
    at = out + (first + row)[:, None] * (heads * D) + head * D + depth[None, :]
    tl.store(at, y, (row < tokens)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _biased_attention(
    q, k, v, q_scale, k_scale, v_scale, line, mask, scale, out, tokens, reach, heads, stride,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, COPIES: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, QUANTIZED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `_attention`, for T5: softmax(q k' + bias) v over all keys, without a scale of its own.

    `line` [COPIES, H, 2 `reach`] is the bias as `shifted_offsets` lays it out. SCALED: q, k and v
    are still to be multiplied by their weights' scales. EVEN: `tokens` is a multiple of KEYS. A
    masked key has a finite score, so that a row without any other is the mean of v, as in PyTorch.
    """
    factor = 1.0
    step = 1.0
    value_scale = 1.0
    if SCALED:
        factor = tl.load(q_scale) * tl.load(k_scale)
        value_scale = tl.load(v_scale)
    if QUANTIZED:
        step = tl.load(scale)
    block, head, first = _place(tokens, heads, QUERIES)
    row = block * QUERIES + tl.arange(0, QUERIES)
    key = tl.arange(0, KEYS)
    column = head * D + tl.arange(0, D)
    # The copy whose line has the bias of `row` and key 0, and so of key 8, 16, ..., aligned.
    offset = reach - row
    lines = ((offset % COPIES) * heads + head) * (2 * reach) + offset // COPIES * COPIES
    at_bias = line + lines[:, None] + key[None, :]
    at_k = k + (first + key)[None, :] * stride + column[:, None]
    at_v = v + (first + key)[:, None] * stride + column[None, :]
    if PDL:
        gdc_wait()
    at = q + (first + row)[:, None] * stride + column[None, :]
    query = tl.load(at, (row < tokens)[:, None], 0.0)
    top = tl.full((QUERIES,), -2e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, D), tl.float32)
    for start in range(0, tokens, KEYS):
        moved = start * stride  # within one prompt: far below 2^31
        inside = start + key < tokens
        if EVEN:
            keys, values = tl.load(at_k + moved), tl.load(at_v + moved)
        else:
            keys = tl.load(at_k + moved, inside[None, :], 0.0)
            values = tl.load(at_v + moved, inside[:, None], 0.0)
        # By way of L1, which the neighbouring rows' biases are in.
        bias = tl.load(at_bias + start, cache_modifier=".ca").to(tl.float32)
        score = tl.dot(query, keys) * factor + bias
        if MASKED:
            allowed = tl.load(mask + first + start + key, inside, 0) != 0
            score = tl.where(allowed[None, :], score, -1e30)
        if not EVEN:
            score = tl.where(inside[None, :], score, -2e30)
        top, total, acc = _weighed(score, values, 1.4426950408889634, top, total, acc, not MASKED)
    y = acc * (value_scale / total)[:, None]
    if QUANTIZED:
        y = _quantize(y, step)
    at = out + (first + row)[:, None] * (heads * D) + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), (row < tokens)[:, None])


@triton.jit
def _gated(
    gate, up, gate_scale, up_scale, scale, out, stride, N: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of a row of out [M, N] = activation(gate) * up, whose rows lie `stride` apart.

    Both are still to be multiplied by their weights' scales.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    a_scale, b_scale = tl.load(gate_scale), tl.load(up_scale)
    step = 1.0
    if QUANTIZED:
        step = tl.load(scale)
    if PDL:
        gdc_wait()
    a = tl.load(gate + row * stride + column, inside, 0.0).to(tl.float32) * a_scale
    b = tl.load(up + row * stride + column, inside, 0.0).to(tl.float32) * b_scale
    y = _activate(a, KIND) * b
    if QUANTIZED:
        y = _quantize(y, step)
    tl.store(out + row * N + column, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def _activation(
    x, scale, out, count, BLOCK: tl.constexpr, KIND: tl.constexpr, QUANTIZED: tl.constexpr
):
    """out = activation(x), quantized with `scale` or not, element by element."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, inside, 0.0)
    y = _activate(value.to(tl.float32), KIND).to(value.dtype)
    if QUANTIZED:
        y = _quantize(y.to(tl.float32), tl.load(scale)).to(out.dtype.element_ty)
    tl.store(out + at, y, inside)


@triton.jit(do_not_specialize=["M"])
def _fp8_linear(
    a, w, column_scale, bias, scale, out, M, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, EPILOGUE: tl.constexpr, LINES: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS, COLUMNS] of a [M, K] times w' [K, N], over one of `SPLIT` parts of K.

    EPILOGUE "partial" stores the FP32 sums [SPLIT, M, N]; "body" scales and biases; any other is an
    activation, which is computed as well and quantized with `scale`. The tile is computed
    transposed: tensor cores take 64 rows at a time, of which there are enough in w but not in a
    prompt. EXACT multiplies the codes as FP16, which holds them all, and so adds up in full FP32.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    LENGTH: tl.constexpr = K // SPLIT
    depth = part * LENGTH + tl.arange(0, DEPTH)
    step = 1.0
    if EPILOGUE != "partial":
        factor = tl.load(column_scale + column)
        offset = tl.load(bias + column)
        if EPILOGUE != "body":
            step = tl.load(scale)
    if PDL:
        line = part * LENGTH + tl.minimum(tl.arange(0, LINES) * 128, LENGTH - 128)
        at = (w + column[:, None] * K + line[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, False, 1
        )
        # Before the wait: the next kernel, which waits for the end of this one, can only fetch.
        gdc_launch_dependents()
        gdc_wait()
    inside = row < M
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    at_w = w + column[:, None] * K + depth[None, :]
    at_a = a + row[None, :] * K + depth[:, None]
    for _ in tl.range(0, LENGTH, DEPTH, num_stages=STAGES):
        left, right = tl.load(at_w), tl.load(at_a, inside[None, :], 0.0)
        if EXACT:
            left, right = left.to(tl.float16), right.to(tl.float16)
        acc = tl.dot(left, right, acc)
        at_w += DEPTH
        at_a += DEPTH
    acc = tl.trans(acc)
    at = out + part * M * N + row[:, None] * N + column[None, :]
    if EPILOGUE == "partial":
        tl.store(at, acc, inside[:, None])
    else:
        y = (acc * factor[None, :] + offset.to(tl.float32)[None, :]).to(offset.dtype)
        if EPILOGUE != "body":
            y = _activate(y.to(tl.float32), EPILOGUE).to(y.dtype)
            y = _quantize(y.to(tl.float32), step).to(out.dtype.element_ty)
        tl.store(at, y, inside[:, None])


@dataclass(frozen=True)
class Tile:
    """How `_fp8_linear` cuts a GEMM: [rows, columns] a program, K in `split` parts by `depth`."""

    rows: int
    columns: int
    depth: int
    split: int
    stages: int
    warps: int = 4


# Rows up to which a GEMM is ours, measured on an H200 with CLIP-L and CLIP-G: at a plain product
# cuBLASLt catches up with FEW_ROWS; for stacked q/k/v it needs three calls; and an activation
# in the epilogue saves a pass over the widest tensor, which outweighs a short K at any size.
STACKED_ROWS = 2048
SHORT_K = 1024
ENOUGH_PROGRAMS = 100  # fewer leave most of a large GPU idle: cut smaller


def _tile(matrix: Matrix, rows: int, *, activated: bool = False) -> Tile | None:
    """How to multiply `rows` rows with `matrix` here, or None: cuBLASLt is to do it. Pure."""
    n, k = matrix.weight.shape
    if matrix.bias is None:  # T5: so large that cuBLASLt is faster at any number of rows
        return None
    if matrix.input_scale is None or n % 64 or k % 128 or rows * max(n, k) >= 2**31:
        return None
    if rows > FEW_ROWS:
        if matrix.is_exact(rows):
            return Tile(128, 128, 64, 1, 3, 8) if n % 128 == 0 else Tile(128, 64, 64, 1, 3)
        stacked = len(matrix.names) > 1 and rows <= STACKED_ROWS
        return Tile(128, 64, 128, 1, 3) if stacked or (activated and k <= SHORT_K) else None
    split = 1
    if len(matrix.names) == 1 and not activated:  # ends in a sum, which can add parts of K
        split = k // 768 if k > n else 2
        while split > 1 and k % (split * 128):
            split -= 1
        split = max(split, 1)
    tall = (n // 64) * triton.cdiv(rows, 64) * split
    height = 64 if tall >= ENOUGH_PROGRAMS else 32
    if matrix.is_exact(rows):
        return Tile(height, 64, 128, split, 4)
    if split >= 5:  # CLIP-G's fc2: 3 % of the whole encoder
        return Tile(32, 64, 128, split, 5)
    if height == 32 and (k // split) % 256 == 0:
        return Tile(height, 64, 256, split, 3)
    return Tile(height, 64, 128, split, 5 if height == 64 else 4)


def _codes(matrix: Matrix, rows: int) -> torch.dtype:
    """What the codes that `matrix` multiplies are stored in: half the conversions if it is FP16."""
    return torch.float16 if matrix.is_exact(rows) else E4M3


class FusedOps(Fp8Ops):
    """`Fp8Ops` on a CUDA device through the kernels above.

    `overlapped`: launch each kernel before the previous one has ended, where `overlaps` says so.
    Kernels read weights before they wait, so nothing that writes any may be under way: use it in a
    CUDA graph, whose start is ordered after all work before it, or on an idle device.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        *,
        simulated: bool = False,
        places: Tensors | None = None,
        lines: Lines | None = None,
        overlapped: bool = False,
    ) -> None:
        super().__init__(weights, simulated=simulated, places=places, lines=lines)
        self._pdl: dict[str, Any] = {"PDL": overlapped}
        if overlapped:
            self._pdl["launch_pdl"] = True

    def sum(self, value: Sum) -> Tensor:
        return self._add_norm(value, None, None)[0]

    def norm(self, value: Norm, consumer: Matrix | None) -> Tensor:
        total, normed = self._add_norm(value.x, value, consumer)
        if isinstance(value.x, Sum):
            value.x.tensor = total
        return normed

    def _add_norm(
        self, x: Tensor | Sum, norm: Norm | None, consumer: Matrix | None
    ) -> tuple[Tensor, Tensor]:
        """(`x` as a tensor, its norm as `consumer` wants it) in one kernel; no `norm`: x twice."""
        added = x if isinstance(x, Sum) and x.tensor is None else None
        base = self.tensor(x) if added is None else added.x
        c = base.shape[-1]
        rows = base.numel() // c
        total, addend, period, parts = base, base, rows, 0
        column_scale = addend_bias = None
        if added is not None:
            total = self._output(base, self.place(added))
            addend = added.addend if isinstance(added.addend, Tensor) else base
            period = addend.shape[0] if isinstance(added.addend, Tensor) else rows
            if isinstance(added.addend, Product):
                addend, parts = self._partial(added.addend)
                matrix = added.addend.matrix
                column_scale, addend_bias = matrix.column_scale, matrix.bias
        weight = bias = scale = None
        normed = total
        if norm is not None:
            weight, bias = self.weights.norms[norm.name]
            scale = None if consumer is None else consumer.input_scale
            place = self.place(norm) if consumer is None else None
            codes = None
            if consumer is not None:
                codes = self.weights.body if scale is None else _codes(consumer, rows)
            normed = self._output(base, place, codes)
        block = triton.next_power_of_2(c)
        warps = 4 if rows > 1024 and c <= 2048 else 16 if rows <= 256 and c > 2048 else 8
        _add_norm[(rows,)](
            base, addend, column_scale, addend_bias, weight, bias, scale, total, normed,
            period, rows, 0.0 if norm is None else norm.eps,
            C=c, BLOCK=block, ADDED=added is not None, PARTS=parts, NORMED=norm is not None,
            RMS=norm is not None and norm.rms, QUANTIZED=scale is not None,
            num_warps=warps, **self._pdl,
        )  # fmt: skip
        return total, normed

    def attend(self, value: Attention, consumer: Matrix | None) -> Tensor:
        if value.bias is not None:
            return self._attend_biased(value, value.bias, consumer)
        q, k, v = (self.tensor(x) for x in (value.q, value.k, value.v))
        b, s, c = q.shape
        d = c // value.heads
        strides = {t.stride()[1:] for t in (q, k, v)}
        if d not in (16, 32, 64, 128) or len(strides) > 1 or q.stride(2) != 1:
            return super().attend(value, consumer)
        scale = None if consumer is None else consumer.input_scale
        codes = None if consumer is None or scale is None else _codes(consumer, b * s)
        out = q.new_empty(b, s, c, dtype=codes)
        heads = b * value.heads
        queries, keys, warps = (16, 128, 4) if heads <= 32 else (16, 64, 4)
        if heads > 256:
            queries, keys, warps = 16, 32, 1
        _attention[(heads * triton.cdiv(s, queries),)](
            q, k, v, value.mask, scale, out, s, value.heads, q.stride(1), d**-0.5 * LOG2_E,
            D=d, QUERIES=queries, KEYS=keys, MASKED=value.mask is not None,
            QUANTIZED=scale is not None, num_warps=warps, num_stages=2, **self._pdl,
        )  # fmt: skip
        return out

    def _attend_biased(self, value: Attention, bias: Bias, consumer: Matrix | None) -> Tensor:
        parts = [x for x in (value.q, value.k, value.v) if isinstance(x, Part)]
        scaled = len(parts) == 3
        q, k, v = (
            (p.raw for p in parts) if scaled else map(self.tensor, (value.q, value.k, value.v))
        )
        b, s, c = q.shape
        d = c // value.heads
        strides = {t.stride()[1:] for t in (q, k, v)}
        if d not in (16, 32, 64, 128) or len(strides) > 1 or q.stride(2) != 1:
            return super().attend(value, consumer)
        q_scale, k_scale, v_scale = (p.scale for p in parts) if scaled else (None, None, None)
        scale = None if consumer is None else consumer.input_scale
        out = q.new_empty(b, s, c, dtype=self.weights.body if scale is None else E4M3)
        line = self.bias_line(bias, s)
        cut = BIASED_WIDE if d > 64 else BIASED_SHORT if s <= 128 else BIASED
        queries, keys, warps, stages = cut
        _biased_attention[(b * value.heads * triton.cdiv(s, queries),)](
            q, k, v, q_scale, k_scale, v_scale, line, value.mask, scale, out,
            s, line.shape[2] // 2, value.heads, q.stride(1), D=d, QUERIES=queries, KEYS=keys,
            COPIES=line.shape[0], EVEN=s % keys == 0, SCALED=scaled,
            MASKED=value.mask is not None, QUANTIZED=scale is not None, num_warps=warps,
            num_stages=stages, **self._pdl,
        )  # fmt: skip
        return out

    def linears(self, x: Value, names: Sequence[str]) -> tuple[Value, ...]:
        matrix = self.weights.matrices.get(tuple(names))
        if matrix is None or len(names) == 1 or matrix.bias is not None:
            return super().linears(x, names)
        if matrix.input_scale is None:
            return super().linears(x, names)
        # One GEMM of cuBLASLt, which takes one scale; those of the linears follow in the kernels.
        operand = self.operand(x, matrix)
        unit, one = self.weights.unit(matrix)
        raw = torch._scaled_mm(
            operand.view(-1, operand.shape[-1]),
            matrix.weight.T,
            scale_a=unit,
            scale_b=one,
            out_dtype=torch.float16,
            use_fast_accum=True,
        ).view(*operand.shape[:-1], -1)
        parts = raw.chunk(len(names), dim=-1)
        return tuple(Part(p, s) for p, s in zip(parts, matrix.raw_scales, strict=True))

    def _gate(self, gate: Part, up: Part, kind: Activation, scale: Tensor | None) -> Tensor:
        *batch, n = gate.raw.shape
        out = gate.raw.new_empty(*batch, n, dtype=self.weights.body if scale is None else E4M3)
        rows = out.numel() // n
        _gated[(rows, triton.cdiv(n, 1024))](
            gate.raw, up.raw, gate.scale, up.scale, scale, out, gate.raw.stride(-2), N=n,
            BLOCK=1024, KIND=kind, QUANTIZED=scale is not None, num_warps=4, **self._pdl,
        )  # fmt: skip
        return out

    def activate(self, value: Activated, consumer: Matrix | None) -> Tensor:
        product = value.product
        if isinstance(product, Part) and isinstance(value.up, Part):
            scale = None if consumer is None else consumer.input_scale
            return self._gate(product, value.up, value.kind, scale)
        if not isinstance(product, Product) or value.up is not None:
            return super().activate(value, consumer)
        n = product.matrix.weight.shape[0]
        scale = None if consumer is None else consumer.input_scale
        codes = self.weights.body
        if consumer is not None and scale is not None:
            codes = _codes(consumer, _rows(product))
        out = product.operand.new_empty(*product.operand.shape[:-1], n, dtype=codes)
        tile = _tile(product.matrix, _rows(product), activated=True)
        if tile is not None and scale is not None:
            self._multiply(product, tile, value.kind, scale, out)
            return out
        x = self.multiply(product)
        _activation[(triton.cdiv(x.numel(), 1024),)](
            x, scale, out, x.numel(), BLOCK=1024, KIND=value.kind,
            QUANTIZED=scale is not None, num_warps=4,
        )  # fmt: skip
        return out

    def multiply_parts(self, product: Product) -> list[Tensor]:
        tile = _tile(product.matrix, _rows(product))
        if tile is None or tile.split > 1:
            return super().multiply_parts(product)
        n = product.matrix.weight.shape[0]
        out = product.operand.new_empty(*product.operand.shape[:-1], n, dtype=self.weights.body)
        self._multiply(product, tile, "body", None, out)
        return list(out.chunk(len(product.matrix.names), dim=-1))

    def _partial(self, product: Product) -> tuple[Tensor, int]:
        """(FP32 partial sums [parts, M, N], parts), or (the finished product, 0)."""
        tile = _tile(product.matrix, _rows(product))
        if tile is None:
            return self.multiply(product), 0
        n = product.matrix.weight.shape[0]
        out = product.operand.new_empty(tile.split, _rows(product), n, dtype=torch.float32)
        self._multiply(product, tile, "partial", None, out)
        return out, tile.split

    def _multiply(
        self, product: Product, tile: Tile, epilogue: str, scale: Tensor | None, out: Tensor
    ) -> None:
        matrix, m = product.matrix, _rows(product)
        n, k = matrix.weight.shape
        grid = (n // tile.columns, triton.cdiv(m, tile.rows), tile.split)
        _fp8_linear[grid](
            product.operand, matrix.weight, matrix.column_scale, matrix.bias, scale, out, m,
            N=n, K=k, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, SPLIT=tile.split,
            STAGES=tile.stages, EPILOGUE=epilogue,
            LINES=triton.next_power_of_2(k // tile.split // LINE),
            EXACT=matrix.is_exact(m), num_warps=tile.warps, num_stages=tile.stages, **self._pdl,
        )  # fmt: skip

    def _output(
        self, like: Tensor, place: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return torch.empty_like(like, dtype=dtype) if place is None else place


def _rows(product: Product) -> int:
    return product.operand.numel() // product.operand.shape[-1]


def overlaps(device: torch.device, rows: int) -> bool:
    """Whether kernels of `rows` rows gain from overlapped launches on `device`.

    With more rows the GEMMs are cuBLASLt's, and one kernel fills the GPU anyway.
    """
    if not HAS_PDL or rows > FEW_ROWS:
        return False
    return torch.cuda.get_device_capability(device) >= PDL_SM


def check(device: torch.device) -> None:
    """Run the smallest kernel; raises whatever a broken Triton or its missing C compiler raises."""
    x = torch.ones(16, dtype=torch.float16, device=device)
    out = torch.empty_like(x)
    _activation[(1,)](x, None, out, 16, BLOCK=16, KIND="quick_gelu", QUANTIZED=False, num_warps=1)
    if not torch.allclose(out, x * torch.sigmoid(1.702 * x), atol=1e-3):
        raise RuntimeError(f"a Triton kernel computed quick_gelu(1) = {out[0].item()}")
