# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The whole job against a hostile world: signals, kill -9, full disks, spoiled caches, rivals.

Whatever happens: one sentence, nothing partial left, nothing lost, and the next run works.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from octavo.engine_cache import EngineCache
from octavo.trt.header import read_header
from pipeline import (
    COMMAND,
    DEEP,
    artifacts,
    build,
    builders,
    complaint,
    copy_of,
    environment,
    flipped,
    kill_group,
    octavo,
    one_thread,  # noqa: F401 - a fixture
    partial_files,
    save,
    start,
    tiny_tensors,
    wait_for,
    wait_until,
)

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals, limits and devices")
RECIPE = ("--recipe", "bf16")  # without ModelOpt, whose import takes longer than all the rest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "tiny.safetensors", tiny_tensors())


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "deep.safetensors", tiny_tensors(DEEP))


@pytest.fixture(scope="module")
def filled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("filled") / "cache"
    build(tiny, cache=cache, recipe="bf16")
    return cache


@pytest.fixture(scope="module")
def deep_filled(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `deep` without a plan: what follows compiles at once, and for seconds."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    build(deep, cache=cache, recipe="bf16")
    for path in (cache / "plans").iterdir():
        path.unlink()
    return cache


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    return copy_of(filled, tmp_path / "cache")


@pytest.fixture
def deep_cache(deep_filled: Path, tmp_path: Path) -> Path:
    return copy_of(deep_filled, tmp_path / "cache")


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        processes.append(start(*arguments))
        return processes[-1]

    yield run
    for process in processes:
        kill_group(process)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Cancelled

SIGNALS = {
    "SIGINT to the group": lambda p: os.killpg(p.pid, signal.SIGINT),  # Ctrl-C in a terminal
    "SIGINT to the parent": lambda p: os.kill(p.pid, signal.SIGINT),
    "SIGTERM to the group": lambda p: os.killpg(p.pid, signal.SIGTERM),
    "SIGTERM to the parent": lambda p: os.kill(p.pid, signal.SIGTERM),
    "SIGHUP to the group": lambda p: os.killpg(p.pid, signal.SIGHUP),  # the terminal closes
}


def assert_cancelled(process: subprocess.Popen[str], cache: Path) -> None:
    sent = time.monotonic()
    children = psutil.Process(process.pid).children(recursive=True)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - sent < 10
    assert (process.returncode, out) == (130, "")
    assert complaint(err).startswith("cancelled; nothing")
    assert not any(is_alive(child) for child in children)
    assert partial_files(cache) == []
    assert artifacts(cache, "plans") == []


@pytest.fixture
def heard() -> Iterator[None]:
    """Under nohup children would inherit that SIGHUP is ignored, and be right to go on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@posix
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("how", SIGNALS)
def test_stopped_while_compiling(
    how: str, deep: Path, deep_cache: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    arguments = ("build", deep, "--gpu", "rtx4090", *RECIPE, "--cache", deep_cache)
    process = started(*arguments)
    wait_for(process, "Compiling the kernels")
    assert len(builders(process.pid)) == 1
    SIGNALS[how](process)
    assert_cancelled(process, deep_cache)
    if how == "SIGINT to the group":  # usable at once, by the lock too
        done = octavo(*arguments, "--json", "-", timeout=120)
        assert done.returncode == 0, done.stderr
        assert not json.loads(done.stdout)["encoders"][0]["engines"][0]["cached"]


@posix
@pytest.mark.parametrize(
    ("how", "phase", "recipe"),
    [
        ("SIGINT to the group", "calibrating", ("--prompts", 512)),
        ("SIGTERM to the parent", "running the FP32 reference", RECIPE),
    ],
)
def test_stopped_while_calibrating(
    how: str, phase: str, recipe: tuple[object, ...], deep: Path, tmp_path: Path,
    started: Callable[..., subprocess.Popen[str]],
) -> None:  # fmt: skip
    cache = tmp_path / "cache"
    process = started(
        *("build", deep, "--gpu", "rtx4090", *recipe, "--cache", cache),
        *("--output", tmp_path / "out.safetensors", "--json", tmp_path / "out.json"),
    )
    wait_for(process, phase)
    SIGNALS[how](process)
    assert_cancelled(process, cache)
    assert artifacts(cache, "checkpoints") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache"]  # no output, no JSON


@posix
def test_stopped_while_waiting_for_another(
    deep: Path, deep_cache: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    arguments = ("build", deep, "--gpu", "rtx4090", *RECIPE, "--cache", deep_cache)
    first = started(*arguments)
    wait_for(first, "Building engine")
    second = started(*arguments)
    wait_for(second, "waiting for another process")
    os.kill(second.pid, signal.SIGINT)
    _, err = second.communicate(timeout=20)
    assert second.returncode == 130 and "cancelled; nothing partial" in err
    _, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert len(artifacts(deep_cache, "plans")) == 1


# Killed


@posix
@pytest.mark.parametrize("phase", ["running the FP32 reference", "Compiling the kernels"])
def test_killed_with_minus_9(
    phase: str, deep: Path, deep_filled: Path, tmp_path: Path,
    started: Callable[..., subprocess.Popen[str]],
) -> None:  # fmt: skip
    """With the lock held: the next run works at once, and sweeps what was left."""
    compiling = phase == "Compiling the kernels"
    cache = tmp_path / "cache"
    if compiling:
        copy_of(deep_filled, cache)
    arguments = ("build", deep, "--gpu", "rtx4090", *RECIPE, "--cache", cache)
    process = started(*arguments)
    wait_for(process, phase)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == compiling
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_alive(child) for child in children), 5)
    left = cache / "checkpoints" / f"{'a' * 32}.{process.pid}-0123abcd.partial"
    left.touch()  # as if killed in mid write
    start_s = time.monotonic()
    done = octavo(*arguments, "--json", "-", timeout=120)
    assert done.returncode == 0, done.stderr
    assert "waiting" not in done.stderr
    (encoder,) = json.loads(done.stdout)["encoders"]
    assert not encoder["engines"][0]["cached"]
    assert time.monotonic() - start_s < 60
    if not compiling:  # a checkpoint was written, and its folder swept
        assert partial_files(cache) == []


@posix
def test_killed_builder(
    deep: Path, deep_cache: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    """The child alone, as the system does where memory runs out."""
    process = started("build", deep, "--gpu", "rtx4090", *RECIPE, "--cache", deep_cache)
    wait_for(process, "Compiling the kernels")
    (child,) = builders(process.pid)
    child.kill()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    sentence = complaint(err)
    assert sentence.startswith("plan for SM 8.9: the builder was killed (SIGKILL), most likely")
    assert partial_files(deep_cache) == [] and artifacts(deep_cache, "plans") == []


# Two at once


def test_two_builds_at_once(deep: Path, deep_cache: Path) -> None:
    """One compiles, the other waits and takes the result."""
    arguments = ("build", deep, "--gpu", "rtx4090", *RECIPE, "--cache", deep_cache, "--json", "-")
    processes = [start(*arguments) for _ in range(2)]
    results = [process.communicate(timeout=180) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], results
    engines = [json.loads(out)["encoders"][0]["engines"][0] for out, _ in results]
    assert sorted(engine["cached"] for engine in engines) == [False, True]
    assert len({engine["key"] for engine in engines}) == 1
    assert sum("waiting for another process" in err for _, err in results) == 1
    assert len(artifacts(deep_cache, "plans")) == 1 and partial_files(deep_cache) == []


def test_two_whole_jobs_at_once(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    arguments = ("build", tiny, "--gpu", "rtx4090", *RECIPE, "--cache", cache, "--json", "-")
    processes = [start(*arguments) for _ in range(2)]
    results = [process.communicate(timeout=180) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], results
    paths = [json.loads(out)["encoders"][0]["checkpoint"]["path"] for out, _ in results]
    assert len(set(paths)) == 1 == len(artifacts(cache, "checkpoints"))
    assert len(artifacts(cache, "plans")) == 1 and partial_files(cache) == []
    assert all(c.fault is None for c in EngineCache(cache).verify_all())


# Spoiled entries are built again


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def foreign(path: Path) -> None:
    """As another version of Octavo would have written it."""
    sidecar = path.with_suffix(".json")
    facts = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({**facts, "schema": 99}))


SPOILED: dict[str, Callable[[Path], object]] = {
    "truncated": truncated,
    "empty": lambda p: p.write_bytes(b""),
    "first byte flipped": lambda p: flipped(p, 0),
    "middle byte flipped": lambda p: flipped(p, p.stat().st_size // 2),
    "last byte flipped": lambda p: flipped(p, p.stat().st_size - 1),
    "without its manifest": lambda p: p.with_suffix(".json").unlink(),
    "manifest without it": lambda p: p.unlink(),
    "manifest truncated": lambda p: truncated(p.with_suffix(".json")),
    "foreign version": foreign,
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("kind", ["checkpoints", "plans"])
def test_spoiled_entry_is_built_again(
    how: str, kind: str, tiny: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = artifacts(cache, kind)
    good = path.read_bytes()
    SPOILED[how](path)
    (built,) = build(tiny, cache=cache, recipe="bf16").encoders
    (engine,) = built.engines
    assert (built.checkpoint_cached, engine.cached) == (kind != "checkpoints", kind != "plans")
    assert len([r for r in caplog.records if "it will be built again" in r.message]) >= 1
    if kind == "checkpoints":
        assert path.read_bytes() == good  # for equal input gives equal bytes
    else:  # a digit in a plan was seen to differ in a long-lived process
        found, wanted = read_header(path), read_header(good)
        assert found and wanted and (found.version, found.sms) == (wanted.version, wanted.sms)
    (again,) = build(tiny, cache=cache, recipe="bf16").encoders
    assert again.checkpoint_cached and again.engines[0].cached
    assert partial_files(cache) == []


def test_every_byte_of_a_manifest_matters_or_is_harmless(tiny: Path, cache: Path) -> None:
    """A flipped byte in free facts must not turn a good checkpoint into a refused one."""
    (checkpoint,), (plan,) = artifacts(cache, "checkpoints"), artifacts(cache, "plans")
    for path in (checkpoint, plan):
        sidecar = path.with_suffix(".json")
        good, content = sidecar.read_bytes(), path.read_bytes()
        for at in range(3, len(good), len(good) // 4):
            flipped(sidecar, at)
            (built,) = build(tiny, cache=cache, recipe="bf16").encoders
            assert built.similarity["token_mean"] > 0.9999
            assert built.checkpoint.path.read_bytes() == checkpoint.read_bytes()
            sidecar.write_bytes(good)
            path.write_bytes(content)


def test_memo_of_another_file(tiny: Path, cache: Path, tmp_path: Path) -> None:
    """A memo that was tampered with costs time, never a wrong key."""
    (cache / "fingerprints.json").write_text('{"schema": 1, "entries": {"x": ')
    (built,) = build(tiny, cache=cache, recipe="bf16").encoders
    assert built.checkpoint_cached and built.engines[0].cached


# Full disks

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from octavo.cli import main
sys.exit(main(sys.argv[2:]))
"""


def with_file_limit(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command where no file, nor the child's, can grow beyond `size` bytes."""
    command = [sys.executable, "-P", "-c", LIMITED, str(size), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(), timeout=120
    )


@posix
@pytest.mark.parametrize("what", ["checkpoint", "plan", "output"])
def test_full_disk(what: str, tiny: Path, cache: Path, tmp_path: Path) -> None:
    if what != "output":
        for path in (cache / f"{what}s").iterdir():
            path.unlink()
    kept = [p.read_bytes() for kind in ("checkpoints", "plans") for p in artifacts(cache, kind)]
    output = tmp_path / "out.safetensors"
    more = ["--output", output] if what == "output" else []
    arguments = ["build", tiny, "--gpu", "rtx4090", *RECIPE, "--cache", cache]
    done = with_file_limit(500_000, *arguments, *more)
    assert done.returncode == 2
    sentence = complaint(done.stderr)
    if what == "output":
        assert sentence.startswith(f"{output}: cannot be written (File too large); free some space")
    else:
        assert sentence.startswith(f"cache {cache / f'{what}s'}")
        assert "free some space" in sentence or "raise the limit" in sentence
    assert not output.exists() and partial_files(tmp_path) == []
    after = [p.read_bytes() for kind in ("checkpoints", "plans") for p in artifacts(cache, kind)]
    assert after == kept
    assert octavo(*arguments, *more).returncode == 0


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts something for the test, or skips it where that is not allowed."""
    places: list[Path] = []

    def mount(*arguments: str) -> Path:
        place = tmp_path / f"mounted-{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("mounting is not allowed here; the other tests of this file stand for it")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_really_full_disk(mounted: Callable[..., Path], tiny: Path, cache: Path) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=14m", "none")
    full = place / "cache"
    arguments = ["build", tiny, "--gpu", "rtx4090", *RECIPE, "--cache", full]
    done = octavo(*arguments)  # the checkpoint fits, the plan does not
    assert done.returncode == 2
    said = complaint(done.stderr)
    assert said.startswith(f"cache {full}") and "free some space" in said
    assert len(artifacts(full, "checkpoints")) == 1
    assert artifacts(full, "plans") == [] and partial_files(place) == []
    for path in (full / "checkpoints").iterdir():
        path.unlink()
    (place / "ballast").write_bytes(b"x" * (1500 << 10))
    done = octavo(*arguments)  # nor does the checkpoint
    assert done.returncode == 2
    said = complaint(done.stderr)
    assert "the disk is full: " in said
    assert "left; free some space, or name a cache on another disk" in said
    assert "calibrating" not in done.stderr  # it was told before the work
    assert artifacts(full, "checkpoints") == [] and partial_files(place) == []


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a folder read-only")
def test_read_only_cache(mounted: Callable[..., Path], tiny: Path, cache: Path) -> None:
    """What it holds is served; what it lacks is refused before the long work."""
    read_only = mounted("--bind", "-o", "ro", str(cache))
    subprocess.run(["mount", "-o", "remount,ro,bind", str(read_only)], check=True)
    arguments = ["build", tiny, *RECIPE, "--cache", read_only, "--gpu"]
    done = octavo(*arguments, "rtx4090", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["encoders"][0]["engines"][0]["cached"]
    done = octavo(*arguments, "rtx5090")
    assert done.returncode == 2
    said = complaint(done.stderr)
    assert (
        said.startswith(f"cache {read_only}")
        and "name a folder you can write to as the cache" in said
    )
    assert "compiling" not in done.stderr
    done = octavo("build", tiny, "--recipe", "fp8", "--cache", read_only, "--gpu", "rtx4090")
    assert done.returncode == 2 and "loading the FP32 reference" not in done.stderr
    assert octavo("cache", "list", "--cache", read_only).returncode == 0
    done = octavo("cache", "list", "--cache", read_only / "new")
    assert done.returncode == 2
    assert f"it is not there and cannot be made, for {read_only} cannot be written; name a" in (
        complaint(done.stderr)
    )


def test_cache_below_a_file(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = octavo("build", tiny, "--gpu", "rtx4090", *RECIPE, "--cache", tmp_path / "file" / "c")
    assert done.returncode == 2
    said = complaint(done.stderr)
    assert "a file and a folder share this name; move it away, or name a folder" in said
    assert "loading the FP32 reference" not in done.stderr


@posix
def test_temporary_folder_that_is_missing(tiny: Path, cache: Path) -> None:
    """TMPDIR of a dead session: Python falls back, or a sentence says so."""
    done = octavo(
        *("build", tiny, "--gpu", "rtx5090", *RECIPE, "--cache", cache),
        env=environment(TMPDIR="/nonexistent"),
    )
    assert done.returncode == 0, done.stderr


@posix
def test_the_command_is_what_a_shell_runs(tiny: Path, cache: Path) -> None:
    """The installed script and the module are one."""
    script = Path(sys.executable).with_name("octavo")
    if not script.exists():
        script = Path(COMMAND[0])
    words = [str(script)] if script.name == "octavo" else list(COMMAND)
    done = subprocess.run(
        [*words, "cache", "list", "--cache", str(cache), "--json", "-"],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0 and len(json.loads(done.stdout)["entries"]) == 2
