# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What the node "FP8 Environment" shows where something that it shows is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline import ROOT

pytestmark = pytest.mark.comfyui

SCRIPT = """
import sys
import importlib.util
checkout, root = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "octavo", root + "/__init__.py", submodule_search_locations=[root]
)
sys.modules["octavo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["octavo"])
sys.path.insert(0, checkout)
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
from octavo.hosts.comfy_compare import environment
print(environment(verify=True))
"""


def shown(folder: Path, **variables: str) -> str:
    python = os.environ.get("OCTAVO_COMFYUI_PYTHON", sys.executable)
    checkout = Path(os.environ["OCTAVO_COMFYUI"]).resolve()
    kept = {n: v for n, v in os.environ.items() if not n.startswith("OCTAVO_")}
    done = subprocess.run(
        [python, "-c", SCRIPT, str(checkout), str(ROOT)], env={**kept, **variables}, cwd=folder,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("fault", ["budget", "file"])
def test_a_broken_cache_is_named_and_the_rest_is_shown(fault: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    if fault == "budget":
        text = shown(tmp_path, OCTAVO_CACHE_BUDGET="lots")
        assert "the cache cannot be used: OCTAVO_CACHE_BUDGET: 'lots' is not a size" in text
    else:
        text = shown(tmp_path, OCTAVO_CACHE=str(tmp_path / "file"), OCTAVO_ENGINE="quick")
        assert f"the cache cannot be used: cache {tmp_path / 'file'}: a file and a folder" in text
        assert "OCTAVO_ENGINE: the engine 'quick' does not exist" in text
    assert "Engines on CPU" in text and "Building plans" in text


def test_a_sound_cache_is_checked(tmp_path: Path) -> None:
    text = shown(tmp_path, OCTAVO_CACHE=str(tmp_path / "cache"))
    assert f"{tmp_path / 'cache'} (writable)" in text and "checked: 0 entries, 0 faults" in text
