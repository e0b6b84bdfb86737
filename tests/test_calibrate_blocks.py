# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Calibration block by block: the numbers of the whole encoder, one block in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from octavo import calibrate as module
from octavo.backends.torch_ops import ReferenceBlock, ReferenceEncoder
from octavo.calibrate import Calibration, calibrate, calibrate_by_blocks
from octavo.encoders import ClipSpec, EncoderSpec, T5Spec
from octavo.encoders.clip import POSITIONS
from octavo.errors import Cancelled, OctavoError, QuantizationError
from octavo.recipes import load_recipe
from octavo.seeded import T5_TINY, TINY, seeded_tensors
from torch import Tensor

MAX = load_recipe("fp8")
MSE = MAX.with_options(algorithm="mse")
SPECS: dict[str, EncoderSpec] = {
    "t5": replace(T5_TINY, layers=3, vocabulary=100),
    "umt5": replace(T5_TINY, layers=3, vocabulary=100, bias_per_layer=True),
    "v1.0": replace(T5_TINY, layers=3, vocabulary=100, gated=False, activation="relu"),
    "clip": replace(TINY, layers=3, vocabulary=100),
}
T5 = SPECS["t5"]
parametrized = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def weights_of(spec: EncoderSpec) -> dict[str, Tensor]:
    return dict(seeded_tensors(spec))


def batches(spec: EncoderSpec) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    lengths = (77, 77) if isinstance(spec, ClipSpec) else (1, 9, 40)
    return [torch.randn(2, length, spec.width, generator=random) for length in lengths]


def into_block_0(spec: EncoderSpec, weights: Mapping[str, Tensor]) -> list[Tensor]:
    if isinstance(spec, T5Spec):
        return batches(spec)
    return [x + weights[POSITIONS].float() for x in batches(spec)]


def whole(spec: EncoderSpec, modelopt: bool, recipe=MAX) -> Calibration:
    reference = ReferenceEncoder(spec, weights_of(spec).__getitem__)
    return calibrate(reference, batches(spec), recipe, modelopt=modelopt)


def by_blocks(spec: EncoderSpec, modelopt: bool, recipe=MAX, **options) -> Calibration:
    weights = weights_of(spec)
    shown = into_block_0(spec, weights)
    return calibrate_by_blocks(
        spec, weights.__getitem__, shown, recipe, modelopt=modelopt, **options
    )


@pytest.mark.parametrize("modelopt", [True, False])
@parametrized
def test_the_ranges_are_the_whole_encoders_bit_for_bit(spec: EncoderSpec, modelopt: bool) -> None:
    one, other = by_blocks(spec, modelopt), whole(spec, modelopt)
    assert one.method == other.method
    assert list(one.input_amax) == list(other.input_amax) == list(spec.linears())
    for name, amax in other.input_amax.items():
        assert torch.equal(one.input_amax[name], amax), name
    assert one.weight_amax is other.weight_amax is None


@parametrized
def test_a_searching_algorithm_carries_fp32_too(spec: EncoderSpec) -> None:
    """Its later passes run fake-quantized; what is carried is of the first."""
    one, other = by_blocks(spec, True, MSE), whole(spec, True, MSE)
    assert one.weight_amax is not None and other.weight_amax is not None
    assert one.weight_amax.keys() == spec.linears().keys()
    for name, amax in other.weight_amax.items():
        assert torch.equal(one.weight_amax[name], amax), name
    assert one.input_amax == whole(spec, False).input_amax
    with pytest.raises(OctavoError, match="'mse' needs NVIDIA ModelOpt"):
        by_blocks(spec, False, MSE)


@pytest.mark.parametrize("modelopt", [True, False])
def test_one_block_is_in_memory(modelopt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    made: list[weakref.ref[torch.nn.Module]] = []

    class Watched(ReferenceBlock):
        def __init__(self, *args, **options) -> None:
            gc.collect()
            alive.append(sum(ref() is not None for ref in made))
            super().__init__(*args, **options)
            names = {n.split(".")[2] for n, _ in self.named_parameters() if "bias" not in n}
            assert names == {str(self.index)}
            made.append(weakref.ref(self))

    monkeypatch.setattr(module, "ReferenceBlock", Watched)
    by_blocks(T5, modelopt)
    assert len(alive) == 3
    assert max(alive) <= 1  # the one before is let go of no later than the next is made


def test_progress_counts_blocks_and_may_cancel() -> None:
    seen: list[tuple[int, int]] = []
    by_blocks(T5, False, progress=lambda *at: seen.append(at))
    assert seen == [(1, 3), (2, 3), (3, 3)]

    def cancel(done: int, total: int) -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        by_blocks(T5, True, progress=cancel)


@pytest.mark.parametrize("modelopt", [True, False])
def test_ranges_that_are_not_finite_are_refused(modelopt: bool) -> None:
    weights = weights_of(T5)
    bad = weights["encoder.block.1.layer.1.layer_norm.weight"]
    bad[3] = torch.inf
    run = partial(calibrate_by_blocks, T5, weights.__getitem__, batches(T5), MAX)
    with pytest.raises(QuantizationError, match=r"ModelOpt refused|encoder\.block\.1\.layer\.1"):
        run(modelopt=modelopt)
