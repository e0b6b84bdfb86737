# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of the whole job share: tiny model files, the job itself, and the command line."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from octavo.compile import BuildResult, Progress
from octavo.compile import build as compile_build
from octavo.encoders.clip import ClipSpec
from octavo.engine_cache import EngineCache
from octavo.recipes import load_recipe
from octavo.seeded import TINY, seeded_tensors
from octavo.trt.gpus import gpu_from_name
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
DEEP = replace(TINY, layers=12)  # seconds of calibration and of compilation, to be interrupted
PROMPTS = 8  # calibration prompts where their number does not matter

Tensors = dict[str, torch.Tensor]


def _packagings() -> ModuleType:
    """tests/checkpoints/packagings.py, which pytest puts on the path for its own folder only."""
    path = ROOT / "tests" / "checkpoints" / "packagings.py"
    spec = importlib.util.spec_from_file_location("packagings", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


packagings = _packagings()


def tiny_tensors(spec: ClipSpec = TINY, **options: Any) -> Tensors:
    """Without outlier channels: at this width they cost FP8 more than its floor allows."""
    return dict(seeded_tensors(spec, **{"outliers": False, **options}))


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, path, {"format": "pt"})
    return path


def build(path: Path, *gpus: str, cache: Path, **options: Any) -> BuildResult:
    """The job in this process. `recipe` by name; `prompts` of calibration."""
    recipe = load_recipe(options.pop("recipe", "fp8"))
    recipe = recipe.with_options(None, options.pop("prompts", PROMPTS))
    named = [gpu_from_name(gpu) for gpu in gpus or ("rtx4090",)]
    return compile_build(path, named, recipe=recipe, cache=EngineCache(cache), **options)


def copy_of(cache: Path, target: Path) -> Path:
    """A filled cache that a test may spoil; entries lie under the same names anywhere."""
    shutil.copytree(cache, target)
    return target


def artifacts(cache: Path, kind: str) -> list[Path]:
    return sorted(p for p in (cache / kind).glob("*") if p.suffix in (".safetensors", ".plan"))


def partial_files(*roots: Path) -> list[str]:
    """What a job that ended in any way must not have left."""
    found = [path for root in roots for path in root.rglob("*") if path.is_file()]
    return [str(p) for p in found if p.suffix in (".partial", ".tmp") or ".tmp" in p.name]


def builders(of: int | None = None) -> list[psutil.Process]:
    """The TensorRT processes below this one (or `of`) that are alive."""
    found = []
    for child in psutil.Process(of).children(recursive=True):
        try:
            dead = child.status() == psutil.STATUS_ZOMBIE
            if not dead and "octavo_builder" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are faster on one thread. A module that imports it has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Recorder:
    """A `report` that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Progress] = []

    def __call__(self, event: Progress) -> None:
        self.events.append(event)

    @property
    def phases(self) -> list[str]:
        """In order, each once per run of equal ones."""
        phases = [e.phase for e in self.events]
        return [p for i, p in enumerate(phases) if i == 0 or p != phases[i - 1]]


# The command line in a process of its own

COMMAND = (sys.executable, "-P", "-m", "octavo")


def environment(**changes: str) -> dict[str, str]:
    """Without what the user has set. A fixture of a module must name its cache."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("OCTAVO_", "PYTHONPATH"))}
    cache = os.environ.get("OCTAVO_CACHE", os.devnull)
    return {**kept, "OMP_NUM_THREADS": "1", "OCTAVO_CACHE": cache, **changes}


def octavo(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"timeout": 300, "env": environment(), **options}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts a job."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
        **options,
    )


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Read the progress of `process` until a line holds `words`."""
    assert process.stderr
    seen = []
    while words not in (line := process.stderr.readline()):
        seen.append(line)
        assert line, f"it ended before {words!r}: {''.join(seen)}"


def wait_until(true: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def complaint(stderr: str) -> str:
    """The one sentence that a failed command ends with."""
    assert "Traceback" not in stderr, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("octavo: ")]
    assert len(lines) == 1 and stderr.rstrip().endswith(lines[0]), stderr
    sentence = lines[0].removeprefix("octavo: ")
    assert sentence.endswith(".") and not sentence.endswith(".."), sentence
    return sentence


def kill_group(process: subprocess.Popen[str]) -> None:
    """For the end of a test: the process and all it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# Values against a description of their types

NUMBER = (int, float)


def check(value: object, wanted: Any, where: str = "$") -> None:
    """`wanted`: a type, a tuple of types, [one description], or a dict of exactly these keys."""
    if isinstance(wanted, dict):
        assert isinstance(value, dict), f"{where}: {value!r}"
        assert list(value) == list(wanted), f"{where}: {list(value)}"
        for name, inner in wanted.items():
            check(value[name], inner, f"{where}.{name}")
    elif isinstance(wanted, list):
        assert isinstance(value, list), f"{where}: {value!r}"
        for index, item in enumerate(value):
            check(item, wanted[0], f"{where}[{index}]")
    else:
        types = wanted if isinstance(wanted, tuple) else (wanted,)
        assert type(value) in types, f"{where}: {value!r} is no {wanted}"


def flipped(path: Path, at: int) -> None:
    """Change one byte of a file in place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def walk(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below `folder` with its content."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(folder)), path.read_bytes()
