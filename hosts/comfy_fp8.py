# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's quantized weights: E4M3 codes and their scale, as its loaders hold them.

comfy/ops.py `_load_quantized_module` makes a comfy_kitchen QuantizedTensor of each weight with a
`comfy_quant` note; files with `scaled_fp8` get such notes first. Value = code * scale.
"""

from __future__ import annotations

from typing import Any

import comfy.quant_ops
import torch
from torch import Tensor, nn

from ..checkpoints.scales import LARGEST_SCALE, SMALLEST_SCALE, Fp8
from ..errors import OctavoError

_E4M3_LAYOUTS = {"TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout"}
# What changes a linear beyond its weight and bias, where some loader puts it beside them.
_BESIDE = ("pre_quant_scale", "scale_weight", "scale_input")
_LARGEST_CODE = 0x7E  # 448, without its sign


def is_quantized(weight: Any) -> bool:
    return isinstance(weight, comfy.quant_ops.QuantizedTensor)


def other_layout(weight: Any) -> str:
    """How a weight is quantized, if it is otherwise than in E4M3 with one scale; else ""."""
    if not is_quantized(weight):
        return ""
    layout = str(weight._layout_cls)
    if layout in _E4M3_LAYOUTS and weight._qdata.dtype == torch.float8_e4m3fn:
        return ""
    return layout.removeprefix("TensorCore").removeprefix("TensorWise").removesuffix("Layout")


def unpacked(weight: Any, module: nn.Module, label: str) -> tuple[Tensor, Fp8]:
    """(codes E4M3, their scales) of a quantized weight of `module`.

    Raises OctavoError, which names `label`, for a scale that is no positive, normal number.
    """
    note = bool(getattr(module, "_full_precision_mm_config", False))
    given = getattr(module, "input_scale", None)
    scale = _number(weight._params.scale, f"{label}: its scale")
    own = None if given is None else _number(given, f"{label}: the scale of its input")
    return weight._qdata, Fp8(scale, own, note)


def _number(value: Any, label: str) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise OctavoError(f"{label} is not one number; load the 16-bit file.")
    found = float(value.detach().float().reshape(()))
    if not SMALLEST_SCALE <= found <= LARGEST_SCALE:
        raise OctavoError(f"{label} is {found}, not a positive number; load the 16-bit file.")
    return found


def is_alone(module: nn.Module) -> bool:
    """Whether nothing stands beside the weight that another reader of it would have to know."""
    return all(getattr(module, name, None) is None for name in _BESIDE)


def reaches_the_end(weight: Tensor) -> bool:
    """Whether the largest magnitude is exactly 448, the largest of E4M3."""
    if weight.dtype == torch.float8_e4m3fn:
        codes = weight.contiguous().view(torch.uint8) & 0x7F
        return int(codes.amax()) == _LARGEST_CODE
    wide = weight.half() if weight.dtype == torch.float8_e5m2 else weight
    low, high = torch.aminmax(wide)
    return bool(torch.maximum(-low, high) == 448.0)
