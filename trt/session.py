# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A plan as something that encodes: engine, contexts and weights behind one call.

The plan's weights are inputs, bound by address: a checkpoint's tensors serve it without a copy, and
a LoRA is another set of them. Contexts get their scratch memory from torch, call by call and sized
for the shapes at hand (USER_MANAGED, as in NVIDIA's memory sample for TensorRT for RTX): the host's
memory manager sees it, and running out of it is torch's error.

What TensorRT for RTX leaves to choose (the full TensorRT has none of it):
* CUDA graphs DISABLED: a captured graph holds addresses; every call has new outputs and scratch.
* kernels for dynamic shapes EAGER: LAZY swaps them in the background, so that call 50 of a prompt
  differs from call 1. The first call of each batch size compiles. Where the length is dynamic too
  (T5), NONE: generic ones, since every prompt may have a length of its own;
* the runtime cache spares later processes that.

Nothing asks which flavour this is, only what it can do. Execution on a GPU is not verified.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..device import probe
from ..errors import EngineUnavailable, OctavoBug
from . import capabilities
from .gpus import sm_text
from .header import read_header

logger = logging.getLogger(__name__)
T = TypeVar("T")

ALIGNMENT = 256  # bytes; what TensorRT asks of device memory
MAX_CONTEXTS = 4  # calls that run at once; a fifth waits
RUNTIME_CACHE_LIMIT_BYTES = 64 * 2**20  # NVIDIA's documentation warns of slowness from 100 MB on

_DTYPES = {  # name in a graph -> torch's, TensorRT's
    "float16": (torch.float16, "HALF"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float32": (torch.float32, "FLOAT"),
    "float8e4m3fn": (torch.float8_e4m3fn, "FP8"),
    "bool": (torch.bool, "BOOL"),
}
_NEXT = "the next engine is used"
_REBUILD = "build the plan again"
_FREE = "free some GPU memory"
_DIAGNOSTICS = {  # member of EngineInvalidityDiagnostics -> what it means, what helps
    "MALFORMED_ENGINE": ("the plan is damaged, or not a plan", _REBUILD),
    "VERSION_MISMATCH": ("the plan was built by another version of TensorRT", _REBUILD),
    "UNSUPPORTED_CC": ("TensorRT or the plan does not support this GPU", _NEXT),
    "OLD_CUDA_DRIVER": ("the NVIDIA driver is too old", "update the NVIDIA driver"),
    "OLD_CUDA_RUNTIME": ("the CUDA runtime is too old", "update the NVIDIA driver"),
    "INSUFFICIENT_GPU_MEMORY": ("there is not enough GPU memory", _FREE),
    "CUDA_ERROR": ("CUDA does not work", "check GPU and driver: octavo doctor"),
}


class TensorType(Protocol):
    """`dtype` as ONNX spells it, in lower case; a size that is a string is dynamic."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int | str, ...]: ...


class Promise(Protocol):
    """What a graph takes and gives (backends/onnx_ops.py `Graph` is one).

    Inputs: `embeds` [B, S, C], `mask` [B, S] bool if any, and all `weights`; S is a number, the
    positions of CLIP, or dynamic as T5's. `outputs`: the hidden states in order (T5 has none), then
    the final state, all of them of the type `state`.
    """

    @property
    def embeds(self) -> TensorType: ...
    @property
    def mask(self) -> bool: ...
    @property
    def weights(self) -> Mapping[str, TensorType]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def state(self) -> TensorType: ...


class Place:
    """A CUDA device, torch's allocator on it and the caller's stream; tests put a double here."""

    def __init__(self, device: torch.device) -> None:
        """Raises `EngineUnavailable` if there is no such device."""
        if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
            raise EngineUnavailable("TensorRT", f"there is no CUDA device '{device}'", _NEXT)
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        facts = probe(self.device)
        self.sm = facts.sm
        self.name = f"{facts.name} {facts.driver or 'unknown driver'}"  # what kernels depend on

    def guard(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Contiguous, aligned to `ALIGNMENT`, and the current stream's: freed in its order."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def record(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of `tensor` from being reused before `stream` is done with it."""
        tensor.record_stream(stream)

    def synchronize(self, stream: Any) -> None:
        stream.synchronize()


def session_from_plan(
    plan: Path | bytes,
    *,
    module: Any,
    graph: Promise,
    weights: Mapping[str, Tensor],
    device: torch.device,
    sha256: str | None = None,
    runtime_cache: Path | None = None,
    batches: tuple[int, int, int] = (1, 2, 16),
    lengths: tuple[int, int, int] | None = None,
    place: Place | None = None,
) -> Session:
    """Load a plan and create a context, so that what can fail has failed.

    `module`: what `trt.load` gave. `weights`: the graph's weight inputs on `device`; bound, not
    copied, and kept alive. `sha256`: of the plan, checked on the very bytes that are loaded.
    `runtime_cache`: where compiled kernels are kept; GPU, driver and version are added to the name.
    `batches`: smallest, usual and largest batch the plan was built for; `lengths` the same of S,
    where that is dynamic.

    Raises `EngineUnavailable` with the reason, and then nothing is left behind.
    """
    at = place or Place(device)

    def load() -> Session:
        with at.guard():
            data = _checked(plan, sha256, module, at.sm)
            return Session(data, module, graph, weights, runtime_cache, batches, at, lengths)

    return _typed(module.__name__, "loading the plan", load)


class Session:
    """An encoder on a GPU, for any number of threads; made by `session_from_plan`."""

    def __init__(
        self,
        plan: bytes,
        module: Any,
        graph: Promise,
        weights: Mapping[str, Tensor],
        runtime_cache: Path | None,
        batches: tuple[int, int, int],
        place: Place,
        lengths: tuple[int, int, int] | None = None,
    ) -> None:
        self._trt = trt = _TensorRt(module)
        self._graph, self._place, self._largest = graph, place, batches[-1]
        self._dtype, self._state = (_DTYPES[t.dtype][0] for t in (graph.embeds, graph.state))
        length, width = graph.embeds.shape[1:]
        self._fixed = None if isinstance(length, str) else length  # S of every call, if it has one
        if self._fixed is not None:
            lengths = (self._fixed, self._fixed, self._fixed)
        elif lengths is None:
            raise OctavoBug("a graph of dynamic length needs the lengths of its plan")
        self._shortest, self._longest, self._width = lengths[0], lengths[-1], int(width)
        self._runtime = trt.start()
        _check_validity(trt, self._runtime, plan)
        self._engine = trt.ask("load the plan", self._runtime.deserialize_cuda_engine, plan)
        self._plan_bytes = len(plan)
        _check_engine(module, self._engine, graph, batches, lengths)
        self._config = trt.ask("configure the plan", self._engine.create_runtime_config)
        self._kernels = _configured(
            trt, self._config, runtime_cache, place, specialize=self._fixed is not None
        )
        self._met: set[tuple[int, int]] = set()  # batch and length that kernels were compiled for
        self._pool = _Pool(_held(weights, graph.weights, place), place)
        with self._pool.context(place.stream(), self._new_context) as context:
            self._shape(context, batches[0], self._shortest)

    def encode(
        self, embeds: Tensor, mask: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Embeddings [B, S, C], any float dtype -> (the L+1 hidden states, the final state).

        Results are [B, S, C] in the body's dtype, new tensors at every call, in order on the
        current stream; T5 has no hidden states. `mask` [B, S] bool, True = attend, needs a plan
        with a mask. S is at most the plan's positions: CLIP's shorter rows are padded, which is
        exact since its attention is causal; T5's are not. More rows than the plan's largest batch
        are split.

        Raises `EngineUnavailable` where this call cannot be served; the session lives on.
        """

        def run() -> tuple[tuple[Tensor, ...], Tensor]:
            with self._place.guard():
                states = self._encode(embeds, mask)
                return tuple(states[:-1]), states[-1]

        return _typed(self._trt.name, f"encoding {list(embeds.shape)}", run)

    def swap_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Use another set from the next call on; running calls finish with the old one.

        Raises `EngineUnavailable`, and keeps the old set, if the new one does not fit the plan.
        """

        def swap() -> None:
            with self._place.guard():
                self._pool.swap(_held(weights, self._graph.weights, self._place))

        _typed(self._trt.name, "swapping weights", swap)

    @property
    def bytes(self) -> int:
        """GPU memory: weights, the scratch of each context at its last shapes, and the plan's size
        for code and constants (TensorRT does not tell what it keeps of it).
        """
        return self._pool.bytes + self._plan_bytes

    @property
    def max_scratch_bytes(self) -> int:
        """The most that a call takes beside its results, which is at the largest batch."""
        return int(self._engine.device_memory_size_v2) if self._engine else 0

    def close(self) -> None:
        """Wait for running calls and free everything; may be called again."""
        with self._place.guard():
            self._pool.close()
            kernels, self._kernels = self._kernels, None
            if kernels is not None:
                kernels.save()
            # In the reverse order of who was made from whom.
            kernels = self._config = None
            self._engine = None
            self._runtime = None
        self._plan_bytes = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # half made, or the interpreter is ending
            self.close()

    # -- one call -------------------------------------------------------------------------------

    def _encode(self, embeds: Tensor, mask: Tensor | None) -> list[Tensor]:
        self._check(embeds, mask)
        stream, length = self._place.stream(), embeds.shape[1]
        with self._pool.context(stream, self._new_context) as context:
            inputs = {"embeds": self._padded(embeds, self._dtype, stream)}
            if self._graph.mask:
                ones = embeds.new_ones(embeds.shape[:2], dtype=torch.bool)
                inputs["mask"] = self._padded(ones if mask is None else mask, torch.bool, stream)
            parts = []
            for start in range(0, len(embeds), self._largest):
                rows = slice(start, start + self._largest)
                part = {name: _aligned(t[rows], self._place) for name, t in inputs.items()}
                parts.append(self._run(context, part))
            return [_joined([t[:, :length] for t in ts]) for ts in zip(*parts, strict=True)]

    def _check(self, embeds: Tensor, mask: Tensor | None) -> None:
        shape, device = list(embeds.shape), self._place.device
        if len(shape) != 3 or not 0 < shape[1] <= self._longest or shape[2] != self._width:
            needed = f"[B, 1 to {self._longest}, {self._width}]"
            raise _Refusal(f"the embeddings are {shape}, the plan takes {needed}", _NEXT)
        if shape[0] == 0:
            raise _Refusal("the batch is empty", "give at least one row")
        if not embeds.is_floating_point() or embeds.device != device:
            found = f"the embeddings are {embeds.dtype} on {embeds.device}"
            raise _Refusal(f"{found}, the plan takes floats on {device}", _NEXT)
        if mask is None:
            return
        if not self._graph.mask:
            raise _Refusal("the plan was built without a mask", _NEXT)
        if mask.dtype != torch.bool or list(mask.shape) != shape[:2] or mask.device != device:
            found = f"the mask is {mask.dtype} {list(mask.shape)} on {mask.device}"
            raise _Refusal(f"{found}, not torch.bool {shape[:2]} on {device}", _NEXT)

    def _padded(self, rows: Tensor, dtype: torch.dtype, stream: Any) -> Tensor:
        """[B, S, ...] -> [B, positions, ...] with zeros behind; the tensor itself where it fits."""
        rows, length = rows.detach(), rows.shape[1]
        wanted = length if self._fixed is None else self._fixed
        if length == wanted and rows.dtype == dtype and _is_bindable(rows):
            self._place.record(rows, stream)  # its memory may belong to another stream
            return rows
        padded = self._place.empty((len(rows), wanted, *rows.shape[2:]), dtype)
        padded[:, :length].copy_(rows)
        padded[:, length:].zero_()
        return padded

    def _run(self, context: _Context, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Enqueue one batch that the plan takes -> [B, S, C] for each output."""
        place, native = self._place, context.native
        batch, length = inputs["embeds"].shape[:2]
        if context.shape != (batch, length):
            self._shape(context, batch, length)
        if context.bound is not context.weights:
            self._bind(native, context.weights.tensors)
            context.bound = context.weights
        shape = (batch, length, self._width)
        outputs = {name: place.empty(shape, self._state) for name in self._graph.outputs}
        scratch = place.empty((context.scratch_bytes,), torch.uint8)
        # All that is freed when this returns is reused in this stream's order: after the plan ran.
        native.set_device_memory(scratch.data_ptr(), context.scratch_bytes)
        self._bind(native, inputs)
        self._bind(native, outputs)
        self._trt.ask("run the plan", native.execute_async_v3, place.handle(context.stream))
        if (batch, length) not in self._met:
            self._met.add((batch, length))
            if self._kernels is not None:  # at once: hosts are killed more often than closed
                self._kernels.save()
        return list(outputs.values())

    def _bind(self, native: Any, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._trt.ask("bind " + name, native.set_tensor_address, name, tensor.data_ptr())

    def _shape(self, context: _Context, batch: int, length: int) -> None:
        """Set the shapes of one batch and learn how much scratch they need."""
        native, shape = context.native, (batch, length, self._width)
        context.shape = None
        for name, dims in (("embeds", shape), ("mask", shape[:2]))[: 1 + self._graph.mask]:
            self._trt.ask(f"take {name} {list(dims)}", native.set_input_shape, name, dims)
        for name in self._graph.outputs:
            if (found := tuple(native.get_tensor_shape(name))) != shape:
                raise _Refusal(f"the plan gives {name} as {list(found)}", _REBUILD)
        # 0 means none, or that it failed: then the most that any shape needs is enough too.
        exact = native.update_device_memory_size_for_shapes()
        context.scratch_bytes = int(exact or self._engine.device_memory_size_v2)
        context.shape = (batch, length)

    def _new_context(self) -> Any:
        make = self._engine.create_execution_context
        return self._trt.ask("create an execution context", make, self._config)


# Loading


class _Refusal(Exception):  # noqa: N818 - never leaves this module
    """(why not, what helps)"""


def _typed(engine: str, doing: str, call: Callable[[], T]) -> T:
    """Turn a refusal, or what torch or CUDA raise, into `EngineUnavailable`."""
    try:
        return call()
    except _Refusal as error:
        refusal = error.args
    except torch.OutOfMemoryError:
        refusal = (f"GPU memory ran out while {doing}", _FREE)
    except RuntimeError as error:
        refusal = (f"{doing} failed ({' '.join(str(error).split())})", _NEXT)
    # Out here: a traceback to the first error would keep everything alive that the call had made.
    raise EngineUnavailable(engine, *refusal)


class _TensorRt:
    """The module and its log, and a way to ask that leaves no null unnoticed."""

    def __init__(self, module: Any) -> None:
        self.module, self.name = module, str(module.__name__)
        self._log = _log_of(module)

    def start(self) -> Any:
        """A runtime."""
        self._log.errors.clear()
        runtime = self.ask("start its runtime", self.module.Runtime, self._log)
        if self._errors():
            # The bindings of the full TensorRT 11.4 wrap a null pointer where the driver is too
            # old. Any use of it, even to destroy it, crashes the process: it must live for ever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
            raise self.refusal("start its runtime", "")
        return runtime

    def ask(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """What `call` returns; None, False and exceptions become a refusal in its own words."""
        said = ""
        try:
            answer = call(*arguments)
            if answer is not None and answer is not False:
                return answer
        except Exception as error:  # native code behind bindings may raise anything
            said = " ".join(str(error).split()) or type(error).__name__
        raise self.refusal(what, said)

    def refusal(self, what: str, said: str) -> _Refusal:
        # The root cause comes first in TensorRT's log; what follows are its consequences.
        cause = next(iter(self._errors()), said) or "it gave no reason"
        self._log.errors.clear()
        memory = re.search(r"out ?of ?memory|bad_alloc|MemoryError", cause, re.IGNORECASE)
        return _Refusal(f"TensorRT could not {what} ({cause})", _FREE if memory else _NEXT)

    def _errors(self) -> list[str]:
        """What this thread was told since the last failure."""
        me = threading.get_ident()
        return [message for thread, message in list(self._log.errors) if thread == me]


@cache  # for the life of the process: TensorRT may keep the first logger that it was given
def _log_of(module: Any) -> Any:
    class Log(module.ILogger):  # type: ignore[misc]  # exists only once TensorRT is loaded
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: deque[tuple[int, str]] = deque(maxlen=32)

        def log(self, severity: Any, message: str) -> None:
            if severity <= module.ILogger.ERROR:
                self.errors.append((threading.get_ident(), " ".join(message.split())))

    return Log()


def _checked(plan: Path | bytes, sha256: str | None, module: Any, sm: int | None) -> bytes:
    """A plan's bytes, all read at once, if nothing visible speaks against them."""
    if isinstance(plan, Path):
        try:
            plan = plan.read_bytes()
        except OSError as error:
            cause = error.strerror or error
            raise _Refusal(f"the plan cannot be read ({cause})", _REBUILD) from None
    header, remedy = read_header(plan), _REBUILD
    if sha256 is not None and hashlib.sha256(plan).hexdigest() != sha256:
        fault = "the plan is damaged, its checksum is wrong"
    elif (header is not None) != capabilities(module).has_validity:
        fault = "the file is not a plan of this TensorRT"
    elif header is None:
        return plan
    elif header.total_bytes != len(plan):
        fault = f"the plan is damaged, it has {len(plan)} of {header.total_bytes} bytes"
    elif header.version != module.__version__:
        fault = f"the plan is of version {header.version}, installed is {module.__version__}"
    elif sm is not None and sm not in header.sms:
        fault = f"the plan is for {sm_text(header.sms)} and this GPU is {sm_text([sm])}"
        remedy = _NEXT
    else:
        return plan
    raise _Refusal(fault, remedy)


def _check_validity(trt: _TensorRt, runtime: Any, plan: bytes) -> None:
    """Ask TensorRT itself, where it answers."""
    if not capabilities(trt.module).has_validity:
        return
    validity, bits = trt.ask("judge the plan", runtime.get_engine_validity, plan)
    if validity != trt.module.EngineValidity.INVALID:
        return
    known = trt.module.EngineInvalidityDiagnostics
    said = [
        words
        for name, words in _DIAGNOSTICS.items()
        if hasattr(known, name) and int(bits) & int(getattr(known, name))
    ]
    if not said:  # as where there is no GPU: no bit, but a word in the log
        raise trt.refusal("use the plan", f"diagnostics {int(bits):#x}")
    raise _Refusal(" and ".join(reason for reason, _ in said), said[0][1])


def _check_engine(
    module: Any,
    engine: Any,
    graph: Promise,
    batches: tuple[int, ...],
    lengths: tuple[int, ...],
) -> None:
    """The engine's inputs, outputs and profile are those of the graph, to the letter."""
    mode, dtype, shape = module.TensorIOMode, graph.embeds.dtype, graph.embeds.shape
    dynamic = {"embeds": shape} | ({"mask": shape[:2]} if graph.mask else {})
    promised = {name: (mode.INPUT, t.dtype, t.shape) for name, t in graph.weights.items()}
    promised |= dict.fromkeys(graph.outputs, (mode.OUTPUT, graph.state.dtype, graph.state.shape))
    promised["embeds"] = (mode.INPUT, dtype, shape)
    if graph.mask:
        promised["mask"] = (mode.INPUT, "bool", shape[:2])
    found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    if wrong := sorted(found ^ set(promised)):
        verb = "lacks the" if wrong[0] in promised else "has an unknown"
        raise _Refusal(f"the plan {verb} tensor {wrong[0]} ({len(wrong)} in all)", _REBUILD)
    for name, (direction, dtype, shape) in promised.items():
        sizes = tuple(-1 if isinstance(size, str) else size for size in shape)
        if (
            engine.get_tensor_mode(name) != direction
            or engine.get_tensor_dtype(name) != getattr(module.DataType, _DTYPES[dtype][1])
            or tuple(engine.get_tensor_shape(name)) != sizes
            or engine.get_tensor_location(name) != module.TensorLocation.DEVICE
        ):
            has = f"{engine.get_tensor_dtype(name)} {list(engine.get_tensor_shape(name))}"
            raise _Refusal(f"the plan has {name} as {has}, not {dtype} {list(sizes)}", _REBUILD)
    for name, shape in dynamic.items():
        profile = [tuple(dims) for dims in engine.get_tensor_profile_shape(name, 0)]
        if profile != [(*at, *shape[2:]) for at in zip(batches, lengths, strict=True)]:
            has = f"{name} from {list(profile[0])} to {list(profile[-1])}"
            raise _Refusal(f"the plan takes {has}, not batches {list(batches)}", _REBUILD)


def _configured(
    trt: _TensorRt, config: Any, runtime_cache: Path | None, place: Place, *, specialize: bool
) -> _RuntimeCache | None:
    """Make the choices that the docstring of this module explains."""
    module, can = trt.module, capabilities(trt.module)
    config.set_execution_context_allocation_strategy(
        module.ExecutionContextAllocationStrategy.USER_MANAGED
    )
    if can.has_cuda_graphs:
        config.cuda_graph_strategy = module.CudaGraphStrategy.DISABLED
    if can.has_kernel_specialization:
        strategies = module.DynamicShapesKernelSpecializationStrategy
        strategy = strategies.EAGER if specialize else strategies.NONE
        config.dynamic_shapes_kernel_specialization_strategy = strategy
    if not can.has_runtime_cache or runtime_cache is None:
        return None
    native = trt.ask("create a runtime cache", config.create_runtime_cache)
    about = re.sub(r"[^a-z0-9.]+", "-", f"{place.name} {module.__version__}".lower())
    kernels = _RuntimeCache(native, Path(f"{runtime_cache}.{about}.kernels"))
    kernels.load()
    trt.ask("use a runtime cache", config.set_runtime_cache, native)
    return kernels


class _RuntimeCache:
    """TensorRT for RTX's runtime cache in a file: SHA-256 of the rest, then what it serialized.

    The file is a convenience: whatever is wrong with it, it is ignored, and written anew.
    """

    def __init__(self, native: Any, path: Path) -> None:
        self._native, self._path = native, path
        self._lock = threading.Lock()
        self._stored = b""  # digest of what the file holds

    def load(self) -> None:
        try:
            with self._path.open("rb") as file:
                digest, blob = file.read(32), file.read(RUNTIME_CACHE_LIMIT_BYTES + 1)
            if digest == hashlib.sha256(blob).digest() and self._native.deserialize(blob):
                self._stored = digest
                return
        except FileNotFoundError:
            return
        except Exception as error:  # of the file system, or anything from native code
            logger.info("%s: %s", self._path, error)
        logger.info("%s is damaged or of another system; kernels are compiled anew.", self._path)

    def save(self) -> None:
        try:
            with self._lock:
                blob = bytes(self._native.serialize() or b"")
                digest = hashlib.sha256(blob).digest()
                if 0 < len(blob) <= RUNTIME_CACHE_LIMIT_BYTES and digest != self._stored:
                    self._replace(digest + blob)
                    self._stored = digest
        except Exception as error:  # of the file system, or anything from native code
            logger.info("%s: compiled kernels are not kept (%s).", self._path, error)

    def _replace(self, data: bytes) -> None:
        # Beside the target: only within one file system is a replacement atomic.
        handle, name = tempfile.mkstemp(".tmp", self._path.name + ".", self._path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, self._path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)


# Tensors


@dataclass(frozen=True, eq=False)
class _Weights:
    """A set of weight inputs that is complete, aligned and kept alive."""

    tensors: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum({t.data_ptr(): t.nbytes for t in self.tensors.values()}.values())


def _held(weights: Mapping[str, Tensor], types: Mapping[str, TensorType], place: Place) -> _Weights:
    """The set, checked. A misaligned tensor is copied once; all others are the caller's memory."""
    if wrong := sorted(set(weights) ^ set(types)):
        verb = "lack" if wrong[0] in types else "have an unknown"
        raise _Refusal(f"the weights {verb} {wrong[0]} ({len(wrong)} in all)", _NEXT)
    held = {}
    for name, needed in types.items():
        tensor, dtype, shape = weights[name], _DTYPES[needed.dtype][0], list(needed.shape)
        if tensor.dtype != dtype or list(tensor.shape) != shape or tensor.device != place.device:
            found = f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise _Refusal(f"{found}, not {dtype} {shape} on {place.device}", _NEXT)
        if not tensor.is_contiguous():
            raise _Refusal(f"{name} is not contiguous", _NEXT)
        # An alias: the caller's tensor may be given other memory (`.data =`), this one then not.
        held[name] = _aligned(tensor.detach(), place)
    if any(held[name].data_ptr() != weights[name].data_ptr() for name in held):
        place.synchronize(place.stream())  # the next call may come on another stream
    return _Weights(held)


def _is_bindable(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _aligned(tensor: Tensor, place: Place) -> Tensor:
    return tensor if _is_bindable(tensor) else place.empty(tensor.shape, tensor.dtype).copy_(tensor)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 and parts[0].is_contiguous() else torch.cat(list(parts))


# Contexts


@dataclass(eq=False)
class _Context:
    """An execution context, its stream, the weights of the call it serves, and what is set now."""

    native: Any
    stream: Any
    weights: _Weights
    bound: _Weights | None = None
    shape: tuple[int, int] | None = None  # batch and length
    scratch_bytes: int = 0


class _Pool:
    """Contexts, each used by one call at a time, and the weights that calls start with.

    A context stays with its stream, whichever thread comes: a stream's calls run in order anyway.
    """

    def __init__(self, weights: _Weights, place: Place) -> None:
        self._place, self._weights = place, weights
        self._condition = threading.Condition()  # guards everything below, and the weights
        self._contexts: list[_Context] = []
        self._idle: list[_Context] = []  # the longest idle first
        self._is_closed = False

    @property
    def bytes(self) -> int:
        with self._condition:
            return self._weights.bytes + sum(c.scratch_bytes for c in self._contexts)

    @contextmanager
    def context(self, stream: Any, create: Callable[[], Any]) -> Iterator[_Context]:
        """A context for `stream`; destroyed if anything is raised, as its state is unknown then."""
        context, is_whole = self._take(stream, create), False
        try:
            yield context
            is_whole = True
        finally:
            try:
                if not is_whole:
                    self._destroy(context)
            finally:  # whatever happens: a context that never comes back would block `close`
                with self._condition:
                    if is_whole:
                        self._idle.append(context)
                        self._retire(context)
                    else:
                        self._contexts.remove(context)
                    self._condition.notify_all()

    def swap(self, weights: _Weights) -> None:
        with self._condition:
            self._check_open()
            self._weights = weights
            for context in self._idle:
                self._retire(context)

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: len(self._idle) == len(self._contexts))
            for context in self._contexts:
                self._destroy(context)
            self._contexts, self._idle, self._weights = [], [], _Weights({})

    def _take(self, stream: Any, create: Callable[[], Any]) -> _Context:
        handle = self._place.handle(stream)
        with self._condition:
            while True:
                self._check_open()
                same = [c for c in self._idle if self._place.handle(c.stream) == handle]
                if same:
                    context = same[-1]
                    self._idle.remove(context)
                    break
                if len(self._contexts) < MAX_CONTEXTS:
                    context = _Context(create(), stream, self._weights)
                    self._contexts.append(context)
                    break
                if self._idle:  # its last call may still run on the other stream
                    self._place.synchronize(self._idle[0].stream)
                    context = self._idle.pop(0)
                    context.stream = stream
                    break
                self._condition.wait()
            context.weights = self._weights  # one set for the whole call
            return context

    def _check_open(self) -> None:
        if self._is_closed:
            raise _Refusal("the session was closed", "load the plan again")

    def _retire(self, context: _Context) -> None:
        """Let go of weights that were swapped out; their memory stays until the stream is done."""
        if context.bound is not None and context.bound is not self._weights:
            for tensor in context.bound.tensors.values():
                self._place.record(tensor, context.stream)
            context.bound = None
        context.weights = self._weights

    def _destroy(self, context: _Context) -> None:
        with suppress(RuntimeError):  # a lost device must not keep the rest from being freed
            self._place.synchronize(context.stream)
        context.native = context.bound = None
