# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes: how precision is lowered, as TOML beside this file. Standard library only.

A recipe names the format, the linears it leaves in 16 bit and why, the calibration algorithm and
its number of prompts, and the floors under which the result is refused (the demotion goes on with
`demote_to`). `Recipe.structure` shapes the graph and is part of a plan's key; the rest is not.
T5 has rules of its own in the table `t5`, which `Recipe.of` gives for a T5.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..encoders import EncoderSpec, T5Spec
from ..errors import OctavoError

NAMES = ("fp8", "fp8-mixed", "bf16")

# What ModelOpt 0.47 offers and FP8 linears can use without a change of graph or file format.
ALGORITHMS = ("max", "mse")
_REFUSED_ALGORITHMS = {
    "smoothquant": "ModelOpt applies it to INT8 only",
    "awq_lite": "it needs a per-channel pre-scale that FP8 checkpoints do not carry",
    "awq_full": "it needs a per-channel pre-scale that FP8 checkpoints do not carry",
    "awq_clip": "it changes nothing for FP8",
    "svdquant": "it adds a low-rank branch that no FP8 text-encoder format carries",
    "gptq": "ModelOpt runs it for many minutes on a CPU and it was never measured here",
}


@dataclass(frozen=True)
class Keep:
    """Linears whose name matches `pattern` stay in 16 bit; `reason` is shown to the user."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class Floor:
    """Cosines against FP32 below which a recipe is refused; verify.Similarity defines them."""

    token_mean: float
    token_min: float
    pooled: float


def shortfall(similarity: Mapping[str, float | None], floor: Floor) -> str | None:
    """The first cosine of `similarity` that is under `floor` or NaN, in words; None if all hold."""
    for name, needed in asdict(floor).items():
        value = similarity.get(name)
        if value is None and name == "pooled":
            continue  # no projection
        if value is None or not value >= needed:
            shown = value if value is None else f"{value:.6g}"  # 0.98999 is not 0.99
            return f"{name} {shown} is under the floor {needed}"
    return None


@dataclass(frozen=True)
class Recipe:
    name: str
    format: Literal["fp8", "none"]
    body: Literal["float16", "bfloat16"]
    algorithm: str
    prompts: int
    demote_to: str | None
    keep: tuple[Keep, ...]
    floor: Floor
    t5: Recipe | None = None  # the same for a T5; None: this one serves every family

    def of(self, spec: EncoderSpec) -> Recipe:
        """The rules for the encoder `spec`; asking them again changes nothing."""
        return self.t5 if self.t5 is not None and isinstance(spec, T5Spec) else self

    def structure(self, linears: Iterable[str]) -> dict[str, Literal["fp8", "16bit"]]:
        """Linear name -> how it is computed."""
        return {
            name: "16bit"
            if self.format == "none" or any(fnmatchcase(name, k.pattern) for k in self.keep)
            else "fp8"
            for name in linears
        }

    @property
    def calibrated(self) -> bool:
        return self.format == "fp8"

    def digest(self) -> str:
        """What a checkpoint's weights depend on: format, exceptions, algorithm; not the floors."""
        facts = asdict(self)
        for name in ("floor", "demote_to", "name", "prompts", "t5"):
            facts.pop(name)
        facts["keep"] = sorted(k.pattern for k in self.keep)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def with_options(self, algorithm: str | None = None, prompts: int | None = None) -> Recipe:
        """A copy with another calibration; raises `OctavoError` for what FP8 does not allow."""
        changed = replace(
            self,
            algorithm=self.algorithm if algorithm is None else algorithm,
            prompts=self.prompts if prompts is None else prompts,
            t5=None if self.t5 is None else self.t5.with_options(algorithm, prompts),
        )
        _check(changed)
        return changed


def _check(recipe: Recipe) -> None:
    name = recipe.algorithm
    if name not in ALGORITHMS:
        why = _REFUSED_ALGORITHMS.get(name, "it is not a ModelOpt algorithm known to Octavo")
        raise OctavoError(
            f"calibration algorithm '{name}' cannot be used: {why}; "
            f"use one of {', '.join(ALGORITHMS)}."
        )
    if recipe.prompts < 1:
        raise OctavoError("calibration needs at least 1 prompt; the recipes use 128.")


@cache
def load_recipe(name: str) -> Recipe:
    """The recipe called `name`; raises `OctavoError` with the known names."""
    if name not in NAMES:
        raise OctavoError(f"recipe '{name}' does not exist; choose one of {', '.join(NAMES)}.")
    data: dict[str, Any] = tomllib.loads(
        (Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8")
    )
    t5 = data.pop("t5")
    recipe = _recipe(name, data)
    # T5's table says what differs, its exceptions always: names differ between the families.
    return replace(recipe, t5=_recipe(name, {**data, "keep": [], **t5}))


def _recipe(name: str, table: Mapping[str, Any]) -> Recipe:
    data = dict(table)
    keep = tuple(Keep(**entry) for entry in data.pop("keep", []))
    floor, demote_to = Floor(**data.pop("floor")), data.pop("demote_to", None)
    recipe = Recipe(name=name, keep=keep, floor=floor, demote_to=demote_to, **data)
    _check(recipe)
    return recipe
