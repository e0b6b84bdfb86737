# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The engine around the simulated arithmetic; what needs a GPU is in tests/gpu/."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from fp8_weights import prompt_embeds, random_embeds, seeded, tiny, tiny_weights
from octavo.backends.torch_fp8 import TorchFp8Engine
from octavo.backends.torch_ops import ReferenceEncoder
from octavo.errors import EngineUnavailable, QuantizationError
from octavo.seeded import TINY
from together import in_threads
from torch import Tensor


@pytest.fixture
def engine() -> TorchFp8Engine:
    return TorchFp8Engine(TINY, tiny_weights(), "cpu")


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a.double(), b.double(), dim=-1)


@pytest.mark.parametrize(
    ("recipe", "body"),
    [("fp8", torch.float16), ("fp8-mixed", torch.float16), ("bf16", torch.bfloat16)],
)
def test_every_state_is_close_to_fp32(recipe: str, body: torch.dtype) -> None:
    engine = TorchFp8Engine(TINY, tiny_weights(recipe), "cpu")
    embeds = prompt_embeds(TINY, tiny(), 4)
    reference = ReferenceEncoder(TINY, tiny().__getitem__)
    with torch.no_grad():
        hidden, last = reference(embeds)
    states, final = engine.encode(embeds)
    assert len(states) == TINY.layers + 1
    for mine, expected in zip((*states, final), (*hidden, last), strict=True):
        assert mine.dtype == body and mine.shape == expected.shape
        # 128 channels, 6 of them outliers: far coarser than a real width.
        assert cosine(mine, expected).mean() > (0.999 if recipe == "bf16" else 0.98)


def test_mixed_recipe_is_closer_than_all_fp8_where_it_differs() -> None:
    """The recipes are not one and the same computation."""
    embeds = random_embeds(TINY, 1)
    a, b = (
        TorchFp8Engine(TINY, tiny_weights(r), "cpu").encode(embeds)[1] for r in ("fp8", "fp8-mixed")
    )
    assert not torch.equal(a, b)


def test_results_are_new_tensors(engine: TorchFp8Engine) -> None:
    embeds = random_embeds(TINY, 1)
    first, last = engine.encode(embeds)
    kept = [t.clone() for t in (*first, last)]
    again, _ = engine.encode(embeds + 1)
    assert first[0].data_ptr() != again[0].data_ptr()
    for tensor in again:
        tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(kept, (*first, last), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, engine.encode(embeds)[0], strict=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_dtype(engine: TorchFp8Engine, dtype: torch.dtype) -> None:
    embeds = random_embeds(TINY, 1).bfloat16()  # exact in all four
    expected = engine.encode(embeds.half())[1]
    assert torch.equal(engine.encode(embeds.to(dtype))[1], expected)


def test_short_prompts_are_prefixes(engine: TorchFp8Engine) -> None:
    """Causal: what comes later changes nothing before it, and nothing is padded."""
    embeds = random_embeds(TINY, 2)
    whole = engine.encode(embeds)[1]
    for tokens in (1, 20, 76):
        short = engine.encode(embeds[:, :tokens])[1]
        assert short.shape == (2, tokens, TINY.width)
        assert cosine(short, whole[:, :tokens]).min() > 0.99


def test_mask_hides_keys(engine: TorchFp8Engine) -> None:
    embeds = random_embeds(TINY, 2)
    mask = torch.ones(2, 77, dtype=torch.bool)
    assert cosine(engine.encode(embeds, mask)[1], engine.encode(embeds)[1]).min() > 0.99
    mask[1, 10:] = False
    masked = engine.encode(embeds, mask)[1]
    changed = embeds.clone()
    changed[1, 10:15] += 1  # hidden keys: only their own rows may change
    other = engine.encode(changed, mask)[1]
    assert torch.equal(masked[0], other[0])
    assert torch.equal(masked[1, :10], other[1, :10])
    assert torch.equal(masked[1, 15:], other[1, 15:])
    assert not torch.equal(masked[1, 10:15], other[1, 10:15])


def test_nan_does_not_outlive_its_call(engine: TorchFp8Engine) -> None:
    embeds = random_embeds(TINY, 1)
    before = engine.encode(embeds)[1]
    poisoned = embeds.clone()
    poisoned[0, 5, 3] = float("nan")
    assert engine.encode(poisoned)[1].isnan().any()
    assert torch.equal(engine.encode(embeds)[1], before)


def test_swapped_weights_are_served(engine: TorchFp8Engine) -> None:
    embeds = random_embeds(TINY, 1)
    before, held = engine.encode(embeds)[1], engine.bytes
    other = tiny_weights().requantized(seeded(TINY, 9))
    engine.swap_weights(other)
    fresh = TorchFp8Engine(TINY, other, "cpu")
    assert torch.equal(engine.encode(embeds)[1], fresh.encode(embeds)[1])
    assert not torch.equal(engine.encode(embeds)[1], before)
    engine.swap_weights(tiny_weights())
    assert torch.equal(engine.encode(embeds)[1], before)
    assert engine.bytes == held


def test_weights_of_another_structure_change_nothing(engine: TorchFp8Engine) -> None:
    embeds = random_embeds(TINY, 1)
    before = engine.encode(embeds)[1]
    with pytest.raises(QuantizationError, match="structure"):
        engine.swap_weights(tiny_weights("fp8-mixed"))
    assert torch.equal(engine.encode(embeds)[1], before)


def test_swapping_does_not_touch_the_source(engine: TorchFp8Engine) -> None:
    name = TINY.block(0) + "mlp.fc1"
    before = tiny_weights().linears[name].weight.float()
    engine.swap_weights(tiny_weights().requantized(seeded(TINY, 9)))
    assert torch.equal(tiny_weights().linears[name].weight.float(), before)


@pytest.mark.parametrize(
    ("embeds", "mask"),
    [
        (torch.zeros(1, 78, 128), None),
        (torch.zeros(1, 0, 128), None),
        (torch.zeros(0, 77, 128), None),
        (torch.zeros(1, 77, 64), None),
        (torch.zeros(77, 128), None),
        (torch.zeros(1, 77, 128, dtype=torch.int64), None),
        (torch.zeros(1, 77, 128), torch.ones(1, 77)),
        (torch.zeros(1, 77, 128), torch.ones(2, 77, dtype=torch.bool)),
    ],
)
def test_shapes_it_does_not_have(engine: TorchFp8Engine, embeds: Tensor, mask) -> None:
    with pytest.raises(ValueError, match=r"embeds|mask"):
        engine.encode(embeds, mask)


def test_bytes_and_close(engine: TorchFp8Engine) -> None:
    codes = sum(out * inner for out, inner in TINY.linears().values())
    assert codes < engine.bytes < 2 * codes
    engine.close()
    engine.close()
    assert engine.bytes == 0
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.encode(random_embeds(TINY, 1))
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.swap_weights(tiny_weights())


def test_in_inference_mode(engine: TorchFp8Engine) -> None:
    embeds = random_embeds(TINY, 1)
    expected = engine.encode(embeds)[1]
    with torch.inference_mode():
        made = TorchFp8Engine(TINY, tiny_weights(), "cpu")
        last = made.encode(embeds * 1.0)[1]
    made.swap_weights(tiny_weights())  # in place, which inference tensors would forbid
    assert torch.equal(last, expected)
    assert not last.requires_grad and not last.is_inference()


def test_threads_get_their_own_answers(engine: TorchFp8Engine) -> None:
    inputs = [random_embeds(TINY, 1, seed=i) for i in range(4)]
    expected = [engine.encode(x)[1] for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(25):
            if not torch.equal(engine.encode(inputs[index])[1], expected[index]):
                wrong.append(index)

    in_threads(work)
    assert wrong == []


def test_whatever_it_does_is_done_on_its_own_gpu(
    engine: TorchFp8Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another GPU current (here of names alone; tests/gpu/test_two_gpus.py has two)."""
    current = [0]

    @contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: places.append(current[0]))
    places: list[int] = []
    for name in ("_begin", "_end", "_wait", "_states"):

        def noted(self: TorchFp8Engine, *args: object, name: str = name) -> object:
            places.append(current[0])
            return torch.zeros(2, 1, 1, 1) if name == "_states" else None

        monkeypatch.setattr(TorchFp8Engine, name, noted)
    embeds = random_embeds(TINY, 1)
    engine.device = torch.device("cuda", 1)
    calls = (
        lambda: engine.encode(embeds),
        lambda: engine.swap_weights(tiny_weights()),
        engine.drop_graphs,
        engine.close,
    )
    for call in calls:
        places.clear()
        call()
        assert places and set(places) == {1}
        assert current == [0]
