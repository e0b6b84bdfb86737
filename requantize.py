# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Other weights under a recipe that serves already: a LoRA, quantized while FP32 reads it.

The FP32 reference that judges a patched set reads every weight once, block by block. What it is
given is quantized on the way, so the weights are patched once, cross the bus once, and no more than
a block of them is on the GPU at any time. Nothing here waits for the GPU before the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .backends.fp8_ops import (
    E4M3_MAX,
    Fp8Linear,
    Fp8Weights,
    quantize_input,
    scale_from_amax,
)

WAITING_BYTES = 32 << 20  # of weights that are read and not yet quantized: about a block


class Requantizer:
    """`read` for the reference; afterwards `weights` is `base`'s recipe over what was read.

    The codes are those of `Fp8Weights.requantized`: one amax and one rounding per tensor. With
    `changed` only the weights of these names are quantized; the others keep `base`'s codes.
    """

    def __init__(
        self,
        base: Fp8Weights,
        read: Callable[[str], Tensor],
        device: torch.device,
        changed: Collection[str] | None = None,
    ) -> None:
        self._base, self._read, self._device = base, read, device
        self._changed = changed
        self._in_fp8 = {
            name + ".weight" for name, v in base.linears.items() if isinstance(v, Fp8Linear)
        }
        table = base.spec.token_table
        self._wanted = {name for name in base.spec.tensors() if name != table}
        self._kept: dict[str, Tensor] = {}
        self._waiting: dict[str, Tensor] = {}  # to be quantized together: fewer, larger steps

    def __call__(self, name: str) -> Tensor:
        weight = self._read(name)
        if name not in self._wanted:
            return weight  # the token table stays where it is
        weight = weight.to(self._device)
        if name in self._kept or name in self._waiting:
            return weight
        own = self._base.linears.get(name.removesuffix(".weight"))
        if isinstance(own, Fp8Linear) and self._changed is not None and name not in self._changed:
            self._kept[name] = own.weight.to(self._device)
            self._kept[name + "_scale"] = own.weight_scale.to(self._device)
        elif name in self._in_fp8:
            self._waiting[name] = weight
            if sum(t.nbytes for t in self._waiting.values()) >= WAITING_BYTES:
                self._quantize()
        else:
            # A copy: what is read may be a small part of a large buffer.
            self._kept[name] = weight.to(self._base.body, copy=True)
        return weight

    def _quantize(self) -> None:
        if not self._waiting:
            return
        amaxes = torch._foreach_norm([t.flatten() for t in self._waiting.values()], float("inf"))
        scales = scale_from_amax(torch.stack(amaxes)).unbind()
        for (name, weight), scale in zip(self._waiting.items(), scales, strict=True):
            self._kept[name] = quantize_input(weight, scale)
            self._kept[name + "_scale"] = scale
        self._waiting.clear()

    def weights(self, amax: Mapping[str, Tensor]) -> Fp8Weights:
        """The set, with the base's input ranges widened to at least `amax` (per linear, FP32 []).

        Raises QuantizationError for weights or ranges that are not finite.
        """
        for name in sorted(self._wanted - self._kept.keys() - self._waiting.keys()):
            self(name)
        self._quantize()
        scales = widened_scales(self._base, amax, self._device)
        inputs = {name + ".input_scale": scale for name, scale in scales.items()}
        return Fp8Weights.from_tensors(self._base.spec, self._kept | inputs, self._base.body)


def widened_scales(
    weights: Fp8Weights, amax: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Per FP8 linear, its input scale or the one that `amax` needs, whichever is larger; FP32 [].

    q, k and v see one input and must keep one scale: their amax are equal, so their maxima are.
    """
    fp8 = {name: v for name, v in weights.linears.items() if isinstance(v, Fp8Linear)}
    if not fp8:
        return {}
    held = torch.stack([v.input_scale for v in fp8.values()]).to(device)
    seen = torch.stack([amax[name] for name in fp8]).to(device) / E4M3_MAX
    return dict(zip(fp8, torch.maximum(held, seen).unbind(), strict=True))


def widened(weights: Fp8Weights, amax: Mapping[str, Tensor], device: torch.device) -> Fp8Weights:
    """`weights` with input ranges of at least `amax`, their scales on `device`."""
    linears = dict(weights.linears)
    for name, scale in widened_scales(weights, amax, device).items():
        linear = linears[name]
        assert isinstance(linear, Fp8Linear)
        linears[name] = replace(linear, input_scale=scale)
    return replace(weights, linears=linears)
