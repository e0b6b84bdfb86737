# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""hosts/comfy*.py ask ComfyUI only for what the recorded one has, under its signatures."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from octavo.hosts.comfy_call import _PARAMETERS
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "data" / "comfyui_calls.safetensors"

# name of a variable in hosts/comfy*.py -> the recorded objects that it may be
VARIABLES = {
    "patcher": ("patcher",),
    "clone.patcher": ("patcher",),
    "management": ("management",),
    "CallbacksMP": ("callbacks",),
}
# What only some patchers have, or what is set by Octavo itself.
OURS = {"patcher": {"__dict__"}}


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    with safe_open(DATA, "pt") as file:
        return dict(json.loads(file.metadata()["facts"]))


def asked() -> dict[str, set[str]]:
    """Variable -> the attributes that hosts/comfy*.py read of it."""
    found: dict[str, set[str]] = {name: set() for name in VARIABLES}
    for path in (ROOT / "hosts").glob("comfy*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner in found:
                    found[owner].add(node.attr)
    return found


def test_every_attribute_exists(facts: dict[str, Any]) -> None:
    for variable, attributes in asked().items():
        assert attributes, f"nothing is asked of {variable}: is the name still right?"
        known = set().union(*(facts["names"][o] for o in VARIABLES[variable]))
        missing = attributes - known - OURS.get(variable, set())
        assert not missing, f"{variable}: ComfyUI {facts['comfyui']} has no {missing}"


def test_a_missing_attribute_would_be_seen(facts: dict[str, Any]) -> None:
    assert "patches_uuid" in asked()["patcher"] and "patches_uuid" in facts["names"]["patcher"]
    assert "no_such_thing" not in facts["names"]["patcher"]


def test_dynamic_patchers_have_what_the_others_have(facts: dict[str, Any]) -> None:
    names = facts["names"]
    methods = asked()["patcher"] & set(names["patcher"]) - {"__dict__"}
    of_instances = {
        "backup", "current_hooks", "forced_hooks", "hook_backup", "injections", "is_injected",
        "load_device", "model", "model_options", "object_patches", "offload_device", "patches",
        "patches_uuid", "weight_wrapper_patches",
    }  # fmt: skip
    assert methods - of_instances <= set(names["dynamic"]), methods - set(names["dynamic"])


def test_signatures(facts: dict[str, Any]) -> None:
    known = facts["signatures"]
    assert tuple(known["forward"]) == ("self", *_PARAMETERS)
    assert known["calculate_weight"][:3] == ["patches", "weight", "key"]
    assert known["get_key_weight"] == ["model", "key"]
    assert known["partially_load"][1:] == ["device_to", "extra_memory", "force_patch_weights"]
    assert known["partially_unload"][1:3] == ["device_to", "memory_to_free"]
    assert known["detach"][1:] == ["unpatch_all"]
    assert known["unpatch_model"][1:] == ["device_to", "unpatch_weights"]
    assert "load_weights" in known["patch_model"]
    assert known["set_injections"][1:] == ["key", "injections"]
    assert known["set_model_patch"][1:] == ["patch", "name"]
    assert known["add_callback_with_key"][1:] == ["call_type", "key", "callback"]


def test_the_module_state_that_is_read(facts: dict[str, Any]) -> None:
    model = set(facts["names"]["model"])
    for name in (
        "current_weight_patches_uuid", "device", "model_loaded_weight_memory", "model_lowvram",
    ):  # fmt: skip
        assert name in model, name
    for name in ("options_default", "transformer", "return_projected_pooled"):
        assert name in facts["names"]["encoder"], name
