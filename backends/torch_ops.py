# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The reference: an encoder as plain `nn.Linear` and norm leaves in FP32 (or any float type).

It is the ground truth of every comparison and what NVIDIA ModelOpt calibrates: ModelOpt replaces
`nn.Linear` leaves and silently skips subclasses that override `forward`, so the leaves are plain.
The token table is not part of it; `embed_tokens` gathers the few rows a prompt needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoders import EncoderSpec, Ops, T5Spec, block, encode
from ..encoders.clip import END_TOKEN, POSITIONS, TOKENS
from .relative_bias import relative_bias

Read = Callable[[str], Tensor]


Observe = Callable[[str, Tensor], None]


class TorchOps(Ops[Tensor]):
    """The weightless operations; a subclass knows where weights come from.

    `observe(name, x)` is told the input of every linear before it runs (calibration).
    """

    def __init__(self, observe: Observe | None = None) -> None:
        self._observe = observe
        self._bias: tuple[tuple[str, int], Tensor] | None = None  # the last one made

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def linear(self, x: Tensor, name: str) -> Tensor:
        if self._observe is not None:
            self._observe(name, x)
        return self._linear(x, name)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        raise NotImplementedError

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, mask: Tensor | None
    ) -> Tensor:
        return causal_attention(q, k, v, heads, mask)

    def relative_bias(self, x: Tensor, name: str, buckets: int, max_distance: int) -> Tensor:
        wanted = (name, x.shape[1])
        if self._bias is None or self._bias[0] != wanted:
            self._bias = (wanted, relative_bias(self._table(name), x.shape[1], max_distance))
        return self._bias[1]

    def _table(self, name: str) -> Tensor:
        """A weight that is no leaf's, under its whole name."""
        raise NotImplementedError

    def biased_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, heads: int, mask: Tensor | None
    ) -> Tensor:
        return biased_attention(q, k, v, bias, heads, mask)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def relu(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def quick_gelu(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class ModuleOps(TorchOps):
    """`Ops` through the leaves of a `ReferenceEncoder`, in that module's dtype."""

    def __init__(self, module: nn.Module, observe: Observe | None = None) -> None:
        super().__init__(observe)
        self._module = module

    def _table(self, name: str) -> Tensor:
        return self._module.get_parameter(name)

    def add_positions(self, x: Tensor, name: str) -> Tensor:
        return x + self._table(name)[: x.shape[1]]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return cast(Tensor, self._module.get_submodule(name)(x))

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return cast(Tensor, self._module.get_submodule(name)(x))

    rms_norm = layer_norm


class StreamedOps(TorchOps):
    """`Ops` in FP32 over weights read one at a time: the reference in bounded memory.

    `read(name)` may give any float dtype on any device; each weight is widened on `device` and
    dropped. `biased` as in the encoder's spec.
    """

    def __init__(
        self,
        read: Read,
        device: torch.device | str,
        observe: Observe | None = None,
        *,
        biased: bool = True,
    ) -> None:
        super().__init__(observe)
        self._read, self._device, self._biased = read, torch.device(device), biased

    def _table(self, name: str) -> Tensor:
        return self._read(name).to(self._device).float()

    _weight = _table

    def add_positions(self, x: Tensor, name: str) -> Tensor:
        return x + self._weight(name)[: x.shape[1]]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._weight(name + ".bias") if self._biased else None
        return F.linear(x, self._weight(name + ".weight"), bias)

    def rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        weight = self._weight(name + ".weight")
        return F.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        weight, bias = self._weight(name + ".weight"), self._weight(name + ".bias")
        return F.layer_norm(x, weight.shape, weight, bias, eps)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """[B, S, C] x 3 -> [B, S, C]; `mask` [B, S] bool, True = attend. Key 0 must be attendable."""
    b, s, c = q.shape
    q, k, v = (t.view(b, s, heads, c // heads).transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
    if mask is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        causal = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal & mask[:, None, None, :])
    return y.transpose(1, 2).reshape(b, s, c)


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, heads: int, mask: Tensor | None
) -> Tensor:
    """T5's attention, [B, S, heads * D] x 3 -> the same; `bias` [1, H, S, S], no scale.

    `mask` [B, S] bool, True = attend. As in transformers and ComfyUI, a key that may not be
    attended to has the lowest finite score, so that a row without any key is the mean of `v`.
    """
    b, s, c = q.shape
    q, k, v = (t.view(b, s, heads, c // heads).transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
    if mask is not None:
        lowest = torch.finfo(bias.dtype).min
        bias = bias.masked_fill(~mask[:, None, None, :], lowest)  # [B, H, S, S]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    return y.transpose(1, 2).reshape(b, s, c)


def tables(spec: EncoderSpec, block: int | None = None) -> list[str]:
    """Names of the tensors that belong to no linear and no norm, without the token table.

    `block`: of those that block `block` alone needs.
    """
    if isinstance(spec, T5Spec):
        return spec.bias_tables() if block is None else [spec.bias_table(block)]
    return [POSITIONS] if block is None else []


class ReferenceEncoder(nn.Module):
    """An encoder under its canonical names; `forward(embeds [B, S, C], mask)` as `encode`.

    `read(name)` gives each canonical tensor (any float dtype); values are copied to `dtype`.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        read: Read,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec

        def parameter(name: str) -> nn.Parameter:
            copied = read(name).to(device=device, dtype=dtype, copy=True)
            return nn.Parameter(copied, requires_grad=False)

        prefix = "" if block is None else spec.block(block)
        # Leaves are made on "meta" and filled, so that no weight is ever initialised for nothing.
        for name, (out, inner) in spec.linears().items():
            if name.startswith(prefix):
                linear = nn.Linear(inner, out, bias=spec.biased, device="meta")
                linear.weight = parameter(name + ".weight")
                if spec.biased:
                    linear.bias = parameter(name + ".bias")
                self._place(name, linear)
        for name in spec.norms():
            if name.startswith(prefix):
                norm: nn.LayerNorm | nn.RMSNorm
                if isinstance(spec, T5Spec):
                    norm = nn.RMSNorm(spec.width, eps=spec.norm_eps, device="meta")
                else:
                    norm = nn.LayerNorm(spec.width, eps=spec.layer_norm_eps, device="meta")
                    norm.bias = parameter(name + ".bias")
                norm.weight = parameter(name + ".weight")
                self._place(name, norm)
        for name in tables(spec, block):
            holder = nn.Module()
            holder.register_parameter("weight", parameter(name))
            self._place(name.removesuffix(".weight"), holder)

    def _place(self, name: str, leaf: nn.Module) -> None:
        *path, last = name.split(".")
        parent: nn.Module = self
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, leaf)

    def ops(self, observe: Observe | None = None) -> ModuleOps:
        return ModuleOps(self, observe)

    def forward(self, embeds: Tensor, mask: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        return encode(self.ops(), self.spec, embeds, mask)


class ReferenceBlock(ReferenceEncoder):
    """Block `index` alone under its canonical names; `forward(x [B, S, C], mask)` as `block`.

    One block at a time is how an encoder is calibrated that is larger than memory.
    """

    def __init__(self, spec: EncoderSpec, read: Read, index: int, **options: Any) -> None:
        super().__init__(spec, read, block=index, **options)
        self.index = index

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return block(self.ops(), self.spec, self.index, x, mask)


class StreamedEncoder:
    """The FP32 reference without its weights: `forward` reads each of them when it is needed."""

    def __init__(self, spec: EncoderSpec, read: Read, device: torch.device | str) -> None:
        self.spec, self._read, self._device = spec, read, device

    def ops(self, observe: Observe | None = None) -> StreamedOps:
        return StreamedOps(self._read, self._device, observe, biased=self.spec.biased)

    def __call__(self, embeds: Tensor, mask: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        return encode(self.ops(), self.spec, embeds, mask)


Reference = ReferenceEncoder | StreamedEncoder


def embed_tokens(read: Read, rows: Sequence[Sequence[int]], table: str = TOKENS) -> Tensor:
    """Rows of token ids -> token embeddings [B, S, C] in FP32; only the needed rows are read.

    `table`: the spec's `token_table`.
    """
    values = read(table)
    ids = torch.tensor(rows, device=values.device)
    unique, places = torch.unique(ids, return_inverse=True)
    return values[unique].float()[places]


def end_positions(rows: Sequence[Sequence[int]]) -> Tensor:
    """Index [B] of the first end token of each row: where CLIP pools."""
    return torch.tensor([list(row).index(END_TOKEN) for row in rows])


def pool(last: Tensor, ends: Tensor, projection: Tensor | None) -> Tensor:
    """Final normed state [B, S, C] at `ends` [B], projected by [P, C] if there is a projection."""
    pooled = last[torch.arange(len(ends), device=last.device), ends.to(last.device)]
    return pooled if projection is None else pooled @ projection.to(pooled).T
