# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Which text encoders a file holds, in any layout and under any prefix, by positive evidence.

Nothing here imports torch or reads a tensor but for scales; `EncoderWeights.read` does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ..encoders import EncoderSpec, T5Spec, spec_from_facts
from ..encoders.clip import HEAD_DIM, PROJECTION, ClipSpec
from ..errors import FileError, OctavoError, UnsupportedEncoder
from . import t5
from .configs import activation_of, matching, with_t5_config
from .files import DAMAGED, Config, WeightsFile, open_weights, shown
from .layouts import (
    LAYER,
    LAYOUTS,
    LONG_CLIP_KEPT,
    Layout,
    Part,
    owner,
    projections,
    shape_of,
)
from .scales import (
    PLAIN_DTYPES,
    Fp8,
    QuantizedLinear,
    fp8_tensors,
    is_side,
    refuse_homeless,
    refused_format,
)
from .t5 import T5Layout

if TYPE_CHECKING:
    import torch

_WANTED = "give a file with CLIP-L, CLIP-H, CLIP-G, LongCLIP, T5 or umT5"
_PLAIN = "give the fp16, bf16 or fp32 file it was made from"
_IGNORED = re.compile(r"(?:^|[._/])(?:position_ids|attn_mask|logit_scale)$")


@dataclass(frozen=True)
class EncoderWeights:
    """One text encoder of a file: what it is, and its tensors under their canonical names, lazily.

    `name` is unique in the file; `prefix` stands before the layout's own names; `dtype` is "fp32",
    "fp16", "bf16" or, where weights are E4M3, "fp8"; `projection_shape` is (proj, width).
    """

    name: str
    spec: EncoderSpec
    prefix: str
    dtype: str
    projection_shape: tuple[int, int] | None
    file: WeightsFile = field(repr=False)
    _parts: Mapping[str, tuple[Part, ...]] = field(repr=False)
    _fp8: Mapping[str, Fp8] = field(repr=False, default_factory=dict)  # by names in the file

    @cached_property
    def quantized(self) -> Mapping[str, QuantizedLinear]:
        """Canonical name (no `.weight`) -> codes and scales, of each linear that is E4M3."""
        return {
            name: QuantizedLinear(shape, self._fp8[part.name], partial(self.read_codes, name))
            for name, shape in self.spec.linears().items()
            for part in self._parts[name + ".weight"]
            if part.name in self._fp8
        }

    @cached_property
    def _sides(self) -> Mapping[str, float]:
        """What belongs to FP8 weights beside their codes, by canonical names."""
        sides: dict[str, float] = {}
        for name, parts in self._parts.items():
            found = self._fp8.get(parts[0].name)
            stem = name.removesuffix(".weight")
            if found is None or (found == Fp8() and stem not in self.quantized):
                continue
            sides[stem + ".weight_scale"] = 1.0 if (w := found.weight_scale) is None else w
            if found.input_scale is not None:
                sides[stem + ".input_scale"] = found.input_scale
            if found.full_precision:
                sides[stem + ".full_precision"] = 1.0
        return sides

    @property
    def scales(self) -> list[str]:
        """Canonical names of what belongs to FP8 weights beside their codes; a plain scale is 1."""
        return sorted(self._sides)

    def side(self, name: str) -> tuple[str, torch.Tensor]:
        """(name, FP32 []) of one of `scales`."""
        import torch

        return name, torch.tensor(self._sides[name], dtype=torch.float32)

    @property
    def label(self) -> object:
        """What messages call these weights: the file's path."""
        return self.file.path

    def check(self) -> None:
        """Raise FileError if the file has changed since it was opened."""
        self.file.check()

    def names(self) -> list[str]:
        """Canonical names in the order of the spec's `tensors`; a projection comes last."""
        return list(self._parts)

    def sources(self, name: str) -> tuple[str, ...]:
        """Names in the file of what the canonical tensor `name` is made of."""
        return tuple(part.name for part in self._parts[name])

    def read(self, name: str) -> torch.Tensor:
        """The values of a canonical tensor. Raises FileError.

        In the file's dtype and a view of the mapped file (but for the position table of LongCLIP's
        own files). FP8 is widened: linears and whatever has a scale to FP32, times the scale; the
        rest to FP16, which holds every value of E4M3 and E5M2.
        """
        wide = name.removesuffix(".weight") in self.quantized
        return _joined([self._widened(part, wide) for part in self._parts[name]])

    def read_codes(self, linear: str) -> torch.Tensor:
        """E4M3 codes [out, in] of one of `quantized`, as they are, a view of the mapped file."""
        (part,) = self._parts[linear.removesuffix(".weight") + ".weight"]
        return self._part(part)

    def stored(self, name: str) -> torch.Tensor:
        """As `read`, but E4M3 codes as they are; with `scales` the whole content."""
        if len(self._parts[name]) > 1:
            return self.read(name)
        return self._part(self._parts[name][0])

    def _part(self, part: Part) -> torch.Tensor:
        tensor = self.file.read(part.name)
        if part.rows is not None:
            tensor = tensor[slice(*part.rows)]
        return tensor.T if part.transposed else tensor

    def _widened(self, part: Part, wide: bool) -> torch.Tensor:
        tensor = self._part(part)
        if not self.file.tensors[part.name].dtype.startswith("F8_"):
            return tensor
        found = self._fp8.get(part.name, Fp8())
        if found.weight_scale is not None:
            return tensor.float().mul_(found.weight_scale)
        return tensor.float() if wide else tensor.half()


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    import torch

    return torch.cat(tensors)


@dataclass(frozen=True)
class Detected:
    """The text encoders of `file`, and a sentence for each other encoder, left as it is."""

    file: WeightsFile
    encoders: tuple[EncoderWeights, ...]
    unsupported: tuple[str, ...]

    @property
    def is_octavo(self) -> bool:
        """Whether Octavo wrote the file: its linears may be FP8, with scales beside them."""
        return _is_octavo(self.file)


@dataclass(frozen=True)
class _Left:
    """Something recognised that is not served: "a T5 encoder ...", and what would help."""

    what: str
    remedy: str = _WANTED


def detect(
    file_or_path: WeightsFile | str | os.PathLike[str],
    *,
    activation: str | None = None,
    heads: int | None = None,
) -> Detected:
    """Recognise every text encoder of a file; `activation` and `heads` override what it tells of a
    CLIP (a T5 tells both itself).

    Raises UnsupportedEncoder where there is none, FileError where one is damaged.
    """
    if activation not in (None, "quick_gelu", "gelu"):
        raise OctavoError(f"activation {shown(activation)} is not known; use quick_gelu or gelu.")
    if isinstance(file_or_path, WeightsFile):
        return _detect(file_or_path, activation, heads)
    file = open_weights(file_or_path)
    try:
        return _detect(file, activation, heads)
    except BaseException:
        file.close()
        raise


def _detect(file: WeightsFile, activation: str | None, heads: int | None) -> Detected:
    encoders: list[EncoderWeights] = []
    left, towers = _other_encoders(file), []
    candidates = _candidates(file)
    for prefix, layout in candidates:
        if any(prefix + name in file.tensors for name in layout.tower):
            towers.append(_Left(f"an image tower{_at(prefix)}"))
            continue
        if not any(prefix + name in file.tensors for name in layout.tops):
            continue  # another model's blocks, named like an encoder's
        unlike = _unlike(file, prefix, layout) or _quantized(file, prefix, layout)
        if unlike:
            left.append(unlike)
            continue
        if any(prefix == at and layout is not other for at, other in candidates):
            # Two encoders, or one some of whose blocks are named otherwise and would be left out.
            fault = f"holds two text encoders, or parts of them, under the prefix {shown(prefix)}"
            raise FileError(file.path, fault, "save each whole and into a file of its own")
        taken = {other.name for other in encoders}
        encoders.append(_encoder(file, prefix, layout, taken, activation, heads))
    overridden = activation is not None or heads is not None
    if encoders and overridden and not any(isinstance(e.spec, ClipSpec) for e in encoders):
        fault = "holds no CLIP, which alone can be told another activation"
        raise FileError(file.path, fault, "leave the activation out")
    if any(x.fp8.weight_scale is None for e in encoders for x in e.quantized.values()):
        refuse_homeless(file)
    if encoders:
        return Detected(file, tuple(encoders), tuple(_sentence(x) for x in left))
    left = left or towers or _no_encoder(file)
    if left:
        fault = f"holds {_listed(dict.fromkeys(x.what for x in left))}, which Octavo does not serve"
        raise UnsupportedEncoder(file.path, fault, _listed(dict.fromkeys(x.remedy for x in left)))
    first = _listed(shown(name) for name in sorted(file.tensors)[:3]) or "none"
    fault = f"holds no text encoder that Octavo knows (its first tensors are {first})"
    raise UnsupportedEncoder(file.path, fault, _WANTED)


def _sentence(left: _Left) -> str:
    what = left.what[0].upper() + left.what[1:]
    return f"{what} is left as it is: Octavo serves CLIP and T5 in 16 or 32 bit or E4M3."


def _at(prefix: str) -> str:
    return f" at {shown(prefix)}" if prefix else ""


def _listed(items: Iterable[str]) -> str:
    *rest, last = [*items] or [""]
    return f"{', '.join(rest)} and {last}" if rest else last


def _is_octavo(file: WeightsFile) -> bool:
    # A folder's encoders each have metadata of their own, so only a file given itself counts.
    return "octavo" in file.metadata and file.path.is_file()


def _candidates(file: WeightsFile) -> list[tuple[str, Layout | T5Layout]]:
    """(prefix, layout) of everything whose blocks are named like an encoder's, sorted."""
    layouts: tuple[Layout | T5Layout, ...] = (*LAYOUTS, *t5.LAYOUTS)
    found: dict[tuple[str, int], Layout | T5Layout] = {}
    for name in file.tensors:
        for order, layout in enumerate(layouts):
            match = layout.probe.search(name)
            if match:
                found[name[: match.start()], order] = layout
    return [(prefix, found[prefix, order]) for prefix, order in sorted(found)]


def _unlike(file: WeightsFile, prefix: str, layout: Layout | T5Layout) -> _Left | None:
    """What a candidate is instead of a text encoder of ours, by tensors that only others have."""
    at = _at(prefix)
    whole = owner(prefix)
    if isinstance(layout, T5Layout):
        return _Left(f"a T5 decoder{at}") if prefix + t5.DECODER in file.tensors else None
    if prefix + "cls_emb" in file.tensors:
        return _Left(f"a CoCa text encoder{at}, which appends a class token")
    if prefix + "head.weight" in file.tensors or whole + "logit_bias" in file.tensors:
        return _Left(f"a SigLIP text encoder{at}, whose attention is not causal")
    if any(top + "text_projection.bias" in file.tensors for top in (prefix, whole)):
        return _Left(f"a text encoder{at} whose projection has a bias")
    return None


def _own(file: WeightsFile, prefix: str, layout: Layout | T5Layout) -> list[str]:
    """All names that belong to an encoder and matter, known or not."""
    spaces = tuple(prefix + space for space in layout.spaces)
    return [n for n in file.tensors if n.startswith(spaces) and not _IGNORED.search(n)]


def _beside(file: WeightsFile, prefix: str) -> list[str]:
    """A projection, if there is one, and what stands beside it."""
    stems = {name.removesuffix(".weight") for name, _ in projections(prefix)}
    return [n for n in file.tensors if n in stems or n.rpartition(".")[0] in stems]


def _config_of(file: WeightsFile, prefix: str) -> Config | None:
    return next((c for top, c in file.configs.items() if prefix.startswith(top)), None)


def _kind(layout: Layout | T5Layout) -> str:
    return "T5 encoder" if isinstance(layout, T5Layout) else "CLIP text encoder"


def _quantized(file: WeightsFile, prefix: str, layout: Layout | T5Layout) -> _Left | None:
    names = _own(file, prefix, layout)
    if isinstance(layout, Layout):
        names += _beside(file, prefix)
    config = _config_of(file, prefix)
    stored = refused_format(file, names, config.quantization if config else None)
    if not stored:
        return None
    return _Left(f"a {_kind(layout)}{_at(prefix)} stored as {_listed(stored)}", _PLAIN)


def _encoder(
    file: WeightsFile,
    prefix: str,
    layout: Layout | T5Layout,
    taken: set[str],
    activation: str | None,
    heads: int | None,
) -> EncoderWeights:
    """The encoder at `prefix`, every tensor's shape checked. Raises FileError."""
    projection_shape = None
    spec: EncoderSpec
    own = _own(file, prefix, layout)
    if isinstance(layout, T5Layout):
        spec = _t5_spec(file, prefix, layout)
        parts = layout.parts(prefix, spec, file.tensors)
        first, name = "layer.0.SelfAttention.q", t5.NAMES[spec.family]
    else:
        spec = _spec(file, prefix, layout, activation, heads)
        parts = layout.parts(prefix, spec, file.tensors)
        first, name = "mlp.fc1", spec.family
    for part in (part for of_one in parts.values() for part in of_one):
        shape_of(file, part.name, part.shape)
    if isinstance(layout, T5Layout):
        used = {part.name for of_one in parts.values() for part in of_one}
        own = t5.without_second_table(prefix, layout, used, own)
        t5.refuse_unused(file, used, [n for n in own if not is_side(n)])
    else:
        beside = _beside(file, prefix)
        own += beside
        _refuse_unknown(file, layout, {n for n, _ in projections(prefix)}, beside)
        for source, transposed in projections(prefix):
            if source in file.tensors:
                wanted = ("projected", spec.width)
                shape = shape_of(file, source, wanted[::-1] if transposed else wanted)
                parts[PROJECTION] = (Part(source, shape, transposed=transposed),)
                projection_shape = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
                break
    weights = {part.name for of_one in parts.values() for part in of_one}
    config = _config_of(file, prefix)
    scaled = bool(config and config.quantization)
    fp8 = fp8_tensors(file, prefix, weights, [n for n in own if is_side(n)], scaled=scaled)
    dtype = file.tensors[parts[f"{spec.block(0)}{first}.weight"][0].name].dtype
    return EncoderWeights(
        name=_unique(_name_in(prefix) or name, taken),
        spec=spec,
        prefix=prefix,
        dtype="fp8" if fp8 else PLAIN_DTYPES[dtype],
        projection_shape=projection_shape,
        file=file,
        _parts=parts,
        _fp8=fp8,
    )


def _t5_spec(file: WeightsFile, prefix: str, layout: T5Layout) -> T5Spec:
    spec = t5.spec_of(file, prefix, layout, _layers(file, prefix, layout))
    try:
        own = spec_from_facts(json.loads(file.metadata["octavo"])["spec"])
        keys = ("activation", "max_distance", "norm_eps")
        told = replace(spec, **{key: getattr(own, key) for key in keys})
        if told == own and t5.is_sound(told):
            return told
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    spec = with_t5_config(_config_of(file, prefix), spec)
    if not t5.is_sound(spec):
        fault = (
            f"its relative bias has {spec.buckets} buckets, too many for distances up to "
            f"{spec.max_distance}"
        )
        raise FileError(file.path, fault, "give the folder that holds its config.json too")
    return spec


def _spec(
    file: WeightsFile,
    prefix: str,
    layout: Layout,
    activation: str | None,
    heads: int | None,
) -> ClipSpec:
    """The sizes, read from a few tensors, and by rule what no tensor tells."""
    layers = _layers(file, prefix, layout)
    vocabulary, width = shape_of(file, prefix + layout.tokens, ("vocabulary", "width"))
    table = prefix + layout.positions
    if prefix + layout.more_positions in file.tensors:
        table = prefix + layout.more_positions
    positions, _ = shape_of(file, table, ("positions", width))
    if table.endswith(layout.more_positions) and positions <= LONG_CLIP_KEPT:
        fault = (
            f"tensor {shown(table)} has {positions} positions, more than {LONG_CLIP_KEPT} needed"
        )
        raise FileError(file.path, fault, DAMAGED)
    stem, _ = layout.leaves["mlp.fc1"]
    fc1 = f"{prefix}{layout.blocks}0.{stem}weight"
    feed_forward, _ = shape_of(file, fc1, ("feed-forward", width))

    own = _told_by_octavo(file)
    activation = activation or own.get("activation")
    heads = own.get("heads") if heads is None else heads
    config = _config_of(file, prefix)
    told = matching(config, width, layers)
    if activation is None and config and told:
        kind = activation_of(config, told)
    elif activation is None:
        kind = "quick_gelu" if width == 768 else "gelu"
    else:
        kind = "quick_gelu" if activation == "quick_gelu" else "gelu"
    if heads is None and told:
        heads = told.heads
    elif heads is None:
        if width % HEAD_DIM:
            fault = f"its width {width} is no multiple of {HEAD_DIM}, so its heads are unknown"
            raise FileError(file.path, fault, "give the folder that holds its config.json too")
        heads = width // HEAD_DIM
    if heads < 1 or width % heads:
        fault = f"its width {width} cannot be split into {heads} heads"
        raise FileError(file.path, fault, "correct the number of heads")
    eps = own.get("layer_norm_eps", told.layer_norm_eps if told else 1e-5)
    return ClipSpec(
        layers, width, feed_forward, heads, positions, vocabulary, kind, layer_norm_eps=eps
    )


def _told_by_octavo(file: WeightsFile) -> dict[str, Any]:
    """What a checkpoint of Octavo's says that no tensor tells; what is not sound is left out."""
    try:
        spec = json.loads(file.metadata["octavo"])["spec"]
        said = {name: spec[name] for name in ("activation", "heads", "layer_norm_eps")}
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    sound = said["activation"] in ("quick_gelu", "gelu") and type(said["heads"]) is int
    eps = said["layer_norm_eps"]
    return said if sound and type(eps) is float and 0 < eps < 1 and said["heads"] > 0 else {}


def _layers(file: WeightsFile, prefix: str, layout: Layout | T5Layout) -> int:
    """How many blocks there are, or one more than stand before a gap, whose absence then shows.

    Raises FileError on a tensor that no such encoder has: it would silently have no effect.
    """
    indices = set()
    known = {prefix + name for name in layout.tops}
    in_block = layout.block_names()
    for name in _own(file, prefix, layout):
        index, _, leaf = name.removeprefix(prefix + layout.blocks).partition(".")
        if name.startswith(prefix + layout.blocks) and re.fullmatch(LAYER, index):
            indices.add(int(index))
            if leaf in in_block:
                continue
        _refuse_unknown(file, layout, known, [name])
    before_gap = min(set(range(len(indices) + 1)) - indices)
    return before_gap if before_gap == len(indices) else before_gap + 1


_NAMES = ("clip_l", "clip_g", "clip_h", "t5xxl", "umt5xxl")


def _refuse_unknown(
    file: WeightsFile, layout: Layout | T5Layout, known: Container[str], names: Iterable[str]
) -> None:
    for name in names:
        if name not in known and not is_side(name):
            fault = f"tensor {shown(name)} is none of a {_kind(layout)}'s"
            raise FileError(file.path, fault, "give weights without added or renamed modules")


def _name_in(prefix: str) -> str | None:
    """The encoder's name where its packaging tells it, as in text_encoders.clip_l."""
    names = [x for x in re.split(r"[./]", prefix) if x in _NAMES]
    return names[-1] if names else None


def _unique(name: str, taken: set[str]) -> str:
    count, unique = 1, name
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    return unique


# What else there may be

_BERT = re.compile(r"encoder\.layer\.(\d{1,4})\.attention\.self\.query\.weight$")
_LLM = re.compile(r"layers\.(\d{1,4})\.input_layernorm\.weight$")
_LORA = re.compile(r"(?:lora_(?:down|up|A|B)|lora_linear_layer\.(?:down|up))\.(?:\w+\.)?weight$")
_DIFFUSION = re.compile(
    r"(?:^|\.)(?:diffusion_model\.|input_blocks\.0\.|down_blocks\.0\.|double_blocks\.0\."
    r"|joint_blocks\.0\.|transformer_blocks\.0\.|single_blocks\.0\.)"
)


def _other_encoders(file: WeightsFile) -> list[_Left]:
    """The text encoders of other families, told by the names that only they have."""
    found: dict[tuple[str, re.Pattern[str]], set[str]] = {}
    for name in file.tensors:
        for pattern in (_BERT, _LLM):
            match = pattern.search(name)
            if match:
                found.setdefault((name[: match.start()], pattern), set()).add(match[1])
    describe = {_BERT: _bert, _LLM: _llm}
    left = []
    for (prefix, pattern), layers in sorted(found.items(), key=lambda item: item[0][0]):
        count = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        left.append(_Left(f"{describe[pattern](file, prefix)} of {count}{_at(prefix)}"))
    return left


def _rows(file: WeightsFile, *names: str) -> int:
    """Rows of the first table there is, which for an embedding is the vocabulary; else 0."""
    shapes = [file.tensors[name].shape for name in names if name in file.tensors]
    return shapes[0][0] if shapes and shapes[0] else 0


def _bert(file: WeightsFile, prefix: str) -> str:
    vocabulary = _rows(file, prefix + "embeddings.word_embeddings.weight")
    return "an XLM-RoBERTa encoder" if vocabulary == 250002 else "a BERT encoder"


def _llm(file: WeightsFile, prefix: str) -> str:
    blocks = prefix + "layers."
    inner = next(name for name in file.tensors if name.startswith(blocks)).removeprefix(blocks)
    block = blocks + inner.partition(".")[0] + "."
    if block + "pre_feedforward_layernorm.weight" in file.tensors:
        kind = "Gemma"
    elif block + "self_attention.query_key_value.weight" in file.tensors:
        kind = "ChatGLM"
    elif any(block + f"self_attn.q_{x}" in file.tensors for x in ("norm.weight", "proj.bias")):
        kind = "Qwen"
    else:
        kind = "Llama or Mistral"
    return f"a language model of the {kind} type"


def _no_encoder(file: WeightsFile) -> list[_Left]:
    """What a file without any encoder is, where its names tell."""
    if any(_LORA.search(name) for name in file.tensors):
        return [_Left("a LoRA, which is differences only")]
    if any(_DIFFUSION.search(name) for name in file.tensors):
        return [_Left("a diffusion model without a text encoder")]
    return []
