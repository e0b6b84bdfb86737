# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The encoders: one file each, a spec and an `encode` over `Ops`. Needs neither torch nor numpy."""

from . import clip, t5
from .clip import ClipSpec
from .ops import Ops, T
from .t5 import T5Spec

EncoderSpec = ClipSpec | T5Spec

__all__ = ["ClipSpec", "EncoderSpec", "Ops", "T5Spec", "block", "encode", "spec_from_facts"]


def encode(ops: Ops[T], spec: EncoderSpec, embeds: T, mask: T | None = None) -> tuple[list[T], T]:
    """Token embeddings [B, S, C] -> (hidden states, the final normed state), all [B, S, C].

    CLIP gives L+1 hidden states, T5 none. `mask` [B, S] is True where a key may be attended to.
    """
    if isinstance(spec, T5Spec):
        return t5.encode(ops, spec, embeds, mask)
    return clip.encode(ops, spec, embeds, mask)


def block(ops: Ops[T], spec: EncoderSpec, index: int, x: T, mask: T | None = None) -> T:
    """Block `index` alone: the residual stream [B, S, C] before it -> after it."""
    if isinstance(spec, T5Spec):
        return t5.block(ops, spec, index, x, mask)
    return clip.block(ops, spec, index, x, mask)


def spec_from_facts(facts: dict[str, object]) -> EncoderSpec:
    """The spec whose `facts()` these are; raises KeyError, TypeError or ValueError for others."""
    fields = dict(facts)
    families: dict[object, type[EncoderSpec]] = {"clip": ClipSpec, "t5": T5Spec}
    name = fields.pop("encoder")
    if name not in families:
        raise ValueError(f"it holds an encoder of the unknown family {name!r}")
    return families[name](**fields)  # type: ignore[arg-type]
