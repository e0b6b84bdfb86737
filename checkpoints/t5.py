# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The layouts of T5 encoders, below a prefix: transformers' names, the same of an encoder that was
saved alone, and Wan's own. A decoder beside the encoder is not looked at.

A file may have its token embeddings under two names; they are one tensor written twice.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

from ..encoders.t5 import FINAL_NORM, TOKENS, T5Spec
from ..errors import FileError
from .files import DAMAGED, WeightsFile, shown
from .layouts import LAYER, START, Part, shape_of

_ATTENTION = "layer.0.SelfAttention."
_BIAS = _ATTENTION + "relative_attention_bias.weight"
_FEED_FORWARD = "layer.1.DenseReluDense."
_WI = _FEED_FORWARD + "wi.weight"  # the first version's; later ones have wi_0 and wi_1
_LEAVES = (
    _BIAS,
    *(f"{_ATTENTION}{name}.weight" for name in "qkvo"),
    *(f"{_FEED_FORWARD}{name}.weight" for name in ("wi", "wi_0", "wi_1", "wo")),
    "layer.0.layer_norm.weight",
    "layer.1.layer_norm.weight",
)
_CANONICAL = re.compile(r"encoder\.block\.(\d+)\.(.+)")
NAMES = {"t5_xxl": "t5xxl", "umt5_xxl": "umt5xxl", "t5": "t5"}  # family -> what files call it


@dataclass(frozen=True)
class T5Layout:
    """Names below the prefix; the same attributes as a CLIP `Layout` has.

    `tables`: every name of the token embeddings, the preferred one first. `leaves`: canonical name
    within a block -> theirs. `umt5`: gated, with a bias in each block, whatever the names tell.
    `more`: what else names start with that belong to an encoder, of which T5 has none.
    """

    blocks: str
    tables: tuple[str, ...]
    final_norm: str
    leaves: Mapping[str, str]
    probe: re.Pattern[str]
    umt5: bool = False
    more: tuple[str, ...] = ()
    tower: tuple[str, ...] = ()

    @property
    def tops(self) -> tuple[str, ...]:
        """The names outside the blocks; any of them is evidence of a T5 encoder."""
        return (*self.tables, self.final_norm)

    @property
    def spaces(self) -> tuple[str, ...]:
        """What all names of an encoder, known or not, start with."""
        tops = (name.removesuffix("weight") for name in self.tops)
        return (self.blocks, *tops, *self.more)

    def block_names(self) -> set[str]:
        """The names within one block, gated or not, with a relative bias or without."""
        return set(self.leaves.values())

    def in_block(self, prefix: str, index: int | str, leaf: str) -> str:
        """Name in the file of the canonical `leaf` of a block."""
        return f"{prefix}{self.blocks}{index}.{self.leaves[leaf]}"

    def table(self, prefix: str, names: Container[str]) -> str:
        """Name in the file of the token embeddings; the preferred one where there are none."""
        return prefix + next((n for n in self.tables if prefix + n in names), self.tables[0])

    def parts(
        self, prefix: str, spec: T5Spec, names: Container[str]
    ) -> dict[str, tuple[Part, ...]]:
        """Canonical name -> the one tensor that it is."""
        found: dict[str, tuple[Part, ...]] = {}
        for name, shape in spec.tensors().items():
            if match := _CANONICAL.fullmatch(name):
                source = self.in_block(prefix, *match.groups())
            elif name == TOKENS:
                source = self.table(prefix, names)
            else:
                source = prefix + self.final_norm
            found[name] = (Part(source, shape),)
        return found


TRANSFORMERS = T5Layout(
    blocks="encoder.block.",
    tables=(TOKENS, "encoder.embed_tokens.weight"),
    final_norm=FINAL_NORM + ".weight",
    leaves={leaf: leaf for leaf in _LEAVES},
    probe=re.compile(rf"{START}encoder\.block\.{LAYER}\.layer\.0\.SelfAttention\.q\.weight$"),
    more=("encoder.",),
)
# What the state dict of transformers' T5Stack, the encoder without its owner, holds.
STACK = T5Layout(
    blocks="block.",
    tables=("embed_tokens.weight", TOKENS),
    final_norm="final_layer_norm.weight",
    leaves=TRANSFORMERS.leaves,
    probe=re.compile(
        rf"{START}(?<!^encoder\.)(?<![./]encoder\.)(?<!decoder\.)"
        rf"block\.{LAYER}\.layer\.0\.SelfAttention\.q\.weight$"
    ),
    more=("relative_bias.", "cell_2d_embedding."),  # UDOP's, whose tokens have places on a page
)
# umT5-XXL as Wan publishes it (models_t5_umt5-xxl-enc-bf16.pth): T5Encoder without a shared bias in
# https://github.com/Wan-Video/Wan2.1/blob/fc124fd0cf31945f39b39af80191fa8c7d07a027/wan/modules/t5.py
WAN = T5Layout(
    blocks="blocks.",
    tables=("token_embedding.weight",),
    final_norm="norm.weight",
    leaves={
        _BIAS: "pos_embedding.embedding.weight",
        **{f"{_ATTENTION}{name}.weight": f"attn.{name}.weight" for name in "qkvo"},
        _FEED_FORWARD + "wi_0.weight": "ffn.gate.0.weight",  # the one that goes through GELU
        _FEED_FORWARD + "wi_1.weight": "ffn.fc1.weight",
        _FEED_FORWARD + "wo.weight": "ffn.fc2.weight",
        "layer.0.layer_norm.weight": "norm1.weight",
        "layer.1.layer_norm.weight": "norm2.weight",
    },
    # Image models too have blocks.0.attn and blocks.0.ffn; no other has this.
    probe=re.compile(rf"{START}(?<!decoder\.)blocks\.{LAYER}\.pos_embedding\.embedding\.weight$"),
    umt5=True,
)
LAYOUTS = (TRANSFORMERS, STACK, WAN)
DECODER = STACK.blocks + "0.layer.1.EncDecAttention.q.weight"  # where the encoder's would be
_MOST = 2**31 - 1  # tokens apart


def is_sound(spec: T5Spec) -> bool:
    """Whether what no tensor tells (and a note or config may say anything of) can be computed."""
    return (
        spec.activation in ("gelu_tanh", "relu")
        and type(spec.gated) is type(spec.bias_per_layer) is bool
        and type(spec.norm_eps) is float
        and 0 < spec.norm_eps < 1
        and type(spec.max_distance) is int
        # The logarithmic buckets begin where a quarter of all ends.
        and spec.buckets // 4 < spec.max_distance <= _MOST
    )


def spec_of(file: WeightsFile, prefix: str, layout: T5Layout, layers: int) -> T5Spec:
    """The sizes, read from a few tensors; the activation by rule. Raises FileError."""
    query, bias = (layout.in_block(prefix, 0, leaf) for leaf in (_ATTENTION + "q.weight", _BIAS))
    inner, width = shape_of(file, query, ("heads times their size", "width"))
    buckets, heads = shape_of(file, bias, ("buckets", "heads"))
    if inner % heads:
        fault = f"tensor {shown(bias)} tells {heads} heads, which do not divide {inner}"
        raise FileError(file.path, fault, DAMAGED)
    if buckets < 4 or buckets % 2:
        fault = f"tensor {shown(bias)} has {buckets} buckets, an even number is needed"
        raise FileError(file.path, fault, DAMAGED)
    wi_0 = layout.in_block(prefix, 0, _FEED_FORWARD + "wi_0.weight")
    gated = layout.umt5 or wi_0 in file.tensors
    wi = wi_0 if gated else layout.in_block(prefix, 0, _WI)
    feed_forward, _ = shape_of(file, wi, ("feed-forward", width))
    vocabulary, _ = shape_of(file, layout.table(prefix, file.tensors), ("vocabulary", width))
    for table in (prefix + name for name in layout.tables):
        if table in file.tensors:
            shape_of(file, table, (vocabulary, width))
    return T5Spec(
        layers,
        width,
        feed_forward,
        heads,
        inner // heads,
        vocabulary,
        gated=gated,
        # Version 1.1 came with gating and GELU at once, the first version with ReLU.
        activation="gelu_tanh" if gated else "relu",
        bias_per_layer=layout.umt5 or layout.in_block(prefix, 1, _BIAS) in file.tensors,
        buckets=buckets,
    )


def without_second_table(
    prefix: str, layout: T5Layout, used: Container[str], own: list[str]
) -> list[str]:
    """`own` without the token table that is not used, where a file has it under both names."""
    tables = (prefix + name for name in layout.tables)
    second = {name.removesuffix(".weight") for name in tables if name not in used}
    return [name for name in own if name.rpartition(".")[0] not in second]


def refuse_unused(file: WeightsFile, used: Container[str], weights: list[str]) -> None:
    """Raise FileError for a weight that such a spec has no place for: it would have no effect."""
    for name in weights:
        if name not in used:
            fault = f"tensor {shown(name)} does not belong beside the encoder's others"
            raise FileError(file.path, fault, DAMAGED)
