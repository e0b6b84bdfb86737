# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 as people's files have it: which tensors are FP8 codes, and the scales that go with them.

One meaning in all of them: value = code * weight scale, and x_q = x / input scale. For a linear L:
- legacy scaled FP8: `L.scale_weight`, `L.scale_input`, and a marker `scaled_fp8` (ComfyUI
  comfy/utils.py `convert_old_quants`: an input scale of exactly 1 stands for none; a marker of two
  elements asks for products in full precision),
- `comfy_quant`: `L.weight_scale`, `L.input_scale`, and per layer a JSON, as the tensor
  `L.comfy_quant` or in the file's metadata `_quantization_metadata` (comfy/ops.py
  `_load_quantized_module`),
- ModelOpt's export for Hugging Face: `L.weight_scale`, `L.input_scale`, hf_quant_config.json
  (modelopt/torch/export/quant_utils.py: scale = amax / 448),
- plain FP8: no scale anywhere, the codes are the values.

Whatever else stands beside a weight is refused: a scale is never dropped. Nothing here imports
torch; only the few bytes of scales and notes are read.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import FileError
from .files import DAMAGED, TensorInfo, WeightsFile, shown

if TYPE_CHECKING:
    from torch import Tensor

E4M3, E5M2 = "F8_E4M3", "F8_E5M2"
PLAIN_DTYPES = {"F16": "fp16", "BF16": "bf16", "F32": "fp32", E5M2: "fp16"}  # as they are read
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32; a subnormal scale cannot be divided by
LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127 / 448.0  # beyond, code * scale is infinite
MARKER = "scaled_fp8"
METADATA = "_quantization_metadata"
_WEIGHT, _INPUT = ("weight_scale", "scale_weight"), ("input_scale", "scale_input")
_NOTE = "comfy_quant"
_SIDES = (*_WEIGHT, *_INPUT, _NOTE)
_FOREIGN = re.compile(
    r"\.(?:weight_scale\w+|pre_quant_scale|SCB|weight_(?:s_rel|s_channel|codebook|format)"
    r"|weight\.(?:absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..*)"
    r"|[kv]_scale|output_scale)$"
)
_MAX_NOTE_BYTES = 64 * 1024
_NOTE_KEYS = {"format", "full_precision_matrix_mult"}
_OTHER_REMEDY = "give the file as its maker wrote it, or the 16-bit file it was made from"


@dataclass(frozen=True)
class Fp8:
    """How one FP8 tensor of a file is to be read; None where the file has no such scale."""

    weight_scale: float | None = None
    input_scale: float | None = None
    full_precision: bool = False


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear that is E4M3 in the file: value = code * weight scale, x_q = x / input scale.

    `full_precision`: the file asks for products in full precision, as do ComfyUI's text encoders.
    """

    shape: tuple[int, int]
    fp8: Fp8
    _codes: Callable[[], Tensor] = field(repr=False, compare=False)

    @property
    def weight_scale(self) -> Tensor | None:
        """FP32 []; None in a plain FP8 file, where it is 1."""
        return _scalar(self.fp8.weight_scale)

    @property
    def input_scale(self) -> Tensor | None:
        """FP32 []; None where the file has none, so that it must be calibrated."""
        return _scalar(self.fp8.input_scale)

    @property
    def full_precision(self) -> bool:
        return self.fp8.full_precision

    def codes(self) -> Tensor:
        """E4M3 [out, in], a view of the mapped file. Raises FileError."""
        return self._codes()


def _scalar(value: float | None) -> Tensor | None:
    import torch

    return None if value is None else torch.tensor(value, dtype=torch.float32)


def is_side(name: str) -> bool:
    """Whether a name is one of those that stand beside quantized weights, in any known format."""
    return name.rpartition(".")[2] in _SIDES or bool(_FOREIGN.search(name))


def refused_format(
    file: WeightsFile, names: Iterable[str], quantization: Mapping[str, Any] | None
) -> list[str]:
    """What the weights called `names` (with what stands beside them) are stored as that is not
    served, by the name that the file itself tells, or by what there is: "mxfp8", "I8", "SCB".

    Raises FileError on an unreadable note.
    """
    names = list(names)
    told = {str(note["format"]) for note in _notes(file, names).values()} - {"float8_e4m3fn"}
    if quantization is not None and not _is_served(quantization):
        method = str(quantization.get("quant_method", "an unnamed method"))
        algorithm = quantization.get("quant_algo")
        told.add(f"{method} {algorithm}" if algorithm else method)
    if told:
        return sorted(map(_harmless, told))
    infos = {name: file.tensors[name] for name in names if name in file.tensors}
    weights = {n: info for n, info in infos.items() if not is_side(n)}
    stored = {info.dtype for info in weights.values()} - set(PLAIN_DTYPES) - {E4M3}
    stored |= {n.rsplit(".", 1)[1] for n in names if _FOREIGN.search(n)}
    for name, info in infos.items():
        stem, _, kind = name.rpartition(".")
        if kind in _WEIGHT + _INPUT:
            stored |= _scaled_format(info, weights.get(stem + ".weight"), kind)
    return sorted(map(_harmless, stored))


def _harmless(name: str) -> str:
    """A name out of a file as it is, if it cannot be mistaken for anything else."""
    return name if re.fullmatch(r"[\w.\- ]{1,60}", name, re.ASCII) else shown(name)


def _scaled_format(scale: TensorInfo, weight: TensorInfo | None, kind: str) -> set[str]:
    if weight is not None and weight.dtype == E5M2:
        return {"FP8 E5M2 with scales"}
    if weight is None or weight.dtype != E4M3 or kind in _INPUT:
        return set()
    if scale.dtype in ("U8", "F8_E8M0"):
        return {"mxfp8"}
    if math.prod(scale.shape) > 1:
        rows = weight.shape[:1]
        one_per_row = scale.shape in (rows, (*rows, 1))
        return {f"FP8 with one scale per {'row' if one_per_row else 'block'}"}
    return set()


def _is_served(quantization: Mapping[str, Any]) -> bool:
    method = quantization.get("quant_method")
    return method == "modelopt" and quantization.get("quant_algo") == "FP8"


def fp8_tensors(
    file: WeightsFile,
    prefix: str,
    weights: Collection[str],
    sides: Collection[str],
    *,
    scaled: bool,
) -> dict[str, Fp8]:
    """Name in the file -> how to read it, for each of `weights` that is E4M3.

    `sides`: every name beside them for which `is_side` holds. `scaled`: a config says that there
    are scales. Raises FileError where a scale is missing, stands beside something else, or is no
    positive, finite number.
    """
    notes = _notes(file, [*weights, *sides])
    matrices = {
        name.removesuffix(".weight"): name
        for name in weights
        if file.tensors[name].dtype in (E4M3, E5M2) and len(file.tensors[name].shape) == 2
    }
    found: dict[str, dict[str, float]] = {}
    for name, value in _values(file, sides).items():
        stem, _, kind = name.rpartition(".")
        _check_beside(file, name, stem, weights, matrices)
        role = "weight" if kind in _WEIGHT else "input"
        if role in found.setdefault(stem, {}):
            raise _faulty(file, f"linear {shown(stem)} has two {role} scales")
        if kind == "scale_input" and value == 1:
            continue  # ComfyUI's way to say that there is none
        found[stem][role] = value
    for stem in notes:
        _check_beside(file, f"{stem}.{_NOTE}", stem, weights, matrices)
    marker = _marker(file, prefix)
    scaled = scaled or bool(marker or notes or any(found.values()))
    for stem, name in sorted(matrices.items()):
        if scaled and "weight" not in found.get(stem, {}):
            raise _faulty(file, f"tensor {shown(name)} is FP8 and its scale is missing")
    twice = marker is not None and math.prod(marker.shape) == 2
    return {
        name: Fp8(
            found.get(stem, {}).get("weight"),
            found.get(stem, {}).get("input"),
            stem in matrices
            and (twice or bool(notes.get(stem, {}).get("full_precision_matrix_mult"))),
        )
        for name in weights
        for stem in (name.removesuffix(".weight"),)
        if file.tensors[name].dtype == E4M3
    }


def refuse_homeless(file: WeightsFile) -> None:
    """Raise FileError for a scale or note whose linear is not in the file under that name.

    For files with FP8 weights that have no scale: it may be theirs, left behind by a renaming.
    """
    for name in file.tensors:
        stem, _, kind = name.rpartition(".")
        if kind in _SIDES and stem + ".weight" not in file.tensors:
            fault = f"tensor {shown(name)} has no weight beside it, and FP8 weights lack a scale"
            raise _faulty(file, fault)
    if METADATA in file.metadata:
        layers = _json(file, f"metadata {METADATA}", file.metadata[METADATA]).get("layers")
        for stem in layers if isinstance(layers, dict) else ():
            # Of a part of a file they may be named without what stands before.
            if not any(name.endswith(f"{stem}.weight") for name in file.tensors):
                fault = f"metadata {METADATA} names {shown(stem)}, which is not there"
                raise _faulty(file, f"{fault}, and FP8 weights lack a scale")


def _faulty(file: WeightsFile, fault: str) -> FileError:
    return FileError(file.path, fault, _OTHER_REMEDY)


def _check_beside(
    file: WeightsFile, name: str, stem: str, weights: Collection[str], matrices: Container[str]
) -> None:
    """Raises FileError unless what has the scale or note `name` is an FP8 matrix."""
    if stem in matrices:
        return
    weight = stem + ".weight"
    if weight not in weights:
        raise _faulty(file, f"tensor {shown(name)} scales nothing that the encoder has")
    info = file.tensors[weight]
    kind = f"{info.dtype} {[*info.shape]}"
    raise _faulty(file, f"tensor {shown(name)} stands beside {kind} and not an FP8 matrix")


def _marker(file: WeightsFile, prefix: str) -> TensorInfo | None:
    """The `scaled_fp8` of the encoder or of whatever it is a part of."""
    tops = [prefix[: match.end()] for match in re.finditer(r"[./]", prefix)]
    for top in (*reversed(tops), ""):
        if top + MARKER in file.tensors:
            return file.tensors[top + MARKER]
    return None


# dtype -> (struct's format, what goes before the bytes: bfloat16 is the upper half of a float32)
_FORMATS = {"F32": ("<f", b""), "F16": ("<e", b""), "BF16": ("<f", b"\0\0")}


def _values(file: WeightsFile, sides: Iterable[str]) -> dict[str, float]:
    """The scales among `sides`; raises FileError for one that is no positive, finite number.

    bfloat16 and float16 widen to float32 exactly; float64 would not narrow exactly.
    """
    scales = [n for n in sides if n.rpartition(".")[2] in _WEIGHT + _INPUT]
    for name in scales:
        info = file.tensors[name]
        if info.dtype not in _FORMATS or math.prod(info.shape) != 1:
            kind = f"{info.dtype} {[*info.shape]}"
            raise _faulty(file, f"tensor {shown(name)} is {kind}, not one float32 number")
    found = {}
    for name, data in file.values(scales).items():
        code, before = _FORMATS[file.tensors[name].dtype]
        (value,) = struct.unpack(code, before + data)
        if not SMALLEST_SCALE <= value <= LARGEST_SCALE:  # NaN fails this too
            fault = f"tensor {shown(name)} is {value}, not a positive, finite and normal number"
            raise _faulty(file, fault)
        found[name] = float(value)
    return found


def _notes(file: WeightsFile, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Stem -> its `comfy_quant` note, for those of `names`; the metadata's win, as in ComfyUI."""
    names = list(names)
    stems = {n.removesuffix(".weight") for n in names} | {n.rpartition(".")[0] for n in names}
    found = {}
    tensors = [n for n in names if n.endswith("." + _NOTE) and n in file.tensors]
    for name in tensors:
        info = file.tensors[name]
        if info.dtype != "U8" or not 0 < math.prod(info.shape) <= _MAX_NOTE_BYTES:
            kind = f"{info.dtype} {[*info.shape]}"
            raise FileError(file.path, f"tensor {shown(name)} is {kind}, not JSON", DAMAGED)
    for name, data in file.values(tensors).items():
        found[name.removesuffix("." + _NOTE)] = _note(file, shown(name), data)
    if METADATA in file.metadata:
        where = f"metadata {METADATA}"
        layers = _json(file, where, file.metadata[METADATA]).get("layers")
        if not isinstance(layers, dict):
            raise FileError(file.path, f"{where} names no layers", DAMAGED)
        found |= {
            stem: _note(file, f"{where} of {shown(stem)}", json.dumps(layers[stem]))
            for stem in sorted(stems & layers.keys())
        }
    return found


def _note(file: WeightsFile, where: str, text: str | bytes) -> dict[str, Any]:
    note = _json(file, where, text)
    if not isinstance(note.get("format"), str):
        raise FileError(file.path, f"{where} names no format", DAMAGED)
    unknown = sorted(key for key in note.keys() - _NOTE_KEYS if note[key])
    if unknown and note["format"] == "float8_e4m3fn":
        fault = f"{where} asks for {shown(unknown[0])}, which Octavo does not know"
        raise _faulty(file, fault)
    return note


def _json(file: WeightsFile, where: str, text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(file.path, f"{where} is not valid JSON", DAMAGED) from error
    if not isinstance(found, dict):
        raise FileError(file.path, f"{where} is not a JSON object", DAMAGED)
    return found
