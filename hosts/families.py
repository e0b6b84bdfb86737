# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The families of text encoders that are recognised in live models of transformers."""

from __future__ import annotations

from torch import nn

from .clip_tower import Clip
from .t5_tower import T5
from .tower import Family, Tower, recognise

FAMILIES: tuple[Family, ...] = (Clip(), T5())


def tower_of(module: nn.Module) -> Tower | str:
    """The text encoder that `module` is, or why it is left to PyTorch, as half a sentence."""
    return recognise(module, FAMILIES)


def family_of(module: nn.Module) -> Family:
    """The family of a model that `tower_of` has recognised, whatever has become of it since."""
    return next(family for family in FAMILIES if family.known(module) is not None)
