# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Where the system grants no thread, what several would have done is done by the one there is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from octavo.checkpoints import fingerprint
from octavo.engine_cache import checksum
from octavo.threads import submit


def grant(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many threads can be started, and no more."""
    left, start = [count], threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("count", [0, 1])
def test_a_call_is_made_here(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grant(count, monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        found = [submit(threads, divmod, n, 3) for n in range(7)]
        assert [f.result() for f in found] == [divmod(n, 3) for n in range(7)]
        with pytest.raises(ZeroDivisionError):
            submit(threads, divmod, 1, 0).result()


@pytest.mark.parametrize("count", [0, 1])
def test_digests_are_the_same(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PART", 1000)
    (tmp_path / "x").write_bytes(bytes(range(250)) * 21)
    tensors = {"a": torch.arange(10.0), "b": torch.ones(3, 4).half()}
    weights = SimpleNamespace(
        spec=SimpleNamespace(tensors=lambda: {n: tuple(t.shape) for n, t in tensors.items()}),
        projection_shape=None,
        scales=(),
        label="x",
        check=lambda: None,
        stored=tensors.__getitem__,
        sources=lambda name: (name,),
    )
    before = checksum.checksum(tmp_path / "x"), fingerprint(weights)
    grant(count, monkeypatch)
    assert (checksum.checksum(tmp_path / "x"), fingerprint(weights)) == before
    assert checksum.matches(tmp_path / "x", before[0].sha256, before[0].parts)
