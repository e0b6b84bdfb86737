# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest
from octavo.engine_cache import Manifest
from octavo.engine_cache.manifest import (
    LIMIT_BYTES,
    MANIFEST_SCHEMA,
    DamagedError,
    ForeignError,
    manifest_from_json,
)
from octavo.errors import OctavoBug


@pytest.fixture
def manifest(plan_key: Any) -> Manifest:
    key = plan_key()
    facts = {"seconds": 1.25, "layers": {"fp8": 48}, "note": "été"}
    name = key.id + ".plan"
    return Manifest(
        "plan", key.id, key.facts, name, 5, "0" * 64, "2026-01-01T00:00:00+00:00", facts
    )


def test_round_trip(manifest: Manifest) -> None:
    text = manifest.to_json()
    assert text.isascii()
    assert manifest_from_json(text.encode()) == manifest
    assert json.loads(text)["schema"] == MANIFEST_SCHEMA


def test_each_field_is_needed_with_its_type(manifest: Manifest) -> None:
    raw = json.loads(manifest.to_json())
    for name in raw:
        for wrong in ({}, {name: None}, {name: True}, {name: [raw[name]]}):
            broken = {**{k: v for k, v in raw.items() if k != name}, **wrong}
            with pytest.raises(DamagedError):
                manifest_from_json(json.dumps(broken).encode())
    with pytest.raises(DamagedError):
        manifest_from_json(json.dumps({**raw, "more": 1}).encode())


@pytest.mark.parametrize("schema", [0, MANIFEST_SCHEMA + 1, "1", 1.0, True, None])
def test_unknown_schema_is_foreign(manifest: Manifest, schema: Any) -> None:
    raw = {**json.loads(manifest.to_json()), "schema": schema}
    with pytest.raises(ForeignError, match="schema"):
        manifest_from_json(json.dumps(raw).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "other"},
        {"kind": "checkpoint"},
        {"key": "x"},
        {"key": "a" * 32, "artifact": "a" * 32 + ".plan"},
        {"artifact": "../../etc/passwd"},
        {"key_facts": {}},
        {"key_facts": {"kind": "plan"}},
    ],
)
def test_fields_must_agree(manifest: Manifest, changes: dict[str, Any]) -> None:
    raw = {**json.loads(manifest.to_json()), **changes}
    with pytest.raises(DamagedError):
        manifest_from_json(json.dumps(raw).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"schema": NaN}',
        b'{"schema": 1e999}',
        b'{"schema": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ],
    ids=range(10),
)
def test_bad_json_is_damage_never_a_crash(data: bytes) -> None:
    with pytest.raises(DamagedError, match="its manifest"):
        manifest_from_json(data)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999"])
def test_values_that_cannot_be_hashed_are_damage(manifest: Manifest, text: str) -> None:
    data = manifest.to_json().replace("1.25", text)
    assert text in data
    with pytest.raises(DamagedError, match="is not JSON"):
        manifest_from_json(data.encode())


def test_a_manifest_has_a_size_limit(manifest: Manifest) -> None:
    data = manifest.to_json().encode()
    assert manifest_from_json(data.ljust(LIMIT_BYTES)) == manifest
    with pytest.raises(DamagedError, match="too large"):
        manifest_from_json(data.ljust(LIMIT_BYTES + 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, b"x"])
def test_facts_that_json_cannot_hold_are_our_bug(manifest: Manifest, value: Any) -> None:
    manifest.facts["bad"] = value
    with pytest.raises(OctavoBug, match=r"facts\.bad"):
        manifest.to_json()
