# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The cache folder: look up, write, lock, prune.

    <root>/checkpoints/<key>.safetensors + <key>.json
    <root>/plans/<key>.plan              + <key>.json, <key>.<gpu and versions>.kernels
    <root>/locks/<key>.lock, commit.lock

A read is suspicious: length and SHA-256 are checked; what fails is removed and built again.
A write is atomic: temporary file, fsync, rename, manifest last. The two renames happen under
commit.lock, so two writers of one key never leave the artifact of one with the other's manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from ..checkpoints import FileIdentity
from ..errors import CacheError, OctavoBug, OctavoError
from . import atomic, manifest
from .checksum import checksum, matches
from .key import KEY_PATTERN, Key, Kind, canonical, is_key
from .lock import LockedError, hold, holder, is_suspended
from .manifest import SUFFIXES, DamagedError, ForeignError, Manifest, manifest_from_json

logger = logging.getLogger(__name__)

KERNELS = ".kernels"  # what TensorRT compiled at run time for a plan, beside it (trt/session.py)
DEFAULT_BUDGET_BYTES = 20 * 2**30
GRACE_S = 600.0  # a write never evicts what was used within this time: its job may still need it
COMMIT_WAIT_S = 60.0
SAY_WAIT_S = 5.0  # after which a wait for another builder is told, and looked at each so often
SUSPENDED_S = 30.0  # for which a builder may be suspended before nobody waits for it any longer

_FOLDERS: dict[Kind, str] = {"checkpoint": "checkpoints", "plan": "plans"}


@dataclass(frozen=True)
class Entry:
    """An artifact that was there when asked; `last_use` (seconds since 1970) as it was before.

    `identity` is the file's before its checksum was verified: who opens it later can compare.
    """

    path: Path
    manifest: Manifest
    last_use: float
    identity: FileIdentity | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Checked:
    """One result of `verify_all`: the `entry`, or the `fault` in words.

    `removed`: it was damaged and is gone. What another version wrote, or cannot be read, stays.
    """

    kind: Kind
    key: str
    path: Path
    entry: Entry | None
    fault: str | None
    removed: bool = False


@dataclass(frozen=True)
class Doomed:
    """One artifact with its manifest, or what is left of them. `last_use` in seconds since 1970."""

    kind: Kind
    key: str
    size_bytes: int
    last_use: float


@dataclass(frozen=True)
class PrunePlan:
    """What would be deleted, longest unused first, as a value to show before it is executed."""

    goes: tuple[Doomed, ...]
    freed_bytes: int
    kept_bytes: int
    cache: EngineCache = field(repr=False, compare=False)

    def execute(self) -> int:
        """Delete; return the bytes freed. What was locked, used or replaced meanwhile stays."""
        return sum(doomed.size_bytes for doomed in self.goes if self.cache.remove(doomed))


def parse_size(text: str, subject: str = "size") -> int:
    """Bytes from "123", "20G", "1.5 GiB"; K, M, G, T are powers of 1024. Raises OctavoError."""
    form = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(?:I?B)?"
    if (found := re.fullmatch(form, text.strip().upper())) is None:
        raise OctavoError(
            f"{subject}: {text!r} is not a size; give bytes, or K, M, G or T as in 20G."
        )
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


class EngineCache:
    """Checkpoints and plans under `root`, else OCTAVO_CACHE, else the platform's cache directory.

    `budget_bytes`, else OCTAVO_CACHE_BUDGET, else 20 GiB; an empty variable counts as unset.
    Nothing is created before the first write, and the folder may be deleted at any time. Serves
    several threads and processes.
    """

    def __init__(self, root: Path | None = None, budget_bytes: int | None = None) -> None:
        chosen: str | Path | None = root or os.environ.get("OCTAVO_CACHE")
        if not chosen:
            from platformdirs import user_cache_path

            chosen = user_cache_path("octavo", appauthor=False)
        try:
            whole = Path(chosen).expanduser().absolute()
        except RuntimeError as error:  # ~ or ~name without a home
            fault = "its ~ stands for no home folder that is known"
            raise CacheError(chosen, fault, "give the whole path") from error
        self.root = Path(atomic.long_path(str(whole)))
        self.places = atomic.BY_NAME if root else atomic.BY_VARIABLE  # what helps, in words
        if budget_bytes is None:
            text = os.environ.get("OCTAVO_CACHE_BUDGET")
            budget_bytes = parse_size(text, "OCTAVO_CACHE_BUDGET") if text else DEFAULT_BUDGET_BYTES
        self.budget_bytes = budget_bytes
        self._held: dict[str, int] = {}  # key -> thread that holds its lock through this object

    def refuse_impossible(self) -> None:
        """Raise CacheError where the folder is not there and cannot be made. Makes nothing.

        One that is there and read-only is none of these: it serves what it holds.
        """
        for at in (self.root, *self.root.parents):
            try:
                mode = os.stat(at).st_mode
            except (FileNotFoundError, NotADirectoryError) as error:
                if os.path.islink(at):
                    remedy = f"remove it, or {self.places.folder}"
                    raise CacheError(at, "it is a link to nothing", remedy) from error
                continue
            except OSError as error:
                raise self._error(self.root, error) from error
            if not stat.S_ISDIR(mode):
                raise self._error(at, NotADirectoryError(errno.ENOTDIR, ""))
            if at != self.root and not os.access(at, os.W_OK | os.X_OK):
                fault = f"it is not there and cannot be made, for {at} cannot be written"
                raise CacheError(self.root, fault, self.places.folder)
            return
        fault = "it is not there and cannot be made, for no folder above it exists"
        raise CacheError(self.root, fault, self.places.folder)

    # Look-up

    def get(self, kind: Kind, key: Key | str, *, verify: bool = True) -> Entry | None:
        """The entry, or None. Load only what was verified; `verify=False` reads no artifact.

        A damaged entry is removed with one line in the log, and is a miss. Counts as a use.
        """
        found = self._look(kind, _id(key), verify=verify)
        if not isinstance(found, Entry):
            return None
        with contextlib.suppress(OSError):  # a read-only cache serves without remembering
            os.utime(self._names(kind, found.manifest.key)[1])
        return found

    def find_plans(
        self, facts: Mapping[str, Any], *, sm: int | None = None, verify: bool = True
    ) -> list[Entry]:
        """Plans whose key facts include all of `facts`; fewest SMs first, then the last used.

        With `sm`, any plan for several SMs that has this one counts, and the `sms` in `facts` are
        not compared: `find_plans(key.facts, sm=89)` finds what was built elsewhere for (89, 120).
        """
        wanted = {name: fact for name, fact in facts.items() if name != "sms" or sm is None}

        def fits(has: dict[str, Any]) -> bool:
            same = canonical({name: has.get(name) for name in wanted}) == canonical(wanted)
            return has["kind"] == "plan" and same and (sm is None or sm in has["sms"])

        found = [entry for entry in self.entries() if fits(entry.manifest.key_facts)]
        found.sort(key=lambda entry: (len(entry.manifest.key_facts["sms"]), -entry.last_use))
        if not verify:
            return found
        whole = (self.get("plan", entry.manifest.key) for entry in found)
        return [entry for entry in whole if entry is not None]

    def entries(self) -> list[Entry]:
        """Every entry with a sound manifest and the right length, the last used first."""
        found = []
        for kind, key in self._files():
            with contextlib.suppress(DamagedError, OSError):
                if (entry := self._load(kind, key, verify=False)) is not None:
                    found.append(entry)
        return sorted(found, key=lambda entry: (-entry.last_use, entry.manifest.key))

    def verify_all(self) -> list[Checked]:
        """Read everything; what is damaged is removed, as a look-up would."""
        checked = []
        for kind, key in self._files():
            found, path = self._look(kind, key, verify=True), self._names(kind, key)[0]
            if isinstance(found, Entry):
                checked.append(Checked(kind, key, path, found, None))
            elif found is not None:
                gone = not any(map(os.path.lexists, self._names(kind, key)))
                checked.append(Checked(kind, key, path, None, found, gone))
        return checked

    # Writing

    def put(
        self,
        kind: Kind,
        key: Key,
        write: Callable[[BinaryIO], object],
        facts: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Store what `write` writes, replacing an entry of the same key; then keep the budget.

        Raises CacheError (disk full, read-only, ...) and then leaves nothing of its own. `write` is
        called a second time if the folder was deleted meanwhile.
        """
        for last in (False, True):
            try:
                with self.temporary(kind, key) as path:
                    with path.open("xb") as file:
                        write(file)
                    return self.adopt(kind, key, path, facts)
            except CacheError as error:
                if last or not isinstance(error.__cause__, FileNotFoundError):
                    raise
        raise AssertionError("unreachable")

    @contextmanager
    def temporary(self, kind: Kind, key: Key | str) -> Iterator[Path]:
        """A path in the cache for writers that want one; give it to `adopt` inside the block.

        Whatever is left there afterwards is deleted. An OSError about it becomes a CacheError.
        """
        artifact, _ = self._names(kind, _id(key))
        folder = artifact.parent
        try:
            path = atomic.new_partial(folder, _id(key))
        except FileNotFoundError as error:  # below /proc, say, whoever asks
            raise CacheError(folder, "it cannot be made", self.places.folder) from error
        except OSError as error:
            raise self._error(folder, error) from error
        atomic.sweep_partials(folder, self._is_abandoned)
        try:
            yield path
        except OSError as error:
            if error.filename is None or str(error.filename).startswith(str(folder)):
                raise self._error(artifact, error) from error
            raise
        finally:
            atomic.drop_partial(path)

    def adopt(
        self, kind: Kind, key: Key, temporary: Path, facts: Mapping[str, Any] | None = None
    ) -> Entry:
        """Make the file at `temporary` the entry of `key`; then keep the budget. Raises CacheError.

        Where Windows refuses since somebody runs from the file there, and it is whole, that stays.
        """
        if kind != key.kind:
            raise OctavoBug(f"a {key.kind} key for a {kind}")
        artifact, sidecar = self._names(kind, key.id)
        try:
            atomic.flush(temporary)
            identity = FileIdentity.of(temporary)  # a rename changes the path alone
            found = checksum(temporary)
            if not found.length:
                raise OctavoBug(f"nothing was written for {artifact.name}")
            about = Manifest(
                kind=kind,
                key=key.id,
                key_facts=key.facts,
                artifact=artifact.name,
                length=found.length,
                sha256=found.sha256,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                facts=dict(facts or {}),
                parts=list(found.parts),
            )
            with self._written(about) as written, self._committing():
                atomic.replace(temporary, artifact)
                atomic.replace(written, sidecar)
                atomic.flush_folder(artifact.parent)
        except OSError as error:
            if isinstance(error, PermissionError):
                with contextlib.suppress(DamagedError, OSError):
                    if (winner := self._load(kind, key.id, verify=True)) is not None:
                        return winner
            raise self._error(artifact, error) from error
        finally:
            atomic.drop_partial(temporary)
        self._keep_budget()
        whole = manifest_from_json(about.to_json().encode())
        return Entry(
            artifact, whole, time.time(), dataclasses.replace(identity, path=str(artifact))
        )

    def update_facts(self, entry: Entry, facts: Mapping[str, Any]) -> Entry | None:
        """Add to an entry's free facts; None if it is gone or replaced. Raises CacheError."""
        kind, key = entry.manifest.kind, entry.manifest.key
        sidecar = self._names(kind, key)[1]
        try:
            with self._committing():
                current = self._load(kind, key, verify=False)
                if current is None or current.manifest.sha256 != entry.manifest.sha256:
                    return None
                merged = {**current.manifest.facts, **facts}
                about = dataclasses.replace(current.manifest, facts=merged)
                with self._written(about) as written:
                    atomic.replace(written, sidecar)
                    atomic.flush_folder(sidecar.parent)
        except DamagedError:
            return None
        except OSError as error:
            raise self._error(sidecar, error) from error
        whole = manifest_from_json(about.to_json().encode())
        return dataclasses.replace(entry, manifest=whole, last_use=time.time())

    @contextmanager
    def lock(
        self,
        key: Key | str,
        timeout_s: float | None = None,
        on_wait: Callable[[float], None] | None = None,
    ) -> Iterator[bool]:
        """One builder per key: after acquiring, look up again, the other may have built it.

        Yields False where no lock can be made (read-only cache): go on without. `on_wait(seconds)`
        is called four times a second while waiting and may raise. CacheError after `timeout_s`, and
        where the other process is suspended; one that builds may take as long as it needs.
        """
        ident, me = _id(key), threading.get_ident()
        if self._held.get(ident) == me:
            raise OctavoBug(f"one thread locks {ident} twice")
        path = self._lock_path(ident)
        with contextlib.ExitStack() as stack:
            try:
                patience = _patience(path, on_wait)
                got = stack.enter_context(hold(path, timeout_s=timeout_s, on_wait=patience))
            except LockedError:
                fault = f"another process has been building this for more than {timeout_s:g} s"
                remedy = "wait until it is done, or end it, and run the command again"
                raise CacheError(path, fault, remedy) from None
            if got:
                self._held[ident] = me
                stack.callback(self._held.pop, ident)
            yield got

    # Deleting

    def plan_prune(self, budget_bytes: int | None = None, *, grace_s: float = 0.0) -> PrunePlan:
        """What must go, longest unused first, for the rest to fit the budget.

        Never what is locked now, or was written or used within the last `grace_s`. A use in the
        future (the clock was set back) tells nothing, and counts as the oldest.
        """
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        now = time.time()

        def age(doomed: Doomed) -> float:
            """Seconds; a little in the future is the clock of a server, and is now."""
            seconds = now - doomed.last_use
            return max(seconds, 0.0) if seconds > -GRACE_S else math.inf

        found = sorted(self._files().values(), key=lambda d: (-age(d), d.last_use, d.key))
        left, goes = sum(doomed.size_bytes for doomed in found), []
        start = left
        for doomed in found:
            if left <= budget:
                break
            recent = grace_s > 0 and age(doomed) < grace_s
            if not recent and not self._is_locked(doomed.key):
                goes.append(doomed)
                left -= doomed.size_bytes
        return PrunePlan(tuple(goes), start - left, left, self)

    def remove(self, doomed: Doomed) -> bool:
        """Delete one entry unless it is locked or was used since; True if it is gone.

        The artifact goes first: if Windows refuses because it is open, the entry stays whole.
        """
        artifact, sidecar = self._names(doomed.kind, doomed.key)
        path = self._lock_path(doomed.key)
        try:
            with hold(path, timeout_s=0), self._committing():
                there = self._files().get((doomed.kind, doomed.key))
                if there is None or there.last_use != doomed.last_use:
                    return False
                artifact.unlink(missing_ok=True)
                sidecar.unlink(missing_ok=True)
                for kernels in artifact.parent.glob(f"{doomed.key}.*{KERNELS}"):
                    kernels.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.unlink()
        except LockedError:
            return False
        except OSError as error:
            if os.name == "nt" and isinstance(error, PermissionError):
                return False
            raise self._error(artifact, error) from error
        return True

    def clear(self) -> int:
        """Delete every entry that nobody has locked; foreign files stay. Returns bytes freed."""
        for folder in _FOLDERS.values():
            atomic.sweep_partials(self.root / folder, self._is_abandoned)
        freed = self.plan_prune(0).execute()
        with contextlib.suppress(OSError):
            for path in list((self.root / "locks").iterdir()):
                if path.suffix == ".lock" and is_key(path.stem):
                    with contextlib.suppress(LockedError, OSError), hold(path, timeout_s=0):
                        path.unlink()
        return freed

    # Inside

    def _error(self, path: Path, error: OSError) -> CacheError:
        return atomic.cache_error(path, error, self.places)

    def _names(self, kind: Kind, ident: str) -> tuple[Path, Path]:
        folder = self.root / _FOLDERS[kind]
        return folder / (ident + SUFFIXES[kind]), folder / (ident + ".json")

    def _lock_path(self, ident: str) -> Path:
        return self.root / "locks" / (ident + ".lock")

    def _load(self, kind: Kind, ident: str, *, verify: bool) -> Entry | None:
        """The entry, or None where there is no trace of one. Raises DamagedError, and OSError."""
        artifact, sidecar = self._names(kind, ident)
        try:
            with sidecar.open("rb") as file:
                data = file.read(manifest.LIMIT_BYTES + 1)
                last_use = os.fstat(file.fileno()).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            if artifact.is_file():
                raise DamagedError("its manifest is missing") from None
            return None
        about = manifest_from_json(data)
        if (about.kind, about.key) != (kind, ident):
            raise DamagedError("its manifest belongs to another entry")
        try:
            identity = FileIdentity.of(artifact)
            if (size := identity.size) != about.length:
                raise DamagedError(f"it has {size} bytes instead of {about.length}")
            if verify and not matches(artifact, about.sha256, about.parts):
                raise DamagedError("its checksum is wrong")
        except FileNotFoundError:
            raise DamagedError("its artifact is missing") from None
        return Entry(artifact, about, last_use, identity)

    def _look(self, kind: Kind, ident: str, *, verify: bool) -> Entry | str | None:
        """The entry, None, or what is wrong with it; what is damaged was removed and logged."""
        with contextlib.suppress(DamagedError, OSError):
            return self._load(kind, ident, verify=verify)
        with self._committing():  # it may have been a writer between its two renames: look again
            try:
                return self._load(kind, ident, verify=verify)
            except ForeignError as error:
                fault, done = str(error), "left alone"
            except OSError as error:
                fault, done = f"it cannot be read ({error.strerror or error})", "left alone"
            except DamagedError as error:
                for path in self._names(kind, ident):
                    with contextlib.suppress(OSError):  # read-only, or open on Windows
                        path.unlink(missing_ok=True)
                there = any(map(os.path.lexists, self._names(kind, ident)))
                fault, done = str(error), "it cannot be removed" if there else "removed"
        path = self._names(kind, ident)[0]
        logger.warning("cache entry %s: %s; %s, it will be built again.", path, fault, done)
        return fault

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """Short and exclusive, for the two renames and for deletions. Never waits for ever."""
        path = self.root / "locks" / "commit.lock"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(hold(path, timeout_s=COMMIT_WAIT_S))
            except LockedError:
                logger.warning("cache lock %s is stuck; going on without it.", path)
            yield

    @contextmanager
    def _written(self, about: Manifest) -> Iterator[Path]:
        """The manifest in a temporary file beside its place, flushed to the disk."""
        text = about.to_json()
        path = atomic.new_partial(self._names(about.kind, about.key)[1].parent, about.key)
        try:
            path.write_text(text, encoding="utf-8", newline="\n")
            atomic.flush(path)
            yield path
        finally:
            atomic.drop_partial(path)

    def _files(self) -> dict[tuple[Kind, str], Doomed]:
        """What there is of ours, by kind and key: sizes added, `last_use` that of the manifest."""
        found: dict[tuple[Kind, str], Doomed] = {}
        for kind, folder in _FOLDERS.items():
            ours = re.compile(
                rf"({KEY_PATTERN})({re.escape(SUFFIXES[kind])}|\.json|\..+{re.escape(KERNELS)})"
            )
            with contextlib.suppress(OSError):
                for path in sorted((self.root / folder).iterdir()):
                    if (name := ours.fullmatch(path.name)) is None or not path.is_file():
                        continue
                    with contextlib.suppress(OSError):
                        stat, at = path.stat(), (kind, name[1])
                        other = found.get(at)
                        size = stat.st_size + (other.size_bytes if other else 0)
                        last_use = other.last_use if other else stat.st_mtime
                        if path.suffix == ".json":
                            last_use = stat.st_mtime
                        found[at] = Doomed(kind, name[1], size, last_use)
        return found

    def _is_locked(self, ident: str) -> bool:
        path = self._lock_path(ident)
        try:
            if os.path.exists(path):  # asking must not litter
                with hold(path, timeout_s=0):
                    pass
        except LockedError:
            return True
        return False

    def _is_abandoned(self, ident: str) -> bool:
        """Nobody builds `ident`, or this object does: a dead process's file is waste either way."""
        return ident in self._held or not self._is_locked(ident)

    def _keep_budget(self) -> None:
        try:
            freed = self.plan_prune(grace_s=GRACE_S).execute()
        except CacheError as error:
            logger.warning("%s", error)
        else:
            if freed:
                logger.info("cache %s: removed %d bytes, longest unused.", self.root, freed)


def _patience(path: Path, on_wait: Callable[[float], None] | None) -> Callable[[float], None]:
    """`on_wait`, which says after a while who holds the lock `path`, and ends a vain wait."""
    looked, suspended = 0.0, 0.0  # seconds so far; since when it was seen suspended

    def wait(waited: float) -> None:
        nonlocal looked, suspended
        if waited - looked >= SAY_WAIT_S:
            pid = holder(path)
            if not looked:
                who = f"process {pid}" if pid else "another process"
                logger.warning("waiting for %s, which builds the same and holds %s.", who, path)
            looked = waited
            if pid is None or not is_suspended(pid):
                suspended = 0.0
            elif not suspended:
                suspended = waited
            elif waited - suspended >= SUSPENDED_S:
                fault = f"process {pid}, which builds this, is suspended"
                raise CacheError(path, fault, "resume or end it, and start again")
        if on_wait is not None:
            on_wait(waited)

    return wait


def _id(key: Key | str) -> str:
    ident = key.id if isinstance(key, Key) else key
    if not is_key(ident):
        raise OctavoBug(f"{ident!r} is not a cache key")
    return ident
