# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""`max` calibration by hand: the largest magnitude each linear's input reaches."""

from __future__ import annotations

from torch import Tensor


class AmaxRecorder:
    """An `observe` for backends/torch_ops.py: per linear, the largest |input|."""

    def __init__(self) -> None:
        self.amax: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> None:
        seen = x.detach().abs().amax().float()
        known = self.amax.get(name)
        # maximum() carries NaN through, so a NaN activation cannot hide behind a later batch
        self.amax[name] = seen if known is None else known.maximum(seen)
