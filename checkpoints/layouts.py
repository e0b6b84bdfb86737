# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The layouts of CLIP text encoders, Hugging Face's and OpenAI's (which OpenCLIP kept).

Whatever stands before a layout's own names is the encoder's prefix, so that any packaging fits.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

from ..encoders.clip import FINAL_NORM, POSITIONS, TOKENS, ClipSpec
from ..errors import FileError
from .files import DAMAGED, WeightsFile, shown

LONG_CLIP_KEPT = (
    20  # LongCLIP (arXiv:2403.15378) keeps CLIP's first 20 positions, replaces the rest
)
LAYER = r"(?:0|[1-9]\d{0,3})"  # bounded: a hostile file must not make us count to a trillion
START = r"(?:^|(?<=[./]))"
_CANONICAL = re.compile(r"text_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Part:
    """Where a canonical tensor lies: (some rows of) the tensor `name`, which must have `shape`."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Layout:
    """Names below the prefix. `leaves`: canonical leaf -> (stem, which third of it or None), where
    "weight" or "bias" completes the stem. `tower`: names that only an image tower has."""

    blocks: str
    tokens: str
    positions: str
    more_positions: str
    final_norm: str
    leaves: Mapping[str, tuple[str, int | None]]
    probe: re.Pattern[str]
    tower: tuple[str, ...]

    @property
    def tops(self) -> tuple[str, ...]:
        """The names outside the blocks; any of them is evidence of a text encoder."""
        norm = (self.final_norm + "weight", self.final_norm + "bias")
        return (self.tokens, self.positions, self.more_positions, *norm)

    @property
    def spaces(self) -> tuple[str, ...]:
        """What all names of an encoder, known or not, start with."""
        tops = {name.partition(".")[0] for name in self.tops}
        return (self.blocks, *sorted(tops))

    def block_names(self) -> set[str]:
        """The names within one block."""
        return {stem + kind for stem, _ in self.leaves.values() for kind in ("weight", "bias")}

    def parts(
        self, prefix: str, spec: ClipSpec, names: Container[str]
    ) -> dict[str, tuple[Part, ...]]:
        """Canonical name -> the parts, to be joined along the first axis, that it is made of."""
        found: dict[str, tuple[Part, ...]] = {}
        for name, shape in spec.tensors().items():
            match = _CANONICAL.fullmatch(name)
            if match:
                index, leaf, kind = match.groups()
                stem, third = self.leaves[leaf]
                source = f"{prefix}{self.blocks}{index}.{stem}{kind}"
                if third is None:
                    part = Part(source, shape)
                else:  # q, k and v are the three thirds of one tensor
                    rows = (third * shape[0], (third + 1) * shape[0])
                    part = Part(source, (3 * shape[0], *shape[1:]), rows)
                found[name] = (part,)
            elif name == TOKENS:
                found[name] = (Part(prefix + self.tokens, shape),)
            elif name != POSITIONS:
                kind = name.removeprefix(FINAL_NORM + ".")
                found[name] = (Part(prefix + self.final_norm + kind, shape),)
            elif prefix + self.more_positions in names:
                found[name] = (
                    Part(prefix + self.positions, shape, (0, LONG_CLIP_KEPT)),
                    Part(prefix + self.more_positions, shape, (LONG_CLIP_KEPT, shape[0])),
                )
            else:
                found[name] = (Part(prefix + self.positions, shape),)
        return found


_LINEARS = (*(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
HUGGING_FACE = Layout(
    blocks="encoder.layers.",
    tokens="embeddings.token_embedding.weight",
    positions="embeddings.position_embedding.weight",
    more_positions="embeddings.position_embedding_res.weight",
    final_norm="final_layer_norm.",
    leaves={leaf: (leaf + ".", None) for leaf in (*_LINEARS, "layer_norm1", "layer_norm2")},
    probe=re.compile(rf"{START}encoder\.layers\.{LAYER}\.self_attn\.(?:[qkv]|out)_proj\.weight$"),
    tower=("embeddings.patch_embedding.weight", "embeddings.class_embedding"),
)
OPENAI = Layout(
    blocks="transformer.resblocks.",
    tokens="token_embedding.weight",
    positions="positional_embedding",
    more_positions="positional_embedding_res",
    final_norm="ln_final.",
    leaves={
        **{f"self_attn.{n}_proj": ("attn.in_proj_", i) for i, n in enumerate("qkv")},
        "self_attn.out_proj": ("attn.out_proj.", None),
        "mlp.fc1": ("mlp.c_fc.", None),
        "mlp.fc2": ("mlp.c_proj.", None),
        "layer_norm1": ("ln_1.", None),
        "layer_norm2": ("ln_2.", None),
    },
    probe=re.compile(
        rf"{START}transformer\.resblocks\.{LAYER}\.attn\.(?:in_proj_weight|out_proj\.weight)$"
    ),
    tower=("conv1.weight", "class_embedding"),
)
LAYOUTS = (HUGGING_FACE, OPENAI)


def shape_of(file: WeightsFile, name: str, wanted: tuple[int | str, ...]) -> tuple[int, ...]:
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


def owner(prefix: str) -> str:
    """The prefix of the model that a text tower is a part of."""
    return prefix.removesuffix("text_model.").removesuffix("text.")


def projections(prefix: str) -> list[tuple[str, bool]]:
    """The places of a text projection, and whether it is stored [width, proj] there, in order."""
    whole = owner(prefix)  # ComfyUI once kept it beside, not inside, its `transformer`
    owners = dict.fromkeys((prefix, whole, whole.removesuffix("transformer.")))
    stored = (("text_projection.weight", False), ("text_projection", True))
    return [(top + name, transposed) for top in owners for name, transposed in stored]
