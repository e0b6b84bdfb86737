# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Which CLIP text encoders a file holds, in any layout and under any prefix, by positive evidence.

Nothing here imports torch or reads a tensor; `EncoderWeights.read` does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..encoders.clip import HEAD_DIM, PROJECTION, ClipSpec
from ..errors import FileError, OctavoError, UnsupportedEncoder
from .configs import activation_of, matching
from .files import DAMAGED, WeightsFile, open_weights, shown
from .layouts import LAYER, LAYOUTS, LONG_CLIP_KEPT, Layout, Part, owner, projections

if TYPE_CHECKING:
    import torch

_DTYPES = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
_WANTED = "give a file with CLIP-L, CLIP-H, CLIP-G or LongCLIP"
_PLAIN = "give the fp16, bf16 or fp32 file it was made from"
_IGNORED = re.compile(r"(?:^|[._/])(?:position_ids|attn_mask|logit_scale)$")
_SCALES = re.compile(
    r"\.(?:comfy_quant|weight_scale\w*|input_scale|scale_weight|scale_input|pre_quant_scale|SCB"
    r"|weight_(?:s_rel|s_channel|codebook|format)|weight\.(?:absmax|quant_map|quant_state\..*))$"
)
_OCTAVO_SCALES = re.compile(r"\.(?:comfy_quant|weight_scale|input_scale)$")


@dataclass(frozen=True)
class EncoderWeights:
    """One text encoder of a file: what it is, and its tensors under their canonical names, lazily.

    `name` is unique in the file; `prefix` stands before the layout's own names; `dtype` is "fp32",
    "fp16", "bf16" or, in a checkpoint of Octavo's, "fp8"; `projection_shape` is (proj, width).
    """

    name: str
    spec: ClipSpec
    prefix: str
    dtype: str
    projection_shape: tuple[int, int] | None
    file: WeightsFile = field(repr=False)
    _parts: Mapping[str, tuple[Part, ...]] = field(repr=False)

    @property
    def scales(self) -> list[str]:
        """Names in the file of what stands beside the FP8 weights of a checkpoint of Octavo's."""
        names = self.file.tensors if self.dtype == "fp8" else ()
        return sorted(n for n in names if n.startswith(self.prefix) and _OCTAVO_SCALES.search(n))

    def side(self, name: str) -> tuple[str, torch.Tensor]:
        """(name without the prefix, value) of one of `scales`."""
        return name.removeprefix(self.prefix), self.file.read(name)

    @property
    def label(self) -> object:
        """What messages call these weights: the file's path."""
        return self.file.path

    def names(self) -> list[str]:
        """Canonical names in the order of `ClipSpec.tensors`; a projection comes last."""
        return list(self._parts)

    def sources(self, name: str) -> tuple[str, ...]:
        """Names in the file of what the canonical tensor `name` is made of."""
        return tuple(part.name for part in self._parts[name])

    def read(self, name: str) -> torch.Tensor:
        """The canonical tensor in the file's dtype, a view of the mapped file (only the position
        table of LongCLIP's own files is a copy). Raises FileError."""
        tensors = []
        for part in self._parts[name]:
            tensor = self.file.read(part.name)
            if part.rows is not None:
                tensor = tensor[slice(*part.rows)]
            tensors.append(tensor.T if part.transposed else tensor)
        if len(tensors) == 1:
            return tensors[0]
        import torch

        return torch.cat(tensors)


@dataclass(frozen=True)
class Detected:
    """The CLIP text encoders of `file`, and a sentence for each other encoder, left as it is."""

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
    """Recognise every CLIP text encoder of a file; `activation` and `heads` override what it tells.

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
    for prefix, layout in _candidates(file):
        if any(prefix + name in file.tensors for name in layout.tower):
            towers.append(_Left(f"an image tower{_at(prefix)}"))
            continue
        if not any(prefix + name in file.tensors for name in layout.tops):
            continue  # another model's blocks, named like CLIP's
        unlike = _unlike_clip(file, prefix) or _quantized(file, prefix, layout)
        if unlike:
            left.append(unlike)
            continue
        if any(prefix == other.prefix for other in encoders):
            fault = f"holds two text encoders under the prefix {shown(prefix)}"
            raise FileError(file.path, fault, "save each into a file of its own")
        taken = {other.name for other in encoders}
        encoders.append(_encoder(file, prefix, layout, taken, activation, heads))
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
    return f"{what} is left as it is: Octavo serves CLIP text encoders in 16 or 32 bit."


def _at(prefix: str) -> str:
    return f" at {shown(prefix)}" if prefix else ""


def _listed(items: Iterable[str]) -> str:
    *rest, last = [*items] or [""]
    return f"{', '.join(rest)} and {last}" if rest else last


def _is_octavo(file: WeightsFile) -> bool:
    # A folder's encoders each have metadata of their own, so only a file given itself counts.
    return "octavo" in file.metadata and file.path.is_file()


def _candidates(file: WeightsFile) -> list[tuple[str, Layout]]:
    """(prefix, layout) of everything whose blocks are named like CLIP's, sorted."""
    found = {}
    for name in file.tensors:
        for order, layout in enumerate(LAYOUTS):
            match = layout.probe.search(name)
            if match:
                found[name[: match.start()], order] = layout
    return [(prefix, found[prefix, order]) for prefix, order in sorted(found)]


def _unlike_clip(file: WeightsFile, prefix: str) -> _Left | None:
    """What a candidate is instead of CLIP's text encoder, by tensors that only others have."""
    at = _at(prefix)
    whole = owner(prefix)
    if prefix + "cls_emb" in file.tensors:
        return _Left(f"a CoCa text encoder{at}, which appends a class token")
    if prefix + "head.weight" in file.tensors or whole + "logit_bias" in file.tensors:
        return _Left(f"a SigLIP text encoder{at}, whose attention is not causal")
    if any(top + "text_projection.bias" in file.tensors for top in (prefix, whole)):
        return _Left(f"a text encoder{at} whose projection has a bias")
    return None


def _own(file: WeightsFile, prefix: str, layout: Layout) -> list[str]:
    """All names that belong to an encoder and matter, known or not."""
    spaces = tuple(prefix + space for space in layout.spaces)
    return [n for n in file.tensors if n.startswith(spaces) and not _IGNORED.search(n)]


def _quantized(file: WeightsFile, prefix: str, layout: Layout) -> _Left | None:
    names = _own(file, prefix, layout)
    names += [n for n, _ in projections(prefix) if n in file.tensors]
    scales = {n for n in names if _SCALES.search(n)}
    dtypes = {file.tensors[n].dtype for n in names if n not in scales}
    if _is_octavo(file):
        scales = {n for n in scales if not _OCTAVO_SCALES.search(n)}
        dtypes.discard("F8_E4M3")
    stored = {"FP8" if d.startswith("F8_") else d for d in dtypes - set(_DTYPES)}
    stored |= {n.rsplit(".", 1)[1] for n in scales}
    if not stored:
        return None
    what = f"a CLIP text encoder{_at(prefix)} stored as {_listed(sorted(stored))}"
    return _Left(what, _PLAIN)


def _encoder(
    file: WeightsFile,
    prefix: str,
    layout: Layout,
    taken: set[str],
    activation: str | None,
    heads: int | None,
) -> EncoderWeights:
    """The encoder at `prefix`, every tensor's shape checked. Raises FileError."""
    spec = _spec(file, prefix, layout, activation, heads)
    parts = layout.parts(prefix, spec, file.tensors)
    for part in (part for of_one in parts.values() for part in of_one):
        _shape(file, part.name, part.shape)
    projection_shape = None
    for name, transposed in projections(prefix):
        if name in file.tensors:
            wanted = ("projected", spec.width)
            shape = _shape(file, name, wanted[::-1] if transposed else wanted)
            parts[PROJECTION] = (Part(name, shape, transposed=transposed),)
            projection_shape = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
            break
    dtypes = {file.tensors[name].dtype for name in _own(file, prefix, layout)}
    first = file.tensors[parts[spec.block(0) + "mlp.fc1.weight"][0].name].dtype
    return EncoderWeights(
        name=_unique(_name_in(prefix) or spec.family, taken),
        spec=spec,
        prefix=prefix,
        dtype="fp8" if "F8_E4M3" in dtypes else _DTYPES[first],
        projection_shape=projection_shape,
        file=file,
        _parts=parts,
    )


def _spec(
    file: WeightsFile,
    prefix: str,
    layout: Layout,
    activation: str | None,
    heads: int | None,
) -> ClipSpec:
    """The sizes, read from a few tensors, and by rule what no tensor tells."""
    layers = _layers(file, prefix, layout)
    vocabulary, width = _shape(file, prefix + layout.tokens, ("vocabulary", "width"))
    table = prefix + layout.positions
    if prefix + layout.more_positions in file.tensors:
        table = prefix + layout.more_positions
    positions, _ = _shape(file, table, ("positions", width))
    if table.endswith(layout.more_positions) and positions <= LONG_CLIP_KEPT:
        fault = (
            f"tensor {shown(table)} has {positions} positions, more than {LONG_CLIP_KEPT} needed"
        )
        raise FileError(file.path, fault, DAMAGED)
    stem, _ = layout.leaves["mlp.fc1"]
    fc1 = f"{prefix}{layout.blocks}0.{stem}weight"
    feed_forward, _ = _shape(file, fc1, ("feed-forward", width))

    own = _told_by_octavo(file)
    activation = activation or own.get("activation")
    heads = own.get("heads") if heads is None else heads
    config = next((c for top, c in file.configs.items() if prefix.startswith(top)), None)
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


def _layers(file: WeightsFile, prefix: str, layout: Layout) -> int:
    """How many blocks there are, or one more than stand before a gap, whose absence then shows.

    Raises FileError on a tensor that CLIP does not have: it would silently have no effect.
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
        if name not in known and not _SCALES.search(name):
            fault = f"tensor {shown(name)} is none of a CLIP text encoder's"
            raise FileError(file.path, fault, "give weights without added or renamed modules")
    before_gap = min(set(range(len(indices) + 1)) - indices)
    return before_gap if before_gap == len(indices) else before_gap + 1


def _shape(file: WeightsFile, name: str, wanted: tuple[int | str, ...]) -> tuple[int, ...]:
    """The tensor's shape if it is as wanted, where a text stands for any size. Raises FileError."""
    info = file.tensors.get(name)
    expected = f"[{', '.join(str(size) for size in wanted)}]"
    if info is None:
        fault = f"tensor {shown(name)} of shape {expected} is missing"
        raise FileError(file.path, fault, DAMAGED)
    sizes = info.shape
    if len(sizes) != len(wanted) or not all(
        size > 0 and (isinstance(want, str) or size == want)
        for size, want in zip(sizes, wanted, strict=True)
    ):
        fault = f"tensor {shown(name)} has the shape {[*sizes]}, expected {expected}"
        raise FileError(file.path, fault, DAMAGED)
    return sizes


def _name_in(prefix: str) -> str | None:
    """The encoder's name where its packaging tells it, as in text_encoders.clip_l."""
    names = [x for x in re.split(r"[./]", prefix) if x in ("clip_l", "clip_g", "clip_h")]
    return names[-1] if names else None


def _unique(name: str, taken: set[str]) -> str:
    count, unique = 1, name
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    return unique


# What else there may be

_T5 = re.compile(r"encoder\.block\.(\d{1,4})\.layer\.0\.SelfAttention\.q\.weight$")
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
        for pattern in (_T5, _BERT, _LLM):
            match = pattern.search(name)
            if match:
                found.setdefault((name[: match.start()], pattern), set()).add(match[1])
    describe = {_T5: _t5, _BERT: _bert, _LLM: _llm}
    left = []
    for (prefix, pattern), layers in sorted(found.items(), key=lambda item: item[0][0]):
        count = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        left.append(_Left(f"{describe[pattern](file, prefix)} of {count}{_at(prefix)}"))
    return left


def _rows(file: WeightsFile, *names: str) -> int:
    """Rows of the first table there is, which for an embedding is the vocabulary; else 0."""
    shapes = [file.tensors[name].shape for name in names if name in file.tensors]
    return shapes[0][0] if shapes and shapes[0] else 0


def _t5(file: WeightsFile, prefix: str) -> str:
    bias_of_second = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    if prefix + bias_of_second in file.tensors:
        return "a umT5 encoder"
    vocabulary = _rows(file, prefix + "shared.weight", prefix + "encoder.embed_tokens.weight")
    return "an mT5 encoder" if vocabulary in (250112, 250100) else "a T5 encoder"


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
