# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Advisory locks between processes. They save work; nothing relies on them for correctness."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STEP_S = 0.25  # how often a waiting caller is told, and can cancel


def holder(path: Path) -> int | None:
    """The process that holds the lock file `path`, where the system tells (Linux); else None."""
    try:
        about = os.stat(path)
        device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # "1: FLOCK ADVISORY WRITE 4711 fe:00:2402697 0 EOF", "->" waits
            if len(words) > 5 and words[1] != "->" and words[5] == device:
                return int(words[4]) if int(words[4]) > 0 else None
    except (OSError, ValueError, AttributeError):  # no such system; Windows has no os.major
        pass
    return None


def is_suspended(pid: int) -> bool:
    """Whether process `pid` was stopped (Ctrl-Z, SIGSTOP) and builds nothing; False if unknown."""
    try:
        # "4711 (any name) T ...", and the name may hold brackets itself.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, ValueError, IndexError):
        return False


class LockedError(Exception):
    """Somebody else held the lock for as long as the caller would wait."""


@contextmanager
def hold(
    path: Path,
    *,
    timeout_s: float | None = None,
    on_wait: Callable[[float], None] | None = None,
) -> Iterator[bool]:
    """Hold the lock file `path`; the system frees it when the process dies, however it dies.

    Yields True, or False where no lock file can be made (a read-only cache, a file system without
    locks): the caller goes on without. `on_wait(seconds so far)` is called while another holds it;
    what it raises ends the wait. Raises LockedError after `timeout_s` (None: wait for ever).
    """
    from filelock import FileLock, Timeout

    lock = FileLock(str(path))

    def attempt(seconds: float) -> bool | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=seconds, poll_interval=0.02)
        except Timeout:  # an OSError itself, so it is asked first
            return False
        except (OSError, NotImplementedError):
            return None
        return True

    start = time.monotonic()
    got = attempt(0)
    while got is False:
        waited = time.monotonic() - start
        if timeout_s is not None and waited >= timeout_s:
            raise LockedError(str(path))
        if on_wait is not None:
            on_wait(waited)
        got = attempt(STEP_S if timeout_s is None else max(0.0, min(STEP_S, timeout_s - waited)))
    try:
        yield got is True
    finally:
        if got:
            lock.release()
