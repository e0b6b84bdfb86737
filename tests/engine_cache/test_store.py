# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from octavo.engine_cache import EngineCache, Entry, parse_size, store
from octavo.engine_cache.atomic import long_path
from octavo.errors import CacheError, OctavoBug, OctavoError


def age(cache: EngineCache, key: str, seconds: float) -> None:
    for path in cache.root.glob(f"*/{key}.*"):
        at = time.time() - seconds
        os.utime(path, (at, at))


def fill(cache: EngineCache, plan_key: Any, count: int, size: int = 1000) -> list[Entry]:
    """`count` plans, each seen to be a hit; the first is the longest unused, each an hour apart."""
    entries = []
    for program in range(count):
        key = plan_key(program=program)
        cache.put("plan", key, lambda file: file.write(os.urandom(size)))
        assert cache.get("plan", key) is not None
        entries.append(cache.get("plan", key))
    for index, entry in enumerate(entries):
        age(cache, entry.manifest.key, 3600 * (count - index))
    return entries


def test_hit_and_what_is_on_disk(cache: EngineCache, stored: Entry, left: Any) -> None:
    key = stored.manifest.key
    assert left(cache, "plan") == [f"{key}.json", f"{key}.plan"]
    assert stored.path == cache.root / "plans" / f"{key}.plan"
    assert stored.manifest.facts == {"layers": 48}
    assert stored.manifest.key_facts["sms"] == [89, 120]
    assert stored.manifest.length == stored.path.stat().st_size
    assert cache.get("checkpoint", key) is None


def test_checkpoint_beside_plan(cache: EngineCache, stored: Entry, checkpoint_key: Any) -> None:
    entry = cache.put("checkpoint", checkpoint_key(), lambda file: file.write(b"tensors"))
    assert entry.path.name == checkpoint_key().id + ".safetensors"
    assert cache.get("checkpoint", checkpoint_key()) is not None
    assert {each.path for each in cache.entries()} == {entry.path, stored.path}


def test_any_other_key_is_a_miss(cache: EngineCache, stored: Entry, plan_key: Any) -> None:
    assert cache.get("plan", plan_key()) is not None
    assert cache.get("plan", plan_key(version="1.7.2")) is None
    with pytest.raises(OctavoBug):
        cache.get("plan", "../" + stored.manifest.key)
    with pytest.raises(OctavoBug):
        cache.put("checkpoint", plan_key(), lambda file: file.write(b"x"))


def test_nothing_is_created_before_the_first_write(tmp_path: Path, plan_key: Any) -> None:
    cache = EngineCache(tmp_path / "new" / "cache")
    assert cache.get("plan", plan_key()) is None
    assert cache.find_plans({}, sm=89) == cache.entries() == cache.verify_all() == []
    assert cache.plan_prune(0).execute() == cache.clear() == 0
    assert list(tmp_path.iterdir()) == []
    cache.put("plan", plan_key(), lambda file: file.write(b"x"))
    assert cache.get("plan", plan_key()) is not None


def test_import_brings_no_heavy_module(child: Any, tmp_path: Path) -> None:
    heavy = ("torch", "numpy", "tensorrt", "tensorrt_rtx", "onnx", "modelopt", "safetensors")
    script = f"cache.get('plan', key); say([name for name in {heavy} if name in sys.modules])"
    assert child(script, tmp_path).communicate()[0].strip() == "[]"


def test_root_and_budget_from_the_environment(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "from env"))
    monkeypatch.setenv("OCTAVO_CACHE_BUDGET", "1.5G")
    assert EngineCache().root == tmp_path / "from env"
    assert EngineCache().budget_bytes == 3 * 2**29
    assert EngineCache(tmp_path, 7).root == tmp_path
    assert EngineCache(tmp_path, 7).budget_bytes == 7
    monkeypatch.setenv("OCTAVO_CACHE_BUDGET", "plenty")
    with pytest.raises(OctavoError, match="OCTAVO_CACHE_BUDGET: 'plenty' is not a size; give"):
        EngineCache()
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.delenv("OCTAVO_CACHE_BUDGET")
    assert "octavo" in EngineCache().root.name.lower() + EngineCache().root.parent.name.lower()
    assert EngineCache().budget_bytes == 20 * 2**30
    platforms = EngineCache().root
    monkeypatch.setenv("OCTAVO_CACHE", "")  # as good as unset, and not the current folder
    monkeypatch.setenv("OCTAVO_CACHE_BUDGET", "")
    assert (EngineCache().root, EngineCache().budget_bytes) == (platforms, 20 * 2**30)
    monkeypatch.chdir(tmp_path)
    assert EngineCache(Path("relative")).root == tmp_path / "relative"


NAME = "name a folder you can write to as the cache (OCTAVO_CACHE, where you named none)"
SHARED = f": a file and a folder share this name; move it away, or {NAME}."
IMPOSSIBLE = {
    "file": "{tmp}/file" + SHARED,
    "file/below/it": "{tmp}/file" + SHARED,
    "link": "{tmp}/link: it is a link to nothing; remove it, or " + NAME,
    "link/below": "{tmp}/link: it is a link to nothing; remove it, or " + NAME,
    "n" * 300: "{tmp}/" + "n" * 300 + ": the system reports File name too long; " + NAME,
    "closed/new": "{tmp}/closed/new: it is not there and cannot be made, for {tmp}/closed cannot "
    "be written; " + NAME,
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_a_cache_is_said(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "closed").mkdir()
    before, access = sorted(tmp_path.iterdir()), os.access

    def closed(path: Path, mode: int) -> bool:  # as for anyone but root, who may run this
        return path != tmp_path / "closed" and access(path, mode)

    monkeypatch.setattr(store.os, "access", closed)
    with pytest.raises(CacheError) as caught:
        EngineCache(tmp_path / name).refuse_impossible()
    said = IMPOSSIBLE[name].format(tmp=tmp_path)
    assert str(caught.value).startswith("cache " + said)
    # Where it was not named, the variable alone is the remedy.
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / name))
    with pytest.raises(CacheError) as caught:
        EngineCache().refuse_impossible()
    variable = "set OCTAVO_CACHE to a folder you can write to"
    assert str(caught.value).startswith("cache " + said.replace(NAME, variable))
    for possible in ("", "closed", "new", "new/below"):  # what there is may be read-only
        EngineCache(tmp_path / possible).refuse_impossible()
    assert sorted(tmp_path.iterdir()) == before


def test_a_home_that_nobody_has() -> None:
    with pytest.raises(CacheError, match=r"^cache ~nobody-at-all/x: its ~ .*; give the whole path"):
        EngineCache(Path("~nobody-at-all/x"))


def test_sizes() -> None:
    good = {"0": 0, "123": 123, "20G": 20 << 30, "1.5 GiB": 3 << 29, "2kb": 2048, " 1T ": 1 << 40}
    assert {text: parse_size(text) for text in good} == good
    for text in ("", "-1", "G", "1X", "1e9", "inf", "nan", "٣", "9" * 400):
        with pytest.raises(OctavoError, match="is not a size"):
            parse_size(text)


@pytest.mark.parametrize("name", ["用户 é#%", "a" * 200, "/".join(["long" * 20] * 12), "dot."])
def test_roots_of_every_kind(tmp_path: Path, plan_key: Any, name: str) -> None:
    cache = EngineCache(tmp_path / name)
    with cache.lock(plan_key()):
        cache.put("plan", plan_key(), lambda file: file.write(b"x"))
    assert cache.get("plan", plan_key()) is not None
    assert cache.clear() > 0


def test_symlinked_root_is_one_cache(cache: EngineCache, stored: Entry, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache.root, target_is_directory=True)
    linked = EngineCache(tmp_path / "link")
    assert linked.get("plan", stored.manifest.key) is not None
    with (
        linked.lock(stored.manifest.key),
        pytest.raises(OctavoError, match="another process"),
        cache.lock(stored.manifest.key, timeout_s=0),
    ):
        pytest.fail("two hold one lock")


def test_long_windows_paths() -> None:
    local, share = "C:\\" + "a" * 200, "\\\\server\\share\\" + "a" * 200
    assert long_path(local, windows=True) == "\\\\?\\" + local
    assert long_path(share, windows=True) == "\\\\?\\UNC\\" + share[2:]
    assert long_path(long_path(local, windows=True), windows=True) == "\\\\?\\" + local
    assert long_path("C:\\cache", windows=True) == "C:\\cache"
    assert long_path("/" + "a" * 200, windows=False) == "/" + "a" * 200


def test_path_writer(cache: EngineCache, plan_key: Any, left: Any) -> None:
    with cache.temporary("plan", plan_key()) as path:
        assert path.parent == cache.root / "plans"
        path.write_bytes(b"by path")
        entry = cache.adopt("plan", plan_key(), path, {"seconds": 1.5})
    assert entry == dataclasses.replace(cache.entries()[0], last_use=entry.last_use)
    found = cache.get("plan", plan_key())
    assert found is not None
    assert found.path.read_bytes() == b"by path"
    with cache.temporary("plan", plan_key(program=2)) as path:
        path.write_bytes(b"given up")
    assert len(left(cache, "plan")) == 2


def test_replacing_an_entry(cache: EngineCache, stored: Entry, plan_key: Any, left: Any) -> None:
    cache.put("plan", plan_key(), lambda file: file.write(b"newer"))
    found = cache.get("plan", plan_key())
    assert found is not None
    assert found.path.read_bytes() == b"newer"
    assert len(left(cache, "plan")) == 2


def test_update_facts(cache: EngineCache, stored: Entry, plan_key: Any, left: Any) -> None:
    updated = cache.update_facts(stored, {"check": {"token_mean": 0.999}})
    found = cache.get("plan", plan_key())
    assert found is not None and updated is not None
    assert found.manifest == updated.manifest
    assert found.manifest.facts == {"layers": 48, "check": {"token_mean": 0.999}}
    with pytest.raises(OctavoBug):
        cache.update_facts(found, {"check": float("nan")})
    assert len(left(cache, "plan")) == 2
    cache.put("plan", plan_key(), lambda file: file.write(b"another build"))
    assert cache.update_facts(stored, {"check": 1}) is None  # not about these bytes
    cache.clear()
    assert cache.update_facts(stored, {"check": 1}) is None


def test_a_plan_built_elsewhere_for_two_sms_is_found(
    cache: EngineCache, stored: Entry, plan_key: Any
) -> None:
    device = plan_key(sms=(89,))
    assert cache.get("plan", device) is None
    assert [each.path for each in cache.find_plans(device.facts, sm=89)] == [stored.path]
    assert [each.path for each in cache.find_plans({"flavour": "tensorrt_rtx"})] == [stored.path]
    assert cache.find_plans(device.facts) == []
    assert cache.find_plans(device.facts, sm=121) == []
    for changes in ({"version": "1.8"}, {"cuda": "cu12"}, {"program": 2}, {"structure": {}}):
        assert cache.find_plans({**device.facts, **changes}, sm=89) == []
    own = cache.put("plan", device, lambda file: file.write(b"for this one alone"))
    found = cache.find_plans(device.facts, sm=89)
    assert [each.path for each in found] == [own.path, stored.path]  # the narrower first
    stored.path.write_bytes(b"damaged")
    assert [each.path for each in cache.find_plans(device.facts, sm=120)] == []


def test_checkpoints_are_no_plans(cache: EngineCache, stored: Entry, checkpoint_key: Any) -> None:
    cache.put("checkpoint", checkpoint_key(), lambda file: file.write(b"x"))
    assert [each.path for each in cache.find_plans({}, sm=89)] == [stored.path]


def test_verify_all(cache: EngineCache, plan_key: Any, left: Any) -> None:
    good, flipped, orphan = fill(cache, plan_key, 3)
    flipped.path.write_bytes(bytes(1000))
    orphan.path.with_suffix(".json").unlink()
    checked = {each.path: each for each in cache.verify_all()}
    assert checked[good.path].entry is not None
    assert checked[flipped.path].fault == "its checksum is wrong"
    assert checked[orphan.path].fault == "its manifest is missing"
    assert left(cache, "plan") == [good.path.with_suffix(".json").name, good.path.name]
    assert [each.fault for each in cache.verify_all()] == [None]


def test_a_look_up_is_a_use(cache: EngineCache, plan_key: Any) -> None:
    first, second, third = fill(cache, plan_key, 3)
    cache.get("plan", first.manifest.key)
    assert [each.path for each in cache.entries()] == [first.path, third.path, second.path]
    goes = cache.plan_prune(0).goes
    assert [each.key for each in goes] == [each.manifest.key for each in (second, third, first)]


def test_prune_within_budget(cache: EngineCache, plan_key: Any, left: Any) -> None:
    entries = fill(cache, plan_key, 4)
    each_bytes = sum(path.stat().st_size for path in (cache.root / "plans").iterdir()) // 4
    plan = cache.plan_prune(each_bytes * 2 + 100)
    assert [doomed.key for doomed in plan.goes] == [each.manifest.key for each in entries[:2]]
    assert len(left(cache, "plan")) == 8  # a plan deletes nothing
    assert plan.execute() == plan.freed_bytes == sum(doomed.size_bytes for doomed in plan.goes)
    assert plan.kept_bytes <= each_bytes * 2 + 100
    assert {each.path for each in cache.entries()} == {each.path for each in entries[2:]}
    assert plan.execute() == 0


def test_a_use_in_the_future_is_the_oldest(cache: EngineCache, plan_key: Any) -> None:
    """The clock was set back; but a server's clock that is a little ahead is no reason."""
    future, old, ahead = fill(cache, plan_key, 3)
    day = 24 * 3600.0
    for entry, at in ((future, day), (old, -day), (ahead, 5.0)):
        os.utime(entry.path.with_suffix(".json"), (time.time() + at,) * 2)
    goes = cache.plan_prune(0, grace_s=store.GRACE_S).goes
    assert [doomed.key for doomed in goes] == [future.manifest.key, old.manifest.key]
    assert len(cache.plan_prune(0).goes) == 3


def test_prune_spares_what_is_locked_or_used_meanwhile(cache: EngineCache, plan_key: Any) -> None:
    locked, used, gone = fill(cache, plan_key, 3)
    with cache.lock(locked.manifest.key):
        plan = cache.plan_prune(0)
        assert [doomed.key for doomed in plan.goes] == [used.manifest.key, gone.manifest.key]
    plan = cache.plan_prune(0)
    cache.get("plan", used.manifest.key)
    with cache.lock(locked.manifest.key):
        assert plan.execute() == plan.goes[2].size_bytes
    assert {each.path for each in cache.entries()} == {locked.path, used.path}


def test_a_write_keeps_the_budget(cache: EngineCache, plan_key: Any) -> None:
    entries = fill(cache, plan_key, 3)
    age(cache, entries[2].manifest.key, store.GRACE_S / 2)  # its job may still need it
    cache.budget_bytes = 1
    new = cache.put("plan", plan_key(program=99), lambda file: file.write(b"x" * 1000))
    assert {each.path for each in cache.entries()} == {entries[2].path, new.path}


def test_prune_and_clear_never_touch_foreign_files(
    cache: EngineCache, stored: Entry, left: Any
) -> None:
    key = stored.manifest.key
    foreign = [
        cache.root / "memo.json",
        cache.root / "plans" / "mine.plan",
        cache.root / "plans" / f"{key}.onnx",
        cache.root / "plans" / f"{key}.safetensors",
        cache.root / "plans" / f"{key}.plan.bak",
        cache.root / "plans" / f"{key.upper()}.plan",
        cache.root / "plans" / "notes.partial",
        cache.root / "checkpoints" / f"{key}.plan",
        cache.root / "locks" / "mine.lock",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    (cache.root / "plans" / ("a" * 32 + ".plan")).mkdir()
    assert cache.clear() > 0
    assert cache.get("plan", key) is None
    assert all(path.read_bytes() == b"mine" for path in foreign)
    assert (cache.root / "plans" / ("a" * 32 + ".plan")).is_dir()
    assert not (cache.root / "locks" / f"{key}.lock").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes nothing")
def test_where_nobody_can_make_a_folder(plan_key: Any) -> None:
    """Not even root, whom the system tells that it may; looking is harmless."""
    cache = EngineCache(Path("/proc/octavo"))
    assert cache.get("plan", plan_key()) is None and cache.entries() == []
    with pytest.raises(CacheError, match=r"it cannot be made.*; name a folder you can write to"):
        cache.put("plan", plan_key(), lambda file: file.write(b"x"))


def test_the_folder_may_go_at_any_time(cache: EngineCache, stored: Entry, plan_key: Any) -> None:
    calls = []

    def write(file: Any) -> None:
        calls.append(file.write(b"x"))
        if len(calls) == 1:
            shutil.rmtree(cache.root)

    with cache.lock(plan_key()):
        cache.put("plan", plan_key(), write)
    assert len(calls) == 2
    assert cache.get("plan", plan_key()) is not None
    shutil.rmtree(cache.root)
    assert cache.get("plan", plan_key()) is None
    with cache.lock(plan_key()) as held:
        assert held
        shutil.rmtree(cache.root)
    cache.put("plan", plan_key(), lambda file: file.write(b"x"))
    assert cache.get("plan", plan_key()) is not None


def test_compiled_kernels_are_counted_and_go_with_their_plan(
    cache: EngineCache, stored: Entry
) -> None:
    before = cache.plan_prune(0)
    beside = stored.path.with_name(f"{stored.manifest.key}.RTX-4090-580.10-1.7.1.kernels")
    beside.write_bytes(b"k" * 5000)
    plan = cache.plan_prune(0)
    assert plan.freed_bytes == before.freed_bytes + 5000
    assert plan.goes[0].last_use == before.goes[0].last_use
    plan.execute()
    assert not beside.exists() and cache.get("plan", stored.manifest.key) is None
