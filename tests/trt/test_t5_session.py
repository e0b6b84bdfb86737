# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5's plan as something that encodes, over the double: any length, no padding, masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from double import Specialization, World, plan_from_graph
from octavo.backends.onnx_ops import Graph, emit
from octavo.backends.plan_inputs import plan_weights
from octavo.checkpoints.quantized import quantized_tensors
from octavo.errors import EngineUnavailable, OctavoBug
from octavo.seeded import T5_TINY, seeded_tensors
from octavo.trt.session import Session, session_from_plan
from octavo.verify import graph_run, twin_weights
from torch import Tensor

SPEC = replace(T5_TINY, vocabulary=50)
BATCHES, LENGTHS = (1, 1, 4), (1, 16, 64)


@dataclass(frozen=True, eq=False)
class Model:
    graph: Graph
    twin: Graph
    plan: bytes
    weights: dict[str, Tensor]


@cache
def model_of(mask: bool = False) -> Model:
    structure = dict.fromkeys(SPEC.linears(), "fp8")
    graph, twin = (emit(SPEC, structure, body=b, mask=mask) for b in ("bfloat16", "float32"))
    amax = dict.fromkeys(SPEC.linears(), torch.tensor(12.0))
    source = dict(seeded_tensors(SPEC, outliers=False))
    tensors = quantized_tensors(SPEC, source.__getitem__, structure, amax)
    weights = plan_weights(SPEC, structure, tensors.__getitem__, "bfloat16")
    plan = plan_from_graph(graph, twin, batches=BATCHES, lengths=LENGTHS)
    return Model(graph, twin, plan, weights)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.check()
    assert made.violations == []


def opened(world: World, model: Model, **options: Any) -> Session:
    place = world.place()
    return session_from_plan(
        model.plan,
        module=world.module,
        graph=model.graph,
        weights={name: place.copied(tensor) for name, tensor in model.weights.items()},
        device=place.device,
        place=place,
        **{"batches": BATCHES, "lengths": LENGTHS, **options},
    )


def embeds_of(batch: int, length: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * batch + length)
    return torch.randn(batch, length, SPEC.width, generator=random)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 16), (3, 7), (4, 64), (9, 5)])
def test_every_length_is_its_own(world: World, batch: int, length: int) -> None:
    """Nothing is padded: a pad would be attended to."""
    model, embeds = model_of(), embeds_of(batch, length)
    _, expected = graph_run(model.twin, twin_weights(model.weights))(embeds)
    with opened(world, model) as session:
        hidden, last = session.encode(embeds)
        again = session.encode(embeds)[1]
    assert hidden == ()
    assert (last.dtype, last.shape) == (torch.bfloat16, embeds.shape)
    assert torch.equal(last, again) and last.data_ptr() != again.data_ptr()
    error = (last.float() - expected).norm() / expected.norm()
    assert error < 0.01  # bfloat16's rounding


def test_lengths_may_come_in_any_order(world: World) -> None:
    model = model_of()
    with opened(world, model) as session:
        first = [session.encode(embeds_of(2, n))[1] for n in (3, 40, 3, 64, 1)]
        second = [session.encode(embeds_of(2, n))[1] for n in (1, 64, 3, 40, 3)]
    for a, b in zip(first, (second[2], second[3], second[4], second[1], second[0]), strict=True):
        assert torch.equal(a, b)


def test_a_mask_hides_keys_and_may_hide_all(world: World) -> None:
    model, embeds = model_of(mask=True), embeds_of(2, 20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 5:] = False
    with opened(world, model) as session:
        plain, ones = session.encode(embeds)[1], session.encode(embeds, torch.ones_like(mask))[1]
        masked = session.encode(embeds, mask)[1]
        none = session.encode(embeds, torch.zeros_like(mask))[1]
        (short,) = session.encode(embeds[:1, :5])[1]
    assert torch.equal(plain, ones)
    assert torch.equal(masked[1], plain[1])
    assert torch.allclose(masked[0, :5].float(), short.float(), atol=0.05)
    assert (masked[0] - plain[0]).float().norm() > 0.05 * plain[0].float().norm()
    assert none.isfinite().all()


def test_beyond_the_plan_is_a_sentence(world: World) -> None:
    model = model_of()
    with opened(world, model) as session:
        for shape in ((1, 65, SPEC.width), (1, 0, SPEC.width), (1, 3, 7)):
            with pytest.raises(EngineUnavailable, match=r"takes \[B, 1 to 64, 128\]"):
                session.encode(torch.zeros(shape))
        with pytest.raises(EngineUnavailable, match="without a mask"):
            session.encode(embeds_of(1, 3), torch.ones(1, 3, dtype=torch.bool))
        assert session.encode(embeds_of(1, 3))[1].shape == (1, 3, SPEC.width)


def test_another_profile_is_refused(world: World) -> None:
    with pytest.raises(EngineUnavailable, match="not batches"):
        opened(world, model_of(), lengths=(1, 16, 128))
    with pytest.raises(OctavoBug, match="lengths"):
        opened(world, model_of(), lengths=None)


def test_kernels_are_not_compiled_for_each_length(world: World) -> None:
    """Prompts have many lengths, and the first call of each would wait for the compiler."""
    with opened(world, model_of()) as session:
        for length in (3, 9, 30):
            session.encode(embeds_of(1, length))
        strategy = session._config.dynamic_shapes_kernel_specialization_strategy
    assert strategy is Specialization.NONE
    assert world.compiled == []
