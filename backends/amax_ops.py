# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A reference that notes the largest magnitude each linear sees: `max` calibration by hand."""

from __future__ import annotations

from torch import Tensor, nn

from .torch_ops import TorchOps


class AmaxOps(TorchOps):
    """`TorchOps` that keeps, per linear, the running largest |input| as a float32 scalar tensor."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.amax: dict[str, Tensor] = {}

    def linear(self, x: Tensor, name: str) -> Tensor:
        seen = x.detach().abs().amax().float()
        known = self.amax.get(name)
        # maximum() carries NaN through, so a NaN activation cannot hide behind a later batch
        self.amax[name] = seen if known is None else known.maximum(seen)
        return super().linear(x, name)
