# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Writing a file so that others see all of it or nothing, and saying why when it cannot be done."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CacheError, remedy_for
from .key import KEY_PATTERN

REPLACE_TRIES = 20
REPLACE_PAUSE_S = 0.05
STALE_S = 24 * 3600.0


@dataclass(frozen=True)
class Places:
    """How a person moves the cache: to another `folder`, to another `disk`."""

    folder: str
    disk: str


BY_VARIABLE = Places(
    "set OCTAVO_CACHE to a folder you can write to", "set OCTAVO_CACHE to another disk"
)
# Where a place was named the variable is not asked; ComfyUI names its models folder without it.
BY_NAME = Places(
    "name a folder you can write to as the cache (OCTAVO_CACHE, where you named none)",
    "name a cache on another disk (OCTAVO_CACHE, where you named none)",
)
_PARTIAL = re.compile(rf"({KEY_PATTERN})\.([0-9]{{1,10}})-[0-9a-f]{{8}}\.partial")
_ours: set[str] = set()  # names of the temporaries that this process is writing now


def new_partial(folder: Path, key: str) -> Path:
    """A name in `folder` that no other process or thread uses; only the folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    _ours.add(path.name)
    return path


def drop_partial(path: Path) -> None:
    with contextlib.suppress(OSError):  # Windows: a killed writer's handle may linger; swept later
        path.unlink(missing_ok=True)
    _ours.discard(path.name)


def sweep_partials(folder: Path, is_free: Callable[[str], bool]) -> None:
    """Delete what killed processes left: a day old, or its process gone and the key's lock free."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            found = _PARTIAL.fullmatch(path.name)
            if found is None or path.name in _ours:
                continue
            with contextlib.suppress(OSError):
                # Of either sign: the clock may have been set back since.
                old = abs(time.time() - path.stat().st_mtime) > STALE_S
                if old or (_is_gone(int(found[2])) and is_free(found[1])):
                    path.unlink(missing_ok=True)


def _is_gone(pid: int) -> bool:
    if pid == os.getpid():
        return True  # an earlier process with our number, as in a restarted container
    if os.name == "nt":
        return False  # os.kill(pid, 0) would send Ctrl-C there; the file goes when it is a day old
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def flush(path: Path) -> None:
    with path.open("r+b") as file:  # Windows syncs only what is open for writing
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make the renames in `folder` last through a power cut, where the system lets us ask."""
    if os.name == "nt":
        return
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace(source: Path, target: Path) -> None:
    """`os.replace`, patient: Windows denies it while a reader has `target` open."""
    for left in range(REPLACE_TRIES, 0, -1):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if left == 1:
                raise
            time.sleep(REPLACE_PAUSE_S)


def long_path(path: str, *, windows: bool = os.name == "nt") -> str:
    r"""An absolute path; on Windows as `\\?\...` if our names could pass 260 characters."""
    if not windows or len(path) < 150 or path.startswith("\\\\?\\"):
        return path
    return "\\\\?\\UNC\\" + path[2:] if path.startswith("\\\\") else "\\\\?\\" + path


def cache_error(path: Path, error: OSError, places: Places = BY_VARIABLE) -> CacheError:
    """The sentence for what the system said about writing `path`; `places` help there."""
    code = error.errno
    if code in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        fault, remedy = "the disk is full", f"free some space, or {places.disk}"
    elif code == errno.EFBIG:
        fault = "the file grew beyond the size limit of this process or file system"
        remedy = f"raise the limit, or {places.disk}"
    elif code in (errno.EROFS, errno.EACCES, errno.EPERM):
        fault, remedy = f"it cannot be written ({error.strerror})", places.folder
    elif code in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        fault, remedy = "a file and a folder share this name", f"move it away, or {places.folder}"
    elif code == errno.ENOENT:
        fault, remedy = "it vanished while it was being written", "start again"
    else:
        fault = f"the system reports {error.strerror or error}"
        remedy = remedy_for(error, places.folder)
    return CacheError(path, fault, remedy)
