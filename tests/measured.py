# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests on a GPU measure with: times, cosines, equality of every bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

States = tuple[Sequence[Tensor], Tensor]  # as engines give them: hidden states, final state


def milliseconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median wall time of one call, with the device idle before and after."""
    times = []
    for _ in range(5 + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[5:])[repeats // 2]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Per token, in FP64, which 16-bit states do not show the rounding of."""
    return F.cosine_similarity(a.double(), b.double(), dim=-1)


def equal(a: States, b: States) -> bool:
    """Whether all states are the same bits."""
    return all(torch.equal(x, y) for x, y in zip((*a[0], a[1]), (*b[0], b[1]), strict=True))
