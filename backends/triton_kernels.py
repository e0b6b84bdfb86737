# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The steps of `Fp8Ops` as Triton kernels, each writing what the next one reads.

Four kernels: [add + layer norm + quantize], [causal attention + quantize], [activation + quantize], and
an FP8 GEMM for few rows, whose epilogue scales, adds the bias and, for `mlp.fc1`, activates and
quantizes. A text encoder at batch 1 is bound by launches and latency, not by arithmetic: a block takes
seven launches. Tile sizes are fixed per shape, nothing is tuned at run time, and no sum depends on
the order in which programs finish, so equal inputs give equal bits. Nothing here needs more than
99 KB of shared memory or an instruction that only SM 9.0 has; programmatic dependent launch
(SM 9.0 and later) lets a kernel start, and fetch its weights, while the one before it finishes.

Importing this module needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .fp8_ops import Activated, Attention, DeviceWeights, Fp8Ops, Matrix, Norm, Product, Sum


@triton.jit
def _quantize(x, scale):
    """FP32 -> E4M3 of x / scale, as fp8_ops.quantize_input: correctly rounded, saturated, NaN kept.

    One Newton step on x * (1 / scale) is IEEE division (Markstein 1990) without its slow path, which
    would cost as much as the rest of an epilogue. The order of the signs keeps -0.0.
    """
    inverse = tl.div_rn(1.0, scale)
    y = tl.clamp(x * inverse, -512.0, 512.0)  # so that inf - inf cannot happen below
    y = tl.fma(tl.fma(y, scale, -x), -inverse, y)
    return tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _activate(x, QUICK: tl.constexpr):
    if QUICK:
        y = x / (1.0 + tl.exp(-1.702 * x))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def _fetch(weights, program, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Ask for this program's share of the next GEMM's weights (128-byte lines) to come into L2."""
    if LINES > 0:
        line = program * BLOCK + tl.arange(0, BLOCK)
        at = (weights + line.to(tl.int64) * 128).to(tl.int64)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r,r", [at, line, tl.full((BLOCK,), LINES, tl.int32)], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["period", "rows"])
def _add_norm(
    x, addend, column_scale, addend_bias, weight, bias, scale, total, normed, ahead,
    period, rows, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, PARTS: tl.constexpr,
    SUMMED: tl.constexpr, NORMED: tl.constexpr, QUANTIZED: tl.constexpr,
    LINES: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of total = x + addend and normed = layer_norm(total), quantized or not.

    `addend` [period, C] is in the body's dtype, or FP32 `PARTS` partial products [PARTS, M, C] that
    are summed in order, scaled per column and biased.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    body = total.dtype.element_ty
    if PDL == 1:
        gdc_launch_dependents()
    _fetch(ahead, tl.program_id(0), LINES, SHARE)
    if NORMED:
        gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
        shift = tl.load(bias + column, inside, 0.0).to(tl.float32)
    if PARTS > 0:
        factor = tl.load(column_scale + column, inside, 0.0)
        offset = tl.load(addend_bias + column, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(x + row * C + column, inside, 0.0).to(tl.float32)
    if ADDED:
        at = addend + (row % period) * C + column
        if PARTS > 0:
            more = tl.load(at, inside, 0.0)
            for part in tl.static_range(1, PARTS):
                more += tl.load(at + part * rows * C, inside, 0.0)
            more = (more * factor + offset).to(body).to(tl.float32)
        else:
            more = tl.load(at, inside, 0.0).to(tl.float32)
        value = (value + more).to(body)
        if PDL == 2:
            gdc_launch_dependents()
        if SUMMED:
            tl.store(total + row * C + column, value, inside)
        value = value.to(tl.float32)
    if NORMED:
        mean = tl.sum(value, 0) / C
        centred = tl.where(inside, value - mean, 0.0)
        variance = tl.sum(centred * centred, 0) / C
        y = (centred * tl.rsqrt(variance + eps) * gain + shift).to(body)
        if QUANTIZED:
            y = _quantize(y.to(tl.float32), tl.load(scale))
        tl.store(normed + row * C + column, y, inside)


@triton.jit(do_not_specialize=["tokens"])
def _attention(
    q, k, v, mask, scale, out, ahead, tokens, heads, stride, softmax_scale,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, QUANTIZED: tl.constexpr,
    LINES: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`QUERIES` rows of one head of softmax(q k' scale) v, causal; q, k, v rows `stride` apart."""
    if PDL == 1:
        gdc_launch_dependents()
    _fetch(ahead, tl.program_id(0), LINES, SHARE)
    if PDL:
        gdc_wait()
    blocks = tl.cdiv(tokens, QUERIES)
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks) % heads
    first = (tl.program_id(0) // blocks // heads).to(tl.int64) * tokens  # row of token 0
    row = block * QUERIES + tl.arange(0, QUERIES)
    depth = tl.arange(0, D)
    query = tl.load(
        q + (first + row)[:, None] * stride + head * D + depth[None, :],
        (row < tokens)[:, None], 0.0,
    )  # fmt: skip
    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, D), tl.float32)
    for start in range(0, tl.minimum(tokens, (block + 1) * QUERIES), KEYS):
        key_row = start + tl.arange(0, KEYS)
        inside = key_row < tokens
        at = (first + key_row) * stride + head * D
        key = tl.load(k + at[None, :] + depth[:, None], inside[None, :], 0.0)  # [D, KEYS]
        value = tl.load(v + at[:, None] + depth[None, :], inside[:, None], 0.0)
        score = tl.dot(query, key) * softmax_scale
        allowed = (key_row[None, :] <= row[:, None]) & inside[None, :]
        if MASKED:
            allowed = allowed & (tl.load(mask + first + key_row, inside, 0) != 0)[None, :]
        # Finite, so that a block without an allowed key leaves no NaN behind.
        score = tl.where(allowed, score, -1e30)
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None])
        top = higher
    if PDL == 2:
        gdc_launch_dependents()
    y = (acc / total[:, None]).to(query.dtype)
    if QUANTIZED:
        y = _quantize(y.to(tl.float32), tl.load(scale))
    tl.store(
        out + (first + row)[:, None] * (heads * D) + head * D + depth[None, :],
        y, (row < tokens)[:, None],
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _activation(x, scale, out, count, BLOCK: tl.constexpr, QUICK: tl.constexpr):
    """out = E4M3 of activation(x) / scale, element by element."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, inside, 0.0)
    y = _activate(value.to(tl.float32), QUICK).to(value.dtype).to(tl.float32)
    tl.store(out + at, _quantize(y, tl.load(scale)), inside)


@triton.jit(do_not_specialize=["M"])
def _fp8_linear(
    a, w, column_scale, bias, scale, out, ahead, M,
    N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
    SWAPPED: tl.constexpr, EPILOGUE: tl.constexpr, PREFETCH: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS, COLUMNS] of a [M, K] times w' [K, N], over one of `SPLIT` parts of K.

    EPILOGUE "partial" stores the FP32 sums [SPLIT, M, N]; "body" scales and biases; "gelu" and
    "quick_gelu" also activate and quantize with `scale`. `SWAPPED` computes the transposed tile, which
    suits the tensor cores' 64-row instructions when there are few tokens.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    LENGTH: tl.constexpr = K // SPLIT
    depth = part * LENGTH + tl.arange(0, DEPTH)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL:
        if PREFETCH:
            # Weights do not depend on the kernel before: bring them into L2 while it runs.
            OWN: tl.constexpr = triton.next_power_of_2(LENGTH // 128)
            line = part * LENGTH + tl.minimum(tl.arange(0, OWN) * 128, LENGTH - 128)
            at = (w + column[:, None] * K + line[None, :]).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, False, 1
            )
    program = (part * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    _fetch(ahead, program, LINES, SHARE)
    if PDL:
        gdc_wait()
    inside = row < M
    if SWAPPED:
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        at_w = w + column[:, None] * K + depth[None, :]
        at_a = a + row[None, :] * K + depth[:, None]
        for _ in tl.range(0, LENGTH, DEPTH, num_stages=STAGES):
            acc = tl.dot(tl.load(at_w), tl.load(at_a, inside[None, :], 0.0), acc, max_num_imprecise_acc=CHUNK)
            at_w += DEPTH
            at_a += DEPTH
        acc = tl.trans(acc)
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        at_w = w + column[None, :] * K + depth[:, None]
        at_a = a + row[:, None] * K + depth[None, :]
        for _ in tl.range(0, LENGTH, DEPTH, num_stages=STAGES):
            acc = tl.dot(tl.load(at_a, inside[:, None], 0.0), tl.load(at_w), acc, max_num_imprecise_acc=CHUNK)
            at_w += DEPTH
            at_a += DEPTH
    if PDL == 2:
        gdc_launch_dependents()
    at = out + part * M * N + row[:, None] * N + column[None, :]
    if EPILOGUE == "partial":
        tl.store(at, acc, inside[:, None])
    else:
        factor = tl.load(column_scale + column)
        offset = tl.load(bias + column)
        y = (acc * factor[None, :] + offset.to(tl.float32)[None, :]).to(offset.dtype)
        if EPILOGUE != "body":
            y = _activate(y.to(tl.float32), EPILOGUE == "quick_gelu").to(y.dtype)
            y = _quantize(y.to(tl.float32), tl.load(scale))
        tl.store(at, y, inside[:, None])


@dataclass(frozen=True)
class Tile:
    """How one GEMM is cut; see `_fp8_linear`."""

    rows: int
    columns: int
    depth: int
    split: int
    swapped: bool
    stages: int
    warps: int


LOG2_E = 1.4426950408889634
LINE = 128  # bytes


class FusedOps(Fp8Ops):
    """`Fp8Ops` on a CUDA device through the kernels of this module."""

    prefetch = 1
    ahead = True
    chunk = None
    overrides: dict = {}
    attention_override = None
    norm_warps = None
    split_qkv = False
    act_block = (2048, 8)

    def __init__(self, weights: DeviceWeights, *, simulated: bool = False, places=None, pdl: int = 0) -> None:
        super().__init__(weights, simulated=simulated, places=places)
        self.pdl = pdl

    def _hints(self, consumer: Matrix | None, programs: int, rows: int) -> dict:
        """Launch keywords: what to bring into L2 ahead, and the launch mode."""
        lines = share = 0
        if self.ahead and consumer is not None and self.tile(consumer, rows) is not None:
            lines = consumer.weight.nbytes // LINE
            share = triton.next_power_of_2(triton.cdiv(lines, programs))
        hints = {"LINES": lines, "SHARE": share, "PDL": self.pdl}
        if self.pdl:
            hints["launch_pdl"] = True
        return hints

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
        added = None
        if isinstance(x, Sum):
            if x.tensor is None:
                added, x = x, x.x
            else:
                x = x.tensor
        scale = None if consumer is None else consumer.input_scale
        c = x.shape[-1]
        rows = x.numel() // c
        matrix, addend, parts, period = None, x, 0, rows
        total = x
        if added is not None:
            place = self.place(added)
            total = torch.empty_like(x) if place is None else place
            if isinstance(added.addend, Product):
                matrix = added.addend.matrix
                addend, parts = self._unfinished(added.addend)
            else:
                addend, period = added.addend, added.addend.shape[0]
        weight = bias = None
        normed = total
        eps = 0.0
        if norm is not None:
            weight, bias = self.weights.norms[norm.name]
            eps = norm.eps
            if scale is not None:
                normed = torch.empty_like(x, dtype=torch.float8_e4m3fn)
            else:
                place = self.place(norm) if consumer is None else None
                normed = torch.empty_like(x) if place is None else place
        block = triton.next_power_of_2(c)
        _add_norm[(rows,)](
            x, addend,
            matrix.column_scale if matrix is not None else x,
            matrix.bias if matrix is not None else x,
            weight, bias, scale, total, normed, consumer.weight.view(torch.uint8) if consumer else x,
            period, rows, eps,
            C=c, BLOCK=block, ADDED=added is not None, PARTS=parts,
            SUMMED=added is not None, NORMED=norm is not None, QUANTIZED=scale is not None,
            num_warps=self.norm_warps or (8 if rows <= 1024 else 4), **self._hints(consumer, rows, rows),
        )  # fmt: skip
        return total, normed

    def _unfinished(self, product: Product) -> tuple[Tensor, int]:
        """FP32 partial sums [parts, M, N] and their number, or (the finished product, 0)."""
        a, matrix = product.operand, product.matrix
        n, k = matrix.weight.shape
        m = a.numel() // k
        tile = self.tile(matrix, m)
        if tile is None:
            return super().multiply(product), 0
        out = torch.empty(tile.split, m, n, dtype=torch.float32, device=a.device)
        self._gemm(a, matrix, m, tile, "partial", None, out)
        return out, tile.split

    def multiply_parts(self, product: Product) -> list[Tensor]:
        a, matrix = product.operand, product.matrix
        n, k = matrix.weight.shape
        m = a.numel() // k
        tile = self.tile(matrix, m)
        if tile is None or tile.split > 1:
            return super().multiply_parts(product)
        out = torch.empty(*a.shape[:-1], n, dtype=self.weights.body, device=a.device)
        self._gemm(a, matrix, m, tile, "body", None, out)
        return list(out.chunk(len(matrix.names), dim=-1))

    def activate(self, value: Activated, consumer: Matrix | None) -> Tensor:
        if consumer is None or consumer.input_scale is None:
            return super().activate(value, consumer)
        a, matrix = value.product.operand, value.product.matrix
        n, k = matrix.weight.shape
        m = a.numel() // k
        out = torch.empty(*a.shape[:-1], n, dtype=torch.float8_e4m3fn, device=a.device)
        tile = self.tile(matrix, m)
        if tile is not None and tile.split == 1:
            self._gemm(a, matrix, m, tile, value.kind, consumer, out)
            return out
        y = self.multiply(value.product)
        B, w = self.act_block
        _activation[(triton.cdiv(out.numel(), B),)](
            y, consumer.input_scale, out, out.numel(), BLOCK=B, QUICK=value.kind == "quick_gelu", num_warps=w
        )
        return out

    def attend(self, value: Attention, consumer: Matrix | None) -> Tensor:
        q = value.q
        b, s, c = q.shape
        d = c // value.heads
        scale = None if consumer is None else consumer.input_scale
        out = torch.empty(b, s, c, dtype=q.dtype if scale is None else torch.float8_e4m3fn, device=q.device)
        queries, keys, warps = self.attention_override or self.attention_tile(b * value.heads, s)
        programs = b * value.heads * triton.cdiv(s, queries)
        _attention[(programs,)](
            q, value.k, value.v, value.mask, scale, out, consumer.weight.view(torch.uint8) if consumer else q,
            s, value.heads, q.stride(1), d**-0.5 * LOG2_E,
            D=d, QUERIES=queries, KEYS=keys, MASKED=value.mask is not None,
            QUANTIZED=scale is not None, num_warps=warps, num_stages=2, **self._hints(consumer, programs, b * s),
        )  # fmt: skip
        return out

    def attention_tile(self, heads: int, tokens: int) -> tuple[int, int, int]:
        return (16, 128, 4) if heads <= 32 else (16, 64, 4) if heads <= 256 else (16, 32, 1)

    def _gemm(self, a, matrix: Matrix, m: int, tile: Tile, epilogue: str, consumer, out) -> None:
        n, k = matrix.weight.shape
        grid = (n // tile.columns, triton.cdiv(m, tile.rows), tile.split)
        _fp8_linear[grid](
            a, matrix.weight, matrix.column_scale, matrix.bias,
            consumer.input_scale if consumer else None, out, consumer.weight.view(torch.uint8) if consumer else a, m,
            N=n, K=k, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, SPLIT=tile.split,
            SWAPPED=tile.swapped, EPILOGUE=epilogue, PREFETCH=self.prefetch, STAGES=tile.stages, CHUNK=self.chunk,
            num_warps=tile.warps, num_stages=tile.stages, **self._hints(consumer, grid[0] * grid[1] * grid[2], m),
        )  # fmt: skip

    def tile(self, matrix: Matrix, m: int) -> Tile | None:
        if matrix.input_scale is None:
            return None
        n, k = matrix.weight.shape
        if n % 64 or k % 128:
            return None
        if (n, k) in self.overrides:
            return self.overrides[n, k]
        stacked = len(matrix.names) > 1
        if m > (1300 if stacked else 320):
            return None
        wide = 256 if k % 256 == 0 else 128
        if n == k:
            return Tile(32, 64, 128, _split(k, 2), True, 3, 4) if m <= 320 else None
        if k > n:
            return Tile(64, 64, 128, _split(k, 3 if k == 3072 else 5), True, 6, 4)
        if m <= 320:
            return Tile(32, 64, wide, 1, True, 3, 4)
        return Tile(128, 64, 128, 1, True, 3, 4)


def _split(k: int, parts: int) -> int:
    while k % (parts * 128):
        parts -= 1
    return parts
