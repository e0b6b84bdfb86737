# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import pytest
from octavo.engine_cache import CheckpointKey, Key, PlanKey, canonical, digest, key
from octavo.errors import OctavoBug

# Another value for every field. A new field without one fails test_every_field_changes_the_key.
OTHER_CHECKPOINT: dict[str, Any] = {
    "spec_facts": {"encoder": "clip", "layers": 12, "width": 769},
    "body": "e" * 64,
    "projection": None,
    "recipe": "e" * 64,
    "calibration": "octavo-512:64",
    "schema": 2,
}
OTHER_PLAN: dict[str, Any] = {
    "flavour": "tensorrt",
    "version": "1.7.2",
    "cuda": "cu12",
    "sms": (89,),
    "profile": {"batch": [1, 2, 8], "positions": 77, "mask": False},
    "program": 2,
    "architecture": {"encoder": "clip", "layers": 12, "width": 768, "layer_norm_eps": 1e-6},
    "structure": {"body": "fp16", "fp8": ["q_proj"]},
    "weights": "embedded",
    "checkpoint": "another",
    "gpu": "NVIDIA GeForce RTX 5090",
    "driver": "590",
}


def changed(base: Key, other: dict[str, Any]) -> dict[str, str]:
    names = [field.name for field in dataclasses.fields(base)]
    assert sorted(names) == sorted(other)
    return {name: dataclasses.replace(base, **{name: other[name]}).id for name in names}


def test_every_field_changes_the_key(checkpoint_key: Any, plan_key: Any, monkeypatch: Any) -> None:
    # The checks on combinations are a test of their own; here each field must count by itself.
    monkeypatch.setattr(
        PlanKey,
        "__post_init__",
        lambda self: object.__setattr__(self, "sms", tuple(sorted(self.sms))),
    )
    for base, other in ((checkpoint_key(), OTHER_CHECKPOINT), (plan_key(), OTHER_PLAN)):
        ids = {"": base.id, **changed(base, other)}
        assert len(set(ids.values())) == len(ids), ids
        monkeypatch.setattr(key, "KEY_SCHEMA", key.KEY_SCHEMA + 1)
        assert base.id not in ids.values()


def test_order_and_container_never_change_the_key(plan_key: Any) -> None:
    base = plan_key()
    assert base.id == plan_key(sms=(120, 89, 120)).id == plan_key(sms=[120, 89]).id
    assert base.id == plan_key(architecture=dict(reversed(base.architecture.items()))).id
    assert base.id == plan_key(profile={"batch": (1, 2, 16), "mask": False, "positions": 77}).id


def test_form_is_safe_on_every_file_system(checkpoint_key: Any, plan_key: Any) -> None:
    for ident in (checkpoint_key().id, plan_key().id):
        assert re.fullmatch("[a-z2-7]{32}", ident)
    assert checkpoint_key(spec_facts={"name": "日本 é"}).id.isascii()


def test_known_keys(checkpoint_key: Any, plan_key: Any) -> None:
    # Users' caches hang on these: if they change, KEY_SCHEMA must have been bumped.
    assert key.KEY_SCHEMA == 1
    assert checkpoint_key().id == "g47ucctzoyb4uoypnjmiukhlao6ljug5"
    assert plan_key().id == "nploobvyenbpi5gj4tnnmnq66o75roie"


def test_three_processes_with_three_hash_seeds_give_one_key(
    child: Any, plan_key: Any, tmp_path: Any
) -> None:
    runs = [
        child("say(key.id)", tmp_path, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("0", "1", "4242")
    ]
    assert {run.communicate()[0].strip() for run in runs} == {plan_key().id}


def test_canonical_tells_apart_what_json_would_mix() -> None:
    values = [1, 1.0, True, "1", None, "None", 0.3, 0.1 + 0.2, [], {}, [1], [[1]], "float", -1]
    assert len({canonical(value) for value in values}) == len(values)
    assert canonical((1, {"b": 2, "a": 1e-5})) == canonical([1, {"a": 1e-5, "b": 2}])
    assert digest(1e-5) != digest(1.0000000000000002e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x", {1: 2}, object()])
def test_what_has_no_single_text_is_refused(value: Any, checkpoint_key: Any) -> None:
    with pytest.raises(OctavoBug, match=r"facts\.spec_facts\.a"):
        checkpoint_key(spec_facts={"a": [value]}).id  # noqa: B018


@pytest.mark.parametrize(
    "changes",
    [
        {"sms": ()},
        {"weights": "embedded"},
        {"checkpoint": "abc"},
        {"gpu": "NVIDIA L4"},
        {"flavour": "tensorrt", "gpu": "NVIDIA L4"},
        {"flavour": "tensorrt"},
    ],
)
def test_a_key_that_would_be_too_coarse_or_too_fine_is_a_bug(
    changes: dict[str, Any], plan_key: Any
) -> None:
    with pytest.raises(OctavoBug, match="PlanKey"):
        plan_key(**changes)


def test_full_tensorrt_and_embedded_plans_have_keys(plan_key: Any) -> None:
    full = plan_key(flavour="tensorrt", gpu="NVIDIA L4", driver="570")
    assert full.id != plan_key(flavour="tensorrt", gpu="NVIDIA L40S", driver="570").id
    one = plan_key(weights="embedded", checkpoint="a" * 32)
    assert one.id != plan_key(weights="embedded", checkpoint="b" * 32).id


def test_facts_are_plain_json_and_detached(checkpoint_key: Any) -> None:
    base: CheckpointKey = checkpoint_key()
    facts = base.facts
    facts["spec_facts"]["layers"] = 99
    assert base.facts["spec_facts"]["layers"] == 12
    assert digest(base.facts) == base.id
