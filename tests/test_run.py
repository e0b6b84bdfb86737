# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""`run.py` without a network: what it decides, what it would run, and in which folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from pipeline import ROOT

posix = pytest.mark.skipif(os.name == "nt", reason="the stand-ins for Python are shell scripts")
MINE = "{}.{}".format(*sys.version_info[:2])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`run.py` as a module, at home in a folder of its own."""
    spec = importlib.util.spec_from_file_location("octavo_run", ROOT / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    home = tmp_path / "clone"
    home.mkdir()
    for name in ("pyproject.toml", "constraints-dev.txt"):
        shutil.copy(ROOT / name, home)
    monkeypatch.setattr(module, "ROOT", home)
    monkeypatch.setattr(module, "VENV", home / ".venv")
    monkeypatch.setattr(module, "PYTHON", home / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "STAMP", home / ".venv" / "octavo-installed")
    return module


def script(path: Path, lines: str) -> None:
    """A stand-in for .venv's Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + lines)
    path.chmod(0o755)


class Commands:
    """Takes the place of `run`: keeps the commands, and lets `act` stand for what they do."""

    def __init__(self, act: Callable[[tuple[str, ...]], object] = lambda _: None) -> None:
        self.seen: list[tuple[str, ...]] = []
        self.environments: list[dict[str, str] | None] = []
        self.act = act

    def __call__(self, *command: object, environment: dict[str, str] | None = None) -> None:
        self.seen.append(tuple(map(str, command)))
        self.environments.append(environment)
        self.act(self.seen[-1])


# Arguments


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--help"], 0), (["-h"], 0)])
def test_help(
    run: ModuleType, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments) == code
    out, err = capsys.readouterr()
    assert "python run.py demo [--model FILE]" in out and err == ""


def test_unknown_command(run: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["dmeo"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "python run.py test" in err
    assert err.endswith("run.py: there is no 'dmeo'; name one of these commands.\n")


def test_arguments_reach_the_command(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(run, "set_up", lambda: seen.append(("set_up", [])))
    for name in ("demo", "test", "doctor"):
        monkeypatch.setattr(run, name, lambda a, name=name: seen.append((name, a)) or 5)
        assert run.main([name, "--json", "x"]) == 5
    set_up = ("set_up", [])
    rest = ["--json", "x"]
    assert seen == [set_up, ("demo", rest), set_up, ("test", rest), ("doctor", rest)]


# Refusals


def test_unsupported_python(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "SUPPORTED", ((3, 97), (3, 99)))
    assert run.main(["demo"]) == 2
    said = f"run.py: Python {MINE} found, 3.11 to 3.13 needed; start it with one of those.\n"
    assert capsys.readouterr().err == said
    assert not run.VENV.exists()


@posix
def test_environment_of_another_python(run: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script(run.PYTHON, "exit 0\n")
    for text, refused in (
        ("version = 3.9.1\n", True),
        (f"version = {MINE}.1\n", False),
        ("", False),
    ):
        (run.VENV / "pyvenv.cfg").write_text("home = /usr/bin\n" + text)
        assert run.venv_version() == (text.split()[-1].rpartition(".")[0] if text else None)
        if refused:
            assert run.main(["test"]) == 2
            assert f"holds Python 3.9 and this is Python {MINE};" in capsys.readouterr().err


def test_no_way_to_make_an_environment(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands()
    monkeypatch.setattr(run, "run", commands)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert run.main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("run.py: this Python has neither ensurepip nor pip,")
    assert commands.seen == []


def test_python_without_ensurepip(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's: virtualenv goes to a temporary folder, and from there makes .venv."""
    commands = Commands()
    monkeypatch.setattr(run, "run", commands)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        run.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find(name)
    )
    run.make_venv()
    install, make = commands.seen
    assert install[:4] == (sys.executable, "-m", "pip", "install") and "--target" in install
    folder = install[install.index("--target") + 1]
    assert make == (sys.executable, "-m", "virtualenv", "-q", str(run.VENV))
    assert commands.environments[1] and commands.environments[1]["PYTHONPATH"] == folder
    assert not Path(folder).exists()  # nothing of it stays


# Set-up happens once


@posix
def test_stamp(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(command: tuple[str, ...]) -> None:
        if "venv" in command:
            script(run.PYTHON, "exit 0\n")

    commands = Commands(act)
    monkeypatch.setattr(run, "run", commands)
    run.set_up()
    venv, tools, package = commands.seen
    assert venv == (sys.executable, "-P", "-m", "venv", str(run.VENV))
    for install in (tools, package):
        assert install[:4] == (str(run.PYTHON), "-P", "-m", "pip")
        assert install[install.index("-c") + 1] == "constraints-dev.txt"
    assert package[-2:] == ("-e", ".[dev]")
    run.set_up()
    assert len(commands.seen) == 3
    with (run.ROOT / "constraints-dev.txt").open("a") as file:
        file.write("another==1\n")
    run.set_up()
    assert commands.seen[3:] == [tools, package]  # the environment itself is kept
    shutil.rmtree(run.VENV)
    run.set_up()
    assert commands.seen[5:] == [venv, tools, package]


@posix
def test_half_an_environment_is_made_again(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set-up that was cancelled before pip was there."""
    script(run.PYTHON, "exit 1\n")
    commands = Commands()
    monkeypatch.setattr(run, "run", commands)
    run.set_up()
    assert "venv" in commands.seen[0]


@posix
@pytest.mark.parametrize(
    "error", [subprocess.CalledProcessError(3, ["pip", "-q"]), KeyboardInterrupt()]
)
def test_failed_set_up_is_not_stamped(
    run: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    script(run.PYTHON, "exit 0\n")

    def fail(command: tuple[str, ...]) -> None:
        raise error

    monkeypatch.setattr(run, "run", Commands(fail))
    code = run.main(["demo"])
    said = capsys.readouterr().err
    if isinstance(error, KeyboardInterrupt):
        assert (code, said) == (130, "run.py: cancelled.\n")
    else:
        assert (code, said) == (2, "run.py: 'pip -q' failed with 3; see above.\n")
    assert not run.STAMP.exists()


def test_a_folder_that_cannot_be_written(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr(run, "make_venv", fail)
    assert run.main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "run.py: /x: Permission denied; check the disk and the folder's permissions.\n"
    )


# The commands themselves, with a stand-in for .venv's Python


@pytest.fixture
def clone(run: ModuleType) -> Path:
    """A folder whose set-up is done; its Python writes what it is asked into `calls`."""
    home: Path = run.ROOT
    shutil.copy(ROOT / "run.py", home)
    script(
        home / ".venv" / "bin" / "python",
        f'echo "$PWD|$PYTHONSAFEPATH|$*" >> "{home}/calls"\n'
        'case "$*" in *"$FAIL"*) exit 7;; *sleep*) exec sleep 60;; esac\n',
    )
    digest = run.hashlib.sha256(
        b"".join((home / n).read_bytes() for n in ("pyproject.toml", "constraints-dev.txt"))
    )
    run.STAMP.write_text(digest.hexdigest())
    return home


def called(
    clone: Path, *arguments: str, folder: Path, fail: str = "nothing"
) -> tuple[int, list[str]]:
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(clone / "run.py"), *arguments],
        cwd=folder, env={**environment, "FAIL": fail}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    calls = clone / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


@posix
def test_demo_runs_in_the_users_folder(clone: Path, tmp_path: Path) -> None:
    """So that a relative --model means what it says."""
    arguments = ("demo", "--model", "my model.safetensors")
    code, calls = called(clone, *arguments, folder=tmp_path, fail="octavo.demo")
    folder = clone / "build" / "demo"
    tail = "--model my model.safetensors"
    assert calls == [f"{tmp_path}||-P -m octavo.demo --folder {folder} {tail}"]
    assert code == 7  # the demo's own
    code, calls = called(clone, *arguments, folder=clone)
    assert (code, calls[1]) == (0, f"{clone}||-P -m octavo.demo --folder build/demo {tail}")


@posix
def test_signals_reach_the_demo(clone: Path, tmp_path: Path) -> None:
    """Nothing stands between: the process that is told is the demo."""
    process = subprocess.Popen(
        [sys.executable, str(clone / "run.py"), "demo", "sleep"], env={**os.environ, "FAIL": "no"}
    )
    while not (clone / "calls").exists() or not (clone / "calls").read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM


@posix
def test_test_runs_everything_in_order(clone: Path, tmp_path: Path) -> None:
    (clone / "tests").mkdir()
    (clone / "tests" / "test_x.py").touch()
    (clone / "module.py").touch()
    code, calls = called(clone, "test", folder=tmp_path)
    assert code == 0
    folders = [call.split("|")[0] for call in calls]
    words = [call.split("|")[2] for call in calls]
    assert words[0] == "-P -m ruff check ."
    assert words[1] == "-P -m ruff format --check ."
    assert words[2].startswith("-m mypy --config-file") and words[2].endswith("-p octavo")
    assert words[3] == "-m pytest --confcutdir=tests"
    copy = clone / ".venv" / "typecheck"  # mypy needs a folder that is named like the package
    assert folders == [str(clone), str(clone), str(copy), str(clone)]
    assert sorted(p.name for p in (copy / "octavo").iterdir()) == [
        "calls", "constraints-dev.txt", "module.py", "pyproject.toml",
    ]  # fmt: skip
    assert calls[3].split("|")[1] == "1"  # PYTHONSAFEPATH


@posix
@pytest.mark.parametrize(("fail", "last"), [("ruff check", 1), ("--check", 2), ("mypy", 3)])
def test_test_stops_at_the_first_fault(clone: Path, fail: str, last: int) -> None:
    code, calls = called(clone, "test", folder=clone, fail=fail)
    assert (code, len(calls)) == (2, last)


@posix
def test_test_with_arguments_is_pytest_alone(clone: Path, tmp_path: Path) -> None:
    code, calls = called(clone, "test", "tests/test_x.py", "-x", folder=tmp_path, fail="pytest")
    assert code == 7  # pytest's own
    assert [c.split("|")[2] for c in calls] == ["-m pytest --confcutdir=tests tests/test_x.py -x"]
