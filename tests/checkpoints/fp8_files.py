# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""One quantized encoder in every FP8 format that people's files have, and E4M3 decoded by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Tensors = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Codes:
    """What a file holds: `codes` E4M3 by linear, scales as Python floats by linear, the rest."""

    codes: Tensors
    weight_scales: dict[str, float]
    input_scales: dict[str, float]
    rest: Tensors


def coded(tensors: Tensors, linears: Iterable[str], *, inputs: bool = True) -> Codes:
    """Scales that are no powers of two and differ from linear to linear."""
    codes, weight_scales, input_scales = {}, {}, {}
    for i, linear in enumerate(linears):
        weight = tensors[linear + ".weight"].float()
        scale = (weight.abs().max() / 448) * (1 + i / 100)
        codes[linear] = (weight / scale).clamp(-448, 448).to(E4M3)
        weight_scales[linear] = float(scale)
        if inputs:
            input_scales[linear] = float(np.float32(0.01 + i / 1000))
    rest = {n: t for n, t in tensors.items() if n.removesuffix(".weight") not in codes}
    return Codes(codes, weight_scales, input_scales, rest)


def note(**conf: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(conf).encode()), dtype=torch.uint8)


def _named(c: Codes, weight_scale: str, input_scale: str) -> Tensors:
    named = {**c.rest, **{n + ".weight": t for n, t in c.codes.items()}}
    named |= {f"{n}.{weight_scale}": torch.tensor(v) for n, v in c.weight_scales.items()}
    return named | {f"{n}.{input_scale}": torch.tensor(v) for n, v in c.input_scales.items()}


def legacy(c: Codes, marker: torch.Tensor | None = None) -> Tensors:
    """As t5xxl_fp8_e4m3fn_scaled.safetensors."""
    marker = torch.zeros(0, dtype=E4M3) if marker is None else marker
    return {**_named(c, "scale_weight", "scale_input"), "scaled_fp8": marker}


def comfy_quant(c: Codes, **conf: object) -> Tensors:
    notes = {n + ".comfy_quant": note(format="float8_e4m3fn", **conf) for n in c.codes}
    return {**_named(c, "weight_scale", "input_scale"), **notes}


def without_notes(c: Codes) -> Tensors:
    """As ModelOpt's export, and as `_quantization_metadata` files."""
    return _named(c, "weight_scale", "input_scale")


def metadata(c: Codes, prefix: str = "") -> dict[str, str]:
    layers = {prefix + n: {"format": "float8_e4m3fn"} for n in c.codes}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


FORMATS: dict[str, Callable[[Codes], Tensors]] = {
    "legacy": legacy,
    "legacy, fp32 marker": lambda c: legacy(c, torch.zeros(1)),
    "comfy_quant": comfy_quant,
    "metadata": without_notes,
    "ModelOpt": without_notes,
}


def _table() -> npt.NDArray[np.float64]:
    """The 256 values of E4M3 (arXiv:2209.05433, table 1), from sign, exponent and mantissa."""
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            values.append(float("nan"))
        elif exponent == 0:
            values.append(sign * mantissa / 8 * 2.0**-6)
        else:
            values.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


TABLE = _table()


def decoded(codes: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Codes times the scale, in exact arithmetic rounded once to FP32."""
    bytes_ = codes.contiguous().view(torch.uint8).numpy()
    return torch.from_numpy((TABLE[bytes_] * np.float64(scale)).astype(np.float32))
