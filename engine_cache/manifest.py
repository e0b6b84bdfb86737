# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON sidecar of an artifact: what it is, what it depends on, and how to know it is whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import OctavoBug
from .checksum import count_of
from .key import Kind, canonical, digest, is_key

MANIFEST_SCHEMA = 2
LIMIT_BYTES = 16 * 2**20

SUFFIXES: dict[Kind, str] = {"checkpoint": ".safetensors", "plan": ".plan"}


class DamagedError(ValueError):
    """An entry that cannot be trusted; the text says why, for the log."""


class ForeignError(DamagedError):
    """Written by another version of Octavo: a miss, but nothing to throw away."""


@dataclass(frozen=True)
class Manifest:
    """`artifact` is a bare file name, `length` in bytes, `sha256` hex, `created` ISO 8601 in UTC.

    `key_facts` are the key's facts in full; `facts` is free (self-check, build seconds, layers);
    `parts` are hex digests of a large artifact's parts (checksum.py), else there are none.
    """

    kind: Kind
    key: str
    key_facts: dict[str, Any]
    artifact: str
    length: int
    sha256: str
    created: str
    facts: dict[str, Any]
    parts: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        canonical(self.facts)  # a NaN or a tensor among the facts is our bug: refuse it here
        text = json.dumps({"schema": MANIFEST_SCHEMA, **asdict(self)}, indent=1, sort_keys=True)
        return text + "\n"


def manifest_from_json(data: bytes) -> Manifest:
    """Parse and check everything that can be checked without the artifact. Raises DamagedError."""
    if len(data) > LIMIT_BYTES:
        raise DamagedError("its manifest is too large")
    try:
        raw = json.loads(data.decode("utf-8"))
        canonical(raw)  # JSON in Python also knows NaN and infinity
    except (ValueError, RecursionError, OctavoBug) as error:
        raise DamagedError(f"its manifest is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise DamagedError("its manifest is not a JSON object")
    schema = raw.pop("schema", None)
    if type(schema) is not int or schema != MANIFEST_SCHEMA:
        raise ForeignError(f"its manifest has schema {schema!r}, not {MANIFEST_SCHEMA}")
    if {name: type(value) for name, value in raw.items()} != _FIELDS:
        raise DamagedError("its manifest lacks a field, or one has the wrong type")
    manifest = Manifest(**raw)
    if manifest.kind not in SUFFIXES or not is_key(manifest.key):
        raise DamagedError("its manifest names no known kind and key")
    if manifest.artifact != manifest.key + SUFFIXES[manifest.kind]:
        raise DamagedError(f"its manifest names the file {manifest.artifact!r}")
    if len(manifest.parts) != count_of(manifest.length):
        raise DamagedError("its manifest does not have a checksum for each part")
    facts = manifest.key_facts
    if facts.get("kind") != manifest.kind or digest(facts) != manifest.key:
        raise DamagedError("its key does not belong to its facts")
    return manifest


_FIELDS: dict[str, type] = dict.fromkeys(("kind", "key", "artifact", "sha256", "created"), str)
_FIELDS |= {"key_facts": dict, "length": int, "facts": dict, "parts": list}
