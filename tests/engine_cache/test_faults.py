# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
from octavo.engine_cache import EngineCache, Entry, atomic
from octavo.engine_cache.manifest import MANIFEST_SCHEMA
from octavo.errors import CacheError, Cancelled, OctavoBug


def truncate(entry: Entry) -> None:
    os.truncate(entry.path, entry.manifest.length // 2)


def flip(entry: Entry) -> None:
    data = bytearray(entry.path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.path.write_bytes(data)


def grow(entry: Entry) -> None:
    with entry.path.open("ab") as file:
        file.write(b"\0")


def sidecar(entry: Entry) -> Path:
    return entry.path.with_suffix(".json")


DAMAGE: dict[str, Callable[[Entry], object]] = {
    "truncated": truncate,
    "one bit flipped": flip,
    "longer": grow,
    "empty": lambda entry: entry.path.write_bytes(b""),
    "no artifact": lambda entry: entry.path.unlink(),
    "no manifest": lambda entry: sidecar(entry).unlink(),
    "empty manifest": lambda entry: sidecar(entry).write_bytes(b""),
    "truncated manifest": lambda entry: os.truncate(sidecar(entry), 100),
    "binary manifest": lambda entry: sidecar(entry).write_bytes(bytes(range(256))),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_one_line_a_miss_and_built_again(
    name: str, cache: EngineCache, stored: Entry, plan_key: Any, left: Any, caplog: Any
) -> None:
    DAMAGE[name](stored)
    assert cache.get("plan", plan_key()) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert stored.path.name in record.getMessage()
    assert "built again" in record.getMessage()
    assert left(cache, "plan") == []
    assert cache.get("plan", plan_key()) is None
    assert len(caplog.records) == 1
    cache.put("plan", plan_key(), lambda file: file.write(b"again"))
    assert cache.get("plan", plan_key()) is not None


def test_a_quick_look_up_sees_length_but_not_content(
    cache: EngineCache, stored: Entry, plan_key: Any
) -> None:
    flip(stored)
    assert cache.get("plan", plan_key(), verify=False) is not None
    truncate(stored)
    assert cache.get("plan", plan_key(), verify=False) is None


def test_another_versions_entry_is_a_miss_but_stays(
    cache: EngineCache, stored: Entry, plan_key: Any, left: Any, caplog: Any
) -> None:
    text = sidecar(stored).read_text()
    sidecar(stored).write_text(text.replace(f'"schema": {MANIFEST_SCHEMA},', '"schema": 0,'))
    assert cache.get("plan", plan_key()) is None
    assert "schema 0" in caplog.text
    assert len(left(cache, "plan")) == 2
    assert [each.entry for each in cache.verify_all()] == [None]
    cache.put("plan", plan_key(), lambda file: file.write(b"ours"))
    assert cache.get("plan", plan_key()) is not None


def test_an_entry_under_another_entrys_name(
    cache: EngineCache, stored: Entry, plan_key: Any, left: Any
) -> None:
    other = cache.put("plan", plan_key(program=2), lambda file: file.write(b"other"))
    os.replace(stored.path, other.path)
    os.replace(sidecar(stored), sidecar(other))
    assert cache.get("plan", plan_key(program=2)) is None
    assert left(cache, "plan") == []


def system_says(code: int) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


REFUSALS = {
    errno.ENOSPC: "disk is full; free some space",
    errno.EROFS: "cannot be written .*; name a folder you can write to as the cache",
    errno.EACCES: "cannot be written .*; name a folder you can write to as the cache",
    errno.EMFILE: "reports .*; close some files, or raise the limit of open files",
    errno.EIO: "reports .*; name a folder",
}


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["write", "fsync", "manifest", "replace"])
def test_a_refused_write_says_why_and_loses_nothing(
    code: int,
    step: str,
    cache: EngineCache,
    stored: Entry,
    plan_key: Any,
    left: Any,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(atomic, "REPLACE_PAUSE_S", 0)
    refuse, key, before = system_says(code), plan_key(program=2), left(cache, "plan")
    with monkeypatch.context() as patch:
        if step == "fsync":
            patch.setattr(os, "fsync", refuse)
        elif step == "manifest":
            patch.setattr(Path, "write_text", refuse)
        elif step == "replace":
            patch.setattr(os, "replace", refuse)
        with pytest.raises(CacheError, match=REFUSALS[code]) as caught:
            cache.put(
                "plan", key, refuse if step == "write" else lambda file: file.write(b"x" * 10**6)
            )
    assert key.id in caught.value.path
    assert left(cache, "plan") == before
    assert cache.get("plan", plan_key()) is not None
    cache.put("plan", key, lambda file: file.write(b"now"))
    assert cache.get("plan", key) is not None


def test_a_disk_that_is_really_full(
    cache: EngineCache, stored: Entry, plan_key: Any, left: Any
) -> None:
    before, key = left(cache, "plan"), plan_key(program=2)
    with (
        pytest.raises(CacheError, match="the disk is full; free some space"),
        cache.temporary("plan", key) as path,
    ):
        path.symlink_to("/dev/full")  # the kernel itself answers ENOSPC
        path.write_bytes(b"x" * 10**6)
    assert left(cache, "plan") == before
    assert cache.get("plan", plan_key()) is not None


def test_a_file_that_really_may_not_grow(
    cache: EngineCache, stored: Entry, plan_key: Any, left: Any, child: Any
) -> None:
    before = left(cache, "plan")
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from octavo.errors import CacheError
import dataclasses
try:
    cache.put("plan", dataclasses.replace(key, program=2), lambda file: file.write(bytes(200_000)))
except CacheError as error:
    say(error)
"""
    said = child(script, cache.root).communicate()[0]
    assert "the file grew beyond the size limit" in said
    assert left(cache, "plan") == before
    assert cache.get("plan", plan_key()) is not None


def test_errors_of_the_writer_itself_pass(cache: EngineCache, plan_key: Any, left: Any) -> None:
    class StopError(Exception):
        pass

    elsewhere = FileNotFoundError(errno.ENOENT, "no such file", "/other")
    for error in (StopError(), Cancelled(), KeyboardInterrupt(), elsewhere):

        def write(file: Any, error: BaseException = error) -> None:
            file.write(b"half")
            raise error

        with pytest.raises(type(error)):
            cache.put("plan", plan_key(), write)
        assert left(cache, "plan") == []
    with pytest.raises(OctavoBug, match="nothing was written"):
        cache.put("plan", plan_key(), lambda file: None)
    assert left(cache, "plan") == []


def test_a_read_only_cache_serves(
    cache: EngineCache, stored: Entry, plan_key: Any, monkeypatch: Any
) -> None:
    refuse, real = system_says(errno.EROFS), Path.open

    def open_to_read(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        return real(path, mode, *rest, **options) if mode in ("r", "rb") else refuse()

    monkeypatch.setattr(Path, "open", open_to_read)
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    for name in ("utime", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    with cache.lock(plan_key()) as held:
        assert not held
        found = cache.get("plan", plan_key())
    assert found is not None
    assert cache.find_plans({}, sm=89)[0].path == found.path
    assert [each.fault for each in cache.verify_all()] == [None]
    for write in (
        lambda: cache.put("plan", plan_key(program=2), lambda file: file.write(b"x")),
        lambda: cache.update_facts(found, {"check": 1}),
        lambda: cache.plan_prune(0).execute(),
    ):
        with pytest.raises(CacheError, match="cannot be written"):
            write()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_load", system_says(errno.EACCES))
        assert cache.get("plan", plan_key()) is None


def test_a_file_where_the_folder_should_be(tmp_path: Path, plan_key: Any) -> None:
    (tmp_path / "cache").write_bytes(b"mine")
    cache = EngineCache(tmp_path / "cache")
    assert cache.get("plan", plan_key()) is None
    assert cache.entries() == cache.verify_all() == []
    with cache.lock(plan_key()) as held:
        assert not held
    with pytest.raises(CacheError, match="a file and a folder share this name; move it away"):
        cache.put("plan", plan_key(), lambda file: file.write(b"x"))
    assert (tmp_path / "cache").read_bytes() == b"mine"


def test_a_root_that_is_too_long_for_the_system(tmp_path: Path, plan_key: Any) -> None:
    cache = EngineCache(tmp_path / ("a" * 300))
    assert cache.get("plan", plan_key()) is None
    with pytest.raises(CacheError, match="name a folder you can write to as the cache"):
        cache.put("plan", plan_key(), lambda file: file.write(b"x"))


def test_windows_denies_the_replace_while_a_reader_is_there(
    cache: EngineCache, stored: Entry, plan_key: Any, left: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(atomic, "REPLACE_PAUSE_S", 0)
    denials, real = [5], os.replace

    def deny(source: Path, target: Path) -> None:
        denials[0] -= 1
        if denials[0] >= 0:
            raise PermissionError(errno.EACCES, "in use")
        real(source, target)

    monkeypatch.setattr(os, "replace", deny)
    cache.put("plan", plan_key(), lambda file: file.write(b"second"))
    assert stored.path.read_bytes() == b"second"
    denials[0] = 10**6  # for good: the one who is there is accepted, if it is whole
    entry = cache.put("plan", plan_key(), lambda file: file.write(b"third"))
    assert entry.path.read_bytes() == b"second"
    assert len(left(cache, "plan")) == 2
    flip(stored)
    with pytest.raises(CacheError, match="cannot be written"):
        cache.put("plan", plan_key(), lambda file: file.write(b"fourth"))
    assert len(left(cache, "plan")) == 2


HALF = """
with cache.lock(key), cache.temporary("plan", key) as path:
    with path.open("wb") as file:
        file.write(bytes(1_000_000))
        file.flush()
        say(path.name)
        time.sleep(60)
"""

BETWEEN = """
from octavo.engine_cache import atomic
real = atomic.replace
def replace_and_stop(source, target):
    real(source, target)
    say(target.name)
    time.sleep(60)
atomic.replace = replace_and_stop
with cache.lock(key):
    cache.put("plan", key, lambda file: file.write(b"half a commit"))
"""


@pytest.mark.parametrize("before", [False, True], ids=["first build", "rebuild"])
@pytest.mark.parametrize("script", [HALF, BETWEEN], ids=["in mid write", "between the renames"])
def test_a_builder_killed_while_it_holds_the_lock(
    script: str, before: bool, cache: EngineCache, plan_key: Any, left: Any, child: Any
) -> None:
    key = plan_key()
    if before:
        cache.put("plan", key, lambda file: file.write(b"old"))
        assert cache.get("plan", key) is not None
    builder = child(script, cache.root)
    name = builder.stdout.readline().strip()
    assert name in left(cache, "plan")
    assert not name.endswith(".json")  # the manifest comes last
    builder.kill()
    builder.wait()
    start = time.monotonic()
    with cache.lock(key, timeout_s=5) as held:
        assert held
        found = cache.get("plan", key)
        if found is not None:  # killed in mid write, the old entry is untouched
            assert before and script is HALF
            assert found.path.read_bytes() == b"old"
        cache.put("plan", key, lambda file: file.write(b"new"))
    assert time.monotonic() - start < 5
    found = cache.get("plan", key)
    assert found is not None
    assert found.path.read_bytes() == b"new"
    assert left(cache, "plan") == [f"{key.id}.json", f"{key.id}.plan"]


def test_only_stale_temporaries_are_swept(
    cache: EngineCache, stored: Entry, plan_key: Any, left: Any, child: Any
) -> None:
    folder, key = cache.root / "plans", stored.manifest.key
    names = {
        "dead": f"{'a' * 32}.4194305-00000000.partial",  # beyond the largest process number
        "earlier me": f"{'a' * 32}.{os.getpid()}-00000000.partial",
        "alive": f"{'a' * 32}.{os.getppid()}-00000000.partial",
        "alive, old": f"{'a' * 32}.{os.getppid()}-00000001.partial",
        "locked": f"{'b' * 32}.4194305-00000000.partial",
        "foreign": "download.partial",
        "foreign too": f"{key}.partial",
    }
    for name in names.values():
        (folder / name).write_bytes(b"half")
    day_ago = time.time() - atomic.STALE_S - 1
    for name in ("alive, old", "foreign", "foreign too"):
        os.utime(folder / names[name], (day_ago, day_ago))
    holder = child("with cache.lock('b' * 32): say('held'); time.sleep(60)", cache.root)
    assert holder.stdout.readline() == "held\n"
    with cache.temporary("plan", plan_key(program=2)) as mine:
        mine.write_bytes(b"x")
        cache.put("plan", plan_key(program=3), lambda file: file.write(b"x"))
        assert mine.exists()
    stays = {names[name] for name in ("alive", "locked", "foreign", "foreign too")}
    assert {name for name in left(cache, "plan") if name.endswith("partial")} == stays
