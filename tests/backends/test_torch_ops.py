# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The reference against transformers, at full size, and its own rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from octavo.backends.torch_ops import (
    ReferenceEncoder,
    StreamedEncoder,
    embed_tokens,
    end_positions,
    pool,
)
from octavo.encoders import encode
from octavo.encoders.clip import END_TOKEN, POSITIONS, PROJECTION, START_TOKEN, TOKENS, ClipSpec
from octavo.seeded import CLIP_G, CLIP_H, CLIP_L, TINY
from samples import TINY_GELU, random_embeds, rows_of, tiny
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

RELATIVE = 1e-5


def distinct_weights(spec: ClipSpec) -> dict[str, Tensor]:
    """FP32 weights of which no two are alike, made faster than by drawing all of them."""
    random = torch.Generator().manual_seed(1)
    drawn: dict[tuple[int, ...], Tensor] = {}

    def values(shape: tuple[int, ...]) -> Tensor:
        if shape not in drawn:
            drawn[shape] = torch.randn(*shape, generator=random)
        return drawn[shape]

    weights = {}
    for count, (name, shape) in enumerate(spec.tensors().items()):
        like = values(shape).roll(count, 0)
        if "norm" in name and name.endswith(".weight"):
            weights[name] = like * 0.1 + 1
        else:
            weights[name] = like * (shape[1] ** -0.5 if len(shape) == 2 else 0.02)
    weights[TOKENS] *= 0.3
    weights[PROJECTION] = values((spec.width, spec.width)) * spec.width**-0.5
    return weights


def transformers_model(spec: ClipSpec, weights: dict[str, Tensor]) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        hidden_size=spec.width,
        intermediate_size=spec.feed_forward,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        max_position_embeddings=spec.positions,
        vocab_size=spec.vocabulary,
        hidden_act=spec.activation,
        layer_norm_eps=spec.layer_norm_eps,
        projection_dim=spec.width,
        bos_token_id=START_TOKEN,
        eos_token_id=END_TOKEN,
    )
    with torch.device("meta"):
        model = CLIPTextModelWithProjection(config)
    model.load_state_dict(weights, assign=True)  # shares them: one copy of G is 2.8 GB
    ids = torch.arange(spec.positions)[None]
    model.text_model.embeddings.register_buffer("position_ids", ids, persistent=False)
    assert type(model.text_model) is CLIPTextModel
    return model.eval()


def assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    assert got.shape == expected.shape, what
    assert torch.isfinite(got).all(), what
    whole = (got - expected).norm() / expected.norm()
    worst = (got - expected).abs().max() / expected.abs().max()
    assert max(whole, worst) < RELATIVE, f"{what}: {whole:.1e} in L2, {worst:.1e} at worst"


@torch.no_grad()
def check_against_transformers(spec: ClipSpec) -> None:
    """Every hidden state, the final one, pooled and projected, with and without a mask."""
    weights = distinct_weights(spec)
    rows = rows_of(spec, 3)[1:]  # 20 tokens and padding, and 77
    ids = torch.tensor(rows)
    read = weights.__getitem__
    embeds, ends = embed_tokens(read, rows), end_positions(rows)
    model = transformers_model(spec, weights)
    pooled: list[Tensor] = []
    model.text_model.register_forward_hook(lambda _m, _a, out: pooled.append(out.pooler_output))

    own = torch.ones(ids.shape, dtype=torch.bool)
    own[0, ends[0] + 1 :] = False
    own[1, 40:60] = False  # not only padding
    theirs = [
        model(ids, attention_mask=mask, output_hidden_states=True) for mask in (None, own.long())
    ]
    del model
    reference = ReferenceEncoder(spec, read)
    for mask, expected, before_projection in zip((None, own), theirs, pooled, strict=True):
        hidden, last = reference(embeds, mask)
        assert len(hidden) == len(expected.hidden_states) == spec.layers + 1
        for i, (got, known) in enumerate(zip(hidden, expected.hidden_states, strict=True)):
            assert_close(got, known, f"hidden state {i}")
        assert_close(last, expected.last_hidden_state, "final state")
        assert_close(pool(last, ends, None), before_projection, "pooled")
        assert_close(pool(last, ends, weights[PROJECTION]), expected.text_embeds, "projected")
    a, b = (t.last_hidden_state for t in theirs)
    assert (a[0, -1] - b[0, -1]).norm() > 0.01 * a[0, -1].norm()  # the mask was not ignored


@pytest.mark.parametrize(
    "spec",
    [CLIP_L, replace(CLIP_H, layers=4), TINY, TINY_GELU],
    ids=["L", "H, 4 layers", "tiny", "tiny, gelu"],
)
def test_equals_transformers(spec: ClipSpec) -> None:
    check_against_transformers(spec)


@pytest.mark.slow
def test_equals_transformers_at_the_full_depth_of_g() -> None:
    check_against_transformers(CLIP_G)


@pytest.mark.parametrize("spec", [TINY_GELU, replace(CLIP_L, layers=1, vocabulary=64)])
@pytest.mark.parametrize("masked", [False, True])
def test_streamed_equals_the_module_bit_for_bit(spec: ClipSpec, masked: bool) -> None:
    weights = tiny(spec)
    embeds = random_embeds(spec, 3)
    mask = torch.ones(3, spec.positions, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[1, 5:] = False
    hidden, last = ReferenceEncoder(spec, weights.__getitem__)(embeds, mask)
    streamed, streamed_last = StreamedEncoder(spec, weights.__getitem__, "cpu")(embeds, mask)
    assert torch.equal(last, streamed_last)
    for one, other in zip(hidden, streamed, strict=True):
        assert torch.equal(one, other)


def test_streamed_reads_each_weight_once_and_keeps_none() -> None:
    reads: list[str] = []

    def read(name: str) -> Tensor:
        reads.append(name)
        return tiny()[name]

    streamed = StreamedEncoder(TINY, read, "cpu")
    assert reads == []
    streamed(random_embeds(TINY, 1))
    assert sorted(reads) == sorted(TINY.tensors().keys() - {TOKENS})


def test_leaves_are_plain_and_copied() -> None:
    """ModelOpt skips subclasses of `nn.Linear` in silence, and writes into what it replaces."""
    weights = {n: t.float() for n, t in tiny().items()}
    module = ReferenceEncoder(TINY, weights.__getitem__)
    leaves = {n: type(m) for n, m in module.named_modules() if not list(m.children())}
    assert {leaves[name] for name in TINY.linears()} == {nn.Linear}
    assert {leaves[name] for name in TINY.norms()} == {nn.LayerNorm}
    own = dict(module.named_parameters())
    assert own.keys() == TINY.tensors().keys() - {TOKENS}
    for name, parameter in own.items():
        assert torch.equal(parameter, weights[name])
        assert parameter.data_ptr() != weights[name].data_ptr()
        assert not parameter.requires_grad
    assert not any(p.is_meta for p in (*module.parameters(), *module.buffers()))


def test_a_bf16_module_computes_in_bf16() -> None:
    module = ReferenceEncoder(TINY, tiny().__getitem__, dtype=torch.bfloat16)
    embeds = random_embeds(TINY, 2)
    _, last = module(embeds.bfloat16())
    assert last.dtype == torch.bfloat16
    _, exact = ReferenceEncoder(TINY, tiny().__getitem__)(embeds)
    cosine = F.cosine_similarity(last.double(), exact.double(), dim=-1)
    assert 0.999 < cosine.min() < 1 - 1e-7


def test_observe_sees_the_input_of_every_linear() -> None:
    seen: dict[str, Tensor] = {}
    module = ReferenceEncoder(TINY, tiny().__getitem__)
    hooked: dict[str, Tensor] = {}
    for name in TINY.linears():
        leaf = module.get_submodule(name)
        leaf.register_forward_hook(lambda _m, a, _o, name=name: hooked.__setitem__(name, a[0]))
    encode(module.ops(seen.__setitem__), TINY, random_embeds(TINY, 2))
    assert list(seen) == list(TINY.linears())
    assert all(seen[name] is hooked[name] for name in seen)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_causal(masked: bool) -> None:
    module = ReferenceEncoder(TINY, tiny().__getitem__)
    embeds = random_embeds(TINY, 1)
    mask = torch.ones(1, 77, dtype=torch.bool) if masked else None
    _, before = module(embeds, mask)
    embeds[0, 40] += 1
    _, after = module(embeds, mask)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 41:], after[0, 41:])


def test_a_masked_token_changes_nothing_after_it() -> None:
    module = ReferenceEncoder(TINY, tiny().__getitem__)
    embeds = random_embeds(TINY, 2)
    mask = torch.ones(2, 77, dtype=torch.bool)
    mask[1, 40] = False
    _, before = module(embeds, mask)
    embeds[:, 40] += 1
    _, after = module(embeds, mask)
    assert torch.equal(before[1, 41:], after[1, 41:])
    assert not torch.equal(before[0, 41:], after[0, 41:])  # of the other row it does


def test_shorter_prompts_take_the_first_positions() -> None:
    module = ReferenceEncoder(TINY, tiny().__getitem__)
    embeds = random_embeds(TINY, 2)
    hidden, last = module(embeds[:, :9])
    assert_close(last, module(embeds)[1][:, :9], "final state")
    assert torch.equal(hidden[0], embeds[:, :9] + tiny()[POSITIONS][:9].float())


def test_token_embeddings_are_the_tables_rows_in_fp32() -> None:
    rows = rows_of(TINY, 3)
    got = embed_tokens(tiny().__getitem__, rows)
    assert got.dtype == torch.float32
    assert torch.equal(got, F.embedding(torch.tensor(rows), tiny()[TOKENS].float()))


def test_pooling_is_at_the_first_end_token() -> None:
    rows = [[START_TOKEN, 5, END_TOKEN, END_TOKEN], [START_TOKEN, END_TOKEN, 0, 0]]
    assert end_positions(rows).tolist() == [2, 1]
    last = torch.arange(2 * 4 * 3.0).view(2, 4, 3)
    assert pool(last, end_positions(rows), None).tolist() == [[6.0, 7.0, 8.0], [15.0, 16.0, 17.0]]
    projection = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 1.0]], dtype=torch.float16)  # [P, C]
    assert pool(last, end_positions(rows), projection).tolist() == [[6.0, 22.0], [15.0, 49.0]]
