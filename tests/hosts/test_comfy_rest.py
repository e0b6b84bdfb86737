# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What a host with its own memory management asks of AcceleratedEncoder: attempt, rest, resume."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from octavo.accelerated import AcceleratedEncoder, Patched
from octavo.bench import LiveHost
from octavo.choose import Packages
from octavo.device import Device
from octavo.seeded import TINY, seeded_tensors
from octavo.trt import Missing

CPU = torch.device("cpu")
FAKE = Device("cuda", 0, "simulated", 89)
NOTHING = Packages(Missing("not here", "-"), Missing("not here", "-"), True)


@pytest.fixture(scope="module")
def host() -> LiveHost:
    return LiveHost("clip_l", TINY, dict(seeded_tensors(TINY, outliers=False)), CPU)


@pytest.fixture
def encoder(host: LiveHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[AcceleratedEncoder]:
    for heavy in ("modelopt", "onnxruntime"):  # Octavo's own ranges: seconds instead of a minute
        monkeypatch.setitem(sys.modules, heavy, None)
    with AcceleratedEncoder(host, engine="torch_fp8", device=FAKE, packages=NOTHING) as made:
        yield made


def embeds(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 77, TINY.width, generator=torch.Generator().manual_seed(1)) * 0.02


def test_rest_frees_and_the_next_request_is_the_same(encoder: AcceleratedEncoder) -> None:
    first = encoder.attempt(embeds())
    assert first is not None and encoder.has_engine
    held = encoder.vram_bytes
    assert held > 0
    assert encoder.rest() == held and encoder.vram_bytes == 0 and encoder.rest() == 0
    assert encoder.has_engine and encoder.report().engine == "torch_fp8"
    again = encoder.attempt(embeds())
    assert again is not None and torch.equal(first[1], again[1])
    assert encoder.vram_bytes == held


def test_resume_loads_ahead_of_the_request(encoder: AcceleratedEncoder) -> None:
    assert not encoder.resume()  # nothing was prepared yet
    encoder.prepare()
    assert not encoder.resume()  # nothing rests
    held = encoder.vram_bytes
    encoder.rest()
    assert encoder.resume() and encoder.vram_bytes == held


def test_patched_weights_survive_a_rest(encoder: AcceleratedEncoder, host: LiveHost) -> None:
    patched = {n: t * 1.1 if n.endswith("fc1.weight") else t for n, t in host.tensors.items()}
    wanted = Patched("one", patched.__getitem__)
    base, first = encoder.attempt(embeds()), encoder.attempt(embeds(), None, wanted)
    assert base is not None and first is not None and not torch.equal(base[1], first[1])
    encoder.rest()
    again = encoder.attempt(embeds(), None, wanted)
    assert again is not None and torch.equal(first[1], again[1])
    back = encoder.attempt(embeds())
    assert back is not None and torch.equal(base[1], back[1])


def test_kept_sets_go_alone_and_are_made_again(encoder: AcceleratedEncoder, host: LiveHost) -> None:
    patched = {n: t * 1.1 if n.endswith("fc1.weight") else t for n, t in host.tensors.items()}
    wanted = Patched("one", patched.__getitem__)
    base = encoder.attempt(embeds())
    engine_alone = encoder.vram_bytes
    first = encoder.attempt(embeds(), None, wanted)
    with_set = encoder.vram_bytes
    assert with_set > engine_alone
    assert encoder.drop_sets() == with_set - engine_alone and encoder.drop_sets() == 0
    assert encoder.vram_bytes == engine_alone and encoder.has_engine
    back, again = encoder.attempt(embeds()), encoder.attempt(embeds(), None, wanted)
    assert base is not None and first is not None and back is not None and again is not None
    assert torch.equal(base[1], back[1]) and torch.equal(first[1], again[1])


def test_waking_up_reads_no_file_again(
    encoder: AcceleratedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = encoder.attempt(embeds())
    encoder.rest()

    def read(*_: object) -> None:
        raise AssertionError("read from the file again")

    monkeypatch.setattr("octavo.checkpoints.quantized.QuantizedCheckpoint.read", read)
    again = encoder.attempt(embeds())
    assert first is not None and again is not None and torch.equal(first[1], again[1])


def test_a_set_that_fails_its_check_never_serves(
    encoder: AcceleratedEncoder, host: LiveHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set is under the engine when it is judged; neither it nor its like may stay there."""
    base = encoder.attempt(embeds())
    monkeypatch.setattr("octavo.accelerated.shortfall", lambda *_: "it is too far from FP32")
    patched = {n: t * 1.1 if n.endswith("fc1.weight") else t for n, t in host.tensors.items()}
    wanted = Patched("far", patched.__getitem__)
    assert encoder.attempt(embeds(), None, wanted) is None
    assert encoder.attempt(embeds(), None, wanted) is None
    again = encoder.attempt(embeds())
    assert base is not None and again is not None and torch.equal(base[1], again[1])
