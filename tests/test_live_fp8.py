# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Hosts whose live weights are FP8: the key of their file, and codes that nothing requantizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp8_files as f
import packagings as p
import pytest
import torch
from octavo.backends.fp8_ops import Fp8Linear, Fp8Weights
from octavo.checkpoints import EncoderWeights, detect, fingerprint
from octavo.compile import fingerprint_of
from octavo.requantize import Requantizer
from torch import Tensor

SPEC = p.SMALL_T5
LINEARS = list(SPEC.linears())
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def coded() -> f.Codes:
    return f.coded(p.t5_canonical(), SPEC.linears())


@pytest.fixture(scope="module")
def weights(coded: f.Codes, tmp_path_factory: pytest.TempPathFactory) -> EncoderWeights:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    (found,) = detect(p.write(path, f.comfy_quant(coded))).encoders
    return found


class Live:
    """The live weights of a host that knows nothing of codes, or (`whole`) all about them."""

    def __init__(self, weights: EncoderWeights, *, whole: bool) -> None:
        self.name, self.spec, self.read = "live", weights.spec, weights.read
        self.projection_shape = weights.projection_shape
        if whole:
            self.stored, self.scales, self.side = weights.stored, weights.scales, weights.side


def test_the_key_is_that_of_the_file(weights: EncoderWeights, tmp_path: Path) -> None:
    of_file = fingerprint(weights)
    assert fingerprint_of(Live(weights, whole=True)) == of_file
    # By their values alone they are other weights, which would be quantized.
    dense = {name: weights.read(name).clone() for name in weights.names()}
    (wide,) = detect(p.write(tmp_path / "wide.safetensors", dense)).encoders
    assert fingerprint_of(Live(weights, whole=False)) == fingerprint(wide) != of_file


@pytest.mark.parametrize("changed", ["weight", "input", "dropped"])
def test_a_scale_is_part_of_the_key(weights: EncoderWeights, changed: str) -> None:
    live: Any = Live(weights, whole=True)
    side = weights.side
    if changed == "dropped":
        live.scales = weights.scales[1:]
    else:
        name = f"{LINEARS[3]}.{changed}_scale"
        assert name in live.scales
        live.side = lambda n: (n, side(n)[1] * (1.5 if n == name else 1.0))
    assert fingerprint_of(live) != fingerprint(weights)


def test_codes_of_a_live_source_without_scales_are_values(weights: EncoderWeights) -> None:
    """E4M3 tensors that a host hands out as values hash as those, whatever their dtype."""
    live: Any = Live(weights, whole=False)
    values = {n: weights.read(n).to(f.E4M3) for n in weights.names()}
    live.read = values.__getitem__
    as_codes = fingerprint_of(live)
    live.read = lambda n: values[n].float()
    assert fingerprint_of(live) == as_codes


def quantized(coded: f.Codes) -> Fp8Weights:
    tensors = {n: t for n, t in coded.rest.items() if n != SPEC.token_table}
    for name, codes in coded.codes.items():
        tensors[name + ".weight"] = codes
        tensors[name + ".weight_scale"] = torch.tensor(coded.weight_scales[name])
        tensors[name + ".input_scale"] = torch.tensor(coded.input_scales[name])
    return Fp8Weights.from_tensors(SPEC, tensors, torch.bfloat16)


@pytest.mark.parametrize("told", [True, False])
def test_only_what_a_patch_changes_is_requantized(
    coded: f.Codes, weights: EncoderWeights, told: bool
) -> None:
    patched = LINEARS[2] + ".weight"

    def read(name: str) -> Tensor:
        values = weights.read(name).float()
        return values + 0.5 * values.abs().amax() if name == patched else values

    base = quantized(coded)
    requantizer = Requantizer(base, read, CPU, {patched} if told else None)
    assert torch.equal(requantizer(patched), read(patched))  # what is read is not touched
    amax = dict.fromkeys(LINEARS, torch.tensor(1.0))
    made = requantizer.weights(amax)
    for name in LINEARS:
        old, new = base.linears[name], made.linears[name]
        assert isinstance(old, Fp8Linear) and isinstance(new, Fp8Linear)
        kept = torch.equal(old.weight.view(torch.uint8), new.weight.view(torch.uint8))
        same = bool(old.weight_scale == new.weight_scale)
        if name + ".weight" == patched:
            assert not kept and not same
            error = new.weight.float() * new.weight_scale - read(patched)
            assert error.abs().max() <= 0.04 * read(patched).abs().max()
        elif told:
            assert kept and same, name
    if not told:  # scales that are not amax / 448 are others after requantizing
        assert any(
            base.linears[n].weight_scale != made.linears[n].weight_scale  # type: ignore[union-attr]
            for n in LINEARS
            if n + ".weight" != patched
        )
