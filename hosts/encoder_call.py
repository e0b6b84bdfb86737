# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A call of a transformers text model, and whether an engine can answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """A call that an engine can answer: `ids` [B, S], `mask` [B, S] bool or None.

    `blank`: whether the mask leaves nothing of some row.
    """

    ids: Tensor
    mask: Tensor | None
    hidden: bool
    as_tuple: bool
    blank: bool = False


class Form(Protocol):
    """How the models of a family are called (tower.Family)."""

    arguments: ClassVar[tuple[str, ...]]
    unset: ClassVar[frozenset[str]]
    float_masks: ClassVar[bool]


def parse(
    form: Form, configs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | str:
    """The call, or why PyTorch must answer it."""
    given = dict(zip(form.arguments, args, strict=False))
    if len(args) > len(form.arguments) or given.keys() & kwargs.keys():
        return "the call has unusual arguments"
    given |= kwargs
    ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
    hidden, as_dict = given.pop("output_hidden_states", None), given.pop("return_dict", None)
    if given.pop("position_ids", None) is not None or given.pop("output_attentions", None):
        return "the call asks for attentions or brings positions"
    for name, value in given.items():
        if value is not None or name not in form.unset:
            return f"the call has the argument '{name}'"
    if type(ids) is not Tensor or ids.dim() != 2 or ids.is_floating_point():
        return "the call has no plain [batch, tokens] ids"
    if not isinstance(hidden, bool | None) or not isinstance(as_dict, bool | None):
        return "the call selects single hidden states"
    for config in configs:
        if (
            getattr(config, "output_attentions", False)
            or (hidden is None and getattr(config, "output_hidden_states", False))
            or not getattr(config, "return_dict", True)
            or getattr(config, "torchscript", False)
        ):
            return "the model's config changes what it returns"
    if mask is not None:
        if type(mask) is not Tensor or mask.shape != ids.shape:
            return "the attention mask is not [batch, tokens]"
        if mask.is_floating_point() and not form.float_masks:
            return "the attention mask is not of integers"
        attended = mask.bool()
        # Transformers' versions differ on other values than 0 and 1. One wait for the device.
        any_left = attended.any(dim=-1).all()
        odd, full, left = torch.stack([(attended != mask).any(), attended.all(), any_left]).tolist()
        if odd:
            return "the attention mask has other values than 0 and 1"
        if not full:
            return Call(ids, attended, bool(hidden), as_dict is False, not left)
    return Call(ids, None, bool(hidden), as_dict is False)
