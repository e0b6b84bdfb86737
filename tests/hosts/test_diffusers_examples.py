# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The examples and the README's lines do what they say, offline."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import octavo
import pytest
import tiny_pipelines as tiny
import torch
from asked import served
from octavo.engine_cache import EngineCache
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"


@pytest.fixture
def _cached(cache: EngineCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(cache.root))


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_pretrained` by a real name gives the tiny pipeline of that kind; `to` stays here."""
    for kind, make in (("StableDiffusionXLPipeline", tiny.sdxl), ("FluxPipeline", tiny.flux)):
        real = getattr(diffusers, kind)

        def load(name: str, *, make: Any = make, **options: Any) -> Any:
            assert options["torch_dtype"] in (torch.float16, torch.bfloat16)
            pipe = make()
            pipe.set_progress_bar_config(disable=True)
            pipe.to = lambda device: pipe
            kind = type(pipe)
            monkeypatch.setattr(kind, "__call__", _small(kind.__call__))
            return pipe

        monkeypatch.setattr(real, "from_pretrained", load)


def _small(call: Any) -> Any:
    if getattr(call, "small", False):
        return call

    def quick(pipe: Any, prompt: str, **options: Any) -> Any:
        options |= {"height": 32, "width": 32, "num_inference_steps": 1}
        if hasattr(pipe, "transformer"):
            options["max_sequence_length"] = 64
        return call(pipe, prompt, **options)

    quick.small = True  # type: ignore[attr-defined]
    return quick


@pytest.mark.usefixtures("_cached")
def test_offline_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "sdxl_offline.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "picture: (1, 32, 32, 3)" in out
    assert out.count("torch_fp8, recipe fp8") == 2


@pytest.mark.usefixtures("_cached", "_offline")
@pytest.mark.parametrize("name", ["sdxl.py", "flux.py"])
def test_examples_by_name(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    available = torch.cuda.is_available

    def to_the_example() -> bool:
        return sys._getframe(1).f_code.co_filename.endswith(name) or available()

    monkeypatch.setattr(torch.cuda, "is_available", to_the_example)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.count("torch_fp8, recipe fp8") == 2
    assert len(list(tmp_path.glob("*.png"))) == 1


def installed_by(extra: str) -> Iterator[importlib.metadata.Distribution]:
    """What `pip install ".[EXTRA]"` would bring, of what is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    known: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if needed and requirement.name not in known:
            known.add(requirement.name)
            try:
                found = importlib.metadata.distribution(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                continue  # torch's for CUDA, beside a torch without it
            yield found
            wanted += found.requires or []


AFTER_THE_EXTRA = """
import pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
for absent in ("pytest", "hypothesis", "onnxruntime", "modelopt"):  # this is not our own .venv
    assert absent not in sys.modules and not __import__("importlib.util").util.find_spec(absent)
from diffusers.utils import is_accelerate_available, is_peft_available
assert is_accelerate_available() and is_peft_available()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.skipif(os.name == "nt", reason="makes links")
def test_the_extra_is_enough(tmp_path: Path) -> None:
    """`pip install ".[diffusers]"` and `python examples/sdxl_offline.py`, as the README says."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "octavo").symlink_to(ROOT, target_is_directory=True)
    for distribution in installed_by("diffusers"):
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "OCTAVO_"))}
    changed = {"PYTHONPATH": str(site), "OCTAVO_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", AFTER_THE_EXTRA, str(EXAMPLES / "sdxl_offline.py")],
        env={**kept, **changed}, cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "picture: (1, 32, 32, 3)" in done.stdout


def test_every_example_is_listed_and_parses() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert path.name in listed
        ast.parse(path.read_text(encoding="utf-8"))


def _section() -> str:
    text = README.read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return next(part for part in parts if part.startswith("diffusers"))


@pytest.mark.usefixtures("_cached", "_offline")
def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", _section(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, Any] = {
        "torch": torch,
        "model": "stabilityai/stable-diffusion-xl-base-1.0",
        "StableDiffusionXLPipeline": diffusers.StableDiffusionXLPipeline,
    }
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # noqa: S102 - our own words
    assert "torch_fp8, recipe fp8" in capsys.readouterr().out
    assert served(names["pipe"].text_encoder) == 0  # restored


def test_readme_lists_every_option() -> None:
    assert isinstance(octavo, ModuleType)
    shown = inspect.signature(octavo.accelerate).parameters
    for name, parameter in shown.items():
        if name != "pipe":
            assert f"{name}={parameter.default!r}".replace("'", '"') in _section()
