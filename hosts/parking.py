# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The original weights wait in host memory while an engine serves, and a hook brings them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .hooks import is_managed


def park(parts: Sequence[nn.Module], device: torch.device) -> None:
    """Move the weights of `parts` from `device` to host memory.

    PyTorch's next use of a part fetches its own.
    """
    for part in parts:
        if any(p.device == device for p in part.parameters()):
            _place(part, torch.device("cpu"))
            if not is_parked(part):
                part.register_forward_pre_hook(bring_home, with_kwargs=True)


def unpark(module: nn.Module, parts: Sequence[nn.Module], home: torch.device) -> None:
    """Undo `park` of these parts of `module`; what an offload hook manages is left to it."""
    parked = list(filter(is_parked, parts))
    managed = bool(parked) and is_managed(module)
    for part in parked:
        if not managed:
            _place(part, home)
        _forget(part)


@torch.no_grad()
def _place(part: nn.Module, device: torch.device) -> None:
    with torch.inference_mode(False):  # or the weights would be inference tensors for ever
        for parameter in part.parameters():
            if parameter.device != device:
                parameter.data = parameter.data.to(device)


def bring_home(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-hook of a parked part: its weights follow its input, whoever calls it.

    It refers to nothing, so that the copy of a parked model brings its own weights home.
    """
    given = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    if given is not None:
        if not is_managed(part):  # an offload hook came since: it has the weights, or their place
            _place(part, given.device)
        _forget(part)


def is_parked(part: nn.Module) -> bool:
    """Whether the weights of `part` come home at its next use."""
    return bring_home in part._forward_pre_hooks.values()


def _forget(part: nn.Module) -> None:
    for key in [k for k, hook in part._forward_pre_hooks.items() if hook is bring_home]:
        del part._forward_pre_hooks[key]
        part._forward_pre_hooks_with_kwargs.pop(key, None)
