# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and plans on disk, under keys made of everything they depend on."""

from .key import CheckpointKey, Key, Kind, PlanKey, canonical, digest
from .manifest import Manifest
from .store import Checked, Doomed, EngineCache, Entry, PrunePlan, parse_size

__all__ = [
    "Checked",
    "CheckpointKey",
    "Doomed",
    "EngineCache",
    "Entry",
    "Key",
    "Kind",
    "Manifest",
    "PlanKey",
    "PrunePlan",
    "canonical",
    "digest",
    "parse_size",
]
