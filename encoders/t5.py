# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5's encoder (Raffel et al. 2020, arXiv:1910.10683): v1.1 XXL, umT5-XXL, every other size.

Version 1.1 has a gated feed-forward (Shazeer 2020, arXiv:2002.05202), the first version a plain
ReLU one. umT5 (Chung et al. 2023, arXiv:2304.09151) has a relative bias of its own in every block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from .ops import Activation, Ops, T

TOKENS = "shared.weight"
FINAL_NORM = "encoder.final_layer_norm"
PAD_TOKEN = 0
END_TOKEN = 1
LONGEST = 1024  # tokens that engines are made for: T5 has no positions to say
VOCABULARY = 32128  # T5's own; the tokenizer has 32100 of them

_ATTENTION = "layer.0.SelfAttention."
_FEED_FORWARD = "layer.1.DenseReluDense."
_BIAS = _ATTENTION + "relative_attention_bias.weight"

Family = Literal["t5_xxl", "umt5_xxl", "t5"]


@dataclass(frozen=True)
class T5Spec:
    """Everything about a T5 encoder but its weights. Sizes are element counts.

    `bias_per_layer`: umT5, where each block has a relative bias of its own and not only block 0.
    """

    layers: int
    width: int
    feed_forward: int
    heads: int
    head_dim: int
    vocabulary: int
    gated: bool = True
    activation: Activation = "gelu_tanh"
    bias_per_layer: bool = False
    buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6

    @property
    def family(self) -> Family:
        xxl = (24, 4096, 10240, 64, 64, True)
        sizes = (self.layers, self.width, self.feed_forward, self.heads, self.head_dim, self.gated)
        if sizes != xxl:
            return "t5"
        return "umt5_xxl" if self.bias_per_layer else "t5_xxl"

    @property
    def pad_token(self) -> int:
        """What hosts fill rows up with."""
        return PAD_TOKEN

    @property
    def token_table(self) -> str:
        """Name of the token embeddings, which stay in the host."""
        return TOKENS

    @property
    def longest(self) -> int:
        """The most tokens that an engine takes; beyond, the host's PyTorch answers."""
        return LONGEST

    @property
    def biased(self) -> bool:
        """Whether linears and norms have a `.bias`."""
        return False

    def facts(self) -> dict[str, object]:
        """Canonical, JSON-ready facts; part of every key. A new field must be added here too."""
        return {"encoder": "t5", **asdict(self)}

    def block(self, index: int) -> str:
        """Prefix of the names of block `index`, counted from 0."""
        return f"encoder.block.{index}."

    def bias_table(self, index: int) -> str:
        """Name of the relative bias [buckets, heads] that block `index` uses."""
        return self.block(index if self.bias_per_layer else 0) + _BIAS

    def bias_tables(self) -> list[str]:
        """Name of every relative bias there is."""
        return list(dict.fromkeys(self.bias_table(i) for i in range(self.layers)))

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name (without `.weight`) -> (out, in) of every linear, in program order."""
        d, f, inner = self.width, self.feed_forward, self.heads * self.head_dim
        sizes = {
            _ATTENTION + "q": (inner, d),
            _ATTENTION + "k": (inner, d),
            _ATTENTION + "v": (inner, d),
            _ATTENTION + "o": (d, inner),
            **dict.fromkeys((_FEED_FORWARD + n for n in self._inputs), (f, d)),
            _FEED_FORWARD + "wo": (d, f),
        }
        return {
            self.block(i) + leaf: size for i in range(self.layers) for leaf, size in sizes.items()
        }

    @property
    def _inputs(self) -> tuple[str, ...]:
        return ("wi_0", "wi_1") if self.gated else ("wi",)

    def groups(self, index: int) -> list[tuple[str, ...]]:
        """The linears of block `index`, those that share one input together, in program order."""
        block = self.block(index)
        together = (("q", "k", "v"), ("o",))
        return [
            *(tuple(block + _ATTENTION + n for n in names) for names in together),
            tuple(block + _FEED_FORWARD + n for n in self._inputs),
            (block + _FEED_FORWARD + "wo",),
        ]

    def norms(self) -> list[str]:
        """Name (without `.weight`) of every RMS norm, in program order."""
        per_block = ("layer.0.layer_norm", "layer.1.layer_norm")
        return [self.block(i) + n for i in range(self.layers) for n in per_block] + [FINAL_NORM]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor."""
        shapes: dict[str, tuple[int, ...]] = {TOKENS: (self.vocabulary, self.width)}
        shapes |= dict.fromkeys(self.bias_tables(), (self.buckets, self.heads))
        shapes |= {name + ".weight": size for name, size in self.linears().items()}
        shapes |= {name + ".weight": (self.width,) for name in self.norms()}
        return shapes


def encode(ops: Ops[T], spec: T5Spec, embeds: T, mask: T | None = None) -> tuple[list[T], T]:
    """Token embeddings [B, S, C] -> ([], the final normed state [B, S, C]); S is free.

    `mask` [B, S] is True where a key may be attended to. No host asks T5 for its hidden states.
    """
    x = embeds
    for i in range(spec.layers):
        x = block(ops, spec, i, x, mask)
    return [], ops.rms_norm(x, FINAL_NORM, spec.norm_eps)


def block(ops: Ops[T], spec: T5Spec, index: int, x: T, mask: T | None = None) -> T:
    """Block `index` alone: the residual stream [B, S, C] before it -> after it."""
    qkv, (o,), inputs, (wo,) = spec.groups(index)
    prefix = spec.block(index)
    y = ops.rms_norm(x, prefix + "layer.0.layer_norm", spec.norm_eps)
    q, k, v = ops.linears(y, qkv)
    bias = ops.relative_bias(x, spec.bias_table(index), spec.buckets, spec.max_distance)
    y = ops.biased_attention(q, k, v, bias, heads=spec.heads, mask=mask)
    x = ops.add(x, ops.linear(y, o))
    y = ops.rms_norm(x, prefix + "layer.1.layer_norm", spec.norm_eps)
    gate, *up = ops.linears(y, inputs)
    y = ops.gated(gate, up[0], spec.activation) if up else ops.activation(gate, spec.activation)
    return ops.add(x, ops.linear(y, wo))
