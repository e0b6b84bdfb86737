# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import struct
from pathlib import Path

import pytest
from octavo.trt.build import build_plan
from octavo.trt.header import HEADER_BYTES, PlanHeader, read_header
from trt_graphs import BLOCK, request_of


def header_bytes(total: int, version: tuple[int, ...], mask: int) -> bytes:
    return struct.pack("<4s12xQ4B4xI28x", b"vtrt", total, *version, mask)


def test_fields() -> None:
    plan = header_bytes(5_000_000_000, (1, 7, 1, 116), 0x18)
    assert len(plan) == HEADER_BYTES
    assert read_header(plan) == PlanHeader(5_000_000_000, "1.7.1.116", (89, 120))
    assert read_header(plan + b"more") == read_header(plan)


@pytest.mark.parametrize(
    "plan", [b"", b"vtrt", header_bytes(64, (1, 7, 1, 116), 8)[:63], b"\0" * 64, b"PK" + b"v" * 100]
)
def test_foreign_or_short(plan: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(plan)
    assert read_header(plan) is None
    assert read_header(tmp_path / "plan") is None


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "plan")


def test_real_plan(tmp_path: Path) -> None:
    """The mask is the SMs that were asked for, and the total tells a truncated file."""
    built = build_plan(request_of(BLOCK, 121, 89), target=tmp_path / "plan")
    header = read_header(built.path)
    assert header == PlanHeader(built.path.stat().st_size, built.version, (89, 121))
    built.path.write_bytes(built.path.read_bytes()[:-1])
    truncated = read_header(built.path)
    assert truncated and truncated.total_bytes != built.path.stat().st_size
