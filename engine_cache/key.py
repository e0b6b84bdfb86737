# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Keys: every fact that an artifact depends on -> canonical JSON -> SHA-256 -> 32 characters.

A key never holds a file name, a path, a time or a launch flag; a fact left out would cost a wrong
image. A new field is a new key for everybody; bump KEY_SCHEMA when a field's meaning changes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..errors import OctavoBug

Kind = Literal["checkpoint", "plan"]
Flavour = Literal["tensorrt_rtx", "tensorrt"]

KEY_SCHEMA = 1
KEY_PATTERN = "[a-z2-7]{32}"  # base32: one case only, and no name that Windows reserves is as long


def canonical(value: object) -> str:
    """JSON text that is equal exactly when the facts are: sorted, ASCII, floats in hexadecimal.

    Takes None, bool, int, finite float, str, lists, tuples and mappings with string keys. OctavoBug
    on anything else: a set has no order, and a numpy scalar prints as its version of numpy likes.
    """
    plain = _plain(value, "facts")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _plain(value: object, where: str) -> object:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return {"float": value.hex()}
    if isinstance(value, Mapping) and all(type(name) is str for name in value):
        return {name: _plain(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise OctavoBug(f"{where}: {value!r} is not a plain JSON value and cannot be kept in the cache")


def digest(facts: object) -> str:
    """160 bits of SHA-256 over `canonical(facts)`: 32 lower-case letters and digits."""
    sha = hashlib.sha256(canonical(facts).encode("ascii")).digest()
    return base64.b32encode(sha[:20]).decode("ascii").lower()


def is_key(text: str) -> bool:
    return re.fullmatch(KEY_PATTERN, text) is not None


@dataclass(frozen=True)
class Key:
    """What both keys share: `facts` is plain JSON, `id` names the files."""

    kind: ClassVar[Kind]

    @property
    def facts(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        facts = {"kind": self.kind, "key_schema": KEY_SCHEMA, **fields}
        canonical(facts)  # refuses what JSON would bend
        plain: dict[str, Any] = json.loads(json.dumps(facts, default=dict))
        return plain

    @property
    def id(self) -> str:
        return digest(self.facts)


@dataclass(frozen=True)
class CheckpointKey(Key):
    """An FP8 checkpoint: the encoder, the content of its tensors, how they were lowered.

    `body` and `projection` are hex digests of the tensors' values, `recipe` that of the canonical
    recipe, `calibration` the prompt set's id and count, `schema` the checkpoint layout's number.
    """

    kind: ClassVar[Kind] = "checkpoint"

    spec_facts: Mapping[str, Any]
    body: str
    projection: str | None
    recipe: str
    calibration: str
    schema: int


@dataclass(frozen=True)
class PlanKey(Key):
    """A TensorRT plan. `sms` is a set: any order and repetition give the same key.

    `version` is that of the run time, `profile` the min/opt/max batch, positions and mask,
    `program` the number of our emitter, `structure` whatever of the recipe shapes the graph (never
    the calibration). A shared plan names no `checkpoint`, an embedded one must. Full TensorRT names
    `gpu` and `driver`; a plan for TensorRT-RTX serves every GPU of its `sms` and names neither.
    """

    kind: ClassVar[Kind] = "plan"

    flavour: Flavour
    version: str
    cuda: str
    sms: tuple[int, ...]
    profile: Mapping[str, Any]
    program: int
    architecture: Mapping[str, Any]
    structure: Mapping[str, Any]
    weights: Literal["shared", "embedded"]
    checkpoint: str | None = None
    gpu: str | None = None
    driver: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sms", tuple(sorted(set(self.sms))))
        if not self.sms:
            raise OctavoBug("PlanKey: a plan is built for at least one SM")
        if (self.weights == "embedded") != (self.checkpoint is not None):
            raise OctavoBug(f"PlanKey: {self.weights} weights with checkpoint {self.checkpoint!r}")
        named = (self.gpu is not None, self.driver is not None)
        if named != ((self.flavour == "tensorrt"),) * 2:
            raise OctavoBug(
                f"PlanKey: {self.flavour} with gpu {self.gpu!r} and driver {self.driver!r}"
            )
