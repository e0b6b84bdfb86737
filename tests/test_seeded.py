# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Seeded weights: complete, repeatable, and with the outlier channels that the targets speak of."""

from __future__ import annotations

import hashlib

import pytest
import torch
from octavo.encoders.clip import PROJECTION
from octavo.seeded import CLIP_G, CLIP_H, CLIP_L, LONG_CLIP_L, TINY, seeded_tensors


def digest(**options) -> str:
    sha = hashlib.sha256()
    for name, tensor in seeded_tensors(TINY, **options):
        sha.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def test_names_shapes_and_order() -> None:
    found = {name: tuple(t.shape) for name, t in seeded_tensors(TINY)}
    assert found == {**TINY.tensors(), PROJECTION: (TINY.width, TINY.width)}
    names = [name for name, _ in seeded_tensors(TINY, projection=False)]
    assert len(names) == len(set(names)) and set(names) == TINY.tensors().keys()


def test_the_seed_decides_every_value() -> None:
    assert digest() == digest()
    assert digest(seed=1) != digest()
    torch.manual_seed(99)  # the global generator has no say and is not moved
    before = torch.random.get_rng_state()
    one = digest()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one == digest()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_only_rounds(dtype: torch.dtype) -> None:
    whole = dict(seeded_tensors(TINY, dtype=torch.float32))
    for name, tensor in seeded_tensors(TINY, dtype=dtype):
        assert torch.equal(tensor, whole[name].to(dtype)), name


def test_every_layer_norm_has_six_outliers_of_twelve() -> None:
    weights = dict(seeded_tensors(TINY))
    places = []
    for norm in TINY.norms():
        gain = weights[norm + ".weight"]
        (channels,) = torch.where(gain == 12)
        assert len(channels) == 6
        rest = gain[gain != 12].float()
        assert rest.min() > 0.5 and rest.max() < 1.5
        places.append(tuple(channels.tolist()))
    assert len(set(places)) == len(places)  # not the same channels in every norm
    plain = dict(seeded_tensors(TINY, outliers=False))
    assert max(plain[n + ".weight"].max() for n in TINY.norms()) < 2


def test_initialisation_is_clips() -> None:
    weights = dict(seeded_tensors(TINY, dtype=torch.float32))
    depth, d = (2 * TINY.layers) ** -0.5, TINY.width
    expected = {
        "self_attn.q_proj": d**-0.5 * depth,
        "self_attn.out_proj": d**-0.5,
        "mlp.fc1": (2 * d) ** -0.5,
        "mlp.fc2": d**-0.5 * depth,
    }
    for leaf, std in expected.items():
        weight = weights[TINY.block(1) + leaf + ".weight"]
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert abs(weight.mean().item()) < 0.05 * std


def test_sizes_are_the_published_ones() -> None:
    def count(spec) -> int:
        return sum(torch.Size(shape).numel() for shape in spec.tensors().values())

    # openai/clip-vit-large-patch14 and laion's ViT-H/14 and ViT-bigG/14, text towers
    assert count(CLIP_L) == 123_060_480
    assert count(CLIP_H) == 352_984_064
    assert count(CLIP_G) == 693_021_440
    assert count(LONG_CLIP_L) - count(CLIP_L) == (248 - 77) * 768
