# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The small set of operations an encoder's mathematics is written in.

An encoder is a function over `Ops` (encoders/clip.py, t5.py) and knows neither torch nor numpy nor
ONNX; an interpreter is a subclass (backends/). Weights are named, never passed: the canonical name
is at once the key in the checkpoint, in the recipe and in the ONNX graph. Precision never appears
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Activation = Literal["quick_gelu", "gelu", "gelu_tanh", "relu"]


class Ops(Generic[T]):
    """Operations on values of type `T`. Primitives raise; the derived ones may be overridden."""

    def add(self, a: T, b: T) -> T:
        """`a + b`, both [B, S, C]."""
        raise NotImplementedError

    def add_positions(self, x: T, name: str) -> T:
        """[B, S, C] plus rows 0..S-1 of the position table `name` [P, C], S <= P."""
        raise NotImplementedError

    def linear(self, x: T, name: str) -> T:
        """[B, S, in] -> [B, S, out] with `name.weight` [out, in] and `name.bias` [out], if any."""
        raise NotImplementedError

    def layer_norm(self, x: T, name: str, eps: float) -> T:
        """Layer norm over the last axis with `name.weight` and `name.bias`, both [C]."""
        raise NotImplementedError

    def rms_norm(self, x: T, name: str, eps: float) -> T:
        """`x / sqrt(mean(x^2) + eps) * name.weight` [C] over the last axis, without a mean."""
        raise NotImplementedError

    def attention(self, q: T, k: T, v: T, *, heads: int, mask: T | None) -> T:
        """Causal attention, [B, S, C] each, scale (C/heads)^-0.5; `mask` [B, S], True = attend."""
        raise NotImplementedError

    def relative_bias(self, x: T, name: str, buckets: int, max_distance: int) -> T:
        """T5's bias [1, H, S, S] of every (query, key), from the table `name` [buckets, H].

        Keys before and after the query have half of the buckets each; `x` [B, S, C] gives S.
        """
        raise NotImplementedError

    def biased_attention(self, q: T, k: T, v: T, bias: T, *, heads: int, mask: T | None) -> T:
        """`softmax(q k^T + bias) v`, without a scale and not causal; [B, S, heads * D] each.

        `mask` [B, S], True = attend; where no key is, the result is the mean of all values.
        """
        raise NotImplementedError

    def mul(self, a: T, b: T) -> T:
        """`a * b`, both [B, S, C]."""
        raise NotImplementedError

    def quick_gelu(self, x: T) -> T:
        """`x * sigmoid(1.702 x)` (OpenAI's CLIP)."""
        raise NotImplementedError

    def gelu(self, x: T) -> T:
        """The exact, erf-based GELU."""
        raise NotImplementedError

    def gelu_tanh(self, x: T) -> T:
        """The GELU's tanh approximation (transformers' `gelu_new`)."""
        raise NotImplementedError

    def relu(self, x: T) -> T:
        """`max(x, 0)`."""
        raise NotImplementedError

    # Derived: an interpreter overrides them where it can fuse.

    def linears(self, x: T, names: Sequence[str]) -> tuple[T, ...]:
        """Several linears of one input (q, k, v); interpreters may run them as one GEMM."""
        return tuple(self.linear(x, name) for name in names)

    def activation(self, x: T, kind: Activation) -> T:
        by_kind = {
            "quick_gelu": self.quick_gelu,
            "gelu": self.gelu,
            "gelu_tanh": self.gelu_tanh,
            "relu": self.relu,
        }
        return by_kind[kind](x)

    def gated(self, gate: T, up: T, kind: Activation) -> T:
        """`activation(gate) * up`, both [B, S, C]."""
        return self.mul(self.activation(gate, kind), up)
