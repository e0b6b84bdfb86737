# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The seam against recorded calls and results of the real ComfyUI (tools/record_comfyui.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from octavo.backends.torch_ops import ReferenceEncoder
from octavo.encoders import ClipSpec, T5Spec
from octavo.hosts.comfy_call import Call, T5Call, answer, answer_t5, parse, parse_t5
from safetensors import safe_open

DATA = Path(__file__).parent / "data" / "comfyui_calls.safetensors"


class Recorded:
    def __init__(self) -> None:
        with safe_open(DATA, "pt") as file:
            self.facts = json.loads(file.metadata()["facts"])
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = self.facts["config"]
        self.spec = ClipSpec(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            feed_forward=config["intermediate_size"],
            heads=config["num_attention_heads"],
            positions=config["max_position_embeddings"],
            vocabulary=49408,
            activation=config["hidden_act"],
        )

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"weights/{name}"]

    def call(self, form: str) -> tuple[list[Any], dict[str, Any]]:
        described = self.facts["calls"][form]
        given: dict[str, Any] = {}
        for name, value in described.items():
            if name == "results":
                continue
            if value == "tensor":
                value = self.tensors[f"{form}/{name}"]
            elif value == "torch.float32":
                value = torch.float32
            given[name] = value
        args = [given.pop(name) for name in sorted(n for n in given if n.startswith("args."))]
        return args, given

    def results(self, form: str) -> list[torch.Tensor | None]:
        there = self.facts["calls"][form]["results"]
        return [self.tensors[f"{form}/result.{i}"] if t else None for i, t in enumerate(there)]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded()


FORMS = list(Recorded().facts["calls"])


def norm_of(recorded: Recorded, x: torch.Tensor) -> torch.Tensor:
    name = "text_model.final_layer_norm."
    weight, bias = recorded.weight(name + "weight"), recorded.weight(name + "bias")
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def answered(recorded: Recorded, form: str, dtype: torch.dtype = torch.float32) -> Any:
    args, kwargs = recorded.call(form)
    call = parse(args, kwargs, recorded.spec)
    assert call is not None, f"the real call '{form}' is not recognised"
    encoder = ReferenceEncoder(recorded.spec, recorded.weight)
    mask = None if call.mask is None else call.mask.bool()
    with torch.no_grad():
        hidden, last = encoder(call.embeds, mask)
    return answer(
        call,
        [h.to(dtype) for h in hidden],
        last.to(dtype),
        norm=lambda x: norm_of(recorded, x),
        project=lambda x: F.linear(x, recorded.weight("text_projection.weight")),
    )


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_comfyui(recorded: Recorded, form: str) -> None:
    got, expected = answered(recorded, form), recorded.results(form)
    assert len(got) == len(expected) == 4
    for value, wanted in zip(got, expected, strict=True):
        assert (value is None) == (wanted is None)
        if wanted is not None:
            assert value.shape == wanted.shape and value.dtype == wanted.dtype == torch.float32
            torch.testing.assert_close(value, wanted, atol=2e-5, rtol=1e-5)


def test_the_forms_differ(recorded: Recorded) -> None:
    """The recording can tell a wrong layer or a missing norm from the right one."""
    forms = ("penultimate", "penultimate normed", "skip 1", "skip 3", "layer 0")
    states = [recorded.results(form)[1] for form in forms]
    for i, a in enumerate(states):
        for j, b in enumerate(states[:i]):
            same = {forms[i], forms[j]} == {"skip 3", "layer 0"}  # of three layers: the same one
            assert torch.allclose(a, b) == same, (forms[i], forms[j])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_are_fresh_and_writable(recorded: Recorded, dtype: torch.dtype) -> None:
    """ComfyUI applies prompt weights in place and keeps `pooled[0:1]`, a view."""
    args, kwargs = recorded.call("penultimate")
    call = parse(args, kwargs, recorded.spec)
    assert call is not None
    hidden = [torch.randn(2, 77, 16).to(dtype) for _ in range(4)]
    last = torch.randn(2, 77, 16).to(dtype)
    copies = [t.clone() for t in (*hidden, last)]
    results = answer(call, hidden, last, norm=lambda x: x, project=lambda x: x * 1.0)
    for result in results:
        assert result is not None and result.dtype == torch.float32
        result.fill_(7.0)
    for before, after in zip(copies, (*hidden, last), strict=True):
        assert torch.equal(before, after)


def changed(recorded: Recorded, **changes: Any) -> Call | None:
    args, kwargs = recorded.call("last")
    return parse(args, {**kwargs, **changes}, recorded.spec)


def test_unknown_calls_are_left_to_comfyui(recorded: Recorded) -> None:
    embeds = recorded.tensors["last/embeds"]
    assert changed(recorded) is not None
    refused: list[dict[str, Any]] = [
        {"past_key_values": []},
        {"embeds": None},
        {"embeds": embeds.half()},
        {"embeds": embeds[:, :70]},
        {"embeds": embeds[0]},
        {"embeds": torch.cat([embeds, embeds], dim=-1)},
        {"num_tokens": None},
        {"num_tokens": [4]},
        {"num_tokens": [4, 78]},
        {"num_tokens": [4, 0]},
        {"dtype": torch.float16},
        {"intermediate_output": [0, 1]},
        {"intermediate_output": "some"},
        {"intermediate_output": True},
    ]
    for changes in refused:
        assert changed(recorded, **changes) is None, changes
    args, kwargs = recorded.call("last")
    assert parse([torch.ones(2, 77), *args[1:]], kwargs, recorded.spec) is None  # token ids
    assert parse([None, torch.ones(2, 1, 77)], kwargs, recorded.spec) is None
    assert parse([None, None, embeds], kwargs, recorded.spec) is None  # given twice
    assert parse([None] * 9, {}, recorded.spec) is None


def test_recorded_signature_is_the_one_that_is_parsed(recorded: Recorded) -> None:
    """Every argument of the real call is named by the parser, so none is dropped unseen."""
    args, kwargs = recorded.call("masked")
    assert len(args) == 2 and args[0] is None
    assert set(kwargs) == {
        "embeds",
        "num_tokens",
        "intermediate_output",
        "final_layer_norm_intermediate",
        "dtype",
        "embeds_info",
    }


# T5


class RecordedT5(Recorded):
    def __init__(self) -> None:
        super().__init__()
        config = self.facts["t5_config"]
        self.facts["calls"] = {f"t5/{form}": c for form, c in self.facts["t5_calls"].items()}
        self.t5 = T5Spec(
            config["num_layers"], config["d_model"], config["d_ff"], config["num_heads"],
            config["d_kv"], config["vocab_size"],
        )  # fmt: skip

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"t5/weights/{name}"]


@pytest.fixture(scope="module")
def t5() -> RecordedT5:
    return RecordedT5()


T5_SERVED = ["flux", "mochi", "wan", "masked row"]


@pytest.mark.parametrize("form", T5_SERVED)
def test_t5_answers_are_those_of_comfyui(t5: RecordedT5, form: str) -> None:
    args, kwargs = t5.call(f"t5/{form}")
    call = parse_t5(args, kwargs, t5.t5)
    assert call is not None, f"the real call '{form}' is not recognised"
    assert (call.mask is None) == (form == "flux")
    with torch.no_grad():
        _, last = ReferenceEncoder(t5.t5, t5.weight)(call.embeds, call.mask)
    got, none = answer_t5(last)
    want, also_none = t5.results(f"t5/{form}")
    assert none is also_none is None and want is not None
    assert got.shape == want.shape and got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def test_t5_masks_matter(t5: RecordedT5) -> None:
    """The recording can tell a dropped mask from the right one."""
    free, masked = (t5.results(f"t5/{form}")[0] for form in ("flux", "mochi"))
    assert free is not None and masked is not None
    assert not torch.allclose(free[0], masked[0], atol=1e-2)
    torch.testing.assert_close(free[1], masked[1], atol=2e-5, rtol=1e-5)  # nothing is masked there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t5_results_are_fresh(dtype: torch.dtype) -> None:
    last = torch.randn(1, 5, 16).to(dtype)
    before = last.clone()
    result, _ = answer_t5(last)
    assert result.dtype == torch.float32
    result.fill_(7.0)
    assert torch.equal(last, before)


def test_unknown_t5_calls_are_left_to_comfyui(t5: RecordedT5) -> None:
    args, kwargs = t5.call("t5/mochi")
    embeds = kwargs["embeds"]

    def changed(*given: Any, **changes: Any) -> T5Call | None:
        return parse_t5(given or args, {**kwargs, **changes}, t5.t5)

    assert changed() is not None
    for changes in (
        {"past_key_values": []},
        {"embeds": None},
        {"embeds": embeds.half()},
        {"embeds": embeds[0]},
        {"embeds": embeds[:, :0]},
        {"embeds": torch.cat([embeds, embeds], dim=-1)},
        {"dtype": torch.float16},
        {"intermediate_output": -2},
        {"intermediate_output": 0},
        {"intermediate_output": "all"},
    ):
        assert changed(**changes) is None, changes
    assert changed(torch.ones(3, 9, dtype=torch.long), args[1]) is None  # token ids
    assert changed(None, torch.ones(3, 1, 9)) is None
    assert changed(None, torch.ones(3, 8)) is None
    assert parse_t5([None, None, embeds], kwargs, t5.t5) is None  # given twice
    assert parse_t5([None] * 5, {}, t5.t5) is None
    skip_args, skip = t5.call("t5/skip 2")
    assert parse_t5(skip_args, skip, t5.t5) is None


@pytest.mark.parametrize("tokens", [1, 2, 255, 2000])
def test_any_length_of_a_t5_is_known(t5: RecordedT5, tokens: int) -> None:
    """Lengths are the engine's to refuse, not the seam's."""
    _, kwargs = t5.call("t5/flux")
    call = parse_t5([None, None], {**kwargs, "embeds": torch.zeros(1, tokens, 16)}, t5.t5)
    assert call is not None and call.embeds.shape[1] == tokens


def test_a_t5_mask_means_what_comfyui_makes_of_it(t5: RecordedT5) -> None:
    """1 - mask must be 0: neither 2 nor a half lets a key through."""
    _, kwargs = t5.call("t5/flux")
    embeds = torch.zeros(1, 4, 16)
    for mask in (torch.tensor([[1, 2, 0, -1]]), torch.tensor([[1.0, 0.5, 0.0, -1.0]])):
        call = parse_t5([None, mask], {**kwargs, "embeds": embeds}, t5.t5)
        assert call is not None and call.mask is not None
        assert call.mask.tolist() == [[True, False, False, False]]


def test_the_recorded_t5_takes_what_is_parsed(t5: RecordedT5) -> None:
    known = t5.facts["signatures"]
    assert known["t5_forward"] == [
        "self", "input_ids", "attention_mask", "embeds", "num_tokens", "kwargs",
    ]  # fmt: skip
    assert set(known["t5_stack_forward"]) == {
        "self", "x", "attention_mask", "intermediate_output", "final_layer_norm_intermediate",
        "dtype", "embeds_info",
    }  # fmt: skip
