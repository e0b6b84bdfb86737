# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Remembered fingerprints, so that an unchanged file is not read again at each start.

Only ever a saving: a memo that is lost, damaged or unwritable costs the time to hash a file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import uuid
from dataclasses import astuple
from pathlib import Path
from typing import Any

from .detect import EncoderWeights
from .files import FileIdentity, WeightsFile
from .fingerprint import Fingerprint

_LOG = logging.getLogger(__name__)
_SCHEMA = 3  # raise it when canonical names, recognition or the digest change
_MAX_ENTRIES = 256
_MAX_BYTES = 4 * 1024 * 1024
# The rule of git's index: a file written so shortly before it was read may have been written again
# within one tick of the file system's clock, and would look unchanged.
RACY_NS = 2_000_000_000
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Memo:
    """Fingerprints of the encoders of model files, in `fingerprints.json` of the cache's folder."""

    def __init__(self, cache_dir: str | os.PathLike[str]) -> None:
        self.path = Path(cache_dir) / "fingerprints.json"

    def get(self, file: WeightsFile, encoder: EncoderWeights) -> Fingerprint | None:
        """What was put for the encoder, if the file as it was opened is still the same."""
        entry = self._entries().get(os.path.realpath(file.path), {})
        digests = (
            entry["encoders"].get(encoder.prefix) if entry.get("file") == _facts(file) else None
        )
        return Fingerprint(*digests) if digests else None

    def put(self, file: WeightsFile, encoder: EncoderWeights, found: Fingerprint) -> bool:
        """Remember a fingerprint, the oldest entry making room. False where that is impossible, or
        unsafe: the file has changed since it was opened, or less than two seconds before."""
        try:
            unchanged = all(FileIdentity.of(i.path) == i for i in file.identities)
            changed_ns = max(max(i.mtime_ns, i.ctime_ns) for i in file.identities)
            if not unchanged or changed_ns + RACY_NS > file.opened_ns:
                return False
            entries = self._entries()
            key, facts = os.path.realpath(file.path), _facts(file)
            entry = entries.pop(key, {"file": None})
            if entry["file"] != facts:
                entry = {"file": facts, "encoders": {}}
            entry["encoders"][encoder.prefix] = [found.body, found.projection]
            kept = dict([*entries.items(), (key, entry)][-_MAX_ENTRIES:])
            self._write(json.dumps({"schema": _SCHEMA, "entries": kept}))
        except OSError as error:
            reason = error.strerror or error
            _LOG.warning("%s is hashed again next time: %s: %s", file.path, self.path, reason)
            return False
        return True

    def _write(self, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _entries(self) -> dict[str, dict[str, Any]]:
        """All sound entries, the oldest first; none if the memo is damaged or of another schema."""
        try:
            found = self.path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:  # a pipe would wait
                return {}
            memo = json.loads(self.path.read_bytes())
            if memo["schema"] != _SCHEMA:
                return {}
            return {key: entry for key, entry in memo["entries"].items() if _is_sound(entry)}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return {}


def _facts(file: WeightsFile) -> list[Any]:
    return [file.header_digest, [[*astuple(identity)] for identity in file.identities]]


def _is_sound(entry: dict[str, Any]) -> bool:
    """Whether an entry holds what `put` writes; raises on the crudest damage."""
    return "file" in entry and all(
        len(digests) == 2
        and _DIGEST.fullmatch(digests[0]) is not None
        and (digests[1] is None or _DIGEST.fullmatch(digests[1]) is not None)
        for digests in entry["encoders"].values()
    )
