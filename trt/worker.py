# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The child process in which a plan is built (build.py starts it and speaks for it).

Protocol. In, on stdin: one line of JSON (the job), then the ONNX bytes; then the pipe stays open, and
its end means that the parent is gone. Out, on what was stdout: JSON lines, `{"phase", "step", "of"}`
any number of times, then one `{"plan": ...}` or `{"error": class name, "fields": [...]}`. Messages of
TensorRT and tracebacks go to stderr. Never imports torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .. import errors
from . import capabilities, load
from .gpus import FP8_SM, sm_text

REPORT_INTERVAL_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_UNWRITABLE_REMEDY = "free some space there or choose another folder"

Report = Callable[[dict[str, Any]], None]
T = TypeVar("T")


def main() -> None:
    """Read the job from stdin, build, report, and leave without TensorRT's teardown."""
    report = _protocol()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills us
    job = json.loads(sys.stdin.buffer.readline())
    onnx = sys.stdin.buffer.read(job["onnx_bytes"])
    _die_with_parent(Path(job["target"]))
    with suppress(OSError):  # where memory runs out, the kernel should take this process, not a host
        Path("/proc/self/oom_score_adj").write_text("500")
    sys.path[:] = job["sys_path"]  # find the packages that the parent finds
    try:
        report({"plan": _Job(job, onnx, report).build()})
    except errors.BuildError as error:
        report({"error": "BuildError", "fields": [error.subject, error.reason, error.remedy]})
    except errors.EngineUnavailable as error:
        report({"error": "EngineUnavailable", "fields": [error.engine, error.reason, error.remedy]})
    except (errors.FileError, errors.CacheError) as error:
        fields = [error.path, error.fault, error.remedy]
        report({"error": type(error).__name__, "fields": fields})
    sys.stderr.flush()
    os._exit(0)


class _Job:
    """One build: the request's fields, TensorRT's objects, and the log they write to."""

    def __init__(self, job: dict[str, Any], onnx: bytes, report: Report) -> None:
        self.onnx, self.report = onnx, report
        self.sms: list[int] = sorted(set(job["sms"]))
        self.profile: dict[str, list[list[int]]] = job["profile"]
        self.weights: dict[str, tuple[str, int, int]] = job["weights"]
        self.target = Path(job["target"])
        self.subject = f"plan for {sm_text(self.sms) if self.sms else 'the local GPU'}"
        self.trt: Any = load(job["flavour"])
        self.can = capabilities(self.trt)
        self.log = _new_log(self.trt)
        self.maps: list[Any] = []  # the parser and the builder read from these by address

    def build(self) -> dict[str, Any]:
        self._check_targets()
        builder = self._made("builder", lambda: self.trt.Builder(self.log))
        flags = 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self._made("network", lambda: builder.create_network(flags))
        parser = self._made("parser", lambda: self.trt.OnnxParser(network, self.log))
        config = self._made("builder config", builder.create_builder_config)
        started = time.monotonic()
        self.report({"phase": "Parsing the graph", "step": 0, "of": 0})
        self._parse(parser)
        self._check_fp8(network)
        if self.can.ahead_of_time:
            config.num_compute_capabilities = len(self.sms)
            for index, sm in enumerate(self.sms):
                config.set_compute_capability(self._compute_capability(sm), index)
        # Part of the plan's bytes (not of their number), so it is not an option.
        config.profiling_verbosity = self.trt.ProfilingVerbosity.DETAILED
        config.progress_monitor = _new_monitor(self.trt, self.report)
        self._add_profile(builder, network, config)
        size, digest = self._write(builder, network, config)
        return {
            "bytes": size,
            "sha256": digest,
            "seconds": time.monotonic() - started,
            "peak_rss_bytes": peak_rss_bytes(),
            "version": self.trt.__version__,
            "layers": self.log.layers,
        }

    def _check_targets(self) -> None:
        if self.can.ahead_of_time and not self.sms:  # a plan for any GPU would claim SM 8.0 too
            raise self._error("no GPU is named", "name at least one, such as rtx4090 or sm120")
        if not self.can.ahead_of_time and self.sms:
            raise self._error(
                "the full TensorRT builds for the local GPU only",
                "name no GPU, or use TensorRT for RTX to build for another one",
            )
        for sm in self.sms:
            self._compute_capability(sm)

    def _compute_capability(self, sm: int) -> Any:
        known = self.trt.ComputeCapability
        if member := getattr(known, f"SM{sm}", None):
            return member
        sms = [int(name[2:]) for name in known.__members__ if name.startswith("SM")]
        found = f"TensorRT {self.trt.__version__} builds for {sm_text(sorted(sms))} only"
        raise self._error(found, "name another GPU or install a newer version")

    def _parse(self, parser: Any) -> None:
        if not self.weights:
            parsed = parser.parse(self.onnx)
        elif not self.can.has_initializers:
            found = f"TensorRT {self.trt.__version__} cannot take weights by address"
            raise self._error(found, "install a newer version or build a shared plan")
        else:
            parsed = parser.load_model_proto(self.onnx) and self._load_weights(parser)
            parsed = parsed and parser.parse_model_proto()
        if not parsed:
            faults = [parser.get_error(i) for i in range(parser.num_errors)]
            said = "; ".join(
                f"node {e.node_name()} ({e.node_operator()}): {e.desc()}" if e.node_name() else e.desc()
                for e in faults
            )
            found = f"the parser refused the graph: {said or self._first_complaint()}"
            raise self._error(found, "report it with this message if Octavo wrote the graph")

    def _load_weights(self, parser: Any) -> bool:
        """Point the parser at the mapped files; nothing is copied."""
        import numpy as np  # here: a shared plan needs none of it

        mapped: dict[str, Any] = {}
        for name, (path, offset, size) in self.weights.items():
            if path not in mapped:
                try:
                    mapped[path] = np.memmap(path, np.uint8, "r")
                except (OSError, ValueError) as error:  # ValueError: an empty file
                    raise errors.FileError(path, f"cannot be mapped ({error})", "check it") from None
                self.maps.append(mapped[path])
            if offset + size > mapped[path].nbytes:
                fault = f"ends before the {size} bytes of {name} at {offset}"
                raise errors.FileError(path, fault, "download or write it again")
            if not parser.load_initializer(name, mapped[path].ctypes.data + offset, size):
                found = f"the graph has no initializer {name} of {size} bytes"
                raise self._error(found, "give the weights that the graph was written for")
        return True

    def _check_fp8(self, network: Any) -> None:
        old = [sm for sm in self.sms if sm < FP8_SM]
        if not old:
            return
        fp8 = self.trt.DataType.FP8
        layers = (network.get_layer(i) for i in range(network.num_layers))
        if any(la.get_output(i).dtype == fp8 for la in layers for i in range(la.num_outputs)):
            found = f"{sm_text(old)} has no FP8, which needs SM 8.9 or newer"
            raise self._error(found, "name an RTX 40 or RTX 50 card, or choose a 16-bit recipe")

    def _add_profile(self, builder: Any, network: Any, config: Any) -> None:
        inputs = {network.get_input(i).name for i in range(network.num_inputs)}
        if unknown := sorted(set(self.profile) - inputs):
            found = f"the shape profile names {', '.join(unknown)}"
            raise self._error(found, f"name inputs of the graph: {', '.join(sorted(inputs))}")
        if not self.profile:
            return
        profile = self._made("optimization profile", builder.create_optimization_profile)
        for name, (smallest, usual, largest) in self.profile.items():
            profile.set_shape(name, smallest, usual, largest)
        if config.add_optimization_profile(profile) < 0:
            found = f"the shape profile is refused: {self._first_complaint()}"
            raise self._error(found, "give smallest <= usual <= largest, of the input's rank")

    def _write(self, builder: Any, network: Any, config: Any) -> tuple[int, str]:
        """Build into the target file; its size and SHA-256."""
        try:
            with self.target.open("wb") as file:
                writer = _new_writer(self.trt, file)
                if self.can.has_plan_stream:
                    done = builder.build_serialized_network_to_stream(network, config, writer)
                else:
                    plan = builder.build_serialized_network(network, config)
                    done = plan is not None and writer.write(plan)
                if writer.failure:  # TensorRT itself reports success then
                    raise writer.failure
                if not done:
                    found = f"TensorRT built no plan: {self._first_complaint()}"
                    raise self._error(found, "report it with this message")
                self.report({"phase": "Writing the plan", "step": 0, "of": 0})
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            fault = f"the plan could not be written ({error.strerror or error})"
            raise errors.CacheError(self.target, fault, _UNWRITABLE_REMEDY) from None
        return writer.size, writer.digest.hexdigest()

    def _made(self, noun: str, make: Callable[[], T | None]) -> T:
        """What `make` returns; TensorRT answers null or raises where it cannot."""
        reason = "TensorRT gave none"
        try:
            if (thing := make()) is not None:
                return thing
        except Exception as error:
            reason = str(error)
        said = self.log.complaints[0] if self.log.complaints else reason
        # The usual cause is a driver older than the CUDA that TensorRT was built with, or no GPU.
        raise self._error(f"no {noun} could be created ({said})", "check GPU and driver: octavo doctor")

    def _first_complaint(self) -> str:
        """The root cause comes first in TensorRT's log; what follows are its consequences."""
        return self.log.complaints[0] if self.log.complaints else "it gave no reason"

    def _error(self, found: str, remedy: str) -> errors.BuildError:
        return errors.BuildError(self.subject, found, remedy)


def _new_log(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]  # the base exists only once TensorRT is loaded
        """Errors and warnings to stderr, where they outlive a crash; the layer list kept."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.layers = ""
            self.complaints: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if message.startswith("Layers:"):
                self.layers += message + "\n"
            elif severity <= trt.ILogger.WARNING:
                line = " ".join(message.split())
                if severity <= trt.ILogger.ERROR:
                    self.complaints.append(line)
                print(line, file=sys.stderr, flush=True)

    return Log()


def _new_monitor(trt: Any, report: Report) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Every phase once at its first start, its steps at most every 50 ms. Any thread calls it."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.sizes: dict[str, int] = {}
            self.last = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if phase_name not in self.sizes:
                report({"phase": phase_name, "step": 0, "of": num_steps})
            self.sizes[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if time.monotonic() - self.last >= REPORT_INTERVAL_S:
                self.last = time.monotonic()
                report({"phase": phase_name, "step": step + 1, "of": self.sizes[phase_name]})
            return True

        def phase_finish(self, phase_name: str) -> None:
            pass

    return Monitor()


def _new_writer(trt: Any, file: BinaryIO) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        """Chunks of a plan into `file`. A write that fails is kept: TensorRT does not stop for it."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.size, self.digest = 0, hashlib.sha256()
            self.failure: OSError | None = None

        def write(self, data: bytes) -> int:
            if self.failure:
                return 0
            try:
                file.write(data)
            except OSError as error:
                self.failure = error
                return 0
            self.digest.update(data)
            self.size += len(data)
            return len(data)

    return Writer()


def _protocol() -> Report:
    """Take stdout for the protocol; what native code prints goes to stderr instead."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lock = threading.Lock()

    def report(message: dict[str, Any]) -> None:
        with lock, suppress(OSError):  # the parent is gone, and so shall we be
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()

    return report


def _die_with_parent(target: Path) -> None:
    """End this process, and what it has written, when the parent ends, however that happens."""

    def leave() -> None:
        with suppress(OSError):
            target.unlink()
        os._exit(1)

    def watch_pipe() -> None:
        while os.read(0, 1):
            pass
        leave()

    threading.Thread(target=watch_pipe, daemon=True).start()
    if sys.platform == "linux":  # also where a process forked from the parent keeps the pipe open

        def watch_signal() -> None:
            signal.sigwait({signal.SIGTERM})
            leave()

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread of TensorRT
        threading.Thread(target=watch_signal, daemon=True).start()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def peak_rss_bytes() -> int:
    """The most physical memory this process has held; 0 where the system does not tell.

    Not `ru_maxrss`: on Linux that starts at the size of the process that started this one.
    """
    if sys.platform == "win32":

        class Counters(ctypes.Structure):  # PROCESS_MEMORY_COUNTERS
            _fields_ = [
                ("size", ctypes.c_uint32),
                ("page_faults", ctypes.c_uint32),
                ("peak_working_set", ctypes.c_size_t),
                ("rest", ctypes.c_size_t * 7),
            ]

        counters = Counters(size=ctypes.sizeof(Counters))
        current = ctypes.c_void_p(-1)  # GetCurrentProcess()
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(
            current, ctypes.byref(counters), ctypes.sizeof(counters)
        )
        return int(counters.peak_working_set)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
