# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Changes in place: what the exact sum of a weight's bits tells apart, and that it is exact."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from octavo.hosts import watch
from octavo.hosts.watch import PROBES, Watch, weighted_sums
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def sums_in_python(tensor: Tensor) -> int:
    """As `weighted_sums` defines it, in integers of any length."""
    bits = tensor.contiguous().view(torch.int16).tolist()
    odd = watch._odd_numbers(4096).tolist()
    if tensor.dim() == 1:
        total = sum(map(operator.mul, bits, odd))
    else:
        total = sum(
            value * (odd[r] + odd[len(bits) + c])
            for r, row in enumerate(bits)
            for c, value in enumerate(row)
        )
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64,), (7, 40), (40, 40), (130, 3)])
def test_sums_are_exact(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alike in chunks and whole, alone and beside others."""
    tensor = values(*shape, dtype=dtype)
    expected = sums_in_python(tensor)
    others = [values(9, 33), values(64), values(*shape)]
    assert weighted_sums([tensor]) == [expected]
    assert weighted_sums([others[0], tensor, *others[1:], tensor])[1::3] == [expected] * 2
    monkeypatch.setattr(watch, "CHUNK_CPU", 100)
    assert weighted_sums([tensor]) == [expected]


def test_the_weights_are_the_same_in_every_process() -> None:
    """The first numbers of SplitMix64 from seed 0, made odd."""
    first = watch._odd_numbers(3).view(np.uint64).tolist()
    assert first == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F5, 0x06C45D188009454F]
    assert watch._odd_numbers(1000)[:3].view(np.uint64).tolist() == first


def rows(w: Tensor, free: Tensor) -> None:
    w[free] = w[free.flip(0)].clone()


def columns(w: Tensor, free: Tensor) -> None:
    w[free] = w[free].flip(1)


def inside_rows(w: Tensor, free: Tensor) -> None:
    for row in free.tolist():
        w[row] = w[row, torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(row))]


def two_values(w: Tensor, free: Tensor) -> None:
    a, b = int(free[0]), int(free[1])
    w[a, 3], w[b, 5] = w[b, 5].clone(), w[a, 3].clone()


def signs(w: Tensor, free: Tensor) -> None:
    w[free] = -w[free]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [rows, columns, inside_rows, two_values, signs])
def test_changes_that_leave_the_probes_alone(
    change: Callable[[Tensor, Tensor], None], dtype: torch.dtype
) -> None:
    weight = values(64, 64, dtype=dtype)
    seen = Watch([weight])
    before, probes = seen.digest(), seen._probe()
    saved = weight.clone()
    step = (weight.numel() - 1) // (PROBES - 1)
    hit = {i * (step - 1 + step % 2) // 64 for i in range(PROBES)}
    change(weight, torch.tensor([row for row in range(64) if row not in hit]))
    assert seen._probe() == probes
    assert seen.digest() != before
    weight.copy_(saved)
    assert seen.digest() == before


def test_a_matrix_is_not_its_transpose() -> None:
    weight = values(32, 32)
    assert weighted_sums([weight]) != weighted_sums([weight.T])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vector_backwards(dtype: torch.dtype) -> None:
    vector = values(64, dtype=dtype)
    assert weighted_sums([vector]) != weighted_sums([vector.flip(0)])
