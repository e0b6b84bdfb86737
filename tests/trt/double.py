# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A strict double of TensorRT's runtime, and of a GPU, on CPU memory.

`World` is one simulated machine: `World().module` stands for `tensorrt_rtx` (or, without its
extras, for the full `tensorrt`) and `World().place()` for a CUDA device with torch's allocator and
streams. A "plan" is a header as TensorRT for RTX writes it, a description of the tensors and an
ONNX graph, which ONNX Runtime runs from and to the raw addresses that were bound. A bfloat16 plan
carries the float32 twin of its graph.

A broken rule raises `Violation` and is kept in `World.violations`; what the real runtime answers
with null, False or an error code, this one does too. Faults are put into `World.faults`.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import json
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from octavo.backends.onnx_ops import Graph
from octavo.trt.session import Place
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

VERSION = "1.7.1.116"
ALIGNMENT = 256
SCRATCH_PER_ROW = 1024
_SM_BITS = {75: 1, 80: 2, 86: 4, 89: 8, 120: 16, 121: 32}
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8e4m3fn": 1, "bool": 1}


class Violation(BaseException):  # no `except Exception` may hide it
    """A documented rule of TensorRT or CUDA was broken."""


# The module's enums: members and values of tensorrt_rtx 1.7.1 (test_bindings.py compares them).

Severity = enum.IntEnum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE", start=0)
TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT", start=0)
TensorLocation = enum.Enum("TensorLocation", "DEVICE HOST", start=0)
EngineValidity = enum.IntEnum("EngineValidity", "VALID SUBOPTIMAL INVALID", start=0)
CudaGraphStrategy = enum.Enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE", start=0)
Specialization = enum.Enum("DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE", start=0)
Allocation = enum.Enum(
    "ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED", start=0
)


class DataType(enum.Enum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4, FP4 = range(11)


class Diagnostics(enum.IntEnum):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4
    OLD_CUDA_RUNTIME = 8
    INSUFFICIENT_GPU_MEMORY = 16
    MALFORMED_ENGINE = 32
    CUDA_ERROR = 64


_DTYPES = {
    "float16": DataType.HALF, "bfloat16": DataType.BF16, "float32": DataType.FLOAT,
    "float8e4m3fn": DataType.FP8, "bool": DataType.BOOL,
}  # fmt: skip


# Plans


def plan_from_graph(
    graph: Graph,
    twin: Graph | None = None,
    *,
    batches: tuple[int, int, int] = (1, 2, 16),
    lengths: tuple[int, int, int] = (0, 0, 0),
    sms: Sequence[int] = (89, 120),
    version: str = VERSION,
    rtx: bool = True,
    changes: dict[str, Any] | None = None,
) -> bytes:
    """The double's plan of `graph`, computed by `twin` (float32) where given.

    `lengths`: of S where that is dynamic. `changes`: tensor name -> [mode, dtype, shape] to put in
    its place, or None to leave it out.
    """
    tensors: dict[str, Any] = {
        "embeds": ["INPUT", graph.embeds.dtype, list(graph.embeds.shape)],
        **({"mask": ["INPUT", "bool", list(graph.embeds.shape[:2])]} if graph.mask else {}),
        **{n: ["INPUT", t.dtype, list(t.shape)] for n, t in graph.weights.items()},
        **{n: ["OUTPUT", graph.state.dtype, list(graph.state.shape)] for n in graph.outputs},
    } | (changes or {})
    tensors = {n: t for n, t in tensors.items() if t is not None}
    profile = {
        n: [
            [{"B": b, "S": s}.get(d, d) for d in shape]
            for b, s in zip(batches, lengths, strict=True)
        ]
        for n, (mode, _, shape) in tensors.items()
        if mode == "INPUT" and isinstance(shape[0], str)
    }
    about = json.dumps({"tensors": tensors, "profile": profile, "twin": twin is not None}).encode()
    payload = struct.pack("<I", len(about)) + about + (twin or graph).model
    body = hashlib.sha256(payload).digest() + payload
    if not rtx:
        return b"ftrt" + bytes(60) + body
    mask = sum(_SM_BITS[sm] for sm in sms)
    numbers = bytes(int(part) for part in version.split("."))
    header = struct.pack("<4s12xQ4s4xI28x", b"vtrt", 64 + len(body), numbers, mask)
    return header + body


@cache
def runner_of(model: bytes) -> ort.InferenceSession:
    """`model` in ONNX Runtime; one thread, so that equal inputs give equal bits."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


# The simulated machine


@dataclass(eq=False)
class Block:
    """Memory that the simulated GPU knows: its storage, and the streams that may use it."""

    start: int
    size: int
    storage: StorageWeakRef
    stream: int
    device: int
    recorded: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Stream:
    handle: int


class World:
    """One machine; see the module's docstring.

    `faults` (each stays until removed): "runtime" ("null", "none", "wrapped" (a null pointer in
    an object, which crashes whoever touches it, as in the full TensorRT) or an exception),
    "validity" (bits), "deserialize", "config", "cache", "context", "execute" (None or an
    exception), "oom" (the number of allocations that still succeed), "rejects" (a tensor name: no
    address and no shape is taken for it), "lies" (a tensor name: its shape in a context is wrong).
    """

    def __init__(self, *, rtx: bool = True, version: str = VERSION) -> None:
        self.rtx, self.version = rtx, version
        self.faults: dict[str, Any] = {}
        self.violations: list[str] = []
        self.calls: Counter[str] = Counter()
        self.compiled: list[int] = []  # batch sizes that kernels were compiled for, in order
        self.live: dict[str, weakref.WeakSet[Any]] = {}
        self.blocks: list[Block] = []
        self.pending: set[tuple[int, Block]] = set()  # what a stream may still be using
        self.handed_out: list[StorageWeakRef] = []
        self.lock = threading.RLock()
        self.local = threading.local()
        self.module = _module(self)

    def place(self, device: int = 0, **facts: Any) -> HostPlace:
        return HostPlace(self, device, **facts)

    def count(self, kind: str) -> int:
        return len(self.live.get(kind, ()))

    @property
    def memory(self) -> int:
        """Blocks of device memory that are alive."""
        return sum(not block.storage.expired() for block in self.blocks)

    def broken(self, rule: str) -> Violation:
        self.violations.append(rule)
        return Violation(rule)

    def fault(self, name: str) -> bool:
        """Whether `name` is injected as null; raises where it is injected as an exception."""
        if name not in self.faults:
            return False
        fault = self.faults[name]
        if isinstance(fault, BaseException):
            raise type(fault)(*fault.args)  # a new one: an old one keeps its traceback alive
        return True

    def guarded(self, device: int, what: str) -> None:
        if getattr(self.local, "device", None) != device:
            raise self.broken(f"{what} without device {device} being current")

    # Memory

    def register(self, tensor: Tensor, device: int, stream: int) -> Block:
        storage = tensor.untyped_storage()
        block = Block(storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage), stream, device)
        with self.lock:
            self.blocks = [b for b in self.blocks if not b.storage.expired()]
            self.blocks.append(block)
        return block

    def find(self, address: int, size: int) -> Block | None:
        with self.lock:
            for block in reversed(self.blocks):
                inside = block.start <= address and address + size <= block.start + block.size
                if inside and not block.storage.expired():
                    return block
        return None

    def check(self) -> None:
        """Nothing was freed while a stream may still have been using it."""
        with self.lock:
            for handle, block in [p for p in self.pending if p[1].storage.expired()]:
                if block.stream != handle and handle not in block.recorded:
                    raise self.broken(f"memory was freed while stream {handle:#x} may use it")
                self.pending.remove((handle, block))

    def synchronized(self, handle: int) -> None:
        self.check()
        with self.lock:
            self.pending = {(h, b) for h, b in self.pending if h != handle}

    def use(self, address: int, size: int, device: int, stream: int, what: str) -> None:
        """A kernel on `stream` reads or writes here."""
        block = self.find(address, size)
        if block is None:
            raise self.broken(f"{what}: {size} bytes at {address:#x} are not live device memory")
        if block.device != device:
            raise self.broken(f"{what}: memory of device {block.device} used by device {device}")
        with self.lock:
            self.pending.add((stream, block))


class HostPlace(Place):
    """`Place` on CPU memory: torch's rules for CUDA memory and streams, enforced."""

    def __init__(
        self,
        world: World,
        index: int,
        *,
        sm: int | None = 89,
        name: str = "RTX 4090 (Double) 580.1",
    ) -> None:
        self.world, self.index, self.sm, self.name = world, index, sm, name
        self.device = torch.device("cpu")
        self.default = Stream(0x1000 * (index + 1))
        self.synchronizations = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        before = getattr(self.world.local, "device", None)
        self.world.local.device = self.index
        try:
            yield
        finally:
            self.world.local.device = before

    @contextmanager
    def on(self, stream: Stream) -> Iterator[Stream]:
        """As `with torch.cuda.stream(stream)`."""
        self.world.local.stream, before = stream, self.stream()
        try:
            yield stream
        finally:
            self.world.local.stream = before

    def stream(self) -> Stream:
        found = getattr(self.world.local, "stream", self.default)
        assert isinstance(found, Stream)
        return found

    def handle(self, stream: Stream) -> int:
        return stream.handle

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.world.guarded(self.index, "an allocation")
        self.world.check()
        if "oom" in self.world.faults:
            self.world.faults["oom"] -= 1
            if self.world.faults["oom"] < 0:
                raise torch.OutOfMemoryError("the double has no memory left")
        return self.allocated(shape, dtype)

    def allocated(self, shape: Sequence[int], dtype: torch.dtype, shift: int = 0) -> Tensor:
        """Memory full of NaN, `shift` bytes off the alignment: what a session's caller has."""
        size = prod(shape) * dtype.itemsize
        raw = torch.full((size + 2 * ALIGNMENT,), 0xFF, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGNMENT + shift
        self.world.register(raw, self.index, self.stream().handle)
        tensor = raw[start : start + size].view(dtype).view(tuple(shape))
        return tensor

    def copied(self, tensor: Tensor, shift: int = 0) -> Tensor:
        """`tensor` in this device's memory."""
        return self.allocated(tensor.shape, tensor.dtype, shift).copy_(tensor)

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self.world.check()
        block = self.world.find(tensor.data_ptr(), tensor.nbytes)
        if block is None:
            block = self.world.register(tensor, self.index, 0)
        block.recorded.add(stream.handle)

    def synchronize(self, stream: Stream) -> None:
        self.synchronizations += 1
        self.world.synchronized(stream.handle)


# The module


class _Object:
    """Counted while it lives; must not outlive what it was made from."""

    def __init__(self, world: World, kind: str, *makers: Any) -> None:
        self.world, self.kind = world, kind
        self.makers = [weakref.ref(maker) for maker in makers]
        world.live.setdefault(kind, weakref.WeakSet()).add(self)
        world.calls[kind] += 1

    def _alive(self) -> None:
        if any(maker() is None for maker in self.makers):
            raise self.world.broken(f"the {self.kind} is used after what it was made from is gone")


class ILogger:
    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING = Severity.INTERNAL_ERROR, Severity.ERROR, Severity.WARNING
    INFO, VERBOSE = Severity.INFO, Severity.VERBOSE
    _is_initialized = False

    def __init__(self) -> None:
        self._is_initialized = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class _Runtime(_Object):
    """`Runtime` without what only TensorRT for RTX has."""

    _machine: World  # set by the subclass that `_module` makes

    def __new__(cls, logger: ILogger) -> Any:
        return None if cls._machine.faults.get("runtime") == "none" else object.__new__(cls)

    def __init__(self, logger: ILogger) -> None:
        world = self._machine
        if not isinstance(logger, ILogger) or not logger._is_initialized:
            raise TypeError("__init__(): incompatible constructor arguments.")
        if world.faults.get("runtime") == "null":
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._is_null = world.faults.get("runtime") == "wrapped"
        if self._is_null:
            logger.log(Severity.ERROR, "createInferRuntime: CUDA initialization failure: 35")
        else:
            world.fault("runtime")
        super().__init__(world, "runtime", logger)

    def __del__(self) -> None:
        if getattr(self, "_is_null", False):
            self.world.violations.append("a null pointer was destroyed: the process would crash")

    def _alive(self) -> None:
        if self._is_null:
            raise self.world.broken("a null pointer was used: the process would crash")
        super()._alive()

    def _complain(self, message: str) -> None:
        logger = self.makers[0]()
        assert logger is not None
        logger.log(Severity.ERROR, message)
        logger.log(Severity.ERROR, "a consequence of the error before")

    def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
        self._alive()
        self.world.guarded(self._device(), "deserialization")
        if self.world.fault("deserialize"):
            self._complain("deserializeCudaEngine: Error Code 2: OutOfMemory (Requested 9)")
            return None
        payload = plan[96:]
        magic = b"vtrt" if self.world.rtx else b"ftrt"
        if plan[:4] != magic or hashlib.sha256(payload).digest() != plan[64:96]:
            self._complain("Serialization assertion magicTag failed")
            return None
        return Engine(self, payload)

    def _device(self) -> int:
        return int(getattr(self.world.local, "device", None) or 0)


class _RtxRuntime(_Runtime):
    engine_header_size = 64

    def get_engine_validity(self, plan: bytes) -> tuple[EngineValidity, int]:
        self._alive()
        if "validity" in self.world.faults:
            return EngineValidity.INVALID, self.world.faults["validity"]
        if plan[:4] != b"vtrt" or len(plan) < 64:
            return EngineValidity.INVALID, int(Diagnostics.MALFORMED_ENGINE)
        if ".".join(map(str, plan[0x18:0x1C])) != self.world.version:
            return EngineValidity.INVALID, int(Diagnostics.VERSION_MISMATCH)
        return EngineValidity.VALID, 0


class Engine(_Object):
    """`ICudaEngine`."""

    def __init__(self, runtime: _Runtime, payload: bytes) -> None:
        super().__init__(runtime.world, "engine", runtime)
        (size,) = struct.unpack_from("<I", payload)
        about = json.loads(payload[4 : 4 + size])
        self.tensors: dict[str, list[Any]] = about["tensors"]
        self.profile: dict[str, list[list[int]]] = about["profile"]
        self.is_twin: bool = about["twin"]
        self.device = runtime._device()
        self.session = runner_of(payload[4 + size :])

    def __del__(self) -> None:
        contexts = self.world.live.get("context", ())
        if any(context.engine_id == id(self) for context in contexts):
            self.world.violations.append("an engine was destroyed before its contexts")

    @property
    def num_io_tensors(self) -> int:
        self._alive()
        return len(self.tensors)

    @property
    def device_memory_size_v2(self) -> int:
        self._alive()
        return SCRATCH_PER_ROW * max(shapes[-1][0] for shapes in self.profile.values())

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name][0]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return _DTYPES[self.tensors[name][1]]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1 if isinstance(size, str) else size for size in self.tensors[name][2]]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        if profile_index != 0 or name not in self.profile:
            raise self.world.broken(f"{name} has no profile {profile_index}")
        return self.profile[name]

    def create_runtime_config(self) -> RuntimeConfig | None:
        self._alive()
        if self.world.fault("config"):
            return None
        return (RtxRuntimeConfig if self.world.rtx else RuntimeConfig)(self)

    def create_execution_context(self, runtime_config: RuntimeConfig) -> Context | None:
        self._alive()
        runtime_config._alive()
        self.world.guarded(self.device, "the creation of a context")
        if self.world.fault("context"):
            runtime = self.makers[0]()
            runtime._complain("CUDA error 2: out of memory")  # type: ignore[union-attr]
            return None
        return Context(self, runtime_config)


class RuntimeConfig(_Object):
    """`IRuntimeConfig`; as in the bindings, an attribute that does not exist cannot be set."""

    _known: frozenset[str] = frozenset({"world", "kind", "makers", "strategy"})

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.world, "config", engine)
        self.strategy = Allocation.STATIC

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._known:
            raise AttributeError(f"'IRuntimeConfig' object has no attribute '{name}'")
        super().__setattr__(name, value)

    def set_execution_context_allocation_strategy(self, strategy: Allocation) -> None:
        self._alive()
        self.strategy = strategy


class RtxRuntimeConfig(RuntimeConfig):
    _known = RuntimeConfig._known | {
        "cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy", "cache",
    }  # fmt: skip

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = Specialization.LAZY
        self.cache: RuntimeCache | None = None

    def create_runtime_cache(self) -> RuntimeCache | None:
        self._alive()
        return None if self.world.fault("cache") else RuntimeCache(self)

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self.cache = cache
        return True


class RuntimeCache(_Object):
    """`IRuntimeCache`: the batch sizes that kernels were compiled for."""

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config.world, "cache", *[m() for m in config.makers])
        self.kernels: set[int] = set()
        self.busy = threading.Lock()

    def serialize(self) -> memoryview:
        self._alive()
        if not self.busy.acquire(blocking=False):
            raise self.world.broken("a runtime cache is used by two threads")
        try:
            time.sleep(0.005)  # long enough to be caught by a second thread
            kernels = sorted(self.kernels)
            return memoryview(json.dumps({"of": self.world.version, "kernels": kernels}).encode())
        finally:
            self.busy.release()

    def deserialize(self, blob: bytes) -> bool:
        self._alive()
        self.world.calls["cache loads"] += 1
        stored = json.loads(blob)  # raises where it is damaged: it must never come this far
        if stored["of"] != self.world.version:
            return False
        self.kernels |= set(stored["kernels"])
        return True


class Context(_Object):
    """`IExecutionContext`."""

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        cache = getattr(config, "cache", None)
        super().__init__(engine.world, "context", engine, *([cache] if cache is not None else []))
        self.engine_id, self.strategy = id(engine), config.strategy
        self.cache = weakref.ref(cache) if cache is not None else None
        if isinstance(config, RtxRuntimeConfig):
            self.specialization = config.dynamic_shapes_kernel_specialization_strategy
            self.graphs = config.cuda_graph_strategy
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch: tuple[int, int] | None = None
        self.is_sized = False
        self.busy = threading.Lock()

    @contextmanager
    def _used(self) -> Iterator[Engine]:
        if not self.busy.acquire(blocking=False):
            raise self.world.broken("a context is used by two threads at once")
        try:
            self._alive()
            engine = self.makers[0]()
            assert isinstance(engine, Engine)
            yield engine
        finally:
            self.busy.release()

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        with self._used() as engine:
            low, _, high = engine.profile[name]
            fits = all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True))
            if not fits or self.world.faults.get("rejects") == name:
                return False
            self.is_sized = self.is_sized and self.shapes.get(name) == tuple(shape)
            self.shapes[name] = tuple(shape)
            return True

    def get_tensor_shape(self, name: str) -> list[int]:
        with self._used() as engine:
            sizes = self._sizes()
            if self.world.faults.get("lies") == name:
                sizes["B"] += 1
            return [sizes.get(size, size) for size in engine.tensors[name][2]]

    def _sizes(self) -> dict[Any, int]:
        """What the dynamic sizes are now."""
        return dict(zip("BS", self.shapes["embeds"], strict=False))

    def update_device_memory_size_for_shapes(self) -> int:
        with self._used() as engine:
            if set(self.shapes) != set(engine.profile):
                return 0
            self.is_sized = True
            return SCRATCH_PER_ROW * self.shapes["embeds"][0]

    def set_device_memory(self, memory: int, size: int) -> None:
        with self._used():
            if memory % ALIGNMENT:
                raise self.world.broken("scratch memory is misaligned")
            self.scratch = memory, size

    def set_tensor_address(self, name: str, memory: int) -> bool:
        with self._used() as engine:
            if name not in engine.tensors or self.world.faults.get("rejects") == name:
                return False
            if memory % ALIGNMENT or memory == 0:
                raise self.world.broken(f"{name} is bound to {memory:#x}, which is misaligned")
            self.addresses[name] = memory
            return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        with self._used() as engine:
            world = self.world
            world.guarded(engine.device, "execution")
            current = getattr(world.local, "stream", None)
            if stream_handle != (current.handle if current else 0x1000 * (engine.device + 1)):
                raise world.broken(f"execution on stream {stream_handle:#x}, not the current one")
            if world.fault("execute"):
                engine.makers[0]()._complain("IExecutionContext::enqueueV3: CUDA error 700")  # type: ignore[union-attr]
                return False
            sizes = self._checked(engine, stream_handle)
            self._compile(self.shapes["embeds"][0])
            self._compute(engine, sizes)
            world.calls["execute"] += 1
            return True

    def _checked(self, engine: Engine, stream: int) -> dict[str, int]:
        """Size in bytes of every tensor, all of which are bound to live memory."""
        world = self.world
        world.check()
        if missing := set(engine.profile) - set(self.shapes):
            raise world.broken(f"no shape was set for {missing}")
        if missing := set(engine.tensors) - set(self.addresses):
            raise world.broken(f"no address was set for {missing}")
        batch, dynamic = self.shapes["embeds"][0], self._sizes()
        if any(shape[:2] != self.shapes["embeds"][:2] for shape in self.shapes.values()):
            raise world.broken(f"batches differ: {self.shapes}")
        if self.strategy is Allocation.USER_MANAGED:
            if not self.is_sized or self.scratch is None:
                raise world.broken("scratch memory was not asked for, or not given")
            if self.scratch[1] < SCRATCH_PER_ROW * batch:
                raise world.broken(f"{self.scratch[1]} bytes of scratch are not enough")
            world.use(*self.scratch, engine.device, stream, "scratch")
        sizes = {}
        for name, (mode, dtype, shape) in engine.tensors.items():
            dims = [dynamic.get(size, size) for size in shape]
            sizes[name] = prod(dims) * _BYTES[dtype]
            world.use(self.addresses[name], sizes[name], engine.device, stream, name)
            if mode == "OUTPUT":
                self._hand_out(name, sizes[name])
        self._check_apart(engine, sizes)
        return sizes

    def _hand_out(self, name: str, size: int) -> None:
        """Memory that a call has returned is never written again."""
        block = self.world.find(self.addresses[name], size)
        assert block is not None
        with self.world.lock:
            old = [ref for ref in self.world.handed_out if not ref.expired()]
            if any(ref.cdata == block.storage.cdata for ref in old):
                raise self.world.broken(f"{name} would overwrite a result handed out before")
            self.world.handed_out = [*old, block.storage]

    def _check_apart(self, engine: Engine, sizes: dict[str, int]) -> None:
        written = [n for n, t in engine.tensors.items() if t[0] == "OUTPUT"]
        spans = sorted((self.addresses[n], self.addresses[n] + sizes[n], n) for n in sizes)
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end and (name in written or other in written):
                raise self.world.broken(f"{name} and {other} overlap")

    def _compile(self, batch: int) -> None:
        if not self.world.rtx or self.specialization is not Specialization.EAGER:
            return
        cache = self.cache() if self.cache is not None else None
        if cache is None or batch not in cache.kernels:
            self.world.compiled.append(batch)
        if cache is not None:
            cache.kernels.add(batch)

    def _compute(self, engine: Engine, sizes: dict[str, int]) -> None:
        binding = engine.session.io_binding()
        held = []  # ONNX Runtime keeps addresses, not references
        for name, (mode, dtype, shape) in engine.tensors.items():
            if mode == "OUTPUT":
                binding.bind_output(name)
                continue
            raw = (ctypes.c_ubyte * sizes[name]).from_address(self.addresses[name])
            dims = self.shapes.get(name, tuple(shape))
            value = _value(np.frombuffer(raw, np.uint8), dtype, dims, engine.is_twin)
            held.append(value)
            binding.bind_ortvalue_input(name, value[-1])
        engine.session.run_with_iobinding(binding)
        outputs = [n for n, t in engine.tensors.items() if t[0] == "OUTPUT"]
        for name, result in zip(outputs, binding.copy_outputs_to_cpu(), strict=True):
            tensor = torch.from_numpy(np.ascontiguousarray(result))
            if engine.is_twin:
                tensor = tensor.to(torch.bfloat16)
            ctypes.memmove(self.addresses[name], tensor.data_ptr(), sizes[name])


def _value(raw: np.ndarray[Any, Any], dtype: str, dims: Sequence[int], is_twin: bool) -> list[Any]:
    """Raw bytes as an `OrtValue`, last in a list with what it refers to."""
    if dtype == "float8e4m3fn":
        array = raw.reshape(tuple(dims)).copy()
        float8 = onnx.TensorProto.FLOAT8E4M3FN
        return [array, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, float8)]
    if is_twin and dtype == "bfloat16":
        array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        array = raw.view({"float16": np.float16, "float32": np.float32, "bool": np.bool_}[dtype])
    array = array.reshape(tuple(dims)).copy()
    return [array, ort.OrtValue.ortvalue_from_numpy(array)]


def _module(world: World) -> ModuleType:
    module: Any = ModuleType("tensorrt_rtx_double" if world.rtx else "tensorrt_double")
    base = _RtxRuntime if world.rtx else _Runtime
    module.__version__ = world.version
    module.Runtime = type("Runtime", (base,), {"_machine": world})
    module.ILogger, module.ICudaEngine, module.IExecutionContext = ILogger, Engine, Context
    module.IRuntimeConfig = RtxRuntimeConfig if world.rtx else RuntimeConfig
    module.Builder, module.OnnxParser = type("Builder", (), {}), type("OnnxParser", (), {})
    module.DataType, module.TensorIOMode = DataType, TensorIOMode
    module.TensorLocation = TensorLocation
    module.ExecutionContextAllocationStrategy = Allocation
    if world.rtx:
        module.EngineValidity, module.EngineInvalidityDiagnostics = EngineValidity, Diagnostics
        module.CudaGraphStrategy = CudaGraphStrategy
        module.DynamicShapesKernelSpecializationStrategy = Specialization
        module.IRuntimeCache = RuntimeCache
    result: ModuleType = module
    return result
