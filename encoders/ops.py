# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The small set of operations an encoder's mathematics is written in.

An encoder is a function over `Ops` (encoders/clip.py) and knows neither torch nor numpy nor ONNX;
an interpreter is a subclass (backends/). Weights are named, never passed: the canonical name is at
once the key in the checkpoint, in the recipe and in the ONNX graph. Precision never appears here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Activation = Literal["quick_gelu", "gelu"]


class Ops(Generic[T]):
    """Operations on values of type `T`. Primitives raise; the derived ones may be overridden."""

    def add(self, a: T, b: T) -> T:
        """`a + b`, both [B, S, C]."""
        raise NotImplementedError

    def add_positions(self, x: T, name: str) -> T:
        """[B, S, C] plus rows 0..S-1 of the position table `name` [P, C], S <= P."""
        raise NotImplementedError

    def linear(self, x: T, name: str) -> T:
        """[B, S, in] -> [B, S, out] with `name.weight` [out, in] and `name.bias` [out]."""
        raise NotImplementedError

    def layer_norm(self, x: T, name: str, eps: float) -> T:
        """Layer norm over the last axis with `name.weight` and `name.bias`, both [C]."""
        raise NotImplementedError

    def attention(self, q: T, k: T, v: T, *, heads: int, mask: T | None) -> T:
        """Causal attention, [B, S, C] each, scale (C/heads)^-0.5; `mask` [B, S], True = attend."""
        raise NotImplementedError

    def quick_gelu(self, x: T) -> T:
        """`x * sigmoid(1.702 x)` (OpenAI's CLIP)."""
        raise NotImplementedError

    def gelu(self, x: T) -> T:
        """The exact, erf-based GELU."""
        raise NotImplementedError

    # Derived: an interpreter overrides them where it can fuse.

    def linears(self, x: T, names: Sequence[str]) -> tuple[T, ...]:
        """Several linears of one input (q, k, v); interpreters may run them as one GEMM."""
        return tuple(self.linear(x, name) for name in names)

    def activation(self, x: T, kind: Activation) -> T:
        return self.quick_gelu(x) if kind == "quick_gelu" else self.gelu(x)
