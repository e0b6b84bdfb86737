# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5 in every packaging: the same encoder, tensor by tensor and by fingerprint."""

import json
from dataclasses import replace

import fp8_files
import packagings as p
import pytest
import torch
from octavo import seeded
from octavo.checkpoints import detect, fingerprint
from octavo.encoders.t5 import TOKENS, T5Spec
from octavo.errors import FileError, UnsupportedEncoder
from test_packagings import shard

EMBED_TOKENS = "encoder.embed_tokens.weight"
BLOCK0, BLOCK1 = "encoder.block.0.", "encoder.block.1."
BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
WI_0 = "layer.1.DenseReluDense.wi_0.weight"

OLD = replace(p.SMALL_T5, gated=False, activation="relu")
UMT5 = replace(p.SMALL_T5, bias_per_layer=True)
FULL_SIZE = {
    "t5xxl": seeded.T5_XXL,
    "umt5xxl": seeded.UMT5_XXL,
    "mt5 xl": T5Spec(24, 2048, 5120, 32, 64, 250112),
    "small": T5Spec(6, 512, 2048, 8, 64, 32128, gated=False, activation="relu"),
    "v1.1 small": T5Spec(8, 512, 1024, 6, 64, 32128),
    "base": T5Spec(12, 768, 3072, 12, 64, 32128, gated=False, activation="relu"),
    "11b": T5Spec(24, 1024, 65536, 128, 128, 32128, gated=False, activation="relu"),
    "byt5 small": T5Spec(12, 1472, 3584, 6, 64, 1510),
}


def with_decoder(tensors, prefix=""):
    """As `T5ForConditionalGeneration` saves it."""
    decoder = {
        name.replace("encoder.", "decoder."): tensor
        for name, tensor in tensors.items()
        if name.startswith("encoder.")
    }
    for i in range(3):
        cross = f"decoder.block.{i}.layer.1.EncDecAttention.q.weight"
        decoder[cross] = tensors["encoder.block.0.layer.0.SelfAttention.q.weight"]
    heads = {"lm_head.weight": tensors[TOKENS], "decoder.embed_tokens.weight": tensors[TOKENS]}
    return p.prefixed({**tensors, **decoder, **heads}, prefix)


def renamed(tensors):
    return {EMBED_TOKENS if n == TOKENS else n: t for n, t in tensors.items()}


def stack(tensors, table="embed_tokens.weight"):
    """As the encoder's own module saves itself, without its owner."""
    return {table if n == TOKENS else n.removeprefix("encoder."): t for n, t in tensors.items()}


WAN = {
    "layer.0.SelfAttention.q": "attn.q",
    "layer.0.SelfAttention.k": "attn.k",
    "layer.0.SelfAttention.v": "attn.v",
    "layer.0.SelfAttention.o": "attn.o",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
    "layer.0.layer_norm": "norm1",
    "layer.1.layer_norm": "norm2",
}


def wan(tensors):
    """As Wan publishes umT5-XXL, scales beside the weights included."""
    named = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("encoder.block."):
            _, _, index, leaf = stem.split(".", 3)
            stem = f"blocks.{index}.{WAN[leaf]}"
        else:
            known = {"shared": "token_embedding", "encoder.final_layer_norm": "norm"}
            stem = known.get(stem, stem)
        named[f"{stem}.{kind}" if stem else name] = tensor
    return named


def with_wan_decoder(tensors):
    """As the whole `T5Model` of Wan's code would be saved."""
    encoder = p.prefixed(wan(tensors), "encoder.")
    decoder = {
        n.replace("encoder.", "decoder.").replace(".attn.", ".self_attn."): t
        for n, t in encoder.items()
    }
    table = encoder["encoder.token_embedding.weight"]
    return {**encoder, **decoder, "token_embedding.weight": table, "head.weight": table}


PACKAGINGS = {
    "transformers, encoder only": (lambda t: t, "t5"),
    "ComfyUI, the table under both names": (lambda t: {**t, EMBED_TOKENS: t[TOKENS]}, "t5"),
    "ComfyUI, embed_tokens alone": (renamed, "t5"),
    "with a tokenizer": (lambda t: {**t, "spiece_model": torch.ones(9, dtype=torch.uint8)}, "t5"),
    "encoder and decoder": (with_decoder, "t5"),
    "encoder and decoder, prefixed": (lambda t: with_decoder(t, "model."), "t5"),
    "in an SD3 checkpoint": (
        lambda t: {
            **p.prefixed(t, "text_encoders.t5xxl.transformer."),
            "text_encoders.t5xxl.logit_scale": torch.tensor(4.6),
            "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": torch.ones(8, 8),
        },
        "t5xxl",
    ),
    "in a Wan checkpoint": (
        lambda t: p.prefixed(renamed(t), "text_encoders.umt5xxl.transformer."),
        "umt5xxl",
    ),
    "CLIPSave": (lambda t: p.prefixed(t, "t5xxl.transformer."), "t5xxl"),
    "DataParallel": (lambda t: p.prefixed(t, "module."), "t5"),
    "the encoder's module alone": (stack, "t5"),
    "the same, the table as shared": (lambda t: stack(t, TOKENS), "t5"),
    "the same, the table under both names": (lambda t: {**stack(t), TOKENS: t[TOKENS]}, "t5"),
    "the same, prefixed": (lambda t: p.prefixed(stack(t), "text_encoder."), "t5"),
    "the same, named by its prefix": (lambda t: p.prefixed(stack(t), "t5xxl."), "t5xxl"),
}
FOR_UMT5 = {
    "Wan": (wan, "t5"),
    "Wan, prefixed": (lambda t: p.prefixed(wan(t), "umt5xxl."), "umt5xxl"),
    "Wan, encoder and decoder": (with_wan_decoder, "t5"),
}


@pytest.mark.parametrize(
    ("packaging", "spec"),
    [
        *((n, spec) for n in PACKAGINGS for spec in (p.SMALL_T5, UMT5, OLD)),
        *((n, UMT5) for n in FOR_UMT5),
    ],
    ids=lambda x: x if isinstance(x, str) else {p.SMALL_T5: "v1.1", UMT5: "umT5", OLD: "v1.0"}[x],
)
def test_every_packaging_gives_the_same_encoder(packaging, spec, tmp_path):
    assemble, name = (PACKAGINGS | FOR_UMT5)[packaging]
    tensors = p.t5_canonical(spec)
    detected = detect(p.write(tmp_path / "x.safetensors", assemble(tensors)))
    (weights,) = detected.encoders
    assert (weights.spec, weights.name, weights.dtype) == (spec, name, "fp16")
    assert weights.names() == list(spec.tensors()) == list(tensors)
    assert weights.projection_shape is None and not weights.quantized and not weights.scales
    assert detected.unsupported == ()
    for canonical, tensor in tensors.items():
        read = weights.read(canonical)
        assert read.dtype == torch.float16 and torch.equal(read, tensor), canonical
    plain = p.write(tmp_path / "plain.safetensors", tensors)
    assert fingerprint(weights) == fingerprint(detect(plain).encoders[0])
    assert fingerprint(weights).projection is None


@pytest.mark.parametrize("assemble", [stack, wan])
@pytest.mark.parametrize("make", [fp8_files.legacy, fp8_files.comfy_quant])
def test_fp8_under_other_names_is_the_same_encoder(make, assemble, tmp_path):
    coded = fp8_files.coded(p.t5_canonical(UMT5), UMT5.linears())
    (usual,) = detect(p.write(tmp_path / "usual.safetensors", make(coded))).encoders
    (weights,) = detect(p.write(tmp_path / "x.safetensors", assemble(make(coded)))).encoders
    assert weights.dtype == "fp8" and set(weights.quantized) == set(UMT5.linears())
    assert weights.scales == usual.scales
    assert fingerprint(weights) == fingerprint(usual)


SIDES = ("weight_scale", "scale_weight", "input_scale", "scale_input", "comfy_quant")


@pytest.mark.parametrize("weights", ["transformers", "stack", "wan"])
@pytest.mark.parametrize("sides", ["transformers", "stack", "wan", "elsewhere"])
@pytest.mark.parametrize("make", [fp8_files.legacy, fp8_files.comfy_quant])
def test_scales_under_another_name_are_not_dropped(make, sides, weights, tmp_path):
    """As a converter that renames weights alone would leave them; the codes would be the values."""
    own = make(fp8_files.coded(p.t5_canonical(UMT5), UMT5.linears()))
    own.pop("scaled_fp8", None)  # with it a scale that is missing is missed
    named = {"transformers": own, "stack": stack(own), "wan": wan(own)}
    named["elsewhere"] = p.prefixed(own, "x.")
    mixed = {n: t for n, t in named[weights].items() if n.rpartition(".")[2] not in SIDES}
    mixed |= {n: t for n, t in named[sides].items() if n.rpartition(".")[2] in SIDES}
    path = p.write(tmp_path / "x.safetensors", mixed)
    if sides == weights:
        assert all(
            linear.fp8.weight_scale for linear in detect(path).encoders[0].quantized.values()
        )
        return
    with pytest.raises(FileError, match="has no weight beside it, and FP8 weights lack a scale"):
        detect(path)


def plain_fp8(spec):
    """Names -> tensors of a file whose codes are the values."""
    coded = fp8_files.coded(p.t5_canonical(spec), spec.linears())
    return {**coded.rest, **{f"{name}.weight": codes for name, codes in coded.codes.items()}}


def test_a_note_in_the_metadata_for_other_names_is_not_dropped(tmp_path):
    note = {"format": "float8_e4m3fn"}
    for layers in (dict.fromkeys(UMT5.linears(), note), {"img_in": note}, {}):
        metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
        path = p.write(tmp_path / "x.safetensors", wan(plain_fp8(UMT5)), metadata)
        if not layers:
            assert detect(path).encoders[0].dtype == "fp8"
            continue
        with pytest.raises(FileError, match="which is not there, and FP8 weights lack a scale"):
            detect(path)


def test_scales_of_the_diffusion_model_beside_a_plain_fp8_encoder(tmp_path):
    """One file whose text encoder has no scales, and whose other parts do."""
    part = "model.diffusion_model.double_blocks.0.img_attn.qkv."
    others = {
        part + "weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        part + "weight_scale": torch.tensor(2.0),
    }
    layers = {"double_blocks.0.img_attn.qkv": {"format": "float8_e4m3fn"}}
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
    encoder = p.prefixed(plain_fp8(p.SMALL_T5), "text_encoders.t5xxl.transformer.")
    path = p.write(tmp_path / "x.safetensors", {**encoder, **others}, metadata)
    assert detect(path).encoders[0].dtype == "fp8"


def test_wans_own_file_by_its_header_and_as_a_torch_file(tmp_path):
    shapes = wan(seeded.UMT5_XXL.tensors())
    assert len(shapes) == 242 and shapes["blocks.23.ffn.gate.0.weight"] == (10240, 4096)
    path = p.write_sparse(tmp_path / "umt5-xxl-enc-bf16.safetensors", shapes, "BF16")
    (weights,) = detect(path).encoders
    assert (weights.spec, weights.name, weights.dtype) == (seeded.UMT5_XXL, "umt5xxl", "bf16")
    tensors = p.t5_canonical(UMT5)
    torch.save(wan(tensors), tmp_path / "models_t5_umt5-xxl-enc-bf16.pth")
    (tmp_path / "config.json").write_text('{"model_type": "t2v", "num_layers": 40, "dim": 5120}')
    (weights,) = detect(tmp_path / "models_t5_umt5-xxl-enc-bf16.pth").encoders
    assert all(torch.equal(weights.read(name), tensors[name]) for name in tensors)


def test_the_module_alone_is_what_transformers_saves(tmp_path):
    import transformers

    config = transformers.T5Config(
        **{"vocab_size": 200, "d_model": 64, "d_kv": 12, "d_ff": 96, "num_layers": 3},
        **{"num_heads": 4, "feed_forward_proj": "gated-gelu"},
    )
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(config)
    alone = p.write(tmp_path / "alone.safetensors", model.encoder.state_dict())
    whole = p.write(tmp_path / "whole.safetensors", model.state_dict())
    (weights,) = detect(alone).encoders
    assert weights.spec == p.SMALL_T5
    assert fingerprint(weights) == fingerprint(detect(whole).encoders[0])


def decoder_alone():
    t = stack(p.t5_canonical())
    moved = {n.replace("layer.1.Dense", "layer.2.Dense"): x for n, x in t.items()}
    cross = "block.0.layer.1.EncDecAttention.q.weight"
    return {**moved, cross: t["block.0.layer.0.SelfAttention.q.weight"]}


def test_a_decoder_alone_is_named(tmp_path):
    decoder = decoder_alone()
    with pytest.raises(UnsupportedEncoder, match="holds a T5 decoder, which Octavo does not serve"):
        detect(p.write(tmp_path / "x.safetensors", decoder))
    both = {**p.prefixed(decoder, "dec."), **p.t5("t5xxl.")}
    detected = detect(p.write(tmp_path / "x.safetensors", both))
    assert [w.name for w in detected.encoders] == ["t5xxl"]
    assert "A T5 decoder at 'dec.' is left as it is" in detected.unsupported[0]


def test_wans_code_with_one_bias_for_all_blocks_is_no_umt5(tmp_path):
    shared = {n.replace("blocks.0.pos_", "pos_"): t for n, t in wan(p.t5_canonical()).items()}
    with pytest.raises(UnsupportedEncoder, match="no text encoder that Octavo knows"):
        detect(p.write(tmp_path / "x.safetensors", shared))


def test_an_image_model_beside_a_t5_is_not_wans(tmp_path):
    """Blocks with a gate and a norm at the top, as some have."""
    image = {f"blocks.{i}.ffn.gate.0.weight": torch.ones(8, 8) for i in range(2)}
    encoder = p.prefixed(p.t5_canonical(), "text_encoders.t5xxl.transformer.")
    path = p.write(tmp_path / "x.safetensors", {**encoder, **image, "norm.weight": torch.ones(8)})
    assert [e.name for e in detect(path).encoders] == ["t5xxl"]


@pytest.mark.parametrize("qkv", ["attn.q", "attn.qkv", "self_attn.q"])
def test_blocks_of_other_models_are_not_wans(qkv, tmp_path):
    """Wan's diffusion model and image models have such names too."""
    tensors = {f"blocks.{i}.{qkv}.weight": torch.ones(8, 8) for i in range(2)}
    tensors |= {"norm.weight": torch.ones(8), "blocks.0.ffn.0.weight": torch.ones(8, 8)}
    with pytest.raises(UnsupportedEncoder, match="no text encoder that Octavo knows"):
        detect(p.write(tmp_path / "x.safetensors", tensors))


@pytest.mark.parametrize("size", FULL_SIZE)
def test_full_sizes_by_headers_alone(size, tmp_path):
    spec = FULL_SIZE[size]
    path = p.write_sparse(tmp_path / "x.safetensors", spec.tensors(), "BF16")
    (weights,) = detect(path).encoders
    assert (weights.spec, weights.dtype) == (spec, "bf16")
    assert weights.name == (size if "xxl" in size else "t5")


@pytest.mark.parametrize("first", ["transformers", "stack", "wan"])
@pytest.mark.parametrize("second", ["transformers", "stack", "wan"])
def test_blocks_under_another_name_are_not_left_out(first, second, tmp_path):
    """Of the last ones, that is; without the others a block would be missing."""
    tensors = {**p.t5_canonical(UMT5), TOKENS: p.t5_canonical(UMT5)[TOKENS]}
    named = {"transformers": renamed(tensors), "stack": stack(tensors), "wan": wan(tensors)}
    mixed = {n: t for n, t in named[first].items() if ".2." not in n[:16]}
    mixed |= {n: t for n, t in named[second].items() if ".2." in n[:16]}
    path = p.write(tmp_path / "x.safetensors", mixed)
    if first == second:
        assert detect(path).encoders[0].spec.layers == 3
        return
    with pytest.raises(FileError, match="two text encoders, or parts of them, under the prefix ''"):
        detect(path)


@pytest.mark.parametrize("alone", [False, True])
def test_a_relative_of_t5_is_not_taken_for_it(alone, tmp_path):
    """UDOP's encoder: the same blocks, and tokens that have places on a page."""
    import transformers

    kind = transformers.UdopEncoderModel(
        transformers.UdopConfig(
            vocab_size=200, d_model=64, d_kv=12, d_ff=96, num_layers=3, num_heads=4
        )
    )
    state = (kind.encoder if alone else kind).state_dict()
    state = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    with pytest.raises(FileError, match=r"(relative_bias|cell_2d).*is none of a T5 encoder's"):
        detect(p.write(tmp_path / "x.safetensors", state))


def test_a_head_beside_a_t5_is_not_its(tmp_path):
    path = p.write(tmp_path / "x.safetensors", {**p.t5_canonical(), "head.weight": torch.ones(4)})
    assert [e.name for e in detect(path).encoders] == ["t5"]


def test_every_tensor_counts(tmp_path):
    tensors = p.t5_canonical(UMT5)
    path = tmp_path / "x.safetensors"
    bodies = {fingerprint(detect(p.write(path, tensors)).encoders[0]).body}
    for name in tensors:
        changed = {**tensors, name: tensors[name].clone()}
        changed[name].view(-1)[-1] += 1
        bodies.add(fingerprint(detect(p.write(path, changed)).encoders[0]).body)
    assert len(bodies) == len(tensors) + 1


def test_a_pipeline_folder_of_shards(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    spec = replace(p.SMALL_T5, max_distance=64, norm_eps=1e-5, activation="relu")
    tensors = p.t5_canonical()
    folder = tmp_path / "text_encoder_2"
    folder.mkdir()
    shard(folder, tensors, kind="safetensors")
    config = config_of(spec, feed_forward_proj="gated-relu")
    (folder / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, folder, folder / "model.safetensors.index.json"):
        (weights,) = detect(path).encoders
        assert (weights.spec, weights.name) == (spec, "t5")
        assert all(torch.equal(weights.read(n), tensors[n]) for n in weights.names())


def config_of(spec, **more):
    return {
        "model_type": "umt5" if spec.bias_per_layer else "t5",
        "d_model": spec.width,
        "num_layers": spec.layers,
        "num_heads": spec.heads,
        "relative_attention_max_distance": spec.max_distance,
        "layer_norm_epsilon": spec.norm_eps,
        "feed_forward_proj": "gated-gelu" if spec.gated else "relu",
        **more,
    }


@pytest.mark.parametrize(
    ("kind", "gating", "spec"),
    [
        ("T5EncoderModel", "gated-gelu", p.SMALL_T5),
        ("T5EncoderModel", "relu", OLD),
        ("T5EncoderModel", "gated-relu", replace(p.SMALL_T5, activation="relu")),
        ("UMT5EncoderModel", "gated-gelu", UMT5),
        ("MT5EncoderModel", "gated-gelu", p.SMALL_T5),
        ("T5ForConditionalGeneration", "gated-gelu", p.SMALL_T5),
    ],
)
def test_what_transformers_saves(kind, gating, spec, tmp_path):
    import transformers

    family = kind[: kind.index("5") + 1]
    config = getattr(transformers, family + "Config")(
        **{"vocab_size": 200, "d_model": 64, "d_kv": 12, "d_ff": 96, "num_layers": 3},
        **{"num_heads": 4, "feed_forward_proj": gating, "num_decoder_layers": 2},
        **{"relative_attention_max_distance": 100, "layer_norm_epsilon": 1e-5},
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    for path in (tmp_path, tmp_path / "model.safetensors"):
        (weights,) = detect(path).encoders
        assert weights.spec == replace(spec, max_distance=100, norm_eps=1e-5)
        assert all(torch.equal(weights.read(name), state[name]) for name in weights.names())


def without(name):
    return {n: t for n, t in p.t5_canonical().items() if n != name}


def shaped(name, *shape, tensors=None):
    return {**(tensors or p.t5_canonical()), name: torch.ones(shape, dtype=torch.float16)}


DAMAGED = {
    "no table": (without(TOKENS), "tensor 'shared.weight' of shape [vocabulary, 64] is missing"),
    "no bias": (without(BLOCK0 + BIAS), f"'{BLOCK0}{BIAS}' of shape [buckets, heads] is missing"),
    "no norm": (
        without("encoder.final_layer_norm.weight"),
        "tensor 'encoder.final_layer_norm.weight' of shape [64] is missing",
    ),
    "a block is missing": (
        {n: t for n, t in p.t5_canonical().items() if not n.startswith(BLOCK1)},
        f"tensor '{BLOCK1}layer.0.SelfAttention.q.weight' of shape [48, 64] is missing",
    ),
    "another width": (
        shaped(TOKENS, 200, 65),
        "[200, 65], expected [vocabulary, 64]",
    ),
    "two tables": (
        shaped(EMBED_TOKENS, 150, 64),
        f"'{EMBED_TOKENS}' has the shape [150, 64], expected [200, 64]",
    ),
    "two shapes": (shaped(BLOCK1 + WI_0, 64, 96), "has the shape [64, 96], expected [96, 64]"),
    "heads that do not fit": (
        shaped(BLOCK0 + BIAS, 32, 5),
        "5 heads, which do not divide 48",
    ),
    "an odd number of buckets": (shaped(BLOCK0 + BIAS, 31, 4), "has 31 buckets, an even number"),
    "gated and not": (
        shaped(BLOCK1 + "layer.1.DenseReluDense.wi.weight", 96, 64),
        f"tensor '{BLOCK1}layer.1.DenseReluDense.wi.weight' does not belong beside",
    ),
    "a stray bias table": (
        shaped("encoder.block.2." + BIAS, 32, 4),
        f"tensor 'encoder.block.2.{BIAS}' does not belong beside",
    ),
    "biases in two blocks of three": (
        shaped(BLOCK1 + BIAS, 32, 4),
        f"tensor 'encoder.block.2.{BIAS}' of shape [32, 4] is missing",
    ),
    "an adapter": (
        shaped(BLOCK0 + "layer.0.SelfAttention.q.lora_A.weight", 4, 64),
        "lora_A.weight' is none of a T5 encoder's",
    ),
    "Wan's, no table": (
        {n: t for n, t in wan(p.t5_canonical(UMT5)).items() if n != "token_embedding.weight"},
        "tensor 'token_embedding.weight' of shape [vocabulary, 64] is missing",
    ),
    "Wan's, no gate": (
        {n: t for n, t in wan(p.t5_canonical(UMT5)).items() if n != "blocks.0.ffn.gate.0.weight"},
        "tensor 'blocks.0.ffn.gate.0.weight' of shape [feed-forward, 64] is missing",
    ),
    "Wan's, a bias in the first block alone": (
        wan(p.t5_canonical()),
        "tensor 'blocks.1.pos_embedding.embedding.weight' of shape [32, 4] is missing",
    ),
    "Wan's, an adapter": (
        {**wan(p.t5_canonical(UMT5)), "blocks.0.attn.q.lora_A.weight": torch.ones(4, 64)},
        "lora_A.weight' is none of a T5 encoder's",
    ),
    "the module alone, no table": (
        {n: t for n, t in stack(p.t5_canonical()).items() if n != "embed_tokens.weight"},
        "tensor 'embed_tokens.weight' of shape [vocabulary, 64] is missing",
    ),
    "a bias": (
        shaped(BLOCK0 + "layer.0.SelfAttention.q.bias", 48),
        "SelfAttention.q.bias' is none of a T5 encoder's",
    ),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged(fault, tmp_path):
    tensors, said = DAMAGED[fault]
    with pytest.raises(FileError) as caught:
        detect(p.write(tmp_path / "x.safetensors", tensors))
    assert said in caught.value.fault and "\n" not in str(caught.value)


CONFIGS = {
    "other sizes": ({"num_heads": 8}, FileError, "says 3 layers of width 64 with 8 heads, gated"),
    "not gated": ({"feed_forward_proj": "relu"}, FileError, "4 heads; the weights have 3 of width"),
    "erf": ({"feed_forward_proj": "gated-silu"}, UnsupportedEncoder, "feed-forward 'gated-silu'"),
    "another model": ({"model_type": "longt5"}, UnsupportedEncoder, "its encoder is a 'longt5'"),
    "epsilon": ({"layer_norm_epsilon": "small"}, FileError, "no sound layer_norm_epsilon"),
    "distance": ({"relative_attention_max_distance": 8}, FileError, "no sound layer_norm_epsilon"),
    "a huge distance": (
        {"relative_attention_max_distance": 10**400},
        FileError,
        "or relative_attention_max_distance",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_config_that_does_not_fit(fault, tmp_path):
    changes, kind, said = CONFIGS[fault]
    path = p.write(tmp_path / "model.safetensors", p.t5_canonical())
    (tmp_path / "config.json").write_text(json.dumps(config_of(p.SMALL_T5, **changes)))
    with pytest.raises(kind) as caught:
        detect(tmp_path)
    assert type(caught.value) is kind and said in caught.value.fault
    if fault in ("other sizes", "not gated"):  # beside a file that was named it means nothing
        assert detect(path).encoders[0].spec == p.SMALL_T5


def test_an_override_that_concerns_no_encoder_is_refused(tmp_path):
    path = p.write(tmp_path / "x.safetensors", p.t5_canonical())
    with pytest.raises(FileError, match="no CLIP, which alone"):
        detect(path, activation="gelu")
    with pytest.raises(FileError, match="no CLIP, which alone"):
        detect(path, heads=4)
    both = {**p.t5("text_encoders.t5xxl.transformer."), **p.canonical()}
    found = {e.spec.activation for e in detect(p.write(path, both), activation="gelu").encoders}
    assert found == {"gelu", "gelu_tanh"}


def test_more_buckets_than_distances_need_a_config(tmp_path):
    """Half of the buckets of each direction is for one distance each, the rest for those beyond."""
    spec = replace(p.SMALL_T5, buckets=512)
    path = p.write(tmp_path / "model.safetensors", p.t5_canonical(spec))
    with pytest.raises(FileError, match=r"512 buckets, too many .* up to 128; .*config\.json too"):
        detect(path)
    (tmp_path / "config.json").write_text(
        json.dumps(config_of(spec, relative_attention_max_distance=129))
    )
    assert detect(tmp_path).encoders[0].spec == replace(spec, max_distance=129)


def test_umt5s_config_is_gated_unless_it_says_otherwise(tmp_path):
    p.write(tmp_path / "model.safetensors", p.t5_canonical(UMT5))
    config = config_of(UMT5)
    del config["feed_forward_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert detect(tmp_path).encoders[0].spec == UMT5


def test_what_is_asked_of_a_clip_does_not_change_a_t5(tmp_path):
    both = {**p.hugging_face(p.canonical()), **p.t5("t5xxl.")}
    path = p.write(tmp_path / "x.safetensors", both)
    by_name = {w.name: w.spec for w in detect(path, activation="quick_gelu", heads=1).encoders}
    assert by_name["t5xxl"] == p.SMALL_T5
    assert (by_name["clip"].activation, by_name["clip"].heads) == ("quick_gelu", 1)
