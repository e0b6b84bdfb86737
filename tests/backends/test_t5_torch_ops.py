# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5's reference against transformers: every kind of size, mask, length; its bias; its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from octavo.backends.relative_bias import relative_bias, relative_buckets
from octavo.backends.torch_ops import ReferenceEncoder, StreamedEncoder, embed_tokens
from octavo.encoders import T5Spec
from octavo.encoders.t5 import TOKENS
from octavo.seeded import T5_TINY, seeded_tensors
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel
from transformers.models.t5.modeling_t5 import T5Attention

RELATIVE = 1e-5
SMALL = T5Spec(3, 256, 512, 8, 64, 1000)  # heads * head_dim is not the width, as in T5 1.0's XXL
SHAPES = {
    "v1.1": SMALL,
    "v1.1, square": replace(SMALL, heads=4),
    "umt5": replace(SMALL, bias_per_layer=True),
    "v1.0": replace(SMALL, gated=False, activation="relu"),
    "gated relu, other buckets": replace(SMALL, activation="relu", buckets=16, max_distance=64),
}


def weights_of(spec: T5Spec, **options) -> dict[str, Tensor]:
    return dict(seeded_tensors(spec, **{"dtype": torch.float32, "outliers": False, **options}))


def transformers_model(spec: T5Spec, weights: dict[str, Tensor]) -> nn.Module:
    activation = {"gelu_tanh": "gelu", "relu": "relu"}[spec.activation]
    sizes = {
        "d_model": spec.width,
        "d_kv": spec.head_dim,
        "d_ff": spec.feed_forward,
        "num_layers": spec.layers,
        "num_heads": spec.heads,
        "vocab_size": spec.vocabulary,
        "relative_attention_num_buckets": spec.buckets,
        "relative_attention_max_distance": spec.max_distance,
        "feed_forward_proj": f"gated-{activation}" if spec.gated else activation,
        "layer_norm_epsilon": spec.norm_eps,
    }
    if spec.bias_per_layer:
        model: nn.Module = UMT5EncoderModel(UMT5Config(**sizes))
    else:
        model = T5EncoderModel(T5Config(**sizes))
    assert model.config.dense_act_fn == ("gelu_new" if activation == "gelu" else "relu")
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"encoder.embed_tokens.weight"}
    return model.eval()


def assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    assert got.shape == expected.shape, what
    assert torch.isfinite(got).all(), what
    worst = (got - expected).abs().max() / expected.abs().max()
    assert worst < RELATIVE, f"{what}: {worst:.1e} at worst"


def rows(spec: T5Spec, length: int) -> Tensor:
    random = torch.Generator().manual_seed(length)
    return torch.randint(2, spec.vocabulary, (2, length), generator=random)


@pytest.mark.parametrize("length", [1, 2, 20, 300])
@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_equals_transformers(spec: T5Spec, length: int) -> None:
    weights = weights_of(spec)
    model, reference = transformers_model(spec, weights), ReferenceEncoder(spec, weights.get)
    ids = rows(spec, length)
    embeds = embed_tokens(weights.__getitem__, ids.tolist(), spec.token_table)
    padding = torch.ones(ids.shape, dtype=torch.bool)
    padding[0, max(1, length // 2) :] = False
    holes = padding.clone()
    holes[1, ::3] = False
    if length < 3:
        holes[1, 0] = True
    found = []
    for mask in (None, padding, holes):
        theirs = model(ids, attention_mask=None if mask is None else mask.long())
        hidden, last = reference(embeds, mask)
        assert hidden == []
        assert_close(last, theirs.last_hidden_state, f"mask {mask is not None}")
        found.append(last)
    if length > 2:  # a mask is not ignored
        plain, padded, holed = found
        assert (plain[0] - padded[0]).norm() > 0.01 * plain[0].norm()
        assert torch.equal(plain[1], padded[1])
        assert (plain[1] - holed[1]).norm() > 0.01 * plain[1].norm()


@pytest.mark.parametrize("length", [1, 7, 64])
@torch.no_grad()
def test_all_masked_rows_are_transformers_eager_ones(length: int) -> None:
    """transformers' SDPA gives zeros or NaN there, by PyTorch version; its own formula does not."""
    spec = SHAPES["v1.1"]
    weights = weights_of(spec)
    model = transformers_model(spec, weights)
    model.set_attn_implementation("eager")
    ids = rows(spec, length)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    mask[1] = False
    embeds = embed_tokens(weights.__getitem__, ids.tolist(), TOKENS)
    _, last = ReferenceEncoder(spec, weights.get)(embeds, mask)
    assert_close(last, model(ids, attention_mask=mask.long()).last_hidden_state, "all masked")


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_streamed_is_the_module_bit_for_bit(spec: T5Spec) -> None:
    weights = weights_of(spec, dtype=torch.float16)
    embeds = embed_tokens(weights.__getitem__, rows(spec, 33).tolist(), TOKENS)
    module, streamed = (
        ReferenceEncoder(spec, weights.get),
        StreamedEncoder(spec, weights.get, "cpu"),
    )
    assert torch.equal(module(embeds)[1], streamed(embeds)[1])


def test_leaves_are_what_modelopt_finds() -> None:
    weights = weights_of(T5_TINY)
    reference = ReferenceEncoder(T5_TINY, weights.get)
    leaves = {n: type(m) for n, m in reference.named_modules() if isinstance(m, nn.Linear)}
    assert leaves == dict.fromkeys(T5_TINY.linears(), nn.Linear)
    assert all(m.bias is None for m in reference.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 64), (8, 20)])
def test_buckets_are_transformers(buckets: int, distance: int) -> None:
    offsets = torch.arange(1024)[None, :] - torch.arange(1024)[:, None]
    theirs = T5Attention._relative_position_bucket(offsets, True, buckets, distance)
    assert torch.equal(relative_buckets(1024, buckets, distance), theirs)
    for length in (1, 2, 300):  # a shorter prompt is a corner of a longer one's
        assert torch.equal(relative_buckets(length, buckets, distance), theirs[:length, :length])


def test_the_bias_has_the_tables_dtype_and_one_value_per_head_and_pair() -> None:
    table = torch.randn(32, 5, dtype=torch.float64).to(torch.bfloat16)
    bias = relative_bias(table, 9, 128)
    assert bias.shape == (1, 5, 9, 9) and bias.dtype == torch.bfloat16 and bias.is_contiguous()
    places = relative_buckets(9, 32, 128)
    assert bias[0, 3, 2, 7] == table[places[2, 7], 3]
    assert not torch.equal(bias[0, 0], bias[0, 0].T)  # before and after are told apart


@torch.no_grad()
def test_the_bias_is_made_once_per_encoding(monkeypatch) -> None:
    made = []

    def counting(table: Tensor, length: int, max_distance: int) -> Tensor:
        made.append(length)
        return relative_bias(table, length, max_distance)

    monkeypatch.setattr("octavo.backends.torch_ops.relative_bias", counting)
    for spec, count in ((SMALL, 1), (replace(SMALL, bias_per_layer=True), 3)):
        weights = weights_of(spec)
        ReferenceEncoder(spec, weights.get)(torch.randn(1, 5, spec.width))
        assert made == [5] * count
        made.clear()


@torch.no_grad()
def test_activations_beyond_fp16_change_nothing_in_fp32() -> None:
    plain, large = (weights_of(T5_TINY, outliers=True, overflow=o) for o in (False, True))
    ids = rows(T5_TINY, 20).tolist()
    seen: list[float] = []
    lasts = []
    for weights in (plain, large):
        embeds = embed_tokens(weights.__getitem__, ids, TOKENS)
        reference = ReferenceEncoder(T5_TINY, weights.get)
        inputs: list[float] = []
        ops = reference.ops(lambda _, x, inputs=inputs: inputs.append(float(x.abs().max())))
        from octavo.encoders import encode

        lasts.append(encode(ops, T5_TINY, embeds)[1])
        seen.append(max(inputs))
    assert seen[0] < 65504 < seen[1]
    assert torch.nn.functional.cosine_similarity(*lasts, dim=-1).min() > 1 - 1e-5
