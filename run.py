#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Set up and run Octavo on a fresh machine with nothing but Python 3.11 to 3.13.

    python run.py demo [--model FILE]   from a checkpoint to TensorRT engines for two GPUs
    python run.py test [pytest args]    lint, types and every test
    python run.py doctor                what this Python has and which engine could serve

`demo` and `test` work in .venv beside this file and leave your Python alone; `doctor` uses the
Python it is started with, for example ComfyUI's own, and installs nothing.
"""

from __future__ import annotations

import contextlib
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


class SetUpError(Exception):
    """Why nothing can be set up here, in one sentence that says what to do."""


def main(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command == "doctor":
        return doctor(arguments[1:])
    if command not in ("demo", "test"):
        asked = command in ("", "-h", "--help")
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else complain(f"there is no '{command}'; name one of these commands.", 2)
    try:
        set_up()
        return demo(arguments[1:]) if command == "demo" else test(arguments[1:])
    except SetUpError as error:
        return complain(str(error), 2)
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        return complain(f"'{command}' failed with {error.returncode}; see above.", 2)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return complain(f"{what}; check the disk and the folder's permissions.", 2)
    except KeyboardInterrupt:
        return complain("cancelled.", 130)


def say(text: str) -> None:
    print(f"-- {text}", flush=True)


def complain(sentence: str, code: int) -> int:
    print(f"run.py: {sentence}", file=sys.stderr)
    return code


def run(*command: object, environment: dict[str, str] | None = None) -> None:
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, env=environment)


def hand_over(*command: object, environment: dict[str, str] | None = None) -> int:
    """Become `command` where the system can: signals then reach it and nothing in between."""
    words = [str(c) for c in command]
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(words[0], words, environment or dict(os.environ))
    return subprocess.call(words, env=environment)


def set_up() -> None:
    """Make .venv and install into it, once for each content of pyproject and constraints."""
    low, high = SUPPORTED
    mine = "{}.{}".format(*sys.version_info[:2])
    if not low <= sys.version_info[:2] <= high:
        raise SetUpError(f"Python {mine} found, 3.11 to 3.13 needed; start it with one of those.")
    theirs = venv_version()
    if PYTHON.exists() and theirs not in (None, mine):
        raise SetUpError(
            f"{VENV} holds Python {theirs} and this is Python {mine}; "
            "start run.py with the former, or delete that folder."
        )
    files = [ROOT / "pyproject.toml", ROOT / "constraints-dev.txt"]
    wanted = hashlib.sha256(b"".join(f.read_bytes() for f in files))
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted.hexdigest():
        return
    if not has_pip():
        say(f"making {VENV.name} with Python {sys.version.split()[0]}")
        make_venv()
    say("installing torch, TensorRT-RTX, ONNX, ModelOpt and the test tools (minutes, once)")
    # -P, here and below: no module of the current folder may be taken for one of the tools'.
    pip = (PYTHON, "-P", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", "-c", "constraints-dev.txt", "torch", "numpy", "setuptools", "wheel")
    run(*pip, "install", "-q", "-c", "constraints-dev.txt", "-e", ".[dev]")
    STAMP.write_text(wanted.hexdigest())


def venv_version() -> str | None:
    """ "3.11" as .venv's own configuration tells; None where it does not."""
    with contextlib.suppress(OSError):
        for line in (VENV / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            if name.strip() in ("version", "version_info"):
                return ".".join(value.strip().split(".")[:2])
    return None


def has_pip() -> bool:
    """Whether .venv is whole: a set-up that was cancelled may have left half of one."""
    return PYTHON.exists() and subprocess.call([str(PYTHON), "-c", "import pip"]) == 0


def make_venv() -> None:
    if importlib.util.find_spec("ensurepip") and importlib.util.find_spec("venv"):
        run(sys.executable, "-P", "-m", "venv", VENV)
        return
    # Debian's Python comes without ensurepip; virtualenv brings its own pip.
    if not importlib.util.find_spec("pip"):
        raise SetUpError(
            "this Python has neither ensurepip nor pip, so no environment can be made; "
            "install one of them (on Debian: apt install python3-venv)."
        )
    with tempfile.TemporaryDirectory() as folder:
        install = (sys.executable, "-m", "pip", "install", "-q", "--target", folder, "virtualenv")
        run(*install)
        environment = {**os.environ, "PYTHONPATH": folder}
        run(sys.executable, "-m", "virtualenv", "-q", VENV, environment=environment)


def demo(arguments: list[str]) -> int:
    """In the user's own folder, for `--model` may be relative to it, but not with its modules."""
    folder = os.path.relpath(ROOT) if Path.cwd() == ROOT else ROOT
    place = ("--folder", Path(folder, "build", "demo"))
    return hand_over(PYTHON, "-P", "-m", "octavo.demo", *place, *arguments)


def test(arguments: list[str]) -> int:
    """Lint, types, tests. With arguments, only pytest with them."""
    # -P keeps the root off sys.path: `import nodes` there would find ours instead of ComfyUI's.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    pytest = (PYTHON, "-m", "pytest", "--confcutdir=tests", *arguments)
    os.chdir(ROOT)
    if not arguments:
        say("ruff")
        run(PYTHON, "-P", "-m", "ruff", "check", ".")
        run(PYTHON, "-P", "-m", "ruff", "format", "--check", ".")
        say("mypy --strict")
        check_types()
        say("pytest")
    return hand_over(*pytest, environment=environment)


def check_types() -> None:
    """mypy wants a folder named like the package, and this folder may have any name: use a copy."""
    copy = VENV / "typecheck"
    shutil.rmtree(copy, ignore_errors=True)
    skipped = shutil.ignore_patterns(
        ".*", "tests", "benchmarks", "tools", "examples", "build", "run.py"
    )
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
