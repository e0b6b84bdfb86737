# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Engines on a GPU that is not the current one, and on two at once.

OCTAVO_TEST_GPUS=0,1 names the current GPU and the other one. 0,0 shows on a machine with one GPU
that the tests themselves are sound.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from fp8_weights import random_embeds, random_weights
from measured import equal
from octavo.accelerated import AcceleratedEncoder, Patched
from octavo.backends.fp8_ops import Fp8Weights
from octavo.backends.torch_fp8 import TorchFp8Engine
from octavo.bench import LiveHost
from octavo.engine_cache import EngineCache
from octavo.seeded import CLIP_L, T5_XXL, seeded_tensors
from together import in_threads

CURRENT, OTHER = map(int, os.environ.get("OCTAVO_TEST_GPUS", "0,1").split(","))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() <= max(CURRENT, OTHER), reason="needs two NVIDIA GPUs with FP8"
    ),
]
HERE, THERE = torch.device("cuda", CURRENT), torch.device("cuda", OTHER)
SAME_KIND = torch.cuda.device_count() > max(CURRENT, OTHER) and (
    torch.cuda.get_device_name(HERE) == torch.cuda.get_device_name(THERE)
)


@pytest.fixture(autouse=True)
def current() -> Iterator[None]:
    with torch.cuda.device(HERE):
        yield
        assert torch.cuda.current_device() == CURRENT


@pytest.fixture(scope="module")
def weights() -> Fp8Weights:
    return random_weights(CLIP_L, HERE)


def alike(a: object, b: object) -> bool:
    """The same bits where the GPUs are of one kind."""
    if SAME_KIND:
        return equal(_home(a), _home(b))
    last, other = _home(a)[1], _home(b)[1]
    return float(torch.nn.functional.cosine_similarity(last.float(), other.float(), -1).min()) > 0.9


def _home(states) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    return tuple(h.to(HERE) for h in states[0]), states[1].to(HERE)


@pytest.mark.parametrize("options", [{}, {"triton": False}, {"graphs": False}])
def test_an_engine_on_the_other_gpu(weights: Fp8Weights, options: dict[str, bool]) -> None:
    here, there = (TorchFp8Engine(CLIP_L, weights, d, **options) for d in (HERE, THERE))
    for batch in (1, 3, 40):
        embeds = random_embeds(CLIP_L, batch)
        expected = here.encode(embeds.to(HERE))
        for given in (embeds.to(THERE), embeds.to(HERE), embeds):
            got = there.encode(given)
            assert {t.device for t in (*got[0], got[1])} == {THERE}
            assert alike(got, expected)
    other = random_weights(CLIP_L, HERE, std=0.03)
    before = there.encode(embeds)
    for engine in (there, here):
        engine.swap_weights(other)
    assert alike(there.encode(embeds), here.encode(embeds))
    assert not equal(_home(there.encode(embeds)), _home(before))
    there.drop_graphs()
    assert alike(there.encode(embeds), here.encode(embeds))
    there.close()
    here.close()


def test_two_engines_at_once(weights: Fp8Weights) -> None:
    """Two threads a GPU; each has its own current GPU and stream."""
    engines = [TorchFp8Engine(CLIP_L, weights, device) for device in (HERE, THERE)]
    inputs = [random_embeds(CLIP_L, 1, seed=i).to((HERE, THERE)[i % 2]) for i in range(4)]
    expected = [engines[i % 2].encode(x) for i, x in enumerate(inputs)]
    for device in (HERE, THERE):
        torch.cuda.synchronize(device)
    wrong: list[int] = []

    def work(index: int) -> None:
        device = (HERE, THERE)[index % 2]
        with torch.cuda.device((HERE, THERE)[index // 2]):  # not always the engine's
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.default_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(100):
                    if not equal(engines[index % 2].encode(inputs[index]), expected[index]):
                        wrong.append(index)

    in_threads(work)
    assert wrong == []
    for engine in engines:
        engine.close()


def test_an_accelerated_encoder_on_the_other_gpu(tmp_path) -> None:
    """Built, checked, patched and given back there; nothing of it stays on the current GPU."""
    tensors = dict(seeded_tensors(CLIP_L))
    name = f"{CLIP_L.block(3)}mlp.fc1.weight"
    changed = {**tensors, name: tensors[name] * 1.4}
    embeds = random_embeds(CLIP_L, 2)
    held = torch.cuda.memory_allocated(HERE)
    results = []
    for device in (HERE, THERE):
        host = LiveHost("clip", CLIP_L, {n: t.to(device) for n, t in tensors.items()}, device)
        with AcceleratedEncoder(host, cache=EngineCache(tmp_path)) as encoder:
            encoder.prepare()
            assert encoder.report().engine == "torch_fp8", encoder.report().text()
            given = embeds.to(device)
            plain = encoder.encode(given)
            patched = encoder.encode(given, None, Patched(1, changed.__getitem__))
            encoder.rest()
            again = encoder.encode(given)
            results.append([(_home(r)) for r in (plain, patched, again)])
            if device != HERE:  # the other GPU's weights are not on this one
                gc.collect()
                assert torch.cuda.memory_allocated(HERE) - held < 40e6
                assert encoder.attempt(embeds.to(HERE)) is None  # the host answers there
            assert encoder._serving is not None
            assert encoder._serving.engine.device == device
        del host
    for mine, theirs in zip(*results, strict=True):
        assert alike(mine, theirs)
    assert not equal(results[1][0], results[1][1])
    assert equal(results[1][0], results[1][2])


def test_t5_on_the_other_gpu() -> None:
    """Its relative bias and its page-locked way onto the GPU, too; two blocks of full width."""
    from dataclasses import replace

    from octavo.backends.fp8_ops import Fp8Linear, quantize_weight
    from octavo.backends.torch_ops import tables

    spec = replace(T5_XXL, layers=2)
    drawn = dict(seeded_tensors(spec, dtype=torch.bfloat16, device=HERE))
    scale = torch.tensor(0.1)
    linears = {}
    for name in spec.linears():
        codes, weight_scale = quantize_weight(drawn[name + ".weight"])
        linears[name] = Fp8Linear(codes.cpu(), None, weight_scale.cpu(), scale)
    norms = {n: (drawn[n + ".weight"].cpu(), None) for n in spec.norms()}
    held = {n: drawn[n].cpu() for n in tables(spec)}
    t5 = Fp8Weights(spec, torch.bfloat16, linears, norms, held)
    here, there = (TorchFp8Engine(spec, t5, device) for device in (HERE, THERE))
    for tokens in (20, 512):
        embeds = torch.randn(1, tokens, spec.width)
        mask = torch.arange(tokens)[None] < tokens - 3
        for m in (None, mask):
            moved = [None if m is None else m.to(d) for d in (HERE, THERE)]
            expected = here.encode(embeds.to(HERE), moved[0])
            assert alike(there.encode(embeds.to(THERE), moved[1]), expected)
    here.close()
    there.close()
