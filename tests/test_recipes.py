# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes: what each lowers, what it refuses, and what its digest depends on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import nan

import pytest
from octavo.errors import OctavoError
from octavo.recipes import ALGORITHMS, NAMES, Floor, Keep, Recipe, load_recipe, shortfall
from octavo.seeded import CLIP_G, CLIP_L, T5_XXL, UMT5_XXL

FLOOR = Floor(token_mean=0.99, token_min=0.95, pooled=0.99)
GOOD = {"token_mean": 0.995, "token_min": 0.97, "pooled": 0.996}


def test_the_shipped_recipes() -> None:
    assert NAMES == ("fp8", "fp8-mixed", "bf16")
    for name in NAMES:
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.algorithm == "max"
        assert recipe.floor == FLOOR
    assert [load_recipe(n).prompts for n in ("fp8", "fp8-mixed")] == [128, 128]
    assert [load_recipe(n).body for n in NAMES] == ["float16", "float16", "bfloat16"]
    assert [load_recipe(n).calibrated for n in NAMES] == [True, True, False]


def test_demotion_ends() -> None:
    steps, name = [], "fp8"
    while name is not None:
        steps.append(name)
        name = load_recipe(name).demote_to
    assert steps == ["fp8", "fp8-mixed", "bf16"]


@pytest.mark.parametrize("spec", [CLIP_L, CLIP_G])
def test_structure(spec) -> None:
    linears = spec.linears()
    fp8, mixed, bf16 = (load_recipe(name).structure(linears) for name in NAMES)
    assert fp8.keys() == mixed.keys() == bf16.keys() == linears.keys()
    assert set(fp8.values()) == {"fp8"}
    assert set(bf16.values()) == {"16bit"}
    kept = {name for name, kind in mixed.items() if kind == "16bit"}
    assert kept == {f"{spec.block(i)}self_attn.out_proj" for i in range(spec.layers)}


def test_every_exception_has_a_reason() -> None:
    for name in NAMES:
        for keep in load_recipe(name).keep:
            assert len(keep.reason) > 20


def test_unknown_recipe_lists_the_known() -> None:
    with pytest.raises(OctavoError, match=r"'int4' does not exist; .* fp8, fp8-mixed, bf16"):
        load_recipe("int4")
    with pytest.raises(OctavoError, match="does not exist"):
        load_recipe("../recipes/fp8")


REFUSED = {
    "smoothquant": "INT8 only",
    "awq_lite": "per-channel pre-scale",
    "awq_full": "per-channel pre-scale",
    "awq_clip": "changes nothing",
    "svdquant": "low-rank branch",
    "gptq": "minutes",
    "Max": "not a ModelOpt algorithm known",
    "": "not a ModelOpt algorithm known",
}


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_refused_algorithms_say_why_and_what_is_left(name: str, why: str) -> None:
    with pytest.raises(OctavoError, match=f"'{name}' cannot be used: .*{why}.*use one of max, mse"):
        load_recipe("fp8").with_options(algorithm=name)


def test_options() -> None:
    recipe = load_recipe("fp8")
    assert recipe.with_options() == recipe
    assert {recipe.with_options(algorithm=a).algorithm for a in ALGORITHMS} == {"max", "mse"}
    assert recipe.with_options(prompts=3).prompts == 3
    for count in (0, -1):
        with pytest.raises(OctavoError, match="at least 1 prompt"):
            recipe.with_options(prompts=count)
    assert recipe == load_recipe("fp8")  # the shared recipe did not change


def test_the_digest_holds_what_the_weights_depend_on() -> None:
    recipe = load_recipe("fp8-mixed")
    changes: dict[str, Recipe] = {
        "format": replace(recipe, format="none"),
        "body": replace(recipe, body="bfloat16"),
        "algorithm": replace(recipe, algorithm="mse"),
        "keep": replace(recipe, keep=(Keep("*.fc2", "as a test"),)),
        "keep nothing": replace(recipe, keep=()),
    }
    digests = {name: changed.digest() for name, changed in changes.items()}
    assert len({recipe.digest(), *digests.values()}) == 1 + len(changes), digests
    same = replace(
        recipe,
        name="mine",
        floor=Floor(0, 0, 0),
        demote_to=None,
        prompts=1,  # beside it in the key, with the set
        keep=tuple(Keep(k.pattern, "in other words") for k in recipe.keep),
    )
    assert same.digest() == recipe.digest()


def test_the_digest_is_the_same_in_every_process() -> None:
    code = "from octavo.recipes import load_recipe; print(load_recipe('fp8-mixed').digest())"
    found = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {load_recipe("fp8-mixed").digest()}


def test_what_holds_has_no_shortfall() -> None:
    assert shortfall(GOOD, FLOOR) is None
    assert shortfall({"token_mean": 0.99, "token_min": 0.95, "pooled": 0.99}, FLOOR) is None
    assert shortfall({**GOOD, "pooled": None}, FLOOR) is None  # no projection
    assert shortfall({**GOOD, "prompts": 16}, FLOOR) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"token_mean": 0.98}, "token_mean 0.98 is under the floor 0.99"),
        ({"token_mean": 0.989999}, "token_mean 0.989999 is under the floor 0.99"),
        ({"token_min": 0.9}, "token_min 0.9 is under the floor 0.95"),
        ({"token_min": -1.0, "pooled": 0.0}, "token_min -1 is under the floor 0.95"),
        ({"pooled": 0.5}, "pooled 0.5 is under the floor 0.99"),
        ({"token_mean": nan}, "token_mean nan is under the floor 0.99"),
        ({"pooled": nan}, "pooled nan is under the floor 0.99"),
        ({"token_mean": None}, "token_mean None is under the floor 0.99"),
    ],
)
def test_shortfall_names_number_and_floor(changed, words: str) -> None:
    assert shortfall({**GOOD, **changed}, FLOOR) == words


def test_nothing_measured_is_a_shortfall() -> None:
    assert shortfall({}, FLOOR) is not None


# T5's own rules


def test_t5_has_rules_of_its_own() -> None:
    for name in NAMES:
        recipe = load_recipe(name)
        t5 = recipe.of(T5_XXL)
        assert recipe.of(CLIP_L) is recipe
        assert t5.of(T5_XXL) == t5 == recipe.of(UMT5_XXL)
        assert t5.body == "bfloat16"  # trained T5 overflows fp16
        assert (t5.floor.token_mean, t5.floor.token_min) == (0.998, 0.99)
        assert (t5.name, t5.demote_to, t5.format) == (name, recipe.demote_to, recipe.format)
    assert [load_recipe(n).of(T5_XXL).prompts for n in NAMES] == [64, 64, 1]


def test_t5_structure() -> None:
    linears = T5_XXL.linears()
    fp8, mixed, bf16 = (load_recipe(name).of(T5_XXL).structure(linears) for name in NAMES)
    assert set(fp8.values()) == {"fp8"} and set(bf16.values()) == {"16bit"}
    kept = {name for name, kind in mixed.items() if kind == "16bit"}
    assert kept == {T5_XXL.groups(i)[3][0] for i in range(24)} and len(kept) == 24
    # A linear is all that a recipe can lower: embeddings, norms and biases have no place in it.
    assert not any("norm" in n or "relative" in n or "shared" in n for n in fp8)


def test_options_reach_t5s_rules_and_clips_digest_does_not_see_them() -> None:
    recipe = load_recipe("fp8")
    changed = recipe.with_options(algorithm="mse", prompts=5)
    assert (changed.of(T5_XXL).algorithm, changed.of(T5_XXL).prompts) == ("mse", 5)
    assert recipe.with_options().of(T5_XXL).prompts == 64
    assert recipe.of(T5_XXL).digest() != recipe.digest()
    assert replace(recipe, t5=None).digest() == recipe.digest()
    assert replace(recipe, t5=None).of(T5_XXL).body == "float16"


@pytest.mark.parametrize(
    ("name", "digest"),
    [("fp8", "3cef4354d500c339"), ("fp8-mixed", "eaf7c144f477ac07"), ("bf16", "7f21d42c43a6be6f")],
)
def test_clips_digests_are_those_of_the_checkpoints_that_exist(name: str, digest: str) -> None:
    assert load_recipe(name).digest() == digest
