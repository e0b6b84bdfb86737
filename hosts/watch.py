# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Noticing, at every call, that weights were changed in place."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PROBES = 16  # values looked at in each weight at every call

_VERSION = operator.attrgetter("_version")


class Watch:
    """Tells whether tensors of one dtype still hold what they held, without reading them whole.

    Three signs: the version counter, which every in-place operation on a parameter raises; 16
    values spread over each tensor, since a write through `.data` (as PEFT fuses) leaves no other
    trace; and, where one of these has changed, an exact sum of all bits. Moving a tensor changes
    none of them. A write through `.data` to a small part of a tensor can go unseen.
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
            sums = [t.view(self._bits).sum() for t in self._tensors]  # enqueued before any wait
            exact = ",".join(str(int(s)) for s in sums)
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
