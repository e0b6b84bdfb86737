# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Noticing, at every call, that weights were changed in place."""

from __future__ import annotations

import hashlib
import operator
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from .hooks import kept

PROBES = 16  # values looked at in each weight at every call
# 16-bit values that are widened at once: what a core's cache holds; on a GPU 64 MB.
CHUNK_CPU, CHUNK_GPU = 1 << 18, 1 << 24

_VERSION = operator.attrgetter("_version")


class Watch:
    """Tells whether tensors of one dtype still hold what they held, without reading them whole.

    Three signs: the version counter, which every in-place operation on a parameter raises; 16
    values spread over each tensor, since a write through `.data` (as PEFT fuses) leaves no other
    trace; and, where one of these has changed, an exact sum of all bits in their places
    (`weighted_sums`). Moving a tensor changes none of them. A write through `.data` that leaves
    those 16 values alone goes unseen.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._dtype = tensors, tensors[0].dtype
        wide = self._dtype.itemsize == 4
        self._bits = torch.int32 if wide else torch.int16
        self._row = np.dtype(np.int32 if wide else np.int16)
        self._pointers: list[int] = []
        self._seen: tuple[list[int], bytes] | None = None
        self._digest = ""
        self.look()

    def look(self) -> bool:
        """See where the tensors lie now; False if they are not of their dtype any more."""
        pointers = list(map(Tensor.data_ptr, self._tensors))
        if pointers != self._pointers:
            if any(t.dtype != self._dtype for t in self._tensors):
                return False
            on_host = [t.device.type == "cpu" for t in self._tensors]
            self._here = [i for i, here in enumerate(on_host) if here]
            self._there = [i for i, here in enumerate(on_host) if not here]
            # Views are kept of host memory only: they would hold the GPU memory of moved weights.
            self._views = [self._few(self._tensors[i]).numpy() for i in self._here]
            self._pointers = pointers
        return True

    @property
    def lies_apart(self) -> bool:
        """Whether some tensor is not in host memory, as of the last `look`."""
        return bool(self._there)

    @torch.no_grad()
    def digest(self) -> str:
        """Equal for equal values, on any device. Call `look` before."""
        seen = list(map(_VERSION, self._tensors)), self._probe()
        if seen != self._seen:
            exact = ",".join(map(str, weighted_sums(self._tensors)))
            self._digest = hashlib.sha256(exact.encode() + seen[1]).hexdigest()
            self._seen = seen
        return self._digest

    def _probe(self) -> bytes:
        if not self._there:
            return np.concatenate(self._views).tobytes()
        rows = np.empty((len(self._tensors), PROBES), self._row)
        if self._here:
            rows[self._here] = np.concatenate(self._views).reshape(-1, PROBES)
        few = torch.cat([self._few(self._tensors[i]) for i in self._there]).cpu()
        rows[self._there] = few.numpy().reshape(-1, PROBES)
        return rows.tobytes()

    def _few(self, tensor: Tensor) -> Tensor:
        step = (tensor.numel() - 1) // (PROBES - 1)
        step -= step > 1 and step % 2 == 0  # an odd step does not stay in one column
        return tensor.detach().as_strided((PROBES,), (step,)).view(self._bits)


class Watches:
    """As `Watch`, of tensors of any dtypes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        dtypes = sorted({t.dtype for t in tensors}, key=str)
        self._watches = [Watch([t for t in tensors if t.dtype == dtype]) for dtype in dtypes]

    def look(self) -> bool:
        """See where the tensors lie now; False if they are not of their dtypes any more."""
        return all(watch.look() for watch in self._watches)

    @property
    def lies_apart(self) -> bool:
        """Whether some tensor is not in host memory, as of the last `look`."""
        return any(watch.lies_apart for watch in self._watches)

    def digest(self) -> tuple[str, ...]:
        """Equal for equal values, on any device. Call `look` before."""
        return tuple(watch.digest() for watch in self._watches)


class Counting:
    """Tells whether the buffer `name` of `part` holds 0, 1, 2, ... to `count` - 1, as [1, count].

    It is read when it was changed in place or is another tensor, as it is whenever a model moves.
    """

    def __init__(self, part: nn.Module, name: str, count: int) -> None:
        self._part, self._name, self._count = part, name, count
        self._seen: tuple[Tensor, int] | None = None

    @torch.no_grad()
    def holds(self) -> bool:
        try:
            found = kept(self._part, self._name)
        except AttributeError:
            return False
        if self._seen is not None and found is self._seen[0] and found._version == self._seen[1]:
            return True
        self._seen = None
        if found.shape != (1, self._count) or found.is_meta:
            return False
        if not bool((found == torch.arange(self._count, device=found.device)).all()):
            return False
        if not found.is_inference():  # those have no version
            self._seen = found, found._version
        return True


def weighted_sums(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the sum of its 16-bit integers, each times a number of its row and column.

    Rows and columns that change places, and values inside them, change the sum. It wraps in 64
    bits, so it is the same on every device and in every order of adding. Values are widened by
    chunks: there is no room for a T5-XXL in 64 bits, and a cache's worth is the fastest.
    """
    alike = defaultdict[tuple[torch.device, torch.dtype, torch.Size], list[int]](list)
    for i, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype, tensor.shape].append(i)
    odd = _odd_numbers(2 * max(sum(t.shape) for t in tensors))
    there = {device: torch.from_numpy(odd).to(device) for device, *_ in alike}
    # All are enqueued before any is waited for.
    found = [
        _sums([tensors[i] for i in group], there[device]) for (device, *_), group in alike.items()
    ]
    sums = [0] * len(tensors)
    for group, values in zip(alike.values(), found, strict=True):
        for i, value in zip(group, values.tolist(), strict=True):
            sums[i] = value
    return sums


def _sums(tensors: Sequence[Tensor], odd: Tensor) -> Tensor:
    """As `weighted_sums`, of tensors of one shape on one device, as a tensor [N] there."""
    bits = [t.detach().contiguous().view(torch.int16) for t in tensors]
    if bits[0].dim() == 1:  # an encoder has hundreds of short ones
        return (torch.stack(bits).long() * odd[: len(bits[0])]).sum(dim=-1)
    return torch.stack([_sum(b.flatten(0, -2), odd) for b in bits])


def _sum(bits: Tensor, odd: Tensor) -> Tensor:
    """Sum of `bits` [R, C] int16, each times odd[row] + odd[R + column]. Adds up in 32 bits first.

    That is exact for up to 65,536 columns, and wraps alike everywhere beyond.
    """
    rows, columns = bits.shape
    chunk = CHUNK_CPU if bits.device.type == "cpu" else CHUNK_GPU
    by_row: list[Tensor] = []
    by_column = odd.new_zeros(columns)
    for part in bits.split(min(max(1, chunk // columns), 1 << 16)):
        wide = part.int()
        by_row.append(wide.sum(dim=1, dtype=torch.int32))
        by_column += wide.sum(dim=0, dtype=torch.int32)
    weights = odd[rows : rows + columns]
    return (torch.cat(by_row) * odd[:rows]).sum() + (by_column * weights).sum()


@lru_cache(maxsize=4)
def _odd_numbers(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[count] fixed pseudo-random odd numbers (SplitMix64): those of a longer row begin alike."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
