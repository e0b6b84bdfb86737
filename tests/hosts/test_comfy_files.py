# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The node pack without ComfyUI: schemas, help, locales and workflows agree; loading is light."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("de", "es", "fr", "ja", "zh")
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))

# A stand-in for comfy_api that keeps what a schema says. It is also written to a file below.
STAND_IN = """
from types import SimpleNamespace


class Recorded(SimpleNamespace):
    def __init__(self, *args, **kwargs):
        super().__init__(id=args[0] if args else None, **kwargs)


class Kind:
    class Input(Recorded):
        pass

    class Output(Recorded):
        pass


class io:
    Clip = String = Image = Int = Float = Combo = Kind
    Schema = NodeOutput = Recorded
    Hidden = SimpleNamespace(unique_id="unique_id", extra_pnginfo="extra_pnginfo")

    class ComfyNode:
        pass


class ui:
    pass


class ComfyExtension:
    pass
"""


@pytest.fixture(scope="module")
def schemas() -> Iterator[dict[str, Any]]:
    package, latest = ModuleType("comfy_api"), ModuleType("comfy_api.latest")
    _Text().exec_module(latest)
    names = {"comfy_api": package, "comfy_api.latest": latest}
    sys.modules.update(names)
    try:
        nodes = importlib.import_module("octavo.nodes")
        modules = ("environment", "report", "save", "text_encoder")
        found = {}
        for name in modules:
            module = importlib.import_module(f"octavo.nodes.{name}")
            for value in vars(module).values():
                if isinstance(value, type) and hasattr(value, "define_schema"):
                    schema = value.define_schema()
                    found[schema.node_id] = schema
        assert nodes.Octavo is not None
        yield found
    finally:
        for name in [n for n in sys.modules if n in names or n.startswith("octavo.nodes")]:
            del sys.modules[name]


class _Text(importlib.abc.InspectLoader):
    """Fills a module from STAND_IN."""

    def get_source(self, fullname: str) -> str:
        return STAND_IN


def test_every_input_explains_itself(schemas: dict[str, Any]) -> None:
    assert set(schemas) == {
        "OctavoTextEncoder",
        "OctavoReport",
        "OctavoSaveTextEncoder",
        "OctavoEnvironment",
    }
    for node, schema in schemas.items():
        assert schema.description and schema.search_aliases, node
        for given in schema.inputs:
            assert given.tooltip, (node, given.id)
            assert not re.search(r"folder|file|path|dir", given.id), "no workflow may name a file"


def test_the_options_are_those_of_the_product(schemas: dict[str, Any]) -> None:
    from octavo.choose import REQUESTS
    from octavo.recipes import NAMES

    inputs = {i.id: i for i in schemas["OctavoTextEncoder"].inputs}
    assert set(inputs["engine"].options) == set(REQUESTS) - {"host"}
    assert set(inputs["precision"].options) == {"auto", *NAMES}
    folded = {name for name, given in inputs.items() if getattr(given, "advanced", False)}
    assert folded == {"engine", "build", "similarity_floor"}


def test_help_pages(schemas: dict[str, Any]) -> None:
    pages = {p.stem: p.read_text(encoding="utf-8") for p in (ROOT / "web" / "docs").glob("*.md")}
    assert set(pages) == set(schemas)
    for node, schema in schemas.items():
        assert pages[node].startswith(f"# {schema.display_name}\n")


@pytest.mark.parametrize("language", LANGUAGES)
def test_locales_are_complete(schemas: dict[str, Any], language: str) -> None:
    text = (ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8")
    defined = json.loads(text)
    assert set(defined) == set(schemas)
    for node, schema in schemas.items():
        translated = defined[node]
        assert translated["display_name"] and translated["description"]
        assert set(translated["inputs"]) == {i.id for i in schema.inputs}, node
        assert all(i["name"] and i["tooltip"] for i in translated["inputs"].values())
        assert set(translated["outputs"]) == {str(i) for i in range(len(schema.outputs))}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflows_are_whole_graphs(path: Path, schemas: dict[str, Any]) -> None:
    graph = json.loads(path.read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"]) and graph["last_node_id"] == max(nodes)
    for number, source, out, target, into, kind in graph["links"]:
        assert number in nodes[source]["outputs"][out]["links"]
        assert nodes[source]["outputs"][out]["type"] == kind
        assert nodes[target]["inputs"][into]["link"] == number
        assert nodes[target]["inputs"][into]["type"] == kind
    linked = {link[0] for link in graph["links"]}
    for node in nodes.values():
        assert all(i["link"] in linked for i in node["inputs"]), node["type"]
        for value in node["widgets_values"]:
            assert not re.search(r"[\\/]", str(value)), "a path of one machine"
        if node["type"] in schemas:
            given = [i for i in schemas[node["type"]].inputs if i.id != "clip"]
            for widget, value in zip(given, node["widgets_values"], strict=True):
                if hasattr(widget, "options"):
                    assert value in widget.options
    assert any(node["type"] == "OctavoTextEncoder" for node in nodes.values())


def test_the_registry_entry_invents_no_publisher() -> None:
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    comfy = facts["tool"]["comfy"]
    assert comfy["PublisherId"] == "" and comfy["requires-comfyui"].startswith(">=")
    assert (ROOT / comfy["Icon"]).is_file()
    assert facts["project"]["authors"] == [{"name": "The Octavo authors"}]


def test_requirements_move_nothing_of_comfyui() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = {re.split(r"[<>=!~ \[;]", line)[0] for line in lines if line and line[0] != "#"}
    assert not names & {"torch", "torchvision", "torchaudio", "numpy", "transformers"}
    assert not any("modelopt" in name for name in names)


def test_loading_the_pack_imports_nothing_heavy(tmp_path: Path) -> None:
    """As ComfyUI does it: by path, with comfy_api there; in a fresh process."""
    api = tmp_path / "comfy_api"
    api.mkdir()
    (api / "__init__.py").write_text("", encoding="utf-8")
    (api / "latest.py").write_text(STAND_IN, encoding="utf-8")
    script = f"""
import asyncio, importlib.util, json, sys, time
sys.path.insert(0, {str(tmp_path)!r})
import comfy_api.latest
place = {str(ROOT / "__init__.py")!r}
start = time.perf_counter()
spec = importlib.util.spec_from_file_location("/some/custom_nodes/octavo", place)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
nodes = asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())
seconds = time.perf_counter() - start
for node in nodes:
    node.define_schema()
heavy = ("torch", "tensorrt", "tensorrt_rtx", "modelopt", "onnx", "onnxruntime", "transformers",
         "diffusers", "numpy")
print(json.dumps([len(nodes), seconds, [n for n in heavy if n in sys.modules],
                  hasattr(module, "NODE_CLASS_MAPPINGS")]))
"""
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
        )
        count, seconds, heavy, old_api = json.loads(done.stdout)
        assert count == 4 and not heavy and not old_api
        times.append(seconds)
    assert min(times) < 0.05, times


def test_only_the_host_modules_import_comfy() -> None:
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = [p.replace("octavo", ".", 1) for p in facts["tool"]["setuptools"]["packages"]]
    paths = [path for f in folders for path in (ROOT / f.replace("..", "./")).glob("*.py")]
    assert len(paths) > 30
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if re.search(r"^\s*(?:import|from) comfy(?:\.|\s)", text, re.M):
            assert path.parent.name == "hosts" and path.name.startswith("comfy"), path
