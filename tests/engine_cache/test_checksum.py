# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Large artifacts are checked part by part, on several threads, and no byte is left out."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from octavo.engine_cache import EngineCache, checksum
from octavo.engine_cache.manifest import DamagedError, manifest_from_json

PART = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PART", PART)
    monkeypatch.setattr(checksum, "_BLOCK", 300)  # does not divide a part


def written(path: Path, length: int) -> bytes:
    data = bytes(i * 7 % 251 for i in range(length))
    path.write_bytes(data)
    return data


@pytest.mark.parametrize(
    "length", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 1, 9 * PART - 1]
)
@pytest.mark.parametrize("workers", [1, 3])
def test_digests_are_those_of_the_bytes(
    length: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "HASHING", workers)
    data = written(tmp_path / "x", length)
    found = checksum.checksum(tmp_path / "x")
    parts = [data[at : at + PART] for at in range(0, length, PART)] if length > PART else []
    assert found.parts == tuple(hashlib.sha256(part).hexdigest() for part in parts)
    assert (found.length, found.sha256) == (length, hashlib.sha256(data).hexdigest())
    assert len(found.parts) == checksum.count_of(length)
    assert checksum.matches(tmp_path / "x", found.sha256, found.parts)
    assert not [t for t in threading.enumerate() if t.name.startswith("octavo-checksum")]


@pytest.mark.parametrize("length", [1, PART, PART + 1, 3 * PART + 7])
def test_no_byte_is_left_out(length: int, tmp_path: Path) -> None:
    data = written(tmp_path / "x", length)
    found = checksum.checksum(tmp_path / "x")
    for at in {*range(0, length, 97), *range(PART - 1, length, PART), length - 1}:
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "x").write_bytes(changed)
        assert not checksum.matches(tmp_path / "x", found.sha256, found.parts), at


def test_parts_in_another_order_are_another_file(tmp_path: Path) -> None:
    data = written(tmp_path / "x", 2 * PART)
    found = checksum.checksum(tmp_path / "x")
    (tmp_path / "x").write_bytes(data[PART:] + data[:PART])
    assert not checksum.matches(tmp_path / "x", found.sha256, found.parts)


@pytest.mark.parametrize("ends", ["differs", "interrupted"])
def test_parts_that_nobody_has_begun_are_left(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "x", 50 * PART)
    begun: list[int] = []

    def part(path: Path, index: int) -> str:
        begun.append(index)
        time.sleep(0.1)  # all of them on two threads: 2.5 s
        return "another"

    def whole(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(checksum, "_part", part)
    monkeypatch.setattr(checksum, "HASHING", 2)
    monkeypatch.setattr(checksum.hashlib, "file_digest", whole)
    if ends == "differs":
        assert not checksum.matches(tmp_path / "x", "", ["0"] * 50)
    else:
        with pytest.raises(KeyboardInterrupt):
            checksum.checksum(tmp_path / "x")
    assert len(begun) < 40


def test_a_file_that_goes_meanwhile_is_an_oserror(tmp_path: Path) -> None:
    written(tmp_path / "x", 3 * PART)
    found = checksum.checksum(tmp_path / "x")
    (tmp_path / "x").unlink()
    with pytest.raises(FileNotFoundError):
        checksum.matches(tmp_path / "x", found.sha256, found.parts)


def test_a_large_entry_is_found_and_its_damage_too(cache: EngineCache, plan_key: Any) -> None:
    data = bytes(range(256)) * 20
    entry = cache.put("plan", plan_key(), lambda file: file.write(data))
    assert len(entry.manifest.parts) == 6
    found = cache.get("plan", plan_key())
    assert found is not None and found.manifest == entry.manifest
    with entry.path.open("r+b") as file:
        file.seek(len(data) - 1)
        file.write(b"\0")
    assert cache.get("plan", plan_key()) is None
    assert not entry.path.exists()


def test_a_part_without_a_checksum_is_damage(cache: EngineCache, plan_key: Any) -> None:
    entry = cache.put("plan", plan_key(), lambda file: file.write(bytes(3 * PART)))
    raw = json.loads(entry.manifest.to_json())
    for parts in ([], raw["parts"][:-1], [*raw["parts"], raw["parts"][0]]):
        with pytest.raises(DamagedError, match="each part"):
            manifest_from_json(json.dumps({**raw, "parts": parts}).encode())
    # One that is no digest equals none.
    wrong = manifest_from_json(json.dumps({**raw, "parts": [1, 2, 3]}).encode())
    assert not checksum.matches(entry.path, wrong.sha256, wrong.parts)
