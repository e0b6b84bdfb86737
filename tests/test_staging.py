# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""staging.upload: every byte arrives, in order, whatever the sizes. The GPU is stood in for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo import staging
from torch import Tensor

CPU = torch.device("cpu")
SLOT = 4096  # bytes, so that a few tensors fill many slots
DTYPES = (torch.float16, torch.float32, torch.float8_e4m3fn, torch.bool, torch.int64)


class Event:
    """CUDA's, which on a CPU has always happened."""

    def __init__(self, *, blocking: bool) -> None:
        self.recorded = False

    def record(self, stream: Any) -> None:
        assert stream == ("stream of", CPU), "of another device than the copy's"
        assert not self.recorded, "an event belongs to the device of its first record"
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded, "waited for a copy that was never queued"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`upload` stages as it does for a GPU, with its copies done by the CPU."""
    slots: list[Any] = []
    monkeypatch.setattr(staging, "_slots", slots)
    monkeypatch.setattr(staging, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(staging, "allocate", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    real = staging._staged
    monkeypatch.setattr(staging, "_staged", lambda tensors, _, done: real(tensors, CPU, done))
    return SimpleNamespace(type="cuda")


def tensors_of(sizes: list[int]) -> list[Tensor]:
    random = torch.Generator().manual_seed(len(sizes))
    made = []
    for i, size in enumerate(sizes):
        raw = torch.randint(0, 2, (size * 8,), dtype=torch.uint8, generator=random)
        dtype = DTYPES[i % len(DTYPES)]
        made.append(raw[: size * dtype.itemsize].view(dtype))
    return made


def equal(a: Tensor, b: Tensor) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3 * SLOT // 4), max_size=12))
def test_a_plan_holds_every_byte_once(sizes: list[int]) -> None:
    tensors = tensors_of(sizes)
    buffers = staging.plan(tensors, SLOT)
    planned = [t for b in buffers for t, _ in b.tensors]
    assert all(a is b for a, b in zip(planned, tensors, strict=True))
    for buffer in buffers:
        held = torch.zeros(buffer.size, dtype=torch.uint8)
        for piece in buffer.pieces:
            assert piece.size <= SLOT
            for place, address, size in piece.parts:
                assert place + size <= piece.size
                ctypes.memmove(held.data_ptr() + piece.start + place, address, size)
        for tensor, place in buffer.tensors:
            if place is None:
                assert tensor.numel() == 0
                continue
            assert place % staging.ALIGNMENT == 0
            assert equal(held[place : place + tensor.nbytes].view(tensor.dtype), tensor)
        assert buffer.size <= SLOT or len(buffer.tensors) == 1 or len(buffer.pieces) > 1


def test_what_arrives_is_what_was_sent(gpu: Any) -> None:
    tensors = tensors_of([10, 700, 3 * SLOT, 0, 1, 5, 900, 2000, 17])
    tensors[1:1] = [torch.arange(12.0).view(3, 4).T, torch.tensor(3.0), torch.ones(2, 3, 4)]
    for _ in range(2):  # the slots serve again
        got = list(staging.upload(tensors, gpu))
        assert all(equal(a, b) for a, b in zip(got, tensors, strict=True))
    assert got[1].stride() == tensors[1].stride()
    assert len(staging._slots) == staging.SLOTS


def test_inference_tensors_arrive_as_ordinary_ones(gpu: Any) -> None:
    with torch.inference_mode():
        sent = torch.arange(9.0)
        list(staging.upload([sent], gpu))
    (got,) = staging.upload([sent], gpu)
    assert torch.equal(got, sent) and not got.is_inference()


def test_a_second_upload_goes_by_itself_meanwhile(gpu: Any) -> None:
    first = staging.upload(tensors_of([SLOT, SLOT]), gpu)
    next(first)
    sent = torch.zeros(2)
    gone: list[Any] = []
    double = SimpleNamespace(to=lambda device: (gone.append(device), sent)[1])
    assert list(staging.upload([double], gpu)) == [sent]  # type: ignore[list-item]
    assert gone == [gpu]
    first.close()  # type: ignore[attr-defined]
    assert not staging._in_use.locked()


def test_who_takes_the_last_tensor_need_not_come_back(gpu: Any) -> None:
    """A generator that nobody asks again would keep the slots from everyone else."""
    under_way = staging.upload(tensors_of([SLOT, 7, SLOT]), gpu)
    for _ in range(2):
        next(under_way)
        assert staging._in_use.locked()
    next(under_way)
    assert not staging._in_use.locked()
    nothing = staging.upload([torch.empty(0)], gpu)
    next(nothing)
    assert not staging._in_use.locked()


def test_an_upload_that_is_left_or_fails_frees_the_slots(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> Iterator[Tensor]:
        yield from staging.upload(tensors_of([SLOT] * 9), gpu)

    next(left())
    assert not staging._in_use.locked()

    def fails(*_: Any) -> None:
        raise RuntimeError("the memory went away")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_fill", fails)
        with pytest.raises(RuntimeError, match="went away"):
            list(staging.upload(tensors_of([5]), gpu))
    assert [len(t) for t in staging.upload(tensors_of([5]), gpu)] == [5]


def test_without_page_locked_memory_each_goes_by_itself(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "allocate", lambda _: None)
    sent = torch.zeros(2)
    double = SimpleNamespace(to=lambda _: sent)
    assert list(staging.upload([double], gpu)) == [sent]  # type: ignore[list-item]
    assert not staging._in_use.locked() and not staging._slots


def test_off_cuda_nothing_is_copied() -> None:
    sent = torch.ones(3)
    (got,) = staging.upload([sent], CPU)
    assert got is sent
