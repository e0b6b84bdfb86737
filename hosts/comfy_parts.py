# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What a text encoder of ComfyUI consists of, and whether something else has changed it since."""

from __future__ import annotations

import operator
from itertools import repeat
from typing import Any

from torch import nn

from .hooks import class_has_own_forward, has_own_forward


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
        self._guarded, self._guard = guarded, guard
        self._parts = [m for m in parts if m is not guarded]
        self._dicts = [m.__dict__ for m in self._parts]
        self._hooks: list[Any] = [m._forward_hooks for m in parts]
        self._hooks += [m._forward_pre_hooks for m in parts]
        kinds: list[Any] = list(dict.fromkeys(map(type, modules)))
        self._forwards = [(kind, kind.forward) for kind in kinds]
        self._replaced = next((k for k in kinds if not class_has_own_forward(k)), None)

    def changed(self) -> str:
        """What another node did to the parts, as half a sentence; "" if nothing."""
        if not all(map(operator.is_, map(dict.get, self._holders, self._keys), self._found)) or sum(
            map(len, self._lists)
        ) != len(self._found):
            return "another node replaced a part of the encoder"
        if any(self._hooks):
            return "another node hooks into the encoder"
        replaced = next((k for k, forward in self._forwards if k.forward is not forward), None)
        if (kind := replaced or self._replaced) is not None:
            return f"the forward of every {kind.__name__} is replaced"
        suspects = [] if isinstance(self._guarded.forward, self._guard) else [self._guarded]
        if any(map(dict.get, self._dicts, repeat("forward"))):
            suspects += self._parts
        # A bypass LoRA that has left puts the class's own method back, onto the instance.
        if not all(map(has_own_forward, suspects)):
            return "another node replaced the forward of a part of the encoder"
        return ""
