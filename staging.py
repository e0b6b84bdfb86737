# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Many tensors from ordinary memory onto a GPU, in order and ahead of whoever uses them.

A copy from ordinary memory waits for the driver, which goes through a small buffer of its own: 6
GB/s where the bus gives 54 (measured, H200). Here threads fill one of two page-locked buffers while
the GPU reads the other, so that the copies run beside the caller's own work. Two buffers of 32 MB
for the whole process, however large the model is. The threads use memmove: torch's own copy would
set all cores spinning for each tensor.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLOT_BYTES = 32 << 20
SLOTS = 2
FILLERS = 4  # threads
ALIGNMENT = 512  # bytes; what torch's allocator gives, so that the same kernels are chosen


def pinned(size: int) -> Tensor | None:
    """`size` bytes of page-locked memory, or None where there is none to be had."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None


# A host that keeps account of page-locked memory puts its own function here.
allocate: Callable[[int], Tensor | None] = pinned


@dataclass
class _Slot:
    buffer: Tensor  # uint8 [SLOT_BYTES]
    read: torch.cuda.Event | None = None  # the GPU's last copy out of it


@dataclass
class _Piece:
    """What one fill of a slot carries into a buffer on the GPU."""

    start: int = 0  # in the buffer
    size: int = 0
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # (place, address, bytes)


@dataclass
class _Buffer:
    """One allocation on the GPU with the tensors that it will hold."""

    size: int = 0
    tensors: list[tuple[Tensor, int | None]] = field(default_factory=list)  # None: goes by itself
    pieces: list[_Piece] = field(default_factory=list)


_slots: list[_Slot] = []
_in_use = threading.Lock()
_fillers: ThreadPoolExecutor | None = None


def upload(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Each of `tensors` on `device`, in order, queued on the current stream.

    Neighbours may share one allocation, so clone what is kept. Where staging does not apply
    (another device, no page-locked memory, another upload under way) it is `tensor.to(device)`.
    """
    if device.type != "cuda" or not _in_use.acquire(blocking=False):
        for tensor in tensors:
            yield tensor.to(device)
        return
    held = True

    def release() -> None:
        nonlocal held
        if held:
            held = False
            _in_use.release()

    try:
        if _has_slots():
            yield from _staged(tensors, device, release)
        else:
            release()
            for tensor in tensors:
                yield tensor.to(device)
    finally:
        release()


def _has_slots() -> bool:
    global _fillers
    while len(_slots) < SLOTS:
        # Outside inference mode: the buffers serve every later caller.
        with torch.inference_mode(False):
            buffer = allocate(SLOT_BYTES)
        if buffer is None:
            return False
        _slots.append(_Slot(buffer))
    _fillers = _fillers or ThreadPoolExecutor(FILLERS, "octavo-staging")
    return True


def _staged(
    tensors: Sequence[Tensor], device: torch.device, done: Callable[[], None]
) -> Iterator[Tensor]:
    """As `upload`; calls `done` once nothing is left to go through the slots.

    Whoever takes the last tensor does not come back to let the generator end.
    """
    assert _fillers is not None
    buffers = plan(tensors, SLOT_BYTES)
    pieces = [piece for buffer in buffers for piece in buffer.pieces]
    filling: list[list[Future[None]]] = []

    def fill(number: int) -> None:
        if number < len(pieces):
            assert _fillers is not None
            slot, piece = _slots[number % SLOTS], pieces[number]
            share = -(-piece.size // FILLERS)
            shares = ((n * share, (n + 1) * share) for n in range(FILLERS))
            filling.append([_fillers.submit(_fill, slot, piece, *ends) for ends in shares])

    try:
        for number in range(SLOTS):
            fill(number)
        number = 0
        for buffer in buffers:
            held = torch.empty(buffer.size, dtype=torch.uint8, device=device)
            for piece in buffer.pieces:
                slot = _slots[number % SLOTS]
                for future in filling[number]:
                    future.result()
                held[piece.start : piece.start + piece.size].copy_(
                    slot.buffer[: piece.size], non_blocking=True
                )
                slot.read = torch.cuda.Event(blocking=True)  # an event is one device's
                slot.read.record(torch.cuda.current_stream(device))
                fill(number + SLOTS)
                number += 1
            if number == len(pieces):
                done()
            typed: dict[torch.dtype, Tensor] = {}
            for tensor, place in buffer.tensors:
                if place is None:
                    yield tensor.to(device)
                    continue
                dtype = tensor.dtype
                if dtype not in typed:
                    typed[dtype] = held.view(dtype)
                yield typed[dtype].as_strided(
                    tensor.shape, tensor.stride(), place // dtype.itemsize
                )
    finally:
        for futures in filling:  # the next upload fills the same slots
            for future in futures:
                future.cancel()
                if not future.cancelled():
                    future.exception()


def _fill(slot: _Slot, piece: _Piece, start: int, stop: int) -> None:
    """Bytes `start` to `stop` of `piece`, once the GPU has read what was in the slot before."""
    if slot.read is not None:
        slot.read.synchronize()
    target = slot.buffer.data_ptr()
    for place, address, size in piece.parts:
        first, last = max(place, start), min(place + size, stop)
        if first < last:
            ctypes.memmove(target + first, address + first - place, last - first)


def plan(tensors: Sequence[Tensor], slot_bytes: int) -> list[_Buffer]:
    """How `tensors` are cut up: buffers of at most a slot's size, or of one larger tensor."""
    buffers = [_Buffer()]
    for tensor in tensors:
        last, size = buffers[-1], tensor.nbytes
        if tensor.device.type != "cpu" or size == 0 or not tensor.is_contiguous():
            last.tensors.append((tensor, None))  # other strides could choose another kernel
            continue
        if last.pieces and last.size + size > slot_bytes:
            buffers.append(last := _Buffer())
        place, address = last.size, tensor.data_ptr()
        last.tensors.append((tensor, place))
        for start in range(0, size, slot_bytes):
            length = min(slot_bytes, size - start)
            if start or not last.pieces:
                last.pieces.append(_Piece(place + start))
            piece = last.pieces[-1]
            piece.parts.append((place + start - piece.start, address + start, length))
            piece.size = place + start - piece.start + length
        last.size = -(-(place + size) // ALIGNMENT) * ALIGNMENT
    return buffers
