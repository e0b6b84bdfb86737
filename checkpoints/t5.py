# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5 encoders in files: transformers' names, which every packaging has kept, below a prefix.

Token embeddings are `shared.weight` or `encoder.embed_tokens.weight` (where a file has both, they
are one tensor written twice). A decoder beside the encoder is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from ..encoders.t5 import FINAL_NORM, TOKENS, T5Spec
from ..errors import FileError
from .files import DAMAGED, WeightsFile, shown
from .layouts import LAYER, START, Part, shape_of

_EMBED_TOKENS = "encoder.embed_tokens.weight"
_ATTENTION = "layer.0.SelfAttention."
_BIAS = _ATTENTION + "relative_attention_bias.weight"
_FEED_FORWARD = "layer.1.DenseReluDense."
NAMES = {"t5_xxl": "t5xxl", "umt5_xxl": "umt5xxl", "t5": "t5"}  # family -> what files call it


@dataclass(frozen=True)
class T5Layout:
    """The names below the prefix; the same attributes as a CLIP `Layout` has."""

    blocks: str = "encoder.block."
    tops: tuple[str, ...] = (TOKENS, _EMBED_TOKENS, FINAL_NORM + ".weight")
    spaces: tuple[str, ...] = (
        "encoder.block.",
        "encoder.embed_tokens.",
        "encoder.final_layer_norm.",
        "shared.",
    )
    probe: re.Pattern[str] = re.compile(
        rf"{START}encoder\.block\.{LAYER}\.layer\.0\.SelfAttention\.q\.weight$"
    )
    tower: tuple[str, ...] = ()

    def block_names(self) -> set[str]:
        """The names within one block, gated or not, with a relative bias or without."""
        linears = [_ATTENTION + n for n in "qkvo"]
        linears += [_FEED_FORWARD + n for n in ("wi", "wi_0", "wi_1", "wo")]
        norms = ["layer.0.layer_norm", "layer.1.layer_norm"]
        return {name + ".weight" for name in (*linears, *norms)} | {_BIAS}

    def parts(
        self, prefix: str, spec: T5Spec, names: Container[str]
    ) -> dict[str, tuple[Part, ...]]:
        """Canonical name -> the one tensor that it is."""
        found: dict[str, tuple[Part, ...]] = {
            name: (Part(prefix + name, shape),) for name, shape in spec.tensors().items()
        }
        if prefix + TOKENS not in names and prefix + _EMBED_TOKENS in names:
            found[TOKENS] = (Part(prefix + _EMBED_TOKENS, spec.tensors()[TOKENS]),)
        return found


LAYOUT = T5Layout()
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


def spec_of(file: WeightsFile, prefix: str, layers: int) -> T5Spec:
    """The sizes, read from a few tensors; the activation by rule. Raises FileError."""
    block = f"{prefix}{LAYOUT.blocks}0."
    inner, width = shape_of(
        file, f"{block}{_ATTENTION}q.weight", ("heads times their size", "width")
    )
    buckets, heads = shape_of(file, block + _BIAS, ("buckets", "heads"))
    if inner % heads:
        fault = f"tensor {shown(block + _BIAS)} tells {heads} heads, which do not divide {inner}"
        raise FileError(file.path, fault, DAMAGED)
    if buckets < 4 or buckets % 2:
        fault = f"tensor {shown(block + _BIAS)} has {buckets} buckets, an even number is needed"
        raise FileError(file.path, fault, DAMAGED)
    gated = f"{block}{_FEED_FORWARD}wi_0.weight" in file.tensors
    wi = f"{block}{_FEED_FORWARD}{'wi_0' if gated else 'wi'}.weight"
    feed_forward, _ = shape_of(file, wi, ("feed-forward", width))
    table = next((n for n in (TOKENS, _EMBED_TOKENS) if prefix + n in file.tensors), TOKENS)
    vocabulary, _ = shape_of(file, prefix + table, ("vocabulary", width))
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
        bias_per_layer=f"{prefix}{LAYOUT.blocks}1.{_BIAS}" in file.tensors,
        buckets=buckets,
    )


def without_second_table(prefix: str, used: Container[str], own: list[str]) -> list[str]:
    """`own` without the token table that is not used, where a file has it under both names."""
    stems = {prefix + n.removesuffix(".weight") for n in (TOKENS, _EMBED_TOKENS)}
    second = {stem for stem in stems if stem + ".weight" not in used}
    return [name for name in own if name.rpartition(".")[0] not in second]


def refuse_unused(file: WeightsFile, used: Container[str], weights: list[str]) -> None:
    """Raise FileError for a weight that such a spec has no place for: it would have no effect."""
    for name in weights:
        if name not in used:
            fault = f"tensor {shown(name)} does not belong beside the encoder's others"
            raise FileError(file.path, fault, DAMAGED)
