# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The `torch_fp8` engine: a quantized encoder on the FP8 tensor cores, through PyTorch alone.

With Triton the steps run as fused kernels (triton_kernels.py), without it as PyTorch's own
operations; each shape is captured as a CUDA graph on its first use. Whether a device can serve at
all is decided in choose.py.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..encoders import EncoderSpec, T5Spec, encode
from ..encoders.clip import POSITIONS
from ..errors import EngineUnavailable
from .fp8_ops import E4M3, DeviceWeights, Fp8Linear, Fp8Ops, Fp8Weights, Lines

log = logging.getLogger(__name__)

NAME = "torch_fp8"
MIN_SM = (8, 9)  # Ada; the first tensor cores that take E4M3

# A shape whose states take more runs eagerly: it keeps the GPU busy for longer than Python needs to
# launch it, and a graph would hold that much memory for good.
GRAPH_BYTES = 256 << 20

Shape = tuple[int, int, bool]  # batch, tokens, whether there is a mask

# PyTorch captures one graph at a time per process.
_capturing = threading.Lock()


@dataclass
class _Captured:
    """A CUDA graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    embeds: Tensor  # [B, S, C]
    mask: Tensor | None  # [B, S]
    states: Tensor  # [L + 2, B, S, C], of T5 [1, B, S, C]
    lines: Lines


class TorchFp8Engine:
    """`encode(embeds [B, S, C], mask [B, S] | None)` -> fresh hidden states; safe from any thread.

    `graphs` off runs every call eagerly; `max_graphs` bounds how many shapes stay captured;
    `triton` off keeps to PyTorch's own operations. On a CPU, or a GPU without FP8, the products are
    simulated from the same codes. Raises EngineUnavailable where PyTorch cannot multiply FP8 here.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        weights: Fp8Weights,
        device: torch.device | str,
        *,
        graphs: bool = True,
        max_graphs: int = 8,
        triton: bool = True,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.max_graphs = max_graphs if graphs and self.device.type == "cuda" else 0
        self._lock = threading.Lock()
        self._captured: OrderedDict[Shape, _Captured] = OrderedDict()
        self._uncapturable: set[Shape] = set()
        self._pool: Any = None
        self._done: torch.cuda.Event | None = None  # the end of the last call's work
        self._stream: torch.cuda.Stream | None = None  # and the stream that it was queued on
        with self._on_device():
            quantized = any(isinstance(v, Fp8Linear) for v in weights.linears.values())
            self._simulated = self._must_simulate(quantized)
            self._kernels = self._load_kernels() if triton else None
            self._weights: DeviceWeights | None = DeviceWeights(weights, self.device)
            if self.device.type == "cuda":
                # The copies are queued on this stream; calls may come on any other.
                torch.cuda.current_stream().synchronize()

    def encode(
        self, embeds: Tensor, mask: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The L+1 hidden states and the final normed state, each [B, S, C] in the body's dtype.

        T5 gives the final state alone, in FP32, as its residual stream is. `embeds` is of any float
        dtype, `mask` bool with True = attend; CLIP's key 0 is always attended to. The results
        are new tensors, queued on the caller's current stream. Raises ValueError for a shape that
        the encoder does not have, EngineUnavailable after `close`, and torch.OutOfMemoryError.
        """
        self._check(embeds, mask)
        with self._lock, self._on_device():
            weights = self._open()
            stream = self._begin()
            try:
                states = self._states(weights, embeds, mask)
            finally:
                self._end(stream)
        *hidden, last = states.unbind()
        return tuple(hidden), last

    def swap_weights(self, weights: Fp8Weights) -> None:
        """Take over other values of the same structure, LoRA applied; captured graphs stay valid.

        Raises QuantizationError if the structure differs, EngineUnavailable after `close`.
        """
        with self._lock, self._on_device():
            held = self._open()
            stream = self._begin()
            try:
                held.copy_from(weights)
                for captured in self._captured.values():
                    for (name, tokens), line in captured.lines.items():
                        line.copy_(held.bias_line(name, tokens))
            finally:
                self._end(stream)

    def drop_graphs(self) -> None:
        """Give back every captured graph's memory; the next call of a shape captures it again."""
        with self._lock, self._on_device():
            self._wait()
            while self._captured:
                self._captured.popitem()[1].graph.reset()
            self._pool = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def bytes(self) -> int:
        """Bytes of device memory held: weights, and the graphs' buffers and pool."""
        with self._lock:
            if self._weights is None:
                return 0
            static = sum(
                t.nbytes
                for c in self._captured.values()
                for t in (c.embeds, c.mask, c.states, *c.lines.values())
                if t is not None
            )
            return self._weights.size_bytes + static + _pool_bytes(self._pool)

    def close(self) -> None:
        """Free everything and give the memory back to the device; then it encodes no more."""
        with self._lock, self._on_device():
            if self._weights is None:
                return
            self._wait()  # other streams may still read the weights
            self._weights = None
        self.drop_graphs()

    # -- what serves ------------------------------------------------------------------------------

    def _must_simulate(self, quantized: bool) -> bool:
        if self.device.type != "cuda" or not quantized:
            return self.device.type != "cuda"
        if torch.cuda.get_device_capability() < MIN_SM:
            return True
        try:
            a = torch.ones(16, 16, device=self.device).to(E4M3)
            one = torch.ones((), device=self.device)
            y = torch._scaled_mm(a, a.T, scale_a=one, scale_b=one, out_dtype=torch.float16)
            works = bool((y == 16).all())
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise EngineUnavailable(
                NAME,
                f"PyTorch {torch.__version__} cannot multiply FP8 here ({reason})",
                "use a build of PyTorch 2.6 or later for this GPU",
            ) from error
        if not works:
            raise EngineUnavailable(
                NAME, "an FP8 product of ones came out wrong", "update PyTorch or the driver"
            )
        return False

    def _load_kernels(self) -> Any:
        """The module `triton_kernels`, or None with one log line where Triton cannot serve."""
        if self.device.type != "cuda" or self._simulated:
            return None
        try:
            kernels = importlib.import_module(".triton_kernels", __package__)
            kernels.check(self.device)
        except ImportError as error:
            log.info("torch_fp8 runs without Triton, which is slower (%s).", error)
            return None
        except Exception as error:  # a broken Triton or C compiler can raise anything
            log.warning("torch_fp8 runs without Triton, which fails here: %s", _summary(error))
            return None
        return kernels

    # -- one call ---------------------------------------------------------------------------------

    def _check(self, embeds: Tensor, mask: Tensor | None) -> None:
        shape, (width, longest) = tuple(embeds.shape), (self.spec.width, self.spec.longest)
        fits = len(shape) == 3 and shape[2] == width and 0 < shape[1] <= longest and shape[0] > 0
        if not fits or not embeds.is_floating_point():
            raise ValueError(
                f"embeds are {embeds.dtype} {shape}; this encoder takes floats [batch, 1 to "
                f"{longest} tokens, {width}]"
            )
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != shape[:2]):
            raise ValueError(
                f"the mask is {mask.dtype} {tuple(mask.shape)}; "
                f"embeds of {shape} need bool {shape[:2]}"
            )

    def _states(self, weights: DeviceWeights, embeds: Tensor, mask: Tensor | None) -> Tensor:
        """All states [L + 2, B, S, C], or T5's only one, in one new tensor."""
        b, s, _ = embeds.shape
        shape: Shape = (b, s, mask is not None)
        captured = self._graph(weights, shape)
        if captured is None:
            embeds = embeds.to(self.device, self._carried(weights)).contiguous()
            mask = None if mask is None else mask.to(self.device).contiguous()
            return self._run(weights, embeds, mask)
        captured.embeds.copy_(embeds)
        if mask is not None and captured.mask is not None:
            captured.mask.copy_(mask)
        captured.graph.replay()
        return captured.states.clone()

    def _run(
        self,
        weights: DeviceWeights,
        embeds: Tensor,
        mask: Tensor | None,
        states: Tensor | None = None,
        lines: Lines | None = None,
        *,
        in_graph: bool = False,
    ) -> Tensor:
        """Run the encoder's operations; every state goes to its place in `states`."""
        spec = self.spec
        if states is None:
            states = embeds.new_empty(self._count, *embeds.shape)
        places = {spec.norms()[-1]: states[-1]}
        if not isinstance(spec, T5Spec):
            places[POSITIONS] = states[0]
            places |= {spec.groups(i)[-1][-1]: states[i + 1] for i in range(spec.layers)}
        if self._kernels is not None:
            rows = embeds.shape[0] * embeds.shape[1]
            overlapped = in_graph and self._kernels.overlaps(self.device, rows)
            ops = self._kernels.FusedOps(weights, places=places, lines=lines, overlapped=overlapped)
            try:
                ops.tensor(encode(ops, spec, embeds, mask)[1])
                return states
            except self._kernels.KernelError as error:
                log.warning("torch_fp8 goes on without Triton, which fails: %s", _summary(error))
                self._kernels = None
        ops = Fp8Ops(weights, simulated=self._simulated, places=places, lines=lines)
        # The last state asks for all the others, which are computed into their places on the way.
        ops.tensor(encode(ops, spec, embeds, mask)[1])
        return states

    @property
    def _count(self) -> int:
        """How many states there are."""
        return 1 if isinstance(self.spec, T5Spec) else self.spec.layers + 2

    def _carried(self, weights: DeviceWeights) -> torch.dtype:
        """The dtype of the residual stream: T5's outgrows FP16 and loses too much in BF16."""
        return torch.float32 if isinstance(self.spec, T5Spec) else weights.body

    # -- graphs -----------------------------------------------------------------------------------

    def _graph(self, weights: DeviceWeights, shape: Shape) -> _Captured | None:
        """The graph of this shape, captured now if it is new; None if it is to run eagerly."""
        if shape in self._captured:
            self._captured.move_to_end(shape)
            return self._captured[shape]
        b, s, _ = shape
        size = self._count * b * s * self.spec.width * self._carried(weights).itemsize
        if self.max_graphs == 0 or size > GRAPH_BYTES or shape in self._uncapturable:
            return None
        while len(self._captured) >= self.max_graphs:
            self._wait()  # a graph may still be running
            self._captured.popitem(last=False)[1].graph.reset()
        if not self._captured:
            self._pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph
        try:
            self._captured[shape] = self._capture(weights, shape)
        except RuntimeError as error:  # out of memory is one
            log.warning("torch_fp8 runs %d x %d without a CUDA graph: %s", b, s, _summary(error))
            self._uncapturable.add(shape)
            return None
        return self._captured[shape]

    def _capture(self, weights: DeviceWeights, shape: Shape) -> _Captured:
        b, s, masked = shape
        carried = self._carried(weights)
        embeds = torch.zeros(b, s, self.spec.width, dtype=carried, device=self.device)
        mask = torch.ones(b, s, dtype=torch.bool, device=self.device) if masked else None
        states = embeds.new_empty(self._count, *embeds.shape)
        lines: Lines = {}  # made by the eager run, outside of the graph that reads them
        graph = torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(), _side_stream(self.device)
        with _capturing, torch.cuda.stream(side):
            # As in a graph, nothing else may be under way: see FusedOps.
            current.synchronize()
            # Once eagerly: compiles the kernels and makes cuBLAS allocate outside the graph's pool.
            self._run(weights, embeds, mask, states, lines, in_graph=True)
            # Not torch.cuda.graph, which also empties the host's allocator cache. Other threads
            # may go on using CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run(weights, embeds, mask, states, lines, in_graph=True)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
            current.wait_stream(side)
        return _Captured(graph, embeds, mask, states, lines)

    # -- order ------------------------------------------------------------------------------------

    def _on_device(self) -> contextlib.ExitStack:
        """No gradients, ordinary tensors (a host may be in inference mode), the right device.

        Enters only what is not so already: at batch 1 each microsecond before the launch shows.
        """
        stack = contextlib.ExitStack()
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_grad_enabled():
            stack.enter_context(torch.no_grad())
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            stack.enter_context(torch.cuda.device(self.device))
        return stack

    def _begin(self) -> torch.cuda.Stream | None:
        """Order this call's work after the last call's, which may be on another stream.

        The weights, the graphs' buffers and their pool are shared by all calls.
        """
        if self.device.type != "cuda":
            return None
        stream = torch.cuda.current_stream()
        if self._done is None:
            self._done = torch.cuda.Event()
        elif stream != self._stream:
            stream.wait_event(self._done)
        return stream

    def _end(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None and self._done is not None:
            self._done.record(stream)
            self._stream = stream

    def _wait(self) -> None:
        """Wait until the device has done all work of this engine."""
        if self._done is not None:
            self._done.synchronize()

    def _open(self) -> DeviceWeights:
        if self._weights is None:
            raise EngineUnavailable(NAME, "the engine is closed", "load it again")
        return self._weights


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device to capture on: cuBLAS keeps a workspace for each stream it has seen."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


def _pool_bytes(pool: Any) -> int:
    """Bytes that the allocator holds for a graph pool."""
    if pool is None:
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


def _summary(error: BaseException) -> str:
    """One line: CUDA's messages begin with what happened, Triton's compiler's end with it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[-1] if lines[0].startswith("at ") else lines[0]
    return line if len(line) <= 160 else line[:157] + "..."
