# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The examples and the README's lines do what they say, offline."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
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
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.count("torch_fp8, recipe fp8") == 2
    assert len(list(tmp_path.glob("*.png"))) == 1


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
