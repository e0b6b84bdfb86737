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
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..encoders import EncoderSpec, T5Spec, spec_from_facts
from ..encoders.clip import PROJECTION
from ..errors import FileError, QuantizationError, remedy_for
from .files import FileIdentity, open_weights
from .scales import SMALLEST_SCALE, QuantizedLinear
from .t5 import is_sound

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Precision = Literal["fp8", "16bit"]
Structure = Mapping[str, Precision]  # linear name -> how it is computed

SCHEMA = 1
METADATA_KEY = "octavo"
FP8_MAX = 448.0  # largest finite float8_e4m3fn
COMFY_FORMAT = b'{"format": "float8_e4m3fn"}'
_BODIES = ("float16", "bfloat16")


def scales_of(amax: Tensor) -> Tensor:
    """`amax / 448` in float32, any shape; 1.0 where that underflows, so that zeros stay zeros."""
    import torch

    scale = amax.float() / FP8_MAX
    # Such a layer is zero to float32's precision, and its own scale could not be divided by.
    return torch.where(scale < SMALLEST_SCALE, torch.ones_like(scale), scale)


def scale_from_amax(amax: Tensor | None, name: str) -> Tensor:
    """`scales_of` one measured range, on the CPU.

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
    return scales_of(value)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Float [...] -> float8_e4m3fn [...] of `x / scale`: divided in float32, saturated at 448.

    The cast rounds to nearest even and NaN stays NaN. `scale` is float32 [].
    """
    import torch

    # One dimension, because torch would let a [] scale take the dtype of x: this way the division
    # is float32's in one kernel. The clamp: a plain cast turns what is too large into NaN.
    wide = x / scale.to(x.device).reshape(1)
    return wide.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def storage(tensor: Tensor, *, small: bool = False) -> Tensor:
    """The 16-bit form of an unquantized tensor, decided by its values, not by the file's dtype.

    fp16 where exact, else bf16 where exact; else fp32 for vectors and what is `small` (norms and
    relative biases matter), and for matrices fp16, or bf16 where fp16 would overflow.
    """
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        narrow = tensor.to(dtype)
        if torch.equal(narrow.to(tensor.dtype) if tensor.dtype != dtype else narrow, tensor):
            return narrow
    if small or tensor.dim() < 2:
        return tensor.float()
    fits = bool(tensor.abs().max() <= torch.finfo(torch.float16).max)
    return tensor.to(torch.float16 if fits else torch.bfloat16)


class QuantizedTensors(Mapping[str, "Tensor"]):
    """All tensors of the checkpoint file, each made of canonical weights when it is asked for.

    So of an encoder that is larger than memory one tensor is held at a time. The linears of
    `quantized` (`EncoderWeights.quantized`) that stay FP8 keep their codes, which are views of
    their file, and their scales; only an input scale that they lack is made of `input_amax`. Those
    that share an input have one input scale, the largest of theirs: their products are one GEMM,
    and what the largest holds it holds for all.
    `kept`: all are made now and kept. Making one raises `QuantizationError` for ranges that are
    missing, NaN or infinite. T5's linears in 16 bit are bfloat16, as every engine of it wants them.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        read: Callable[[str], Tensor],
        structure: Structure,
        input_amax: Mapping[str, Tensor],
        *,
        weight_amax: Mapping[str, Tensor] | None = None,
        projection: bool = False,
        quantized: Mapping[str, QuantizedLinear] | None = None,
        kept: bool = False,
    ) -> None:
        self._read, self._input_amax, self._weight_amax = read, input_amax, weight_amax
        self._own = quantized or {}
        self._small: set[str] = set()
        self._bfloat16: set[str] = set()
        if isinstance(spec, T5Spec):
            self._small = set(spec.bias_tables())
            self._bfloat16 = {name + ".weight" for name in spec.linears()}
        self._parts: dict[str, tuple[str, str]] = {}  # name -> (linear or name, what of it)
        for name in (*spec.tensors(), *((PROJECTION,) if projection else ())):
            linear = name.removesuffix(".weight")
            if structure.get(linear) != "fp8" or not name.endswith(".weight"):
                self._parts[name] = (name, "whole")
                continue
            for part in ("weight", "weight_scale", "input_scale", "comfy_quant"):
                self._parts[f"{linear}.{part}"] = (linear, part)
        fp8 = {linear for linear, precision in structure.items() if precision == "fp8"}
        groups = (names for i in range(spec.layers) for names in spec.groups(i))
        self._sharing = {name: [n for n in names if n in fp8] for names in groups for name in names}
        self._shapes = spec.tensors()
        self._scales: dict[str, Tensor] = {}
        self._types: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._kept: dict[str, Tensor] = {}
        if kept:
            self._kept = {name: self[name] for name in self}

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        import torch

        if name in self._kept:
            return self._kept[name]
        stem, part = self._parts[name]
        if name in self._bfloat16 and part == "whole":
            return self._read(name).to(torch.bfloat16).contiguous()
        if part == "whole":
            return storage(self._read(name), small=name in self._small).contiguous()
        if part == "weight":
            return self._codes(stem)
        if part == "weight_scale":
            if stem not in self._scales:
                self._codes(stem)
            return self._scales[stem]
        if part == "input_scale":
            return torch.stack([self._input_scale(n) for n in self._sharing[stem]]).amax()
        return torch.frombuffer(bytearray(COMFY_FORMAT), dtype=torch.uint8)

    def _input_scale(self, linear: str) -> Tensor:
        own = self._own[linear].input_scale if linear in self._own else None
        if own is not None:
            return own
        return scale_from_amax(self._input_amax.get(linear), linear + " (input)")

    def _codes(self, linear: str) -> Tensor:
        import torch

        if linear in self._own:
            scale = self._own[linear].weight_scale
            self._scales[linear] = torch.ones(()) if scale is None else scale
            return self._own[linear].codes()
        name = linear + ".weight"
        tensor = self._read(name)
        # A searched (mse) range may be narrower than the weights: to_fp8's clamp is part of it.
        searched = self._weight_amax
        amax = tensor.float().abs().amax() if searched is None else searched.get(linear)
        self._scales[linear] = scale_from_amax(amax, name)
        return to_fp8(tensor, self._scales[linear])

    def type(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape of a tensor, without making it where that is known."""
        import torch

        part = self._parts[name][1]
        if part == "weight":
            return torch.float8_e4m3fn, self._shapes[name]
        if part in ("weight_scale", "input_scale"):
            return torch.float32, ()
        if name not in self._types:
            tensor = self[name]
            self._types[name] = (tensor.dtype, tuple(tensor.shape))
        return self._types[name]


def quantized_tensors(
    spec: EncoderSpec,
    read: Callable[[str], Tensor],
    structure: Structure,
    input_amax: Mapping[str, Tensor],
    *,
    weight_amax: Mapping[str, Tensor] | None = None,
    projection: bool = False,
    quantized: Mapping[str, QuantizedLinear] | None = None,
) -> dict[str, Tensor]:
    """`QuantizedTensors`, all of them in memory."""
    return dict(
        QuantizedTensors(
            spec, read, structure, input_amax,
            weight_amax=weight_amax, projection=projection, quantized=quantized,
        )
    )  # fmt: skip


def metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    """The safetensors metadata of a checkpoint file; `facts` must be JSON-ready."""
    return {"format": "pt", METADATA_KEY: json.dumps({"schema": SCHEMA, **facts}, sort_keys=True)}


_DTYPES = {
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
}  # of what an engine or a graph reads


class _Held:
    """A file that stays readable while this lives, whoever deletes or replaces it meanwhile.

    Only its header is read now. Raises OSError, and `FileError` where it is not `identity`.
    """

    def __init__(self, path: Path, identity: FileIdentity) -> None:
        self.path, self._identity = path, identity
        self._number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._number)
        self.check()
        with open(self._number, "rb", closefd=False) as file:
            length = int.from_bytes(file.read(8), "little")
            self.header: dict[str, Any] = json.loads(file.read(length))
        self.header.pop("__metadata__", None)
        self.start = 8 + length

    def check(self) -> None:
        """Raise `FileError` where the file was written to: its pages may end the process."""
        now, known = os.fstat(self._number), self._identity
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (known.size, known.mtime_ns, known.inode):
            raise FileError(self.path, "changed while it was being read", "start again")

    @cached_property
    def pages(self) -> mmap.mmap:
        """Private to us and writable, because torch wants that of memory which it did not make."""
        return mmap.mmap(self._number, 0, access=mmap.ACCESS_COPY)


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """An FP8 checkpoint on disk, held open: deleting the file does not take it from us."""

    path: Path
    spec: EncoderSpec
    structure: Structure
    facts: Mapping[str, Any]
    names: frozenset[str]
    _held: _Held = field(repr=False, compare=False)

    def read(self, name: str) -> Tensor:
        """A tensor as it lies in the file (mapped).

        Raises KeyError where there is none, and `FileError` where it cannot be read any more.
        """
        import torch

        if name not in self.names:
            raise KeyError(name)
        self.check()
        about = self._held.header[name]
        dtype = getattr(torch, _DTYPES.get(about["dtype"], ""), None)
        if dtype is None:
            fault = f"tensor {name} is {about['dtype']}, which no checkpoint of Octavo holds"
            raise FileError(self.path, fault, "build it again from the original file")
        shape, count = tuple(about["shape"]), math.prod(about["shape"])
        if not count:
            return torch.empty(shape, dtype=dtype)
        place = self._held.start + about["data_offsets"][0]
        try:
            pages = self._held.pages
        except (OSError, ValueError) as error:  # no address space, no mapping on this file system
            fault = f"cannot be mapped ({getattr(error, 'strerror', None) or error})"
            raise FileError(self.path, fault, "free some memory, or move it to a disk") from error
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=place).reshape(shape)

    def check(self) -> None:
        """Raise `FileError` where the file has changed since it was opened.

        Then none of its tensors may be touched: a page that is no longer there ends the process.
        """
        self._held.check()

    def dense(self, name: str) -> Tensor:
        """A canonical tensor in float32, FP8 values multiplied by their scale."""
        tensor = self.read(name)
        linear = name.removesuffix(".weight")
        if self.structure.get(linear) == "fp8" and name.endswith(".weight"):
            return tensor.float() * self.read(linear + ".weight_scale")
        return tensor.float()

    def locations(self) -> dict[str, tuple[int, int]]:
        """Tensor -> (offset, bytes) of its values in the file, from the header, already checked."""
        return {
            name: (self._held.start + begin, end - begin)
            for name, (begin, end) in ((n, t["data_offsets"]) for n, t in self._held.header.items())
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
            if not (usable and torch.isfinite(scale).all() and (scale >= SMALLEST_SCALE).all()):
                raise FileError(
                    checkpoint.path,
                    f"has {name} = {scale.flatten()[:2].tolist()} where one positive, finite "
                    "float32 is needed",
                    "build it again from the original file",
                )


def open_quantized(path: Path, identity: FileIdentity | None = None) -> QuantizedCheckpoint:
    """Open a file that Octavo wrote; raises `FileError` if it is not one, or incomplete.

    `identity`: what it was when its checksum was verified; another file is refused.
    """
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
            spec = spec_from_facts(facts["spec"])
            structure = dict(facts["structure"])
            # The count first: a hostile number of layers must not make us list them.
            whole = spec.layers * len(replace(spec, layers=1).linears()) == len(structure)
            if not whole or structure.keys() != spec.linears().keys():
                raise ValueError("its structure does not name every linear")
            bodies = _BODIES[1:] if isinstance(spec, T5Spec) else _BODIES  # T5 overflows fp16
            if not set(structure.values()) <= {"fp8", "16bit"} or facts["body"] not in bodies:
                raise ValueError("its precision is unknown")
            if isinstance(spec, T5Spec) and not is_sound(spec):
                raise ValueError("its spec cannot be computed")
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
        try:
            held = _Held(Path(path), identity or file.identities[0])
        except OSError as error:  # deleted since its header was read, or one file too many is open
            fault = f"cannot be opened ({error.strerror or error})"
            raise FileError(path, fault, remedy_for(error, "start again")) from error
        return QuantizedCheckpoint(
            Path(path), spec, structure, facts, frozenset(file.tensors), held
        )


def _expected_tensors(
    spec: EncoderSpec, structure: Structure
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
