# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A plan from an ONNX graph, built in a child process.

The builder is native code that may crash, run out of memory or run for minutes. In a process of
its own none of this reaches the host, its memory is counted apart, and cancelling is a kill. The
child is started from this package's folder, because inside ComfyUI that has no importable name.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .. import errors
from . import Flavour
from .gpus import sm_text
from .header import read_header
from .layers import LayerReport, layer_report
from .worker import MORE_MEMORY

CANCEL_POLL_S = 0.05
STALL_S = 30.0
LOG_LINES = 20
_PACKAGE = Path(__file__).resolve().parent.parent
_BOOTSTRAP = """\
import sys, types
package = types.ModuleType("octavo_builder")
package.__path__ = [sys.argv[1]]
sys.modules["octavo_builder"] = package
from octavo_builder.trt import worker
worker.main()
"""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BuildRequest:
    """What to build: `onnx` is a serialized ModelProto, strongly typed.

    `sms`: the GPUs one plan shall serve, 89 for 8.9; empty means the local GPU, for the full
    TensorRT only. `profile`: input name -> smallest, usual, largest shape, for every input with a
    dynamic size. `weights`: initializer name -> file, offset and size in bytes, for initializers
    that the graph declares as external; they are mapped, not copied.
    """

    flavour: Flavour
    onnx: bytes
    sms: tuple[int, ...]
    profile: Mapping[str, tuple[Shape, Shape, Shape]] = field(default_factory=dict)
    weights: Mapping[str, tuple[Path, int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Where a build is. Phases nest and repeat; `of` is 0 where the number of steps is unknown."""

    phase: str
    step: int
    of: int


@dataclass(frozen=True)
class BuiltPlan:
    """A plan on disk, flushed to it. `version` is what TensorRT said at run time.

    `seconds`: parsing, compiling and writing, not the start of the process. `peak_rss_bytes`: of
    the child, 0 where unknown. `layers`: None where the builder listed none in the known form.
    """

    path: Path
    bytes: int
    sha256: str
    seconds: float
    peak_rss_bytes: int
    sms: tuple[int, ...]
    flavour: Flavour
    version: str
    layers: LayerReport | None


def build_plan(
    request: BuildRequest,
    *,
    target: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: threading.Event | None = None,
    timeout_s: float | None = None,
) -> BuiltPlan:
    """Build `request` into `target`, which is overwritten (None: a new temporary file).

    Blocks; `progress` is called on this thread. When an exception leaves here, Ctrl-C and those of
    `progress` included, the child is dead and the target gone.

    Raises `BuildError` (refused, crashed, killed, too slow), `EngineUnavailable` (no TensorRT),
    `FileError` (weights), `CacheError` (the target cannot be written), `Cancelled`.
    """
    if target is None:
        handle, name = tempfile.mkstemp(prefix="octavo-", suffix=".plan")
        os.close(handle)
        target = Path(name)
    try:
        return _build(request, target, progress or (lambda _: None), cancel, timeout_s)
    except BaseException:
        with suppress(OSError):
            target.unlink()
        raise


def _build(
    request: BuildRequest,
    target: Path,
    progress: Callable[[Progress], None],
    cancel: threading.Event | None,
    timeout_s: float | None,
) -> BuiltPlan:
    subject = f"plan for {sm_text(request.sms) if request.sms else 'the local GPU'}"
    with tempfile.TemporaryFile() as log:
        child = _start(subject, log)
        reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        talk = threading.Thread(
            target=_converse, args=(child, _message(request, target), reports), daemon=True
        )
        try:
            progress(Progress("Starting the builder", 0, 0))
            talk.start()
            outcome = _follow(reports, subject, progress, cancel, timeout_s)
            if outcome is None:
                raise _died(subject, child.wait(), _tail(log))
        finally:
            child.kill()
            child.wait()
            if talk.ident:
                talk.join()  # it ends with the child
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):
                    pipe and pipe.close()
        if "error" in outcome:
            fields = outcome["fields"]
            if "log" in fields:
                fields["log"] = _tail(log)
            raise getattr(errors, outcome["error"])(**fields)
        return _built(request, target, subject, outcome["plan"])


def _start(subject: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # -P: the modules of the current folder are not the child's.
    command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(_PACKAGE)]
    pipe = subprocess.PIPE
    try:  # in a process group of its own: Ctrl-C in a terminal shall reach the parent only
        if sys.platform == "win32":
            flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
            return subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, creationflags=flags
            )
        else:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, process_group=0)
    except OSError as error:
        found = f"the builder process could not be started ({error})"
        raise errors.BuildError(subject, found, f"check that {sys.executable!r} runs") from error


def _message(request: BuildRequest, target: Path) -> bytes:
    spans = request.weights.items()
    job = {
        "flavour": request.flavour,
        "sms": sorted(set(request.sms)),
        "profile": dict(request.profile),
        "weights": {name: (str(path.resolve()), at, size) for name, (path, at, size) in spans},
        "target": str(target.absolute()),
        "sys_path": [os.path.abspath(entry) for entry in sys.path],
        "stall_s": STALL_S,
        "onnx_bytes": len(request.onnx),
    }
    return json.dumps(job).encode() + b"\n" + request.onnx


def _converse(
    child: subprocess.Popen[bytes],
    message: bytes,
    reports: queue.SimpleQueue[dict[str, Any] | None],
) -> None:
    """Send the job, then hand on what the child reports; None once it is silent for good."""
    assert child.stdin and child.stdout
    try:
        child.stdin.write(message)
        child.stdin.flush()
        for line in child.stdout:
            reports.put(json.loads(line))
    except (OSError, ValueError):  # killed in mid line
        pass
    finally:
        reports.put(None)


def _follow(
    reports: queue.SimpleQueue[dict[str, Any] | None],
    subject: str,
    progress: Callable[[Progress], None],
    cancel: threading.Event | None,
    timeout_s: float | None,
) -> dict[str, Any] | None:
    """The child's last word, or None if it died without one."""
    started = time.monotonic()
    while True:
        if cancel and cancel.is_set():
            raise errors.Cancelled(f"{subject}: cancelled")
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            found = f"the builder was stopped after {timeout_s:g} seconds"
            raise errors.BuildError(subject, found, "allow it more time")
        try:
            report = reports.get(timeout=CANCEL_POLL_S)
        except queue.Empty:
            continue
        if report is None or "phase" not in report:
            return report
        progress(Progress(report["phase"], report["step"], report["of"]))


def _built(request: BuildRequest, target: Path, subject: str, plan: dict[str, Any]) -> BuiltPlan:
    header, size = read_header(target), target.stat().st_size
    sms = tuple(sorted(set(request.sms)))
    if size != plan["bytes"] or (header and header.total_bytes != size):
        raise errors.BuildError(subject, f"only {size} bytes of it were written", "build it again")
    if header and not set(sms) <= set(header.sms):
        found = f"TensorRT built it for {sm_text(header.sms)}"
        raise errors.BuildError(subject, found, "report it with the version of TensorRT")
    return BuiltPlan(
        path=target,
        bytes=size,
        sha256=plan["sha256"],
        seconds=plan["seconds"],
        peak_rss_bytes=plan["peak_rss_bytes"],
        sms=sms,
        flavour=request.flavour,
        version=plan["version"],
        layers=layer_report(plan["layers"]),
    )


def _died(subject: str, code: int, log: tuple[str, ...]) -> errors.BuildError:
    """The error for a child that ended without a word, from its exit code."""
    remedy = f"{MORE_MEMORY}, or report it with its log"
    if any("bad_alloc" in line for line in log):
        found, remedy = "the builder ran out of memory", MORE_MEMORY
    elif code == -9:
        found = "the builder was killed (SIGKILL), most likely because memory ran out"
        remedy = MORE_MEMORY
    elif code < 0:
        found = f"the builder crashed ({signal.Signals(-code).name})"
    else:
        found = f"the builder ended with exit code {code:#x}"
        if log:
            found += f" ({log[-1]})"
    return errors.BuildError(subject, found, remedy, log)


def _tail(log: IO[bytes]) -> tuple[str, ...]:
    log.seek(0)
    return tuple(log.read().decode(errors="replace").splitlines()[-LOG_LINES:])
