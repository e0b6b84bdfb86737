# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""AcceleratedEncoder over a T5 on a CPU: the device is invented, torch_fp8 (simulated) serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from octavo import accelerated as module
from octavo.accelerated import AcceleratedEncoder, Patched
from octavo.bench import LiveHost
from octavo.encoders import T5Spec
from octavo.engine_cache import EngineCache
from octavo.recipes import Floor
from octavo.seeded import seeded_tensors
from test_accelerated import ADA, NO_TENSORRT
from torch import Tensor

SPEC = T5Spec(2, 256, 512, 4, 64, 32128)
# An encoder this narrow is nowhere near what a T5-XXL reaches; its recipe would be refused.
FLOOR = Floor(token_mean=0.9, token_min=0.1, pooled=0.0)
WI = SPEC.block(0) + "layer.1.DenseReluDense.wi_1.weight"


class CountingHost(LiveHost):
    calls = 0

    def encode(self, embeds: Tensor, mask: Tensor | None = None) -> Any:
        self.calls += 1
        return super().encode(embeds, mask)


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_failed", {})


@pytest.fixture(scope="module")
def host() -> CountingHost:
    tensors = dict(seeded_tensors(SPEC, outliers=False))
    return CountingHost("t5xxl", SPEC, tensors, torch.device("cpu"))


@pytest.fixture(scope="module")
def encoder(host: CountingHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cache = EngineCache(tmp_path_factory.mktemp("cache"))
    with AcceleratedEncoder(
        host, cache=cache, floor=FLOOR, device=ADA, packages=NO_TENSORRT
    ) as made:
        yield made


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, SPEC.width, generator=generator)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).mean()


@pytest.mark.parametrize("shape", [(1, 1), (1, 77), (2, 300), (1, 1024)])
def test_any_length_is_served(
    encoder: AcceleratedEncoder, host: CountingHost, shape: tuple[int, int]
) -> None:
    embeds = prompt(shape[1], shape[0])
    want = host.encode(embeds)[1]
    before = host.calls
    hidden, last = encoder.encode(embeds)
    assert host.calls == before and tuple(hidden) == ()
    assert cosine(last, want) >= 0.97
    report = encoder.report()
    assert (report.engine, report.recipe, report.family) == ("torch_fp8", "fp8", "t5")


def test_longer_ones_are_the_hosts(encoder: AcceleratedEncoder, host: CountingHost) -> None:
    embeds = prompt(1025)
    before = host.calls
    got = encoder.encode(embeds)[1]
    assert host.calls == before + 1
    assert torch.equal(got, host.encode(embeds)[1])
    assert encoder.encode(prompt(5)) is not None and host.calls == before + 2


def test_masks_even_of_whole_rows(encoder: AcceleratedEncoder, host: CountingHost) -> None:
    embeds, mask = prompt(30, 3), torch.ones(3, 30)
    mask[0, 20:] = 0
    mask[1] = 0
    mask[2, :4] = 0  # its first key: nothing special without causality
    want = host.encode(embeds, mask)[1]
    before = host.calls
    got = encoder.encode(embeds, mask)[1]
    assert host.calls == before and got.isfinite().all()
    assert cosine(got, want) >= 0.97
    assert cosine(got[0], host.encode(embeds)[1][0]) < cosine(got[0], want[0])


def test_patched_weights_and_back(encoder: AcceleratedEncoder, host: CountingHost) -> None:
    embeds = prompt(40, seed=3)
    base = encoder.encode(embeds)[1]
    changed = {**host.tensors, WI: host.tensors[WI] * -1.5}
    got = encoder.encode(embeds, None, Patched("lora", changed.__getitem__))[1]
    want = LiveHost("x", SPEC, changed, torch.device("cpu")).encode(embeds)[1]
    assert cosine(got, want) >= 0.97 > cosine(got, base)
    assert torch.equal(encoder.encode(embeds)[1], base)


def test_the_recipes_own_floor_refuses_so_narrow_an_encoder(host: CountingHost) -> None:
    tensors = dict(seeded_tensors(SPEC))
    narrow = CountingHost("t5", SPEC, tensors, torch.device("cpu"))
    with AcceleratedEncoder(narrow, device=ADA, packages=NO_TENSORRT) as encoder:
        report = encoder.prepare()
    assert report.recipe != "fp8"
    assert any("token_mean" in r.reason for r in report.refusals)


def test_resting_frees_and_comes_back(encoder: AcceleratedEncoder) -> None:
    embeds = prompt(20)
    before = encoder.encode(embeds)[1]
    assert encoder.rest() > 0 and encoder.vram_bytes == 0
    assert encoder.resume() and encoder.vram_bytes > 0
    assert torch.equal(encoder.encode(embeds)[1], before)


def test_it_is_checked_at_the_length_that_flux_uses(
    encoder: AcceleratedEncoder, host: CountingHost
) -> None:
    held_out = encoder._held_out(host.read)
    assert held_out.embeds.shape == (module.CHECK_PROMPTS, 256, SPEC.width)
    assert [len(row) for row in held_out.rows] == [256] * module.CHECK_PROMPTS
