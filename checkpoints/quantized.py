# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 checkpoint: one safetensors file in ComfyUI's own `comfy_quant` layout.

Per FP8 linear L: `L.weight` float8_e4m3fn [out, in], `L.weight_scale` and `L.input_scale` float32
[], `L.comfy_quant` uint8 JSON, so that W = weight * weight_scale and x_q = x / input_scale (ComfyUI
comfy/ops.py `_load_quantized_module`). Names are Hugging Face's, which ComfyUI's loaders detect.
Octavo's own facts are one JSON string under the metadata key "octavo".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..encoders import ClipSpec
from ..encoders.clip import PROJECTION
from ..errors import FileError, QuantizationError

if TYPE_CHECKING:
    from torch import Tensor

Precision = Literal["fp8", "16bit"]
Structure = Mapping[str, Precision]  # linear name -> how it is computed

SCHEMA = 1
METADATA_KEY = "octavo"
_SMALLEST = 2.0**-126  # the smallest normal float32; a subnormal scale cannot be divided by
FP8_MAX = 448.0  # largest finite float8_e4m3fn
COMFY_FORMAT = b'{"format": "float8_e4m3fn"}'
_LINEARS_PER_LAYER = 6
_BODIES = ("float16", "bfloat16")


def scale_from_amax(amax: Tensor | None, name: str) -> Tensor:
    """amax / 448 as a float32 scalar; 1.0 where only zeros were seen (any scale is exact then).

    Raises `QuantizationError` where the range is unknown, NaN or infinite: it is never shipped.
    """
    import torch

    if amax is None:
        raise QuantizationError(
            f"{name}: calibration never reached this layer, so its range is unknown; "
            "nothing was written."
        )
    value = amax.detach().to("cpu", torch.float32).reshape(())
    if not torch.isfinite(value):
        raise QuantizationError(
            f"{name}: its largest magnitude is {value.item()}; FP8 needs finite values, "
            "check the file."
        )
    scale = value / FP8_MAX
    # A scale that underflows would divide by zero: such a layer is zero to FP32's precision.
    return scale if scale >= _SMALLEST else torch.ones(())


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize to float8_e4m3fn: divide in float32, clamp; the cast rounds to nearest even."""
    import torch

    return (x.float() / scale.to(x.device)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def storage(tensor: Tensor) -> Tensor:
    """The 16-bit form of an unquantized tensor, decided by its values, not by the file's dtype.

    fp16 where exact, else bf16 where exact; else fp32 for vectors (small, and norms matter), and
    for matrices fp16, or bf16 where fp16 would overflow.
    """
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        small = tensor.to(dtype)
        if torch.equal(small.to(tensor.dtype) if tensor.dtype != dtype else small, tensor):
            return small
    if tensor.dim() < 2:
        return tensor.float()
    fits = bool(tensor.abs().max() <= torch.finfo(torch.float16).max)
    return tensor.to(torch.float16 if fits else torch.bfloat16)


def quantized_tensors(
    spec: ClipSpec,
    read: Callable[[str], Tensor],
    structure: Structure,
    input_amax: Mapping[str, Tensor],
    *,
    weight_amax: Mapping[str, Tensor] | None = None,
    projection: bool = False,
) -> dict[str, Tensor]:
    """All tensors of the checkpoint file, from canonical weights `read` one at a time."""
    import torch

    comfy = torch.frombuffer(bytearray(COMFY_FORMAT), dtype=torch.uint8)
    tensors: dict[str, Tensor] = {}
    for name in (*spec.tensors(), *((PROJECTION,) if projection else ())):
        tensor = read(name)
        linear = name.removesuffix(".weight")
        if structure.get(linear) != "fp8" or not name.endswith(".weight"):
            tensors[name] = storage(tensor).contiguous()
            continue
        # A searched (mse) range may be narrower than the weights: to_fp8's clamp is part of it.
        amax = tensor.float().abs().amax() if weight_amax is None else weight_amax.get(linear)
        scale = scale_from_amax(amax, name)
        tensors[name] = to_fp8(tensor, scale)
        tensors[linear + ".weight_scale"] = scale
        tensors[linear + ".input_scale"] = scale_from_amax(
            input_amax.get(linear), linear + " (input)"
        )
        tensors[linear + ".comfy_quant"] = comfy.clone()
    return tensors


def metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    """The safetensors metadata of a checkpoint file; `facts` must be JSON-ready."""
    return {"format": "pt", METADATA_KEY: json.dumps({"schema": SCHEMA, **facts}, sort_keys=True)}


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """An FP8 checkpoint on disk, opened lazily."""

    path: Path
    spec: ClipSpec
    structure: Structure
    facts: Mapping[str, Any]
    names: frozenset[str]

    def read(self, name: str) -> Tensor:
        """A tensor as it lies in the file (mapped). Raises KeyError where there is none."""
        import safetensors
        from torch import Tensor

        if name not in self.names:
            raise KeyError(name)
        with safetensors.safe_open(self.path, framework="pt") as file:
            tensor = file.get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def dense(self, name: str) -> Tensor:
        """A canonical tensor in float32, FP8 values multiplied by their scale."""
        tensor = self.read(name)
        linear = name.removesuffix(".weight")
        if self.structure.get(linear) == "fp8" and name.endswith(".weight"):
            return tensor.float() * self.read(linear + ".weight_scale")
        return tensor.float()

    def locations(self) -> dict[str, tuple[int, int]]:
        """Tensor -> (offset, bytes) of its values in the file, from the header, already checked."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: (8 + length + begin, end - begin)
            for name, (begin, end) in ((n, t["data_offsets"]) for n, t in header.items())
        }

    @property
    def projection(self) -> bool:
        return PROJECTION in self.names


def check_scales(checkpoint: QuantizedCheckpoint) -> None:
    """Raise `FileError` for a scale that is not one positive, finite number."""
    import torch

    for linear, precision in checkpoint.structure.items():
        if precision != "fp8":
            continue
        for name in (linear + ".weight_scale", linear + ".input_scale"):
            scale = checkpoint.read(name)
            usable = scale.numel() == 1 and scale.dtype == torch.float32
            if not (usable and torch.isfinite(scale).all() and (scale >= _SMALLEST).all()):
                raise FileError(
                    checkpoint.path,
                    f"has {name} = {scale.flatten()[:2].tolist()} where one positive, finite "
                    "float32 is needed",
                    "build it again from the original file",
                )


def open_quantized(path: Path) -> QuantizedCheckpoint:
    """Open a file that Octavo wrote; raises `FileError` if it is not one, or incomplete."""
    from .files import open_weights

    with open_weights(path) as file:
        text = file.metadata.get(METADATA_KEY)
        if text is None:
            raise FileError(
                path,
                "is not an FP8 checkpoint written by Octavo",
                "make one with 'octavo build'",
            )
        remedy = "build it again from the original file"
        try:
            facts = json.loads(text)
            if facts["schema"] != SCHEMA:
                raise FileError(
                    path, f"has checkpoint schema {facts['schema']}, not {SCHEMA}", remedy
                )
            spec_facts = dict(facts["spec"])
            if spec_facts.pop("encoder") != "clip":
                raise FileError(path, "holds an encoder of another family", remedy)
            spec = ClipSpec(**spec_facts)
            structure = dict(facts["structure"])
            # The count first: a hostile number of layers must not make us list them.
            whole = spec.layers * _LINEARS_PER_LAYER == len(structure)
            if not whole or structure.keys() != spec.linears().keys():
                raise ValueError("its structure does not name every linear")
            if not set(structure.values()) <= {"fp8", "16bit"} or facts["body"] not in _BODIES:
                raise ValueError("its precision is unknown")
            expected = _expected_tensors(spec, structure)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(path, f"has unreadable Octavo metadata ({error})", remedy) from error
        for name, (dtypes, shape) in expected.items():
            found = file.tensors.get(name)
            if found is None:
                raise FileError(path, f"lacks the tensor {name}", remedy)
            if found.shape != shape or found.dtype not in dtypes:
                fault = (
                    f"has {name} as {found.dtype} {list(found.shape)}, "
                    f"not {' or '.join(dtypes)} {list(shape)}"
                )
                raise FileError(path, fault, remedy)
        return QuantizedCheckpoint(Path(path), spec, structure, facts, frozenset(file.tensors))


def _expected_tensors(
    spec: ClipSpec, structure: Structure
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Name -> (dtypes it may have, shape) of all that a checkpoint must hold."""
    expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    for name, shape in spec.tensors().items():
        linear = name.removesuffix(".weight")
        if name.endswith(".weight") and structure.get(linear) == "fp8":
            expected[name] = (("F8_E4M3",), shape)
            expected[linear + ".weight_scale"] = expected[linear + ".input_scale"] = (("F32",), ())
        else:
            expected[name] = (("F16", "BF16", "F32"), shape)
    return expected
