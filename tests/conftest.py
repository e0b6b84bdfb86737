# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Makes `octavo` importable without an installation, and lists what was skipped and why."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("octavo") is None:
    # As ComfyUI does: the folder may have any name, the package is what lies in it.
    spec = importlib.util.spec_from_file_location(
        "octavo", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["octavo"] = package
    spec.loader.exec_module(package)


def _has_fp8_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = None
    checkout = os.environ.get("OCTAVO_COMFYUI")
    if checkout and not (Path(checkout) / "comfy").is_dir():
        raise pytest.UsageError(f"OCTAVO_COMFYUI={checkout}: there is no ComfyUI; name a checkout")
    for item in items:
        if item.get_closest_marker("gpu"):
            gpu = _has_fp8_gpu() if gpu is None else gpu
            if not gpu:
                item.add_marker(
                    pytest.mark.skip(reason="needs an NVIDIA GPU with FP8 (SM 8.9 or newer)")
                )
        if item.get_closest_marker("comfyui") and not checkout:
            item.add_marker(pytest.mark.skip(reason="needs OCTAVO_COMFYUI=<a ComfyUI checkout>"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may see or fill the user's cache."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo-cache"))
    monkeypatch.delenv("OCTAVO_CACHE_BUDGET", raising=False)
    monkeypatch.delenv("OCTAVO_ENGINE", raising=False)
