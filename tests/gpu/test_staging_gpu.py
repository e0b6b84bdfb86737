# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""staging.upload on a GPU: every byte, on any stream, while the GPU is busy."""

from __future__ import annotations

import time

import pytest
import torch
from octavo import staging

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
SIZES = (5, 1000, 3_000_001, 40_000_000, 7, 100_000_000, 12_345_678) * 2


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def same(sent: list[torch.Tensor], device: torch.device) -> bool:
    """Compared as they come, so that slots and buffers are reused meanwhile."""
    alike = torch.ones((), dtype=torch.bool, device=device)
    for a, b in zip(sent, staging.upload(sent, device), strict=True):
        alike &= (a.pin_memory().to(device, non_blocking=True) == b).all()
    return bool(alike)


@pytest.mark.parametrize("side", [False, True])
def test_every_byte_arrives(device: torch.device, side: bool) -> None:
    random = torch.Generator().manual_seed(1)
    sent = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=random) for n in SIZES]
    work = torch.randn(4096, 4096, device=device)
    stream = torch.cuda.Stream(device) if side else torch.cuda.current_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work @ work  # the copies queue behind it, and the slots must wait for them
            assert same(sent, device)
    torch.cuda.synchronize(device)
    assert not staging._in_use.locked()
    assert sum(s.buffer.nbytes for s in staging._slots) == staging.SLOTS * staging.SLOT_BYTES


def test_it_is_faster_than_one_after_the_other(device: torch.device) -> None:
    sent = [torch.ones(13 << 20, dtype=torch.uint8) for _ in range(40)]

    def seconds(staged: bool) -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for tensor in staging.upload(sent, device) if staged else (t.to(device) for t in sent):
            del tensor
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for staged in (True, False):
        seconds(staged)
    assert min(seconds(True) for _ in range(3)) < min(seconds(False) for _ in range(3))
