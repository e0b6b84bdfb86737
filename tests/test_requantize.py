# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Requantizer: one pass gives, bit for bit, what a pass for each step gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from fp8_weights import prompt_embeds, seeded, tiny_weights
from octavo.accelerated import _as_tensors
from octavo.backends.amax import AmaxRecorder
from octavo.backends.fp8_ops import Fp8Weights, HalfLinear
from octavo.backends.torch_ops import StreamedEncoder
from octavo.encoders import encode
from octavo.encoders.clip import TOKENS
from octavo.errors import QuantizationError
from octavo.requantize import Requantizer, widened
from octavo.seeded import TINY
from torch import Tensor

CPU = torch.device("cpu")
FC1 = TINY.block(0) + "mlp.fc1"
FC2 = TINY.block(0) + "mlp.fc2"


@pytest.fixture(scope="module")
def base() -> Fp8Weights:
    return tiny_weights()


@pytest.fixture(scope="module")
def changed() -> dict[str, Tensor]:
    """Every matrix another one, and one so large that what follows it sees a wider range."""
    tensors = {name: tensor.half() for name, tensor in seeded(TINY, 9).items()}
    tensors[FC1 + ".weight"] = tensors[FC1 + ".weight"] * 40
    return tensors


def reference(read: Callable[[str], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ranges of the FP32 reference over `read`, on 3 prompts."""
    recorder = AmaxRecorder()
    with torch.no_grad():
        ops = StreamedEncoder(TINY, read, CPU).ops(recorder)
        encode(ops, TINY, prompt_embeds(TINY, tensors, 3))
    return recorder.amax


def in_bytes(weights: Fp8Weights) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (t.dtype, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in _as_tensors(weights).items()
    }


def half_body(weights: Fp8Weights, name: str) -> Fp8Weights:
    """`weights` with the linear `name` kept in 16 bit, as a mixed recipe does."""
    linear = weights.linears[name]
    half = HalfLinear(linear.weight.to(weights.body), linear.bias)
    return replace(weights, linears={**weights.linears, name: half})


@pytest.mark.parametrize("mixed", [False, True])
def test_one_pass_is_the_separate_passes(
    base: Fp8Weights, changed: dict[str, Tensor], mixed: bool
) -> None:
    old = half_body(base, FC2) if mixed else base
    amax = reference(changed.__getitem__, changed)
    names = [n for n in TINY.tensors() if n != TOKENS]
    want = widened(old.requantized({n: changed[n] for n in names}), amax, CPU)
    requantizer = Requantizer(old, changed.__getitem__, CPU)
    seen = reference(requantizer, changed)
    assert seen.keys() == amax.keys() and all(torch.equal(seen[n], amax[n]) for n in amax)
    got = requantizer.weights(seen)
    assert in_bytes(got) == in_bytes(want)
    grown = [n for n in base.linears if n != FC2 or not mixed]
    assert any(got.linears[n].input_scale > old.linears[n].input_scale for n in grown)
    assert not any(got.linears[n].input_scale < old.linears[n].input_scale for n in grown)


def test_each_weight_is_read_once_and_let_go(base: Fp8Weights, changed: dict[str, Tensor]) -> None:
    reads: Counter[str] = Counter()

    def read(name: str) -> Tensor:
        """A view into something large, as staging gives it."""
        reads[name] += 1
        whole = torch.cat([changed[name].reshape(-1), torch.zeros(1000, dtype=torch.float16)])
        return whole[: changed[name].numel()].view(changed[name].shape)

    requantizer = Requantizer(base, read, CPU)
    weights = requantizer.weights(reference(requantizer, changed))
    assert set(reads.values()) == {1} and TOKENS not in reads
    for name, tensor in _as_tensors(weights).items():
        held = tensor.untyped_storage().nbytes()
        assert held <= max(tensor.nbytes, 4 * len(base.linears)), name


def test_what_the_reference_leaves_out_is_read_at_the_end(
    base: Fp8Weights, changed: dict[str, Tensor]
) -> None:
    amax = reference(changed.__getitem__, changed)
    requantizer = Requantizer(base, changed.__getitem__, CPU)
    reference(requantizer, changed)
    late = Requantizer(base, changed.__getitem__, CPU)
    assert in_bytes(late.weights(amax)) == in_bytes(requantizer.weights(amax))


def test_the_token_table_is_handed_through(base: Fp8Weights) -> None:
    table = torch.zeros(2, 2, device="meta")  # moving it would fail
    assert Requantizer(base, lambda _: table, CPU)(TOKENS) is table


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", [FC1 + ".weight", FC1 + ".bias", "text_model.final_layer_norm.weight"]
)
def test_no_set_of_numbers_that_are_none(
    base: Fp8Weights, changed: dict[str, Tensor], name: str, value: float
) -> None:
    broken = {**changed, name: changed[name].clone()}
    broken[name].view(-1)[3] = value
    amax = reference(changed.__getitem__, changed)
    with pytest.raises(QuantizationError, match=name.rsplit(".", 1)[0].replace(".", r"\.")):
        Requantizer(base, broken.__getitem__, CPU).weights(amax)
