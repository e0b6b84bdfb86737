# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5's definition: what its spec lists, in which order the program runs, its seeded weights."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch
from octavo import encoders
from octavo.encoders import ClipSpec, Ops, T5Spec, encode, spec_from_facts
from octavo.encoders.t5 import FINAL_NORM, TOKENS
from octavo.seeded import (
    CLIP_L,
    OUTLIER_GAIN,
    RESIDUAL_OUTLIER,
    T5_TINY,
    T5_XXL,
    UMT5_XXL,
    seeded_tensors,
)
from torch import nn
from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

V1_0 = replace(T5_TINY, gated=False, activation="relu")
SHAPES = {"xxl": T5_XXL, "umt5 xxl": UMT5_XXL, "tiny": T5_TINY, "v1.0": V1_0}


def on_meta(spec: T5Spec) -> nn.Module:
    sizes = {
        "d_model": spec.width,
        "d_kv": spec.head_dim,
        "d_ff": spec.feed_forward,
        "num_layers": spec.layers,
        "num_heads": spec.heads,
        "vocab_size": spec.vocabulary,
        "feed_forward_proj": "gated-gelu" if spec.gated else "relu",
    }
    with torch.device("meta"):
        if spec.bias_per_layer:
            return UMT5EncoderModel(UMT5Config(**sizes))
        return T5EncoderModel(T5Config(**sizes))


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_a_spec_lists_what_transformers_has(spec: T5Spec) -> None:
    model = on_meta(spec)
    theirs = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    theirs.pop("encoder.embed_tokens.weight", None)  # the same tensor as `shared`
    assert spec.tensors() == theirs
    linears = {n: tuple(m.weight.shape) for n, m in model.named_modules() if type(m) is nn.Linear}
    assert spec.linears() == linears
    norms = {n for n, _ in model.named_modules() if n.endswith("layer_norm")}
    assert set(spec.norms()) == norms and len(spec.norms()) == len(norms)
    assert all((n + ".bias") not in theirs for n in linears) and not spec.biased
    assert model.config.layer_norm_epsilon == spec.norm_eps
    assert spec.token_table == TOKENS and spec.pad_token == model.config.pad_token_id


@pytest.mark.parametrize("spec", [*SHAPES.values(), CLIP_L], ids=[*SHAPES, "clip"])
def test_groups_are_the_linears_in_order(spec: T5Spec | ClipSpec) -> None:
    names = [n for i in range(spec.layers) for group in spec.groups(i) for n in group]
    assert names == list(spec.linears())
    for i in range(spec.layers):
        for group in spec.groups(i):
            assert len({spec.linears()[n][1] for n in group}) == 1  # one input


class Listing(Ops[str]):
    """Notes every operation; a value is the text of how it was made."""

    def __init__(self) -> None:
        self.linears_run: list[str] = []
        self.norms_run: list[str] = []
        self.together: list[tuple[str, ...]] = []
        self.biases: list[tuple[str, int, int]] = []
        self.attentions: list[tuple[str, int, str | None]] = []

    def add(self, a: str, b: str) -> str:
        return f"({a} + {b})"

    def mul(self, a: str, b: str) -> str:
        return f"({a} * {b})"

    def linear(self, x: str, name: str) -> str:
        self.linears_run.append(name)
        return f"{name.rsplit('.', 1)[1]}({x})"

    def linears(self, x: str, names) -> tuple[str, ...]:
        self.together.append(tuple(names))
        return super().linears(x, names)

    def rms_norm(self, x: str, name: str, eps: float) -> str:
        self.norms_run.append(name)
        assert eps == 1e-6
        return f"rms({x})"

    def relative_bias(self, x: str, name: str, buckets: int, max_distance: int) -> str:
        self.biases.append((name, buckets, max_distance))
        return "bias"

    def biased_attention(self, q, k, v, bias, *, heads: int, mask: str | None) -> str:
        self.attentions.append((bias, heads, mask))
        assert (q[0], k[0], v[0]) == ("q", "k", "v")
        return "attention"

    def gelu_tanh(self, x: str) -> str:
        return f"gelu({x})"

    def relu(self, x: str) -> str:
        return f"relu({x})"


@pytest.mark.parametrize("mask", [None, "mask"])
@pytest.mark.parametrize("spec", [T5_TINY, V1_0, replace(T5_TINY, bias_per_layer=True)])
def test_the_program_runs_everything_once_and_in_the_listed_order(
    spec: T5Spec, mask: str | None
) -> None:
    ops = Listing()
    hidden, _ = encode(ops, spec, "e", mask)
    assert hidden == []
    assert ops.linears_run == list(spec.linears())
    assert ops.norms_run == spec.norms() and spec.norms()[-1] == FINAL_NORM
    assert ops.attentions == [("bias", 2, mask)] * 2
    table = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    places = (0, 1) if spec.bias_per_layer else (0, 0)
    assert ops.biases == [(table.format(i), 32, 128) for i in places]
    assert [n for n in ops.together if len(n) == 3] == [spec.groups(i)[0] for i in range(2)]


def test_one_block_is_t5() -> None:
    attended = "(e + o(attention))"
    gate = f"(gelu(wi_0(rms({attended}))) * wi_1(rms({attended})))"
    _, gated = encode(Listing(), replace(T5_TINY, layers=1), "e")
    assert gated == f"rms(({attended} + wo({gate})))"
    _, plain = encode(Listing(), replace(V1_0, layers=1), "e")
    assert plain == f"rms(({attended} + wo(relu(wi(rms({attended}))))))"
    assert encoders.block(Listing(), V1_0, 0, "e") == plain.removeprefix("rms(")[:-1]


def test_primitives_must_be_implemented() -> None:
    ops: Ops[int] = Ops()
    for call in (
        lambda: ops.mul(1, 2),
        lambda: ops.rms_norm(1, "n", 1e-6),
        lambda: ops.relative_bias(1, "b", 32, 128),
        lambda: ops.biased_attention(1, 2, 3, 4, heads=1, mask=None),
        lambda: ops.gelu_tanh(1),
        lambda: ops.relu(1),
        lambda: ops.gated(1, 2, "gelu_tanh"),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_families() -> None:
    assert {name: spec.family for name, spec in SHAPES.items()} == {
        "xxl": "t5_xxl",
        "umt5 xxl": "umt5_xxl",
        "tiny": "t5",
        "v1.0": "t5",
    }
    assert replace(T5_XXL, vocabulary=32100).family == "t5_xxl"
    assert replace(T5_XXL, layers=23).family == "t5"


def test_facts_hold_every_field_and_give_the_spec_back() -> None:
    for field in fields(T5Spec):
        changed: object = {"gated": False, "activation": "relu", "bias_per_layer": True}.get(
            field.name, 7
        )
        other = replace(T5_TINY, **{field.name: changed})
        assert other.facts() != T5_TINY.facts(), field.name
        assert spec_from_facts(json.loads(json.dumps(other.facts()))) == other
    assert spec_from_facts(CLIP_L.facts()) == CLIP_L
    for wrong in ({}, {"encoder": "bert"}, {"encoder": "t5", "layers": 3}, {"encoder": ["t5"]}):
        with pytest.raises((KeyError, ValueError, TypeError)):
            spec_from_facts(wrong)


# Seeded weights


def test_seeded_weights_are_complete_and_repeatable() -> None:
    for spec in (T5_TINY, V1_0, replace(T5_TINY, bias_per_layer=True)):
        one, other = (dict(seeded_tensors(spec, seed=s)) for s in (0, 0))
        assert {n: tuple(t.shape) for n, t in one.items()} == spec.tensors()
        assert all(torch.equal(one[n], other[n]) for n in one)
        assert not torch.equal(one[TOKENS], dict(seeded_tensors(spec, seed=1))[TOKENS])


def test_overflow_scales_the_stream_and_the_input_of_wo_alone() -> None:
    plain, large = (
        dict(seeded_tensors(T5_TINY, overflow=o, dtype=torch.float32)) for o in (False, True)
    )
    scaled = {n for n in plain if not torch.equal(plain[n], large[n])}
    assert {n.rsplit(".", 2)[-2] for n in scaled} == {"shared", "o", "wi_1"}
    assert all(torch.allclose(large[n], plain[n] * 4096) for n in scaled)
    half = dict(seeded_tensors(T5_TINY, overflow=True))
    assert all(t.isfinite().all() for t in half.values())  # only the activations overflow


def test_outliers_are_where_trained_t5_has_them() -> None:
    weights = dict(seeded_tensors(T5_TINY, dtype=torch.float32))
    plain = dict(seeded_tensors(T5_TINY, dtype=torch.float32, outliers=False))
    assert max(float(plain[n + ".weight"].max()) for n in T5_TINY.norms()) < 2
    streams = set()
    for i in range(T5_TINY.layers):
        rows = weights[T5_TINY.groups(i)[3][0] + ".weight"].square().mean(1).sqrt()
        (loud,) = torch.where(rows > 10 * rows.median())
        assert len(loud) == 6
        assert rows[loud].mean() / rows.median() == pytest.approx(RESIDUAL_OUTLIER, rel=0.2)
        streams.add(tuple(loud.tolist()))
    assert len(streams) == 1  # the same channels of the residual stream in every block
    for norm in T5_TINY.norms():
        assert int((weights[norm + ".weight"] == OUTLIER_GAIN).sum()) == 6


def test_sizes_are_the_published_ones() -> None:
    def count(spec: T5Spec) -> int:
        return sum(torch.Size(shape).numel() for shape in spec.tensors().values())

    assert count(T5_XXL) == 4_762_310_656  # google/t5-v1_1-xxl, encoder with `shared`
    assert count(UMT5_XXL) == count(T5_XXL) + (256384 - 32128) * 4096 + 23 * 32 * 64
