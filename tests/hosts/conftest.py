# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny real pipelines, served by simulated FP8 on a CPU: the device is invented."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import octavo
import pytest
import torch
from octavo import calibrate
from octavo.engine_cache import EngineCache
from octavo.hosts import diffusers as host

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "examples")]

from asked import ADA, NO_TENSORRT  # noqa: E402 - found through the line above


@pytest.fixture(autouse=True)
def _an_rtx_4090(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host, "facts", lambda device: (ADA, NO_TENSORRT))
    monkeypatch.setattr(calibrate, "has_modelopt", lambda: False)  # seconds to import
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> EngineCache:
    return EngineCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def accelerate(cache: EngineCache) -> Iterator[Callable[..., Any]]:
    """`octavo.accelerate` with a cache that the tests share; undone at the end."""
    pipes = []

    def call(pipe: Any, **options: Any) -> Any:
        pipes.append(pipe)
        return octavo.accelerate(pipe, **{"cache": cache, **options})

    yield call
    for pipe in pipes:
        octavo.restore(pipe)
