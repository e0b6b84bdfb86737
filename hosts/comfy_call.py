# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The one call that ComfyUI makes to a text model: what it asks for and the answer it expects.

ComfyUI's `SDClipModel.forward` calls `transformer(None, mask, embeds=..., num_tokens=..., ...)`
(comfy/sd1_clip.py, unchanged since August 2025) and reads four values of a CLIP's result, two of a
T5's. Whatever does not look exactly like that is not ours to answer: `parse` and `parse_t5` give
None and the original runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..encoders import ClipSpec, T5Spec

Intermediate = int | Literal["all"] | None

# Every argument of CLIPTextModel_.forward in ComfyUI 0.33, in order.
_PARAMETERS = (
    "input_tokens",
    "attention_mask",
    "embeds",
    "num_tokens",
    "intermediate_output",
    "final_layer_norm_intermediate",
    "dtype",
    "embeds_info",
)


@dataclass(frozen=True)
class Call:
    """One request: `embeds` [B, S, C] FP32, `mask` bool [B, S] (true = attend) or None."""

    embeds: Tensor
    mask: Tensor | None
    num_tokens: tuple[int, ...]
    intermediate: Intermediate
    norm_intermediate: bool


def parse(args: Sequence[Any], kwargs: Mapping[str, Any], spec: ClipSpec) -> Call | None:
    """The call, or None if anything about it is unknown: the original forward then answers."""
    given = _given(args, kwargs, len(_PARAMETERS))
    if given is None:
        return None
    embeds, mask = given.get("embeds"), given.get("attention_mask")
    wanted, lengths = given.get("intermediate_output"), given.get("num_tokens")
    if (
        given.get("input_tokens") is not None
        or not isinstance(embeds, Tensor)
        or embeds.dtype != torch.float32
        or embeds.dim() != 3
        or embeds.shape[1:] != (spec.positions, spec.width)
        or given.get("dtype", torch.float32) != torch.float32
        or not isinstance(lengths, list | tuple)
        or len(lengths) != len(embeds)
        or not all(isinstance(n, int) and 1 <= n <= spec.positions for n in lengths)
    ):
        return None
    if mask is not None:
        if not (isinstance(mask, Tensor) and mask.shape == embeds.shape[:2]):
            return None
        mask = mask == 1  # CLIPTextModel_.forward masks whatever 1 - mask is not 0 for
    if not (wanted is None or wanted == "all" or type(wanted) is int):
        return None  # a list of layers is refused by ComfyUI's own CLIP; let it say so
    norm = given.get("final_layer_norm_intermediate", True)
    return Call(embeds, mask, tuple(lengths), wanted, bool(norm))


@dataclass(frozen=True)
class T5Call:
    """One request: `embeds` [B, S, C] FP32, `mask` bool [B, S] (true = attend) or None."""

    embeds: Tensor
    mask: Tensor | None


# Of T5.forward in ComfyUI 0.33; the others it passes on by name.
_T5_POSITIONAL = 4


def parse_t5(args: Sequence[Any], kwargs: Mapping[str, Any], spec: T5Spec) -> T5Call | None:
    """The call, or None if anything about it is unknown: the original forward then answers.

    A layer other than the last is PyTorch's, because T5's engines have no hidden states. Without
    one nothing is asked of `num_tokens`, `embeds_info` and `final_layer_norm_intermediate`.
    """
    given = _given(args, kwargs, _T5_POSITIONAL)
    if given is None:
        return None
    embeds, mask = given.get("embeds"), given.get("attention_mask")
    if (
        given.get("input_tokens") is not None
        or given.get("intermediate_output") is not None
        or not isinstance(embeds, Tensor)
        or embeds.dtype != torch.float32
        or embeds.dim() != 3
        or embeds.shape[2] != spec.width
        or 0 in embeds.shape
        or given.get("dtype", torch.float32) != torch.float32
    ):
        return None
    if mask is None:
        return T5Call(embeds, None)
    if not (isinstance(mask, Tensor) and mask.shape == embeds.shape[:2]):
        return None
    # T5Stack.forward masks whatever 1 - mask is not 0 for.
    return T5Call(embeds, mask == 1)


def _given(
    args: Sequence[Any], kwargs: Mapping[str, Any], positional: int
) -> dict[str, Any] | None:
    """The arguments by name; None for more than the known ones or one that is given twice."""
    if len(args) > positional:
        return None
    given = dict(zip(_PARAMETERS, args, strict=False))
    if not kwargs.keys() <= set(_PARAMETERS) or kwargs.keys() & given.keys():
        return None
    return {**given, **kwargs}


def answer_t5(last: Tensor) -> tuple[Tensor, None]:
    """(last state, no intermediate) as T5 returns them: fresh, writable FP32."""
    return _fp32(last), None


def answer(
    call: Call,
    hidden: Sequence[Tensor],
    last: Tensor,
    *,
    norm: Callable[[Tensor], Tensor],
    project: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(last state, intermediate or None, projected pooled, pooled) as CLIPTextModel returns them.

    `hidden` are the L+1 states and `last` the final normed one, fresh and in any float dtype; the
    results are fresh, writable FP32. `norm` and `project` are the host's own final norm and
    projection, so that they carry its patches.
    """
    last = _fp32(last)
    intermediate = _intermediate(call.intermediate, hidden)
    if intermediate is not None and call.norm_intermediate:
        intermediate = norm(intermediate)
    ends = [n - 1 for n in call.num_tokens]
    pooled = last[list(range(len(ends))), ends]  # [B, C]
    return last, intermediate, project(pooled), pooled


def _intermediate(wanted: Intermediate, hidden: Sequence[Tensor]) -> Tensor | None:
    """The state after layer `wanted` [B, S, C], or "all" of them [B, L, S, C]."""
    if wanted is None:
        return None
    if wanted == "all":
        return torch.stack([h.float() for h in hidden[1:]], dim=1)
    layers = len(hidden) - 1
    index = layers + wanted if wanted < 0 else wanted
    # ComfyUI compares the index with each layer's number: none matches, nothing comes back.
    return _fp32(hidden[index + 1]) if 0 <= index < layers else None


def _fp32(state: Tensor) -> Tensor:
    """FP32 in memory of its own: ComfyUI applies prompt weights in place."""
    return state.to(torch.float32, copy=True)
