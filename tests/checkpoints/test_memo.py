# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A memo is used when nothing changed, and never when anything may have."""

import json
import os
import shutil
import subprocess
import sys
import time

import packagings as p
import pytest
from octavo.checkpoints import Fingerprint, Memo, detect
from octavo.checkpoints import memo as memo_module
from together import in_threads

FOUND = Fingerprint("a" * 64, "b" * 64)
BARE = Fingerprint("c" * 64, None)


@pytest.fixture
def old(monkeypatch):
    """Files count as old at once."""
    monkeypatch.setattr(memo_module, "RACY_NS", -60_000_000_000)


@pytest.fixture
def path(tmp_path):
    return p.write(tmp_path / "x.safetensors", p.canonical())


@pytest.fixture
def memo(tmp_path):
    return Memo(tmp_path / "cache")


def put(memo, path, found=FOUND):
    detected = detect(path)
    return memo.put(detected.file, detected.encoders[0], found)


def get(memo, path):
    detected = detect(path)
    return memo.get(detected.file, detected.encoders[0])


def test_it_remembers(memo, path, old):
    assert get(memo, path) is None
    assert put(memo, path)
    assert get(memo, path) == FOUND
    assert get(Memo(memo.path.parent), path) == FOUND
    assert put(memo, path, BARE) and get(memo, path) == BARE
    link = path.with_name("link.safetensors")
    try:
        link.symlink_to(path)
    except OSError:
        return  # Windows without the right to make links
    assert get(memo, link) == BARE


def test_the_two_second_rule(memo, path):
    assert not put(memo, path)
    assert not memo.path.exists()
    time.sleep(2.1)
    assert put(memo, path) and get(memo, path) == FOUND


@pytest.mark.parametrize("change", ["size", "content", "time", "other file", "header"])
def test_a_changed_file_is_not_remembered(change, memo, path, old):
    assert put(memo, path)
    status = path.stat()
    if change == "size":
        p.write(path, p.canonical(projection=False))
    elif change == "content":  # size and mtime as before; POSIX still shows ctime
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + (os.name == "nt")))
    elif change == "time":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 1_000_000_000))
    elif change == "other file":
        copy = path.with_name("copy")
        shutil.copy2(path, copy)
        os.replace(copy, path)
    else:
        p.write(path, p.canonical(), {"note": "another header"})
    assert get(memo, path) is None


def test_a_file_that_changed_since_it_was_opened(memo, path, old):
    detected = detect(path)
    path.write_bytes(path.read_bytes())
    assert not memo.put(detected.file, detected.encoders[0], FOUND)
    path.unlink()
    assert not memo.put(detected.file, detected.encoders[0], FOUND)


def test_several_encoders_of_one_file(memo, tmp_path, old):
    both = {**p.hugging_face(p.canonical()), **p.openai(p.canonical(p.LARGER), "g.")}
    detected = detect(p.write(tmp_path / "both.safetensors", both))
    first, second = detected.encoders
    assert memo.put(detected.file, first, FOUND)
    assert memo.get(detected.file, second) is None
    assert memo.put(detected.file, second, BARE)
    assert memo.get(detected.file, first) == FOUND
    assert memo.get(detected.file, second) == BARE


def test_any_shard_counts(memo, tmp_path, old):
    from test_packagings import shard

    index = shard(tmp_path, p.canonical(), kind="safetensors")
    assert put(memo, index) and get(memo, index) == FOUND
    for name in (index.name, "model-00002-of-00002.safetensors"):
        assert put(memo, index)
        file = tmp_path / name
        os.utime(file, ns=(1, file.stat().st_mtime_ns + 1000))
        assert get(memo, index) is None


GOOD = {"file": ["x", []], "encoders": {"text_model.": ["a" * 64, None]}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": 2}',
        '{"schema": 2, "entries": []}',
        '{"schema": 2, "entries": {"x": 3}}',
        '{"schema": 1, "entries": {}}',
        "[" * 100_000,
        "\xff\xfe",
        json.dumps({"schema": 2, "entries": {"x": {**GOOD, "encoders": {"a": ["zz", None]}}}}),
        json.dumps({"schema": 2, "entries": {"x": {**GOOD, "encoders": {"a": [None, None]}}}}),
        json.dumps({"schema": 2, "entries": {"x": {**GOOD, "encoders": 3}}}),
    ],
)
def test_a_damaged_memo_is_an_empty_one(text, memo, path, old):
    put(memo, path)
    # The damage sits under this file's own key.
    memo.path.write_text(text.replace('"x"', json.dumps(os.path.realpath(path))), encoding="latin1")
    assert get(memo, path) is None
    assert put(memo, path) and get(memo, path) == FOUND


def test_it_is_bounded_and_forgets_the_oldest(memo, path, old, monkeypatch):
    monkeypatch.setattr(memo_module, "_MAX_ENTRIES", 3)
    paths = [path, *(path.with_name(f"{i}.safetensors") for i in range(3))]
    for other in paths[1:]:
        shutil.copyfile(path, other)
    for one in paths:
        assert put(memo, one)
    assert [get(memo, one) for one in paths] == [None, FOUND, FOUND, FOUND]
    assert put(memo, paths[1]) and put(memo, paths[0])
    assert get(memo, paths[2]) is None and get(memo, paths[1]) == FOUND


def test_an_unwritable_memo_is_no_failure(tmp_path, path, old, monkeypatch):
    (tmp_path / "a file").write_text("")
    assert not put(Memo(tmp_path / "a file"), path)

    memo = Memo(tmp_path / "cache")
    assert put(memo, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not put(memo, path, BARE)
    assert [x.name for x in memo.path.parent.iterdir()] == [memo.path.name]
    assert get(memo, path) == FOUND


def test_writers_at_once_leave_a_whole_memo(memo, path, old):
    paths = [path.with_name(f"{i}.safetensors") for i in range(4)]
    for other in paths:
        shutil.copyfile(path, other)
    in_threads(lambda i: [put(memo, paths[i]) for _ in range(5)])
    json.loads(memo.path.read_text())
    assert FOUND in [get(memo, x) for x in paths]
    assert [x.name for x in memo.path.parent.iterdir()] == [memo.path.name]


def test_a_look_up_is_quick_and_without_torch(memo, tmp_path, old):
    from octavo import seeded
    from test_detect import hf_shapes

    path = p.write_sparse(tmp_path / "x.safetensors", hf_shapes(seeded.CLIP_L))
    assert put(memo, path)
    code = """
import sys, time
start = time.perf_counter()
from octavo.checkpoints import Memo, detect
detected = detect(sys.argv[1])
found = Memo(sys.argv[2]).get(detected.file, detected.encoders[0])
print(time.perf_counter() - start, found is not None, "torch" in sys.modules)
"""
    times = []
    for _ in range(3):
        command = [sys.executable, "-P", "-c", code, str(path), str(memo.path.parent)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, known, torch_loaded = done.stdout.split()
        assert (known, torch_loaded) == ("True", "False")
        times.append(float(seconds))
    assert min(times) < 0.3
