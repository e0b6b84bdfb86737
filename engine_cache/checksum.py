# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a file is still what was written, known by SHA-256 of all of it and of its parts.

The whole is what anybody can check with `sha256sum`. It takes one thread, of which a T5-XXL in FP8
is four seconds at every start; so a file of more than one part is checked by its parts, by several.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..threads import HASHING, submit

PART = 64 * 2**20  # bytes that have a digest of their own; another would change all manifests
_BLOCK = 2**20


@dataclass(frozen=True)
class Checksum:
    """`length` in bytes; hex digests of the whole and of every `PART` bytes, the last part's fewer.

    `parts` is empty where there would be one.
    """

    length: int
    sha256: str
    parts: tuple[str, ...]


def count_of(length: int) -> int:
    """How many digests `parts` holds for a file of `length` bytes."""
    return -(-length // PART) if length > PART else 0


def checksum(path: Path) -> Checksum:
    """Read the file, twice if it has parts. Raises OSError."""
    with _threads() as threads, path.open("rb") as file:
        count = count_of(os.fstat(file.fileno()).st_size)
        parts = [submit(threads, _part, path, index) for index in range(count)]
        whole = hashlib.file_digest(file, "sha256").hexdigest()
        return Checksum(file.tell(), whole, tuple(part.result() for part in parts))


def matches(path: Path, sha256: str, parts: Sequence[str]) -> bool:
    """Whether a file of the right length has these digests. Raises OSError."""
    if not parts:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    with _threads() as threads:
        found = [submit(threads, _part, path, index) for index in range(len(parts))]
        return all(a.result() == b for a, b in zip(found, parts, strict=True))


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Leaving does not wait for parts that nobody has begun: one differs, or Ctrl-C came."""
    threads = ThreadPoolExecutor(HASHING, "octavo-checksum")
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def _part(path: Path, index: int) -> str:
    digest, block, left = hashlib.sha256(), memoryview(bytearray(_BLOCK)), PART
    with path.open("rb", buffering=0) as file:
        file.seek(index * PART)
        while read := file.readinto(block[: min(left, _BLOCK)]):
            digest.update(block[:read])
            left -= read
    return digest.hexdigest()
