# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The metric, by its definition; and the targets on seeded weights with outliers."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from octavo.backends.onnx_ops import emit
from octavo.backends.torch_ops import ReferenceEncoder, end_positions, pool
from octavo.encoders.clip import PROJECTION
from octavo.errors import OctavoError
from octavo.recipes import load_recipe, shortfall
from octavo.seeded import CLIP_L, TINY
from octavo.verify import (
    Similarity,
    States,
    graph_run,
    measure,
    reference_run,
    states_of,
)
from samples import (
    clip_l,
    clip_l_ranges,
    embeds_of,
    quantize,
    quantized_clip_l,
    rows_of,
    tiny,
)
from torch import Tensor


def states(*, seed: int = 0, pooled: bool = True) -> States:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    return States(draw(2, 5, 8), draw(2, 5, 8), draw(2, 4) if pooled else None)


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))


def test_equal_states() -> None:
    found = measure(states(), states())
    assert found.token_mean == pytest.approx(1, abs=1e-12)
    assert found.token_min == pytest.approx(1, abs=1e-12)
    assert found.pooled == pytest.approx(1, abs=1e-12)
    assert (found.max_abs_error, found.prompts) == (0, 2)


def test_definitions() -> None:
    a, b = states(), states(seed=1)
    final = [cosine(a.final[i, j], b.final[i, j]) for i in range(2) for j in range(5)]
    before = [cosine(a.penultimate[i, j], b.penultimate[i, j]) for i in range(2) for j in range(5)]
    assert a.pooled is not None and b.pooled is not None
    pooled = [cosine(a.pooled[i], b.pooled[i]) for i in range(2)]
    found = measure(a, b)
    assert found.token_mean == pytest.approx(sum(final + before) / 20, rel=1e-12)
    assert found.token_min == pytest.approx(min(final + before), rel=1e-12)
    assert found.pooled == pytest.approx(sum(pooled) / 2, rel=1e-12)
    error = max(
        (a.final - b.final).abs().max().item(), (a.penultimate - b.penultimate).abs().max().item()
    )
    assert found.max_abs_error == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("where", ["final", "penultimate"])
def test_the_worst_token_of_either_state_counts(where: str) -> None:
    got = states()
    getattr(got, where)[1, 4] *= -1
    found = measure(states(), got)
    assert found.token_min == pytest.approx(-1)
    assert found.token_mean == pytest.approx(18 / 20)
    worst = 2 * getattr(states(), where)[1, 4].abs().max().item()
    assert found.max_abs_error == pytest.approx(worst)


@pytest.mark.parametrize("where", ["final", "penultimate"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_count_as_opposite(where: str, value: float) -> None:
    got = states()
    getattr(got, where)[0, 0, 0] = value
    found = measure(states(), got)
    assert found.token_min == -1
    assert found.token_mean == pytest.approx(18 / 20)
    assert found.max_abs_error is None
    assert shortfall(found.facts(), load_recipe("fp8").floor) is not None


def test_nan_in_the_pooled_vector() -> None:
    got = states()
    assert got.pooled is not None
    got.pooled[1, 2] = math.nan
    assert measure(states(), got).pooled == pytest.approx(0)  # the mean of 1 and -1


def test_a_dead_engine_is_not_close() -> None:
    zero = States(*(torch.zeros_like(t) for t in (states().final, states().penultimate)), None)
    assert measure(states(), zero).token_mean == 0


def test_no_projection_no_pooled() -> None:
    assert measure(states(pooled=False), states()).pooled is None
    assert measure(states(), states(pooled=False)).pooled is None
    assert measure(states(pooled=False), states(pooled=False)).facts()["pooled"] is None


def test_the_metric_is_blind_to_dtype_and_has_no_rounding_of_its_own() -> None:
    a = states()
    half = States(a.final.half(), a.penultimate.half(), None)
    assert measure(half, half).token_min == pytest.approx(1, abs=1e-12)
    assert 0 < 1 - measure(a, half).token_mean < 1e-6


def test_facts_are_the_fields() -> None:
    assert Similarity(0.9, 0.8, None, 0.1, 3).facts() == {
        "token_mean": 0.9,
        "token_min": 0.8,
        "pooled": None,
        "max_abs_error": 0.1,
        "prompts": 3,
    }


def test_states_come_in_batches_and_pool_at_the_first_end_token() -> None:
    weights, rows = tiny(), rows_of(TINY, 5)
    embeds = embeds_of(TINY, weights, 5)
    reference = ReferenceEncoder(TINY, weights.__getitem__)
    sizes, steps = [], []
    inner = reference_run(reference)

    def run(batch: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(batch))
        return inner(batch)

    found = states_of(
        run, embeds, rows, weights[PROJECTION], batch=2, progress=lambda d, t: steps.append((d, t))
    )
    hidden, last = reference(embeds)
    assert sizes == [2, 2, 1]
    assert steps == [(2, 5), (4, 5), (5, 5)]
    torch.testing.assert_close(found.final, last)
    torch.testing.assert_close(found.penultimate, hidden[TINY.layers - 1])
    expected = pool(last, end_positions(rows), weights[PROJECTION].float())
    torch.testing.assert_close(found.pooled, expected)
    assert found.penultimate.shape == found.final.shape == (5, 77, 128)
    assert states_of(inner, embeds, rows, None).pooled is None


def test_progress_may_cancel() -> None:
    def cancel(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    run = reference_run(ReferenceEncoder(TINY, tiny().__getitem__))
    with pytest.raises(KeyboardInterrupt):
        states_of(run, embeds_of(TINY, tiny(), 2), rows_of(TINY, 2), None, progress=cancel)


def test_missing_or_old_onnxruntime_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    graph = emit(TINY, load_recipe("fp8").structure(TINY.linears()))
    monkeypatch.setattr(onnxruntime, "__version__", "1.29.9")
    with pytest.raises(OctavoError, match=r"1\.29\.9 cannot run FP8 graphs; install 1\.30"):
        graph_run(graph, {})
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(OctavoError, match=r"needs onnxruntime and onnx .*install them"):
        graph_run(graph, {})


HELD_OUT = 12


@cache
def expected_of_clip_l() -> States:
    weights, rows = clip_l(), rows_of(CLIP_L, HELD_OUT)
    run = reference_run(ReferenceEncoder(CLIP_L, weights.__getitem__))
    embeds = embeds_of(CLIP_L, weights, HELD_OUT)
    return states_of(run, embeds, rows, weights[PROJECTION])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed"])
def test_clip_l_with_outliers_reaches_the_targets(
    recipe: str, record_property: pytest.RecordProperty
) -> None:
    """The compiled graph itself, in ONNX Runtime, against FP32."""
    weights = clip_l()
    if recipe == "fp8":
        quantized = quantized_clip_l()
    else:
        quantized = quantize(CLIP_L, weights, clip_l_ranges(), recipe)
    run = graph_run(emit(CLIP_L, quantized.structure), quantized.plan_weights())
    embeds, rows = embeds_of(CLIP_L, weights, HELD_OUT), rows_of(CLIP_L, HELD_OUT)
    got = states_of(run, embeds, rows, weights[PROJECTION], batch=8)
    found = measure(expected_of_clip_l(), got)
    record_property("similarity", found.facts())
    assert found.token_mean >= (0.993 if recipe == "fp8" else 0.995), found
    assert found.token_min >= 0.98, found
    assert found.pooled is not None and found.pooled >= 0.993, found
    assert found.token_mean < 0.9999, found  # FP8 that costs nothing did not happen
    assert shortfall(found.facts(), load_recipe(recipe).floor) is None


def test_without_a_hidden_state_the_final_one_counts_alone() -> None:
    """T5's hosts ask for no other."""
    a = states()
    one, other = (replace(s, penultimate=None, pooled=None) for s in (a, states(seed=1)))
    assert measure(one, one).token_min == pytest.approx(1)
    found = measure(one, other)
    cosines = torch.nn.functional.cosine_similarity(
        one.final.double(), other.final.double(), dim=-1
    )
    assert found.token_mean == pytest.approx(float(cosines.mean()))
    assert found.token_min == pytest.approx(float(cosines.min()))
    assert found.pooled is None and found.prompts == 2
    whole = measure(replace(a, pooled=None), other)  # what only one side has is not compared
    assert whole.token_mean == pytest.approx(found.token_mean)
