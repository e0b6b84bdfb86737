# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What is shipped: the wheel, the requirements for ComfyUI users, and the folder as a node pack."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import octavo
import pytest
from pipeline import ROOT, environment, save, tiny_tensors

KEPT_OUT = ("tests", "benchmarks", "tools", "examples", "workflows", "build")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
THEIRS = {"torch", "numpy", "transformers"}  # ComfyUI's: never named, never moved


def copy_tree(target: Path) -> Path:
    """The product as a clone has it, without what building and testing leave."""
    skipped = shutil.ignore_patterns(".*", "tests", "build", "__pycache__", "*.egg-info", "dist")
    shutil.copytree(ROOT, target, ignore=skipped)
    return target


def names_of(requirements: list[str]) -> set[str]:
    """Distribution names of requirement lines, normalised."""
    found = (re.match(r"[A-Za-z0-9._-]+", line) for line in requirements)
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in found if name}


def lines_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_tree(folder / "ComfyUI-Octavo main")  # built from a folder of any name
    subprocess.run(
        [sys.executable, "-P", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "-w", folder, source],
        check=True, cwd=folder,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    assert built.name == f"octavo-{octavo.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(built)


def test_wheel_holds_the_whole_package(wheel: zipfile.ZipFile) -> None:
    modules = {
        f"octavo/{path.relative_to(ROOT).as_posix()}"
        for path in ROOT.rglob("*.py")
        if not path.relative_to(ROOT).parts[0].startswith((".", *KEPT_OUT))
    }
    names = set(wheel.namelist())
    assert modules <= names, sorted(modules - names)
    extra = {n for n in names if n.endswith(".py")} - modules
    assert extra == set()


def test_wheel_holds_the_data(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    wanted = ["py.typed"]
    wanted += [f"recipes/{name}.toml" for name in ("fp8", "fp8-mixed", "bf16")]
    for one in ("calibration", "held_out"):
        wanted += [f"prompts/{one}.{kind}" for kind in ("jsonl", "t5.json", "tokens.json")]
    assert {f"octavo/{name}" for name in wanted} <= names
    (licence,) = [n for n in names if n.endswith("LICENSE")]
    assert b"Apache License" in wheel.read(licence)
    kinds = {Path(n).suffix for n in names if n.startswith("octavo/")}
    assert kinds <= {".py", ".typed", ".toml", ".json", ".jsonl"}


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"octavo", f"octavo-{octavo.__version__}.dist-info"}
    second = {n.split("/")[1] for n in wheel.namelist() if n.startswith("octavo/")}
    assert not second & {*KEPT_OUT, "test", "conftest.py", "shared", ".scratch", ".ci"}
    assert sum(info.file_size for info in wheel.infolist()) < 3e6


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (path,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = wheel.read(path).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE))
    assert {"rtx", "tensorrt", "quantize", "diffusers", "dev"} <= extras
    (path,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    assert "octavo = octavo.cli:main" in wheel.read(path).decode()


def test_wheel_works(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Unpacked before everything else on the path: data files are found from there."""
    wheel.extractall(tmp_path / "site")
    code = (
        "import octavo, octavo.cli, octavo.recipes, octavo.prompts, octavo.hosts\n"
        "print(octavo.__file__)\n"
        "octavo.recipes.load_recipe('fp8-mixed'), octavo.prompts.set_id('held_out')\n"
        "raise SystemExit(octavo.cli.main(['--version']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{code}",
         str(tmp_path / "site")],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, version = done.stdout.splitlines()
    assert Path(where) == tmp_path / "site" / "octavo" / "__init__.py"
    assert version == f"octavo, version {octavo.__version__}"


def test_every_package_is_listed() -> None:
    packages = {
        ".".join(("octavo", *path.parent.relative_to(ROOT).parts))
        for path in ROOT.rglob("__init__.py")
        if not path.relative_to(ROOT).parts[0].startswith((".", *KEPT_OUT))
    }
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])
    assert PROJECT["project"]["version"] == octavo.__version__


# Requirements


def test_requirements_name_nothing_of_comfyuis() -> None:
    lines = lines_of(ROOT / "requirements.txt")
    assert not names_of(lines) & THEIRS
    assert all(">=" in line and "==" not in line for line in lines)  # a pin would move something
    project = PROJECT["project"]
    known = [*project["dependencies"], *project["optional-dependencies"]["rtx"]]
    assert {line.replace(" ", "") for line in lines} <= {k.replace(" ", "") for k in known}
    for extra in project["optional-dependencies"].values():
        assert not names_of(extra) & {"torch", "numpy"}


def test_requirements_are_all_a_node_pack_imports() -> None:
    needed = names_of(PROJECT["project"]["dependencies"]) - THEIRS - {"click", "rich"}
    assert needed <= names_of(lines_of(ROOT / "requirements.txt"))


@pytest.mark.parametrize("what", [["-r", "requirements.txt"], [".[rtx]", "--no-build-isolation"]])
def test_installing_moves_nothing_of_comfyuis(what: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    source = copy_tree(tmp_path / "octavo")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "install", "--dry-run", "-q", "--report", str(report),
         *what],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    moved = {e["metadata"]["name"].lower() for e in json.loads(report.read_text())["install"]}
    assert not moved & THEIRS, moved


def test_constraints_cover_what_ci_installs() -> None:
    pinned = names_of(lines_of(ROOT / "constraints-dev.txt"))
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"]]
    wanted += [r for extra in ("rtx", "verify", "quantize") for r in extras[extra]]
    assert names_of(wanted) - {"octavo"} <= pinned


# The folder as a node pack

NODE_PACK = """
import importlib.util, json, sys
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "octavo":
            raise ImportError("the pack imported itself by a name it does not have")

sys.meta_path.insert(0, Refuse())
folder, model, cache = sys.argv[1:]
name = folder.replace(".", "_x_")  # as ComfyUI's nodes.py names a custom node
spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
sys.modules[name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
heavy = {"torch", "tensorrt_rtx", "onnx", "modelopt", "transformers", "diffusers"}
assert not heavy & set(sys.modules), "loading the pack imports too much"

def module(path):
    return importlib.import_module(f"{name}.{path}")

result = module("compile").build(
    model,
    [module("trt.gpus").gpu_from_name("rtx4090")],
    recipe=module("recipes").load_recipe("bf16"),
    cache=module("engine_cache").EngineCache(Path(cache)),
)
assert "octavo" not in sys.modules
print(json.dumps(result.facts()))
"""


def test_a_folder_with_a_strange_name_builds(tmp_path: Path) -> None:
    """As ComfyUI loads custom_nodes/: by path, under a name nobody could import."""
    folder = copy_tree(tmp_path / "custom_nodes" / "ComfyUI-Octavo v1.2 (é)")
    model = save(tmp_path / "tiny.safetensors", tiny_tensors())
    for name in ("json", "onnx", "errors", "trt"):  # a host's folder holds anything
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", NODE_PACK, str(folder), str(model), str(tmp_path / "cache")],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (encoder,) = json.loads(done.stdout)["encoders"]
    (engine,) = encoder["engines"]
    assert engine["sms"] == [89] and os.path.getsize(engine["path"]) == engine["bytes"] > 1e6


def test_import_is_light() -> None:
    """`import octavo` takes well under 50 ms and brings in none of the heavy packages."""
    code = (
        "import sys, time\nstart = time.perf_counter()\nimport octavo\n"
        "seconds = time.perf_counter() - start\n"
        "heavy = {'tensorrt', 'tensorrt_rtx', 'torch', 'modelopt', 'onnx', 'onnxruntime', "
        "'transformers', 'diffusers', 'numpy'}\n"
        "assert not heavy & set(sys.modules)\nprint(seconds)\n"
    )
    command = [sys.executable, "-P", "-c", code]
    times = [float(subprocess.check_output(command, text=True)) for _ in range(3)]
    assert min(times) < 0.05
