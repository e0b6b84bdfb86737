#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Set up and run Octavo on a fresh machine with nothing but Python 3.11 to 3.13.

    python run.py demo [--model FILE]   from a checkpoint to TensorRT engines for two GPUs
    python run.py test [pytest args]    lint, types and every test
    python run.py doctor                what this Python has and which engine could serve

`demo` and `test` work in .venv beside this file and leave your Python alone; `doctor` uses the Python
it is started with, for example ComfyUI's own, and installs nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "octavo-installed"
SUPPORTED = ((3, 11), (3, 13))


def main(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command == "doctor":
        return doctor(arguments[1:])
    if command not in ("demo", "test"):
        print(__doc__)
        return 0 if command in ("", "-h", "--help") else 2
    try:
        set_up()
        return demo(arguments[1:]) if command == "demo" else test(arguments[1:])
    except subprocess.CalledProcessError as error:
        print(f"run.py: '{' '.join(map(str, error.cmd))}' failed with {error.returncode}.")
        return 2
    except KeyboardInterrupt:
        print("run.py: cancelled.")
        return 130


def say(text: str) -> None:
    print(f"-- {text}", flush=True)


def run(*command: object, environment: dict[str, str] | None = None) -> None:
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, env=environment)


def set_up() -> None:
    """Make .venv and install into it, once for each content of pyproject and constraints."""
    low, high = SUPPORTED
    if not low <= sys.version_info[:2] <= high:
        found = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"run.py: Python {found} found, 3.11 to 3.13 needed; start it with one of those.")
    files = [ROOT / "pyproject.toml", ROOT / "constraints-dev.txt"]
    wanted = hashlib.sha256(b"".join(f.read_bytes() for f in files) + sys.version.encode())
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted.hexdigest():
        return
    if not PYTHON.exists():
        say(f"making {VENV.name} with Python {sys.version.split()[0]}")
        make_venv()
    say("installing torch, TensorRT-RTX, ONNX, ModelOpt and the test tools (minutes, once)")
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", "-c", "constraints-dev.txt", "torch", "numpy", "setuptools", "wheel")
    run(*pip, "install", "-q", "-c", "constraints-dev.txt", "-e", ".[dev]")
    STAMP.write_text(wanted.hexdigest())


def make_venv() -> None:
    if importlib.util.find_spec("ensurepip") and importlib.util.find_spec("venv"):
        run(sys.executable, "-m", "venv", VENV)
        return
    # Debian's Python comes without ensurepip; virtualenv brings its own pip.
    if not importlib.util.find_spec("pip"):
        sys.exit(
            "run.py: this Python has neither ensurepip nor pip, so no environment can be made; "
            "install one of them (on Debian: apt install python3-venv)."
        )
    with tempfile.TemporaryDirectory() as folder:
        install = (sys.executable, "-m", "pip", "install", "-q", "--target", folder, "virtualenv")
        run(*install)
        environment = {**os.environ, "PYTHONPATH": folder}
        run(sys.executable, "-m", "virtualenv", "-q", VENV, environment=environment)


def demo(arguments: list[str]) -> int:
    return subprocess.call([str(PYTHON), "-m", "octavo.demo", *arguments], cwd=ROOT)


def test(arguments: list[str]) -> int:
    """Lint, types, tests. With arguments, only pytest with them."""
    # -P keeps the root off sys.path: `import nodes` there would find ours instead of ComfyUI's.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    pytest = (PYTHON, "-m", "pytest", "--confcutdir=tests", *arguments)
    if not arguments:
        say("ruff")
        run(PYTHON, "-m", "ruff", "check", ".")
        run(PYTHON, "-m", "ruff", "format", "--check", ".")
        say("mypy --strict")
        check_types()
        say("pytest")
    return subprocess.call([str(c) for c in pytest], cwd=ROOT, env=environment)


def check_types() -> None:
    """mypy wants a folder named like the package, and this folder may have any name: use a copy."""
    copy = VENV / "typecheck"
    shutil.rmtree(copy, ignore_errors=True)
    skipped = shutil.ignore_patterns(".*", "tests", "benchmarks", "tools", "examples", "build", "run.py")
    shutil.copytree(ROOT, copy / "octavo", ignore=skipped)
    config = ("--config-file", ROOT / "pyproject.toml")
    environment = {**os.environ, "MYPYPATH": str(copy)}
    command = [str(c) for c in (PYTHON, "-m", "mypy", *config, "-p", "octavo")]
    subprocess.run(command, check=True, cwd=copy, env=environment)


def doctor(arguments: list[str]) -> int:
    """Load the package from this folder, whatever the folder is called, and ask it."""
    init = ROOT / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        "octavo", init, submodule_search_locations=[str(ROOT)]
    )
    assert spec and spec.loader
    package = importlib.util.module_from_spec(spec)
    sys.modules["octavo"] = package
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
    spec.loader.exec_module(package)
    module = importlib.import_module("octavo.doctor")
    return int(module.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
