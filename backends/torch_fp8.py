# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The `torch_fp8` engine: a quantized encoder on the FP8 tensor cores, through PyTorch alone."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..encoders import ClipSpec, encode
from ..encoders.clip import FINAL_NORM, POSITIONS
from ..errors import EngineUnavailable
from .fp8_ops import DeviceWeights, Fp8Ops, Fp8Weights

log = logging.getLogger(__name__)

NAME = "torch_fp8"
MIN_SM = (8, 9)  # Ada; the first tensor cores that take E4M3


class DeviceFacts(Protocol):
    """What the choice needs to know of a device."""

    @property
    def kind(self) -> str:
        """"cuda", "cpu", "mps", ..."""
        ...

    @property
    def sm(self) -> tuple[int, int] | None:
        """Compute capability of an NVIDIA GPU, (8, 9) for example."""
        ...


def refusal(device: DeviceFacts) -> str | None:
    """Why this engine cannot serve on `device`, in one sentence, or None if it can."""
    if device.kind != "cuda" or device.sm is None:
        return f"FP8 in PyTorch needs an NVIDIA GPU, and the encoder's device is {device.kind}"
    if device.sm < MIN_SM:
        have, need = (f"sm_{major}{minor}" for major, minor in (device.sm, MIN_SM))
        return f"the GPU is {have} and FP8 tensor cores start at {need}"
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm, whose E4M3 is another format"
    if not hasattr(torch, "float8_e4m3fn") or not hasattr(torch, "_scaled_mm"):
        return f"PyTorch {torch.__version__} has no FP8 matrix product; 2.6 or later has"
    return None


class TorchFp8Engine:
    """`encode(embeds [B, S, C], mask [B, S] | None)` -> fresh hidden states; safe from any thread.

    On a CPU it computes the same numbers in simulation, for tests.
    """

    def __init__(
        self,
        spec: ClipSpec,
        weights: Fp8Weights,
        device: torch.device | str,
        *,
        graphs: bool = True,
        max_graphs: int = 8,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        self._lock = threading.Lock()
        self._weights: DeviceWeights | None = DeviceWeights(weights, self.device)

    @torch.no_grad()
    def encode(self, embeds: Tensor, mask: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The L+1 hidden states and the final normed state, each [B, S, C] in the body's dtype."""
        with self._lock:
            assert self._weights is not None
            states = self._run(embeds.to(self._weights.body), mask)
        return tuple(states[:-1].unbind()), states[-1]

    def _run(self, embeds: Tensor, mask: Tensor | None) -> Tensor:
        states = embeds.new_empty(self.spec.layers + 2, *embeds.shape)
        places = {POSITIONS: states[0], FINAL_NORM: states[-1]}
        for i in range(self.spec.layers):
            places[self.spec.block(i) + "mlp.fc2"] = states[i + 1]
        ops = Fp8Ops(self._weights, simulated=True, places=places)
        _, last = encode(ops, self.spec, embeds, mask)
        ops.tensor(last)
        return states

    def swap_weights(self, weights: Fp8Weights) -> None:
        """Take over other values of the same structure, LoRA applied for example."""
        with self._lock:
            assert self._weights is not None
            self._weights.copy_from(weights)

    @property
    def bytes(self) -> int:
        """Bytes of device memory held."""
        return 0 if self._weights is None else self._weights.size_bytes

    def close(self) -> None:
        """Free everything; a closed engine encodes no more."""
        with self._lock:
            self._weights = None
