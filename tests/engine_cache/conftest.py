# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo.engine_cache import CheckpointKey, EngineCache, Entry, Kind, PlanKey

PLAN: dict[str, Any] = {
    "flavour": "tensorrt_rtx",
    "version": "1.7.1",
    "cuda": "cu13",
    "sms": (89, 120),
    "profile": {"batch": [1, 2, 16], "positions": 77, "mask": False},
    "program": 1,
    "architecture": {"encoder": "clip", "layers": 12, "width": 768, "layer_norm_eps": 1e-5},
    "structure": {"body": "fp16", "fp8": ["q_proj", "k_proj"]},
    "weights": "shared",
}
CHECKPOINT: dict[str, Any] = {
    "spec_facts": {"encoder": "clip", "layers": 12, "width": 768},
    "body": "b" * 64,
    "projection": "c" * 64,
    "recipe": "d" * 64,
    "calibration": "octavo-512:128",
    "schema": 1,
}


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "cache", budget_bytes=2**30)


@pytest.fixture
def plan_key() -> Callable[..., PlanKey]:
    return lambda **changes: PlanKey(**{**PLAN, **changes})


@pytest.fixture
def checkpoint_key() -> Callable[..., CheckpointKey]:
    return lambda **changes: CheckpointKey(**{**CHECKPOINT, **changes})


@pytest.fixture
def stored(cache: EngineCache, plan_key: Callable[..., PlanKey]) -> Entry:
    """A plan in the cache, seen to be a hit: what a fault is then put on."""
    key = plan_key()
    cache.put("plan", key, lambda file: file.write(b"plan bytes " * 1000), {"layers": 48})
    entry = cache.get("plan", key)
    assert entry is not None
    assert entry.path.read_bytes() == b"plan bytes " * 1000
    return entry


@pytest.fixture
def left() -> Callable[[EngineCache, Kind], list[str]]:
    """The names in one folder of a cache."""

    def names(cache: EngineCache, kind: Kind) -> list[str]:
        folder = cache.root / f"{kind}s"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    return names


PRELUDE = f"""
import os, sys, time
from pathlib import Path
from octavo.engine_cache import *
cache = EngineCache(Path(sys.argv[1]))
key = PlanKey(**{PLAN!r})
def say(text):
    print(text, flush=True)
def await_go(path):
    while not os.path.exists(path):
        time.sleep(0.005)
"""


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python on PRELUDE plus a script, argv[1] the cache's root; all are killed later."""
    running: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-c", PRELUDE + script, *map(str, arguments)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
