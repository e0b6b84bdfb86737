# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The child process in which a plan is built; build.py starts it and speaks for it.

In, on stdin: one line of JSON (the job), then the ONNX bytes; then the pipe stays open, and its end
means that the parent is gone. Out, on what was stdout, a line of JSON each: `{"phase", "step",
"of"}` any number of times, then one `{"plan"}` or `{"error", "fields"}`. TensorRT's messages and
tracebacks go to stderr, where they outlive a crash. Never imports torch.
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
from typing import Any, BinaryIO

from .. import errors
from . import capabilities, load
from .gpus import FP8_SM, sm_text

REPORT_INTERVAL_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The phase that takes nearly all the time (and has one step) is not what its name says.
_PLAIN_NAMES = {"Determining refit engines": "Compiling the kernels"}

_STALL_CHECKS = 3
_IDLE_CPU_S = 0.02
MORE_MEMORY = "close other programs, or build on a machine with more memory"

Report = Callable[[dict[str, Any]], None]


def main() -> None:
    """Read the job from stdin, build, report, and leave without TensorRT's teardown."""
    report = _open_protocol()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills us
    job = json.loads(sys.stdin.buffer.readline())
    onnx = sys.stdin.buffer.read(job["onnx_bytes"])
    _die_with_parent(Path(job["target"]))
    with suppress(OSError):  # if memory runs out, the kernel should take this process, not a host
        Path("/proc/self/oom_score_adj").write_text("500")
    sys.path[:] = job["sys_path"]  # find the packages that the parent finds
    try:
        report({"plan": _Build(job, onnx, report).run()})
    except errors.OctavoError as error:
        report(_report_of(error))
    os._exit(0)


class _Build:
    """One build: the job, TensorRT's objects, and the log they write to."""

    def __init__(self, job: dict[str, Any], onnx: bytes, report: Report) -> None:
        self.job, self.onnx, self.report = job, onnx, report
        self.target = Path(job["target"])
        self.trt: Any = load(job["flavour"])
        self.log = _new_log(self.trt)
        self.maps: dict[str, Any] = {}  # the parser and the builder read from these by address

    def run(self) -> dict[str, Any]:
        targets = self._targets()
        builder = self._made("builder", lambda: self.trt.Builder(self.log))
        flags = 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self._made("network", lambda: builder.create_network(flags))
        parser = self._made("parser", lambda: self.trt.OnnxParser(network, self.log))
        config = self._made("builder config", builder.create_builder_config)
        started = time.monotonic()
        self.report({"phase": "Parsing the graph", "step": 0, "of": 0})
        self._parse(parser)
        self._check_fp8(network)
        if targets:
            config.num_compute_capabilities = len(targets)
            for index, target in enumerate(targets):
                config.set_compute_capability(target, index)
        # It changes the plan's bytes (not their number), so it is no option.
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

    def _watch_for_a_stall(self) -> threading.Event:
        """Until the event is set, give up when no CPU time is used any more.

        TensorRT waits for ever once a thread of its own has failed to get memory (seen on 1.7.1).
        """
        done = threading.Event()

        def watch() -> None:
            idle, spent = 0, 0.0
            while idle < _STALL_CHECKS:  # several: a frozen container thaws into one idle interval
                if done.wait(self.job["stall_s"] / _STALL_CHECKS):
                    return
                now = time.process_time()
                idle, spent = (idle + 1 if now - spent < _IDLE_CPU_S else 0), now
            found = "the builder stands still, most likely because memory ran out"
            self.report(_report_of(self._error(found, MORE_MEMORY)))
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
        return done

    def _targets(self) -> list[Any]:
        """TensorRT's names for the job's SMs; a plan for none would claim SM 8.0 too."""
        sms: list[int] = self.job["sms"]
        if not capabilities(self.trt).ahead_of_time:
            if sms:
                remedy = "name no GPU, or use TensorRT for RTX to build for another one"
                raise self._error("the full TensorRT builds for the local GPU only", remedy)
            return []
        known = self.trt.ComputeCapability.__members__
        if not sms or any(f"SM{sm}" not in known for sm in sms):
            served = sm_text(int(name[2:]) for name in known if name.startswith("SM"))
            remedy = f"name one that TensorRT {self.trt.__version__} builds for: {served}"
            raise self._error("that GPU is not supported" if sms else "no GPU is named", remedy)
        return [known[f"SM{sm}"] for sm in sms]

    def _parse(self, parser: Any) -> None:
        if self.job["weights"]:
            parsed = parser.load_model_proto(self.onnx) and self._load_weights(parser)
            parsed = parsed and parser.parse_model_proto()
        else:
            parsed = parser.parse(self.onnx)
        if not parsed:
            faults = [parser.get_error(i) for i in range(parser.num_errors)]
            said = [f"{e.node_name()} {e.node_operator()} {e.desc()}".strip() for e in faults]
            found = f"TensorRT cannot read the graph ({'; '.join(said) or self.log.cause})"
            raise self._error(found, "report it with this message")

    def _load_weights(self, parser: Any) -> bool:
        """Point the parser at the mapped files; nothing is copied."""
        import numpy as np  # here: a shared plan needs none of it

        for name, (path, offset, size) in self.job["weights"].items():
            try:
                if path not in self.maps:
                    self.maps[path] = np.memmap(path, np.uint8, "r")
            except (OSError, ValueError) as error:  # ValueError: an empty file
                fault, remedy = f"cannot be mapped ({error})", "check the file"
                raise errors.FileError(path, fault, remedy) from None
            if offset + size > self.maps[path].nbytes:
                fault = f"ends before the {size} bytes of {name} at {offset}"
                raise errors.FileError(path, fault, "write or download it again")
            if not parser.load_initializer(name, self.maps[path].ctypes.data + offset, size):
                found = f"the graph has no initializer {name} of {size} bytes"
                raise self._error(found, "give the weights that the graph was written for")
        return True

    def _check_fp8(self, network: Any) -> None:
        old = [sm for sm in self.job["sms"] if sm < FP8_SM]
        layers = (network.get_layer(i) for i in range(network.num_layers if old else 0))
        outputs = (layer.get_output(i) for layer in layers for i in range(layer.num_outputs))
        if any(output.dtype == self.trt.DataType.FP8 for output in outputs):
            found = f"{sm_text(old)} has no FP8, which needs SM 8.9 or newer"
            raise self._error(found, "name an RTX 40 or RTX 50 card, or choose a 16-bit recipe")

    def _add_profile(self, builder: Any, network: Any, config: Any) -> None:
        shapes: dict[str, list[list[int]]] = self.job["profile"]
        inputs = {network.get_input(i).name for i in range(network.num_inputs)}
        if unknown := sorted(set(shapes) - inputs):
            found = f"its shapes are given for {', '.join(unknown)}, which the graph has not"
            raise self._error(found, "name inputs of the graph")
        profile = self._made("optimization profile", builder.create_optimization_profile)
        for name, (smallest, usual, largest) in shapes.items():
            profile.set_shape(name, smallest, usual, largest)
        if shapes and config.add_optimization_profile(profile) < 0:
            found = f"its shapes are refused ({self.log.cause})"
            raise self._error(found, "give smallest <= usual <= largest, of the input's rank")

    def _write(self, builder: Any, network: Any, config: Any) -> tuple[int, str]:
        """Build into the target file; its size and SHA-256."""
        has_built = self._watch_for_a_stall()
        try:
            with self.target.open("wb") as file:
                writer = _new_writer(self.trt, file)
                built = builder.build_serialized_network_to_stream(network, config, writer)
                has_built.set()  # what follows may wait for a slow disk
                if writer.failure:  # TensorRT itself takes that for a success
                    raise writer.failure
                if not built:
                    found = f"TensorRT built none ({self.log.cause})"
                    remedy = "report it with this message"
                    raise self._error(found, MORE_MEMORY if "bad_alloc" in found else remedy)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            fault = f"the plan could not be written ({error.strerror or error})"
            remedy = "free some space there or choose another folder"
            raise errors.CacheError(self.target, fault, remedy) from None
        return writer.size, writer.digest.hexdigest()

    def _made(self, noun: str, make: Callable[[], Any]) -> Any:
        """What `make` returns. Where TensorRT cannot, it answers null, raises, or logs an error and
        answers with an object around a null pointer, which must not be touched.
        """
        had_failed, reason = self.log.has_failed, ""
        try:
            thing = make()
        except Exception as error:
            thing, reason = None, f"; {error}"
        if thing is None or self.log.has_failed > had_failed:
            found = f"TensorRT made no {noun} ({self.log.cause}{reason})"
            # The usual cause is no GPU, or a driver older than the CUDA it was built with.
            raise self._error(found, "check GPU and driver")
        return thing

    def _error(self, found: str, remedy: str) -> errors.BuildError:
        sms = self.job["sms"]
        return errors.BuildError(
            f"plan for {sm_text(sms) if sms else 'the local GPU'}", found, remedy
        )


def _report_of(error: errors.OctavoError) -> dict[str, Any]:
    """The fields of an error are its arguments, by name."""
    return {"error": type(error).__name__, "fields": vars(error)}


def _new_log(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]  # a base that exists once TensorRT is loaded
        """`layers`: the builder's list. `cause`: its first error; the later ones follow from it."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.layers, self.cause = "", "it gave no reason"
            self.has_failed = False

        def log(self, severity: Any, message: str) -> None:
            if message.startswith("Layers:"):
                self.layers += message + "\n"
            elif severity <= trt.ILogger.WARNING:
                line = " ".join(message.split())
                if severity <= trt.ILogger.ERROR and not self.has_failed:
                    self.has_failed, self.cause = True, line
                print(line, file=sys.stderr, flush=True)

    return Log()


def _new_monitor(trt: Any, report: Report) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """The first start of every phase, and steps at most every 50 ms. Called on any thread."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.sizes: dict[str, int] = {}
            self.last = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if phase_name not in self.sizes:
                self.tell(phase_name, 0, num_steps)
            self.sizes[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if time.monotonic() - self.last >= REPORT_INTERVAL_S:
                self.last = time.monotonic()
                self.tell(phase_name, step + 1, self.sizes[phase_name])
            return True

        def phase_finish(self, phase_name: str) -> None:
            pass

        def tell(self, phase: str, step: int, of: int) -> None:
            report({"phase": _PLAIN_NAMES.get(phase, phase), "step": step, "of": of})

    return Monitor()


def _new_writer(trt: Any, file: BinaryIO) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        """A plan's chunks into `file`. TensorRT ignores a failed write, so it is kept."""

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


def _open_protocol() -> Report:
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

    def leave_after(wait: Callable[[], object]) -> None:
        wait()
        with suppress(OSError):
            target.unlink()
        os._exit(1)

    # The pipe ends with the parent, on any system. On Linux the kernel tells too, for a process
    # forked from the parent may hold the pipe open.
    waits: list[Callable[[], object]] = [lambda: os.read(0, 1)]
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for every thread from here on
        waits.append(lambda: signal.sigwait({signal.SIGTERM}))
    for wait in waits:
        threading.Thread(target=leave_after, args=[wait], daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def peak_rss_bytes() -> int:
    """The most physical memory this process has held; 0 where the system does not tell (Windows).

    Not `ru_maxrss`: on Linux that starts at the size of the process that started this one.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
