# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from octavo.engine_cache import EngineCache, Entry, lock, store
from octavo.errors import CacheError, Cancelled, OctavoBug
from together import in_threads

BUILDER = """
ready, counter = Path(sys.argv[2]), Path(sys.argv[3])
say("ready")
await_go(ready)
waits = []
with cache.lock(key, on_wait=waits.append):
    entry = cache.get("plan", key)
    if entry is None:
        with counter.open("a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.4)
        entry = cache.put("plan", key, lambda file: file.write(os.urandom(1000)))
say(entry.manifest.sha256)
say(len(waits))
"""


def test_two_builders_at_once_build_once(
    cache: EngineCache, plan_key: Any, child: Any, tmp_path: Path
) -> None:
    go, counter = tmp_path / "go", tmp_path / "builds"
    builders = [child(BUILDER, cache.root, go, counter) for _ in range(2)]
    for builder in builders:
        assert builder.stdout.readline() == "ready\n"
    go.touch()
    said = [builder.communicate()[0].split() for builder in builders]
    assert len(counter.read_text().split()) == 1
    entry = cache.get("plan", plan_key())
    assert entry is not None
    assert {sha256 for sha256, _ in said} == {entry.manifest.sha256}
    assert sorted(int(waits) > 0 for _, waits in said) == [False, True]


WRITER = """
say("ready")
await_go(sys.argv[2])
for number in range(40):
    cache.put("plan", key, lambda file: file.write(os.urandom(1000 + number)), {"of": os.getpid()})
"""


def test_writers_of_one_key_without_a_lock_never_show_a_broken_entry(
    cache: EngineCache, stored: Entry, child: Any, tmp_path: Path, caplog: Any, left: Any
) -> None:
    writers = [child(WRITER, cache.root, tmp_path / "go") for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    seen = set()
    while any(writer.poll() is None for writer in writers):
        entry = cache.get("plan", stored.manifest.key)
        assert entry is not None
        seen.add(entry.manifest.facts.get("of"))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(seen) > 1  # the reader really met other writers' entries
    assert cache.get("plan", stored.manifest.key) is not None
    assert len(left(cache, "plan")) == 2
    assert caplog.records == []


HOLDER = "with cache.lock(key): say('held'); time.sleep(60)"


def test_a_waiter_is_told_may_cancel_and_gives_up(
    cache: EngineCache, plan_key: Any, child: Any
) -> None:
    holder = child(HOLDER, cache.root)
    assert holder.stdout.readline() == "held\n"
    waits: list[float] = []
    with (
        pytest.raises(CacheError, match=r"building this for more than 0\.6 s; wait until"),
        cache.lock(plan_key(), 0.6, waits.append),
    ):
        pytest.fail("two hold one lock")
    assert len(waits) >= 3 and waits == sorted(waits)

    def cancel(waited: float) -> None:
        raise Cancelled

    with pytest.raises(Cancelled), cache.lock(plan_key(), on_wait=cancel):
        pytest.fail("two hold one lock")
    with cache.lock(plan_key(program=2), timeout_s=0) as held:
        assert held  # another key is free


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc who holds a lock")
def test_a_wait_is_told_and_ends_where_the_holder_is_suspended(
    cache: EngineCache, plan_key: Any, child: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(store, "SAY_WAIT_S", 0.3)
    monkeypatch.setattr(store, "SUSPENDED_S", 0.6)
    holder = child(HOLDER, cache.root)
    assert holder.stdout.readline() == "held\n"
    path = cache.root / "locks" / f"{plan_key().id}.lock"
    with pytest.raises(CacheError, match="more than 2 s"), cache.lock(plan_key(), 2):
        pytest.fail("two hold one lock")  # one that works is waited for
    (record,) = caplog.records
    said = f"waiting for process {holder.pid}, which builds the same and holds {path}."
    assert record.getMessage() == said
    holder.send_signal(signal.SIGSTOP)
    fault = f"process {holder.pid}, which builds this, is suspended; resume or end it, and start"
    with pytest.raises(CacheError, match=fault), cache.lock(plan_key(), 30):
        pytest.fail("two hold one lock")
    assert lock.holder(path) == holder.pid
    holder.kill()
    holder.wait()
    assert lock.holder(path) is None and not lock.is_suspended(holder.pid)


def test_a_wait_without_knowing_for_whom(
    cache: EngineCache, plan_key: Any, child: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(store, "SAY_WAIT_S", 0.3)
    monkeypatch.setattr(store, "SUSPENDED_S", 0.0)
    monkeypatch.setattr(store, "holder", lambda _: None)
    assert child(HOLDER, cache.root).stdout.readline() == "held\n"
    with pytest.raises(CacheError, match="more than 2 s"), cache.lock(plan_key(), 2):
        pytest.fail("two hold one lock")
    (record,) = caplog.records
    assert record.getMessage().startswith("waiting for another process, which builds the same")


def test_a_killed_holder_frees_the_lock_for_one_who_waits(
    cache: EngineCache, plan_key: Any, child: Any
) -> None:
    holder = child(HOLDER, cache.root)
    assert holder.stdout.readline() == "held\n"
    waits: list[float] = []

    def kill_once(waited: float) -> None:
        waits.append(waited)
        holder.kill()

    with cache.lock(plan_key(), timeout_s=10, on_wait=kill_once) as held:
        assert held
    assert waits


def test_threads_exclude_each_other(cache: EngineCache, plan_key: Any) -> None:
    inside, most, builds = [0], [0], []

    def build() -> None:
        with cache.lock(plan_key()):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            if cache.get("plan", plan_key()) is None:
                builds.append(1)
                time.sleep(0.05)
                cache.put("plan", plan_key(), lambda file: file.write(b"x"))
            inside[0] -= 1

    in_threads(lambda _: build())
    assert (most, builds) == ([1], [1])


def test_one_thread_never_waits_for_itself(cache: EngineCache, plan_key: Any) -> None:
    with cache.lock(plan_key()), pytest.raises(OctavoBug, match="twice"), cache.lock(plan_key()):
        pytest.fail("locked twice")
    with cache.lock(plan_key(), timeout_s=0) as held:
        assert held


def test_a_stuck_commit_lock_delays_but_never_stops(
    cache: EngineCache, plan_key: Any, child: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(store, "COMMIT_WAIT_S", 0.1)
    holder = child("with cache._committing(): say('held'); time.sleep(60)", cache.root)
    assert holder.stdout.readline() == "held\n"
    cache.put("plan", plan_key(), lambda file: file.write(b"x"))
    assert "is stuck" in caplog.text
    assert cache.get("plan", plan_key()) is not None


def test_prune_while_another_process_builds(cache: EngineCache, stored: Entry, child: Any) -> None:
    holder = child(HOLDER, cache.root)
    assert holder.stdout.readline() == "held\n"
    assert cache.plan_prune(0).goes == ()
    assert cache.clear() == 0
    assert cache.get("plan", stored.manifest.key) is not None
    holder.kill()
    holder.wait()
    assert cache.clear() > 0
    assert cache.get("plan", stored.manifest.key) is None
