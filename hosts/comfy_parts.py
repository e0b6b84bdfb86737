# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What a text encoder of ComfyUI consists of, and whether something else has changed it since."""

from __future__ import annotations

import operator
from itertools import repeat
from typing import Any

from torch import nn


class Parts:
    """The modules below `transformer`; the forward of `guarded` may be a `guard`, which is ours.

    Columns, because `changed` is asked at each call and loops in C. Weights are not looked at: they
    change with every patch, and a patcher tells of its patches.
    """

    def __init__(self, transformer: nn.Module, guarded: nn.Module, guard: type) -> None:
        modules = list(transformer.modules())
        parts = [m for m in modules if m is not transformer]
        places = [(m._modules, key, part) for m in modules for key, part in m._modules.items()]
        self._holders = [holder for holder, _, _ in places]
        self._keys = [key for _, key, _ in places]
        self._found = [part for _, _, part in places]
        self._lists = [m._modules for m in modules]
        self._guarded, self._guard = guarded.__dict__, guard
        self._dicts = [m.__dict__ for m in parts if m is not guarded]
        self._hooks: list[Any] = [m._forward_hooks for m in parts]
        self._hooks += [m._forward_pre_hooks for m in parts]
        self._classes: list[Any] = list(dict.fromkeys(map(type, modules)))
        self._forwards = [kind.forward for kind in self._classes]

    def changed(self) -> str:
        """What another node did to the parts, as half a sentence; "" if nothing."""
        if not all(map(operator.is_, map(dict.get, self._holders, self._keys), self._found)) or sum(
            map(len, self._lists)
        ) != len(self._found):
            return "another node replaced a part of the encoder"
        if any(self._hooks):
            return "another node hooks into the encoder"
        for kind, forward in zip(self._classes, self._forwards, strict=True):
            if kind.forward is not forward or not _is_own(kind):
                return f"the forward of every {kind.__name__} is replaced"
        replaced = [self._guarded]
        if any(map(dict.get, self._dicts, repeat("forward"))):
            replaced += self._dicts
        for own in replaced:
            if not (isinstance(own.get("forward"), self._guard) or _is_plain(own)):
                return "another node replaced the forward of a part of the encoder"
        return ""


def _is_plain(own: dict[str, Any]) -> bool:
    """Whether a module with this `__dict__` runs its class's forward."""
    forward = own.get("forward")
    if forward is None:
        return True
    # A bypass LoRA that has left puts the class's own method back, onto the instance.
    module: Any = getattr(forward, "__self__", None)
    return (
        module is not None
        and module.__dict__ is own
        and bool(forward.__func__ is type(module).forward)
    )


def _is_own(kind: Any) -> bool:
    """Whether the class's forward is of the module that defines the class."""
    owner = next(c for c in kind.__mro__ if "forward" in c.__dict__)
    return bool(getattr(kind.forward, "__module__", None) == owner.__module__)
