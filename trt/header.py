# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The 64-byte header of a TensorRT for RTX plan, so that no truncated or foreign file reaches it.

Observed on 1.7.1, not documented: without a GPU TensorRT itself checks neither size, version nor
SM. Little endian: 0x00 `vtrt`; 0x10 u64 size of the file; 0x18 four bytes of version; 0x20 u32 mask
of compute capabilities.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

HEADER_BYTES = 64
_MAGIC = b"vtrt"
_SM_BITS = (75, 80, 86, 89, 120, 121)  # bit 6, set where no GPU was named, is unknown


@dataclass(frozen=True)
class PlanHeader:
    """What a plan says of itself. `total_bytes` must be the size of the file."""

    total_bytes: int
    version: str
    sms: tuple[int, ...]


def read_header(plan: bytes | Path) -> PlanHeader | None:
    """Header of a plan's bytes (64 suffice) or file; None if it is no plan of TensorRT for RTX.

    Raises OSError if the file cannot be read.
    """
    if isinstance(plan, Path):
        with plan.open("rb") as file:
            plan = file.read(HEADER_BYTES)
    if len(plan) < HEADER_BYTES or plan[:4] != _MAGIC:
        return None
    total_bytes, version, mask = struct.unpack_from("<Q4s4xI", plan, 0x10)
    sms = tuple(sm for bit, sm in enumerate(_SM_BITS) if mask >> bit & 1)
    return PlanHeader(total_bytes, ".".join(map(str, version)), sms)
