# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Encoders with seeded weights, quantized, for the tests of the numeric core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from octavo import prompts
from octavo.backends.onnx_ops import Body
from octavo.backends.plan_inputs import plan_weights
from octavo.backends.torch_ops import ReferenceEncoder, embed_tokens
from octavo.calibrate import calibrate
from octavo.checkpoints.quantized import (
    QuantizedCheckpoint,
    Structure,
    metadata,
    open_quantized,
    quantized_tensors,
)
from octavo.encoders.clip import PROJECTION, ClipSpec
from octavo.recipes import Recipe, load_recipe
from octavo.seeded import CLIP_L, TINY, seeded_tensors
from safetensors.torch import save_file
from torch import Tensor

TINY_GELU = replace(TINY, activation="gelu")
LAYER = TINY.block(0)


@dataclass(frozen=True)
class Quantized:
    """What compile.py's `_quantize` makes: a checkpoint file's tensors and how they compute."""

    spec: ClipSpec
    structure: Structure
    tensors: Mapping[str, Tensor]
    body: Body

    def plan_weights(self, *, fused: bool = True) -> dict[str, Tensor]:
        return plan_weights(
            self.spec, self.structure, self.tensors.__getitem__, self.body, fused=fused
        )

    def save(self, path: Path, **facts: object) -> QuantizedCheckpoint:
        known = {"spec": self.spec.facts(), "structure": dict(self.structure), "body": self.body}
        save_file(dict(self.tensors), path, metadata({**known, **facts}))
        return open_quantized(path)


def weights_of(spec: ClipSpec, *, seed: int = 0, dtype: torch.dtype = torch.float16, **options):
    return dict(seeded_tensors(spec, seed=seed, dtype=dtype, **options))


@cache
def tiny(spec: ClipSpec = TINY) -> dict[str, Tensor]:
    return weights_of(spec)


@cache
def clip_l() -> dict[str, Tensor]:
    """Full-size CLIP-L in fp16: 0.25 GB, made once."""
    return weights_of(CLIP_L)


def rows_of(spec: ClipSpec, count: int, name: prompts.SetName = "held_out") -> list[list[int]]:
    return prompts.padded(prompts.load_tokens(name)[:count], spec.positions, spec.pad_token)


def embeds_of(
    spec: ClipSpec, weights: Mapping[str, Tensor], count: int, name: prompts.SetName = "held_out"
) -> Tensor:
    return embed_tokens(weights.__getitem__, rows_of(spec, count, name))


def random_embeds(spec: ClipSpec, batch: int, *, seed: int = 0) -> Tensor:
    """Of the size that token embeddings have, [B, S, C] in FP32."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(batch, spec.positions, spec.width, generator=random) * 0.02


def ranges_of(spec: ClipSpec, weights: Mapping[str, Tensor], prompts: int) -> dict[str, Tensor]:
    """Input ranges by our own `max` on the first calibration prompts."""
    embeds = embeds_of(spec, weights, prompts, "calibration").split(16)
    reference = ReferenceEncoder(spec, weights.__getitem__)
    return calibrate(reference, embeds, load_recipe("fp8"), modelopt=False).input_amax


@cache
def tiny_ranges(spec: ClipSpec = TINY) -> dict[str, Tensor]:
    return ranges_of(spec, tiny(spec), 4)


@cache
def clip_l_ranges() -> dict[str, Tensor]:
    return ranges_of(CLIP_L, clip_l(), 16)


def quantize(
    spec: ClipSpec,
    weights: Mapping[str, Tensor],
    ranges: Mapping[str, Tensor],
    recipe: Recipe | str = "fp8",
) -> Quantized:
    if isinstance(recipe, str):
        recipe = load_recipe(recipe)
    structure = recipe.structure(spec.linears())
    tensors = quantized_tensors(
        spec, weights.__getitem__, structure, ranges, projection=PROJECTION in weights
    )
    return Quantized(spec, structure, tensors, recipe.body)


@cache
def quantized_clip_l() -> Quantized:
    return quantize(CLIP_L, clip_l(), clip_l_ranges())


def quantized_tiny(recipe: Recipe | str = "fp8", spec: ClipSpec = TINY) -> Quantized:
    return quantize(spec, tiny(spec), tiny_ranges(spec), recipe)
