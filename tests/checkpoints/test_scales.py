# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 files as they are: their own codes and scales, exactly, or one clear sentence."""

import json
import subprocess
import sys

import fp8_files as f
import packagings as p
import pytest
import torch
from octavo.checkpoints import detect, fingerprint
from octavo.encoders.clip import PROJECTION
from octavo.encoders.t5 import TOKENS
from octavo.errors import FileError, UnsupportedEncoder

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
T5 = (p.t5_canonical, p.SMALL_T5)
CLIP = (p.canonical, p.SMALL)
T5_PREFIX = "text_encoders.t5xxl.transformer."
QUERY = "encoder.block.0.layer.0.SelfAttention.q"
OUT = "encoder.block.1.layer.0.SelfAttention.o"
BIAS_TABLE = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
NORM = "encoder.final_layer_norm"
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": []},
}


def codes_of(kind, **options):
    tensors, spec = kind[0](), kind[1]
    return f.coded(tensors, spec.linears(), **options)


def written(path, name, c, prefix=""):
    """The file of one format; ModelOpt's is a folder."""
    tensors = p.prefixed(f.FORMATS[name](c), prefix)
    if name == "ModelOpt":
        path.mkdir()
        p.write(path / "model.safetensors", tensors)
        (path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
        return path
    metadata = f.metadata(c, prefix) if name == "metadata" else None
    return p.write(path / "x.safetensors" if path.is_dir() else path, tensors, metadata)


def assert_own(weights, c, *, plain=False):
    """The codes bit by bit, the scales, and the values by the formula."""
    assert weights.dtype == "fp8" and list(weights.quantized) == list(weights.spec.linears())
    for name, linear in weights.quantized.items():
        codes = c.codes[name]
        scale = None if plain else c.weight_scales[name]
        assert linear.shape == weights.spec.linears()[name] == tuple(codes.shape)
        for found in (linear.codes(), weights.read_codes(name), weights.stored(name + ".weight")):
            assert found.dtype == E4M3
            assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
        for found, expected in (
            (linear.weight_scale, scale),
            (linear.input_scale, c.input_scales.get(name)),
        ):
            if expected is None:
                assert found is None
            else:
                assert (found.dtype, found.shape, found.item()) == (torch.float32, (), expected)
        read = weights.read(name + ".weight")
        assert read.dtype == torch.float32
        assert torch.equal(read, f.decoded(codes, 1.0 if plain else scale))
    for name, tensor in c.rest.items():
        assert torch.equal(weights.read(name), tensor), name


@pytest.mark.parametrize("kind", [T5, CLIP], ids=["T5", "CLIP"])
@pytest.mark.parametrize("inputs", [True, False], ids=["inputs", "weights"])
@pytest.mark.parametrize("name", f.FORMATS)
def test_each_format_gives_its_codes_and_scales(name, inputs, kind, tmp_path):
    c = codes_of(kind, inputs=inputs)
    (weights,) = detect(written(tmp_path / "x", name, c)).encoders
    assert_own(weights, c)
    assert not any(q.full_precision for q in weights.quantized.values())
    assert fingerprint(weights) == reference(tmp_path, c)


def reference(folder, c):
    """The digest of the same codes and scales as a `comfy_quant` file."""
    path = p.write(folder / "reference.safetensors", f.comfy_quant(c))
    return fingerprint(detect(path).encoders[0])


@pytest.mark.parametrize("name", ["legacy", "comfy_quant", "metadata"])
def test_inside_a_checkpoint(name, tmp_path):
    c = codes_of(T5)
    sd3 = {
        **p.prefixed(f.FORMATS[name](c), T5_PREFIX),
        **p.hugging_face(p.canonical(), "text_encoders.clip_l.transformer.text_model.", ""),
        "model.diffusion_model.scaled_fp8": torch.zeros(2),  # the diffusion model's own affair
        "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.scale_weight": torch.ones(3),
    }
    path = p.write(
        tmp_path / "sd3.safetensors", sd3, f.metadata(c, T5_PREFIX) if name == "metadata" else None
    )
    clip, t5 = detect(path).encoders
    assert (clip.name, clip.dtype, dict(clip.quantized)) == ("clip_l", "fp16", {})
    assert t5.name == "t5xxl"
    assert_own(t5, c)
    assert not any(q.full_precision for q in t5.quantized.values())
    assert fingerprint(t5) == reference(tmp_path, c)


@pytest.mark.parametrize("kind", [T5, CLIP], ids=["T5", "CLIP"])
def test_plain_fp8(kind, tmp_path):
    """Everything is E4M3, tables and norms too; the codes are the values."""
    tensors, spec = kind[0](), kind[1]
    stored = {n: t.to(E4M3) for n, t in tensors.items()}
    (weights,) = detect(p.write(tmp_path / "x.safetensors", stored)).encoders
    c = f.Codes({n: stored[n + ".weight"] for n in spec.linears()}, {}, {}, {})
    assert_own(weights, c, plain=True)
    for name in weights.names():
        if name.removesuffix(".weight") not in spec.linears():
            assert weights.read(name).dtype == torch.float16
            assert torch.equal(weights.read(name).float(), f.decoded(stored[name]))
    scaled = f.Codes(c.codes, dict.fromkeys(c.codes, 1.0), {}, weights_of(weights, spec))
    body = reference(tmp_path, scaled).body
    assert fingerprint(weights).body != body  # other tables: their codes are hashed as such
    half = p.write(tmp_path / "half.safetensors", {n: t.half() for n, t in stored.items()})
    assert fingerprint(weights).body != fingerprint(detect(half).encoders[0]).body


def weights_of(weights, spec):
    kept = [n for n in weights.names() if n.removesuffix(".weight") not in spec.linears()]
    return {n: weights.read(n) for n in kept}


def test_plain_fp8_in_openais_names(tmp_path):
    """q, k and v are rows of one tensor of codes."""
    tensors = p.canonical()
    stored = {
        n: t.to(E4M3) if t.dim() == 2 else t
        for n, t in p.openai(tensors, "", "text_projection").items()
    }
    (weights,) = detect(p.write(tmp_path / "x.safetensors", stored)).encoders
    assert len(weights.quantized) == 12
    for name, linear in weights.quantized.items():
        expected = tensors[name + ".weight"].to(E4M3)
        assert torch.equal(linear.codes().view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(weights.read(name + ".weight"), f.decoded(expected))
    assert torch.equal(weights.read(PROJECTION).float(), f.decoded(tensors[PROJECTION].to(E4M3)))
    fused = weights.quantized["text_model.encoder.layers.0.self_attn.k_proj"].codes()
    assert fused.untyped_storage().nbytes() == 3 * 128 * 128  # a view of the file


@pytest.mark.parametrize("size", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.float32])
@pytest.mark.parametrize("where", ["", T5_PREFIX, "text_encoders.t5xxl."])
def test_the_marker(where, dtype, size, tmp_path):
    """Two elements ask for full precision; nothing else about it changes how a file is read."""
    c = codes_of(T5)
    tensors = p.prefixed(f.legacy(c), T5_PREFIX)
    del tensors[T5_PREFIX + "scaled_fp8"]
    tensors[where + "scaled_fp8"] = torch.zeros(size).to(dtype)
    (weights,) = detect(p.write(tmp_path / "x.safetensors", tensors)).encoders
    assert_own(weights, c)
    assert {q.full_precision for q in weights.quantized.values()} == {size == 2}
    assert (fingerprint(weights) == reference(tmp_path, c)) == (size != 2)


def test_full_precision_in_a_note(tmp_path):
    c = codes_of(T5)
    tensors = f.comfy_quant(c)
    tensors[OUT + ".comfy_quant"] = f.note(format="float8_e4m3fn", full_precision_matrix_mult=True)
    (weights,) = detect(p.write(tmp_path / "x.safetensors", tensors)).encoders
    assert [n for n, q in weights.quantized.items() if q.full_precision] == [OUT]
    assert_own(weights, c)


def test_a_legacy_input_scale_of_one_is_none(tmp_path):
    """ComfyUI's `convert_old_quants` drops it; in a `comfy_quant` file it is a scale."""
    c = codes_of(T5)
    tensors = f.legacy(c)
    tensors[QUERY + ".scale_input"] = torch.tensor(1.0)
    (weights,) = detect(p.write(tmp_path / "x.safetensors", tensors)).encoders
    assert weights.quantized[QUERY].input_scale is None
    assert weights.quantized[OUT].input_scale.item() == c.input_scales[OUT]
    tensors = f.comfy_quant(c)
    tensors[QUERY + ".input_scale"] = torch.tensor(1.0)
    (weights,) = detect(p.write(tmp_path / "y.safetensors", tensors)).encoders
    assert weights.quantized[QUERY].input_scale.item() == 1


def test_some_linears_in_16_bit(tmp_path):
    """Whoever made the file left some as they were: each is what it is."""
    tensors = p.t5_canonical()
    c = f.coded(tensors, [n for n in p.SMALL_T5.linears() if "block.0." not in n])
    (weights,) = detect(p.write(tmp_path / "x.safetensors", f.comfy_quant(c))).encoders
    assert weights.dtype == "fp8" and weights.quantized.keys() == c.codes.keys()
    assert torch.equal(weights.read(QUERY + ".weight"), tensors[QUERY + ".weight"])


@pytest.mark.parametrize("name", ["shared", BIAS_TABLE])
def test_a_table_with_a_scale(name, tmp_path):
    """ComfyUI's embeddings may be FP8 too; they are no linears, and are read by value."""
    c = codes_of(T5)
    tensors = f.comfy_quant(c)
    codes = (tensors[name + ".weight"].float() / 0.03).to(E4M3)
    tensors |= {name + ".weight": codes, name + ".weight_scale": torch.tensor(0.03)}
    path = p.write(tmp_path / "x.safetensors", tensors)
    (weights,) = detect(path).encoders
    assert weights.quantized.keys() == c.codes.keys()
    scale = torch.tensor(0.03).item()
    assert torch.equal(weights.read(name + ".weight"), f.decoded(codes, scale))
    bodies = {fingerprint(weights).body, reference(tmp_path, c).body}
    tensors[name + ".weight_scale"] = torch.tensor(0.04)
    bodies.add(fingerprint(detect(p.write(path, tensors)).encoders[0]).body)
    assert len(bodies) == 3


def test_the_second_table_may_be_fp8_with_a_scale_of_its_own(tmp_path):
    c = codes_of(T5)
    second = "encoder.embed_tokens."
    more = {second + "weight": c.rest[TOKENS].to(E4M3), second + "weight_scale": torch.tensor(0.5)}
    (weights,) = detect(p.write(tmp_path / "x.safetensors", {**f.comfy_quant(c), **more})).encoders
    assert_own(weights, c)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_in_another_form_of_one_number(dtype, shape, tmp_path):
    """bf16 and fp16 widen exactly: the file's own number is taken, whatever it was before."""
    c = codes_of(T5)
    tensors = f.comfy_quant(c)
    scale = torch.tensor(0.0123, dtype=dtype).reshape(shape)
    tensors[QUERY + ".weight_scale"] = tensors[OUT + ".input_scale"] = scale
    (weights,) = detect(p.write(tmp_path / "x.safetensors", tensors)).encoders
    found = weights.quantized[QUERY].weight_scale
    assert (found.dtype, found.shape, found.item()) == (torch.float32, (), scale.double().item())
    assert weights.quantized[OUT].input_scale.item() == scale.double().item()
    read = weights.read(QUERY + ".weight")
    assert torch.equal(read, f.decoded(c.codes[QUERY], scale.double().item()))


def test_plain_e5m2_is_16_bit_exactly(tmp_path):
    tensors = {n: t.to(E5M2) for n, t in p.t5_canonical().items()}
    (weights,) = detect(p.write(tmp_path / "x.safetensors", tensors)).encoders
    assert weights.dtype == "fp16" and not weights.quantized and not weights.scales
    half = {n: t.half() for n, t in tensors.items()}
    for name, tensor in half.items():
        assert weights.read(name).dtype == torch.float16
        assert torch.equal(weights.read(name), tensor)
    plain = p.write(tmp_path / "half.safetensors", half)
    assert fingerprint(weights) == fingerprint(detect(plain).encoders[0])


def test_torch_files(tmp_path):
    c = codes_of(T5)
    torch.save(f.legacy(c), tmp_path / "x.pt")
    (weights,) = detect(tmp_path / "x.pt").encoders
    assert_own(weights, c)
    assert fingerprint(weights) == reference(tmp_path, c)


# What ModelOpt and others say in JSON


def folder_of(tmp_path, c, **files):
    p.write(tmp_path / "model.safetensors", f.without_notes(c))
    for name, said in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(said))
    return tmp_path


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}}},
            "stored as modelopt NVFP4, which",
        ),
        (
            {"config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
            "stored as compressed-tensors, which",
        ),
        (
            {"config": {"quantization_config": {"quant_method": "bitsandbytes"}}},
            "stored as bitsandbytes, which",
        ),
        (
            {"config": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8"}}},
            "stored as modelopt W4A8, which",
        ),
    ],
)
def test_another_method_is_refused_by_its_name(files, said, tmp_path):
    with pytest.raises(UnsupportedEncoder, match="which Octavo does not serve") as caught:
        detect(folder_of(tmp_path, codes_of(T5), **files))
    assert said in caught.value.fault


@pytest.mark.parametrize("said", [{}, {"quantization": 3}, []])
def test_an_unreadable_hf_quant_config(said, tmp_path):
    with pytest.raises(FileError, match=r"hf_quant_config\.json: (names no quant|is not valid J)"):
        detect(folder_of(tmp_path, codes_of(T5), hf_quant_config=said))


@pytest.mark.parametrize("beside", [True, False])
def test_a_modelopt_export_without_its_scales(beside, tmp_path):
    """Its config says that there are scales; a plain FP8 file has nobody to say so."""
    c = codes_of(T5)
    p.write(tmp_path / "model.safetensors", unscaled())
    if beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
        with pytest.raises(FileError, match="is FP8 and its scale is missing"):
            detect(tmp_path)
    else:
        assert_own(detect(tmp_path).encoders[0], f.Codes(c.codes, {}, {}, c.rest), plain=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["T5EncoderModel", "CLIPTextModel"])
def test_what_modelopt_exports(kind, tmp_path):
    """Its own export, and its own values: what its quantizers make of the weights."""
    import modelopt.torch.quantization as mtq
    import transformers
    from modelopt.torch.export import export_hf_checkpoint

    torch.manual_seed(0)
    if kind == "T5EncoderModel":
        config = transformers.T5Config(
            **{"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2},
            **{"num_heads": 4, "feed_forward_proj": "gated-gelu"},
        )
    else:
        config = transformers.CLIPTextConfig(
            **{"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128},
            **{"num_hidden_layers": 2, "num_attention_heads": 1, "hidden_act": "gelu"},
            **{"bos_token_id": 98, "eos_token_id": 99},
        )
    config.architectures = [kind]
    model = getattr(transformers, kind)(config)
    ids = torch.randint(0, 99, (2, 16))
    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda m: m(ids))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    with torch.no_grad():
        expected = {n: m.weight_quantizer(m.weight).clone() for n, m in linears.items()}
        # As its export does, q, k and v first share the largest of their input ranges.
        ranges = {n: m.input_quantizer.amax.item() for n, m in linears.items()}
    export_hf_checkpoint(model, export_dir=tmp_path)
    (weights,) = detect(tmp_path).encoders
    assert weights.quantized.keys() == weights.spec.linears().keys()
    for name, linear in weights.quantized.items():
        (theirs,) = [n for n in linears if name.endswith(n)]
        read = weights.read(name + ".weight")
        # ModelOpt multiplies by the reciprocal of 448 / amax: an FP32 rounding away.
        torch.testing.assert_close(read, expected[theirs], rtol=1e-6, atol=0)
        assert linear.input_scale.item() == pytest.approx(ranges[theirs] / 448, rel=1e-6)


# Bad input


def comfy(**changes):
    """A comfy_quant file with changes by `linear__kind`; None deletes."""
    tensors = f.comfy_quant(codes_of(T5))
    for name, value in changes.items():
        linear, kind = name.split("__")
        key = f"{ {'q': QUERY, 'o': OUT, 'norm': NORM, 'table': BIAS_TABLE}[linear] }.{kind}"
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    return tensors


def half_scaled(make):
    tensors = make(codes_of(T5))
    gone = ("weight_scale", "scale_weight", "input_scale", "scale_input", "comfy_quant")
    return {
        n: t for n, t in tensors.items() if not ("block.1." in n and n.rpartition(".")[2] in gone)
    }


def unscaled(**more):
    tensors = {n + ".weight": t for n, t in codes_of(T5).codes.items()}
    return {**codes_of(T5).rest, **tensors, **more}


ONE = torch.tensor(1.0)
PLAIN_Q = p.t5_canonical()[QUERY + ".weight"]
NO_NUMBER = "not a positive, finite and normal number"
BAD = {
    "scale missing": (comfy(q__weight_scale=None), f"'{QUERY}.weight' is FP8 and its scale is mis"),
    "scales for half, legacy": (
        half_scaled(f.legacy),
        "block.1.layer.0.SelfAttention.k.weight' is",
    ),
    "scales for half, comfy_quant": (half_scaled(f.comfy_quant), "FP8 and its scale is missing"),
    "scales for half, ModelOpt": (half_scaled(f.without_notes), "FP8 and its scale is missing"),
    "marker and no scales": (unscaled(scaled_fp8=torch.zeros(1)), "FP8 and its scale is missing"),
    "notes and no scales": (
        unscaled(**{QUERY + ".comfy_quant": f.note(format="float8_e4m3fn")}),
        "FP8 and its scale is missing",
    ),
    "one input scale alone": (
        unscaled(**{QUERY + ".input_scale": ONE}),
        "FP8 and its scale is missing",
    ),
    "table in FP8 without": (
        comfy(table__weight=torch.ones(32, 4).to(E4M3)),
        "bias.weight' is FP8",
    ),
    "E5M2 among scaled": (comfy(q__weight=PLAIN_Q.to(E5M2)), "FP8 E5M2 with scales"),
    "zero": (comfy(q__weight_scale=ONE * 0), f"q.weight_scale' is 0.0, {NO_NUMBER}"),
    "negative": (comfy(o__weight_scale=-ONE), f"o.weight_scale' is -1.0, {NO_NUMBER}"),
    "NaN": (comfy(q__weight_scale=ONE * torch.nan), f"q.weight_scale' is nan, {NO_NUMBER}"),
    "infinite": (comfy(q__weight_scale=ONE * torch.inf), f"q.weight_scale' is inf, {NO_NUMBER}"),
    "subnormal": (comfy(q__weight_scale=ONE * 1e-40), NO_NUMBER),
    "too large": (comfy(q__weight_scale=ONE * 1e36), NO_NUMBER),
    "input zero": (comfy(q__input_scale=ONE * 0), f"q.input_scale' is 0.0, {NO_NUMBER}"),
    "input NaN": (comfy(q__input_scale=ONE * torch.nan), f"q.input_scale' is nan, {NO_NUMBER}"),
    "bf16 zero": (comfy(q__weight_scale=torch.zeros((), dtype=torch.bfloat16)), NO_NUMBER),
    "double": (comfy(q__weight_scale=ONE.double()), "is F64 [], not one float32 number"),
    "integer": (comfy(q__weight_scale=ONE.int()), "is I32 [], not one float32 number"),
    "empty": (comfy(q__weight_scale=torch.ones(0)), "is F32 [0], not one float32 number"),
    "input per row": (comfy(q__input_scale=torch.ones(48)), "is F32 [48], not one float32 number"),
    "weight per row": (comfy(q__weight_scale=torch.ones(48, 1)), "FP8 with one scale per row"),
    "input for a plain weight": (
        {**p.t5_canonical(), QUERY + ".input_scale": ONE},
        f"'{QUERY}.input_scale' stands beside F16 [48, 64] and not an FP8 matrix",
    ),
    "scale for a plain weight": (
        {**p.t5_canonical(), QUERY + ".scale_weight": ONE},
        "stands beside F16 [48, 64] and not an FP8 matrix",
    ),
    "note for a plain weight": (
        {**p.t5_canonical(), QUERY + ".comfy_quant": f.note(format="float8_e4m3fn")},
        f"'{QUERY}.comfy_quant' stands beside F16 [48, 64] and not",
    ),
    "codes stored as fp16": (comfy(q__weight=PLAIN_Q), "stands beside F16 [48, 64] and not an FP8"),
    "beside a norm": (
        comfy(norm__weight=torch.ones(64).to(E4M3), norm__weight_scale=ONE),
        f"'{NORM}.weight_scale' stands beside F8_E4M3 [64] and not an FP8 matrix",
    ),
    "beside nothing": (
        {**p.t5_canonical(), "encoder.block.0.layer.0.SelfAttention.weight_scale": ONE},
        "SelfAttention.weight_scale' scales nothing that the encoder has",
    ),
    "two of them": (comfy(q__scale_weight=ONE), f"linear '{QUERY}' has two weight scales"),
    "two inputs": (comfy(q__scale_input=ONE), f"linear '{QUERY}' has two input scales"),
    "unknown": (comfy(q__scale=ONE), f"'{QUERY}.scale' is none of a T5 encoder's"),
    "unknown too": (comfy(q__weight_zero_scale=ONE), "weight_zero_scale' is none of a T5 encoder"),
    "of the other kind": (comfy(q__scales=ONE), f"'{QUERY}.scales' is none of a T5 encoder's"),
    "an output scale": (comfy(q__output_scale=ONE), "stored as output_scale"),
    "smoothing": (comfy(q__pre_quant_scale=torch.ones(64)), "stored as pre_quant_scale"),
    "no JSON": (comfy(q__comfy_quant=ONE.to(torch.uint8)), "q.comfy_quant' is not"),
    "no object": (comfy(q__comfy_quant=torch.tensor([34, 34], dtype=torch.uint8)), "not a JSON ob"),
    "no format": (comfy(q__comfy_quant=f.note(x=1)), "q.comfy_quant' names no format"),
    "a note of floats": (comfy(q__comfy_quant=ONE), "comfy_quant' is F32 [], not JSON"),
    "an unknown wish": (
        comfy(q__comfy_quant=f.note(format="float8_e4m3fn", convrot=True)),
        "asks for 'convrot', which Octavo does not know",
    ),
    "a format that writes to the terminal": (
        comfy(q__comfy_quant=f.note(format="a\n\x1b[2J")),
        r"stored as 'a\n\x1b[2J', which",
    ),
    "an unknown format": (comfy(q__comfy_quant=f.note(format="fp6")), "stored as fp6"),
    "NaN among the codes": (
        comfy(q__weight=torch.full((48, 64), torch.nan).to(E4M3)),
        f"tensor '{QUERY}.weight' holds 3072 values that are NaN",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input(fault, tmp_path):
    tensors, said = BAD[fault]
    path = p.write(tmp_path / "x.safetensors", tensors)
    with pytest.raises(FileError) as caught:
        for weights in detect(path).encoders:
            fingerprint(weights)
    assert said in caught.value.fault, caught.value.fault
    error = caught.value
    assert str(error) == f"{error.path}: {error.fault}; {error.remedy}." and "\n" not in str(error)
    torch.save(tensors, tmp_path / "x.pt")  # a pickle of the same says the same
    with pytest.raises(type(error)) as caught:
        for weights in detect(tmp_path / "x.pt").encoders:
            fingerprint(weights)
    assert said in caught.value.fault


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ("{", "metadata _quantization_metadata is not valid JSON"),
        ("3", "metadata _quantization_metadata is not a JSON object"),
        ("{}", "metadata _quantization_metadata names no layers"),
        (json.dumps({"layers": {QUERY: 3}}), f"of '{QUERY}' is not a JSON object"),
        (json.dumps({"layers": {QUERY: {}}}), f"of '{QUERY}' names no format"),
        (json.dumps({"layers": {QUERY: {"format": "nvfp4"}}}), "stored as nvfp4"),
        (json.dumps({"layers": {NORM: {"format": "float8_e4m3fn"}}}), "stands beside F16 [64]"),
    ],
)
def test_bad_metadata(metadata, said, tmp_path):
    tensors = f.without_notes(codes_of(T5))
    path = p.write(tmp_path / "x.safetensors", tensors, {"_quantization_metadata": metadata})
    with pytest.raises(FileError) as caught:
        detect(path)
    assert said in caught.value.fault
    layers = json.dumps({"layers": {"model.diffusion_model.x": {"format": "nvfp4"}}})
    other = p.write(tmp_path / "y.safetensors", tensors, {"_quantization_metadata": layers})
    assert detect(other).encoders  # another model's layers are not ours


@pytest.mark.parametrize("name", ["text_projection.scale", "text_projection.k"])
def test_an_unknown_scale_of_the_projection(name, tmp_path):
    path = p.write(tmp_path / "x.safetensors", {**p.canonical(), name: ONE})
    with pytest.raises(FileError, match="none of a CLIP text encoder's"):
        detect(path)


def test_the_projection_may_be_fp8_with_a_scale(tmp_path):
    tensors = p.canonical()
    codes = (tensors[PROJECTION].float() / 0.001).clamp(-448, 448).to(E4M3)
    tensors |= {PROJECTION: codes, "text_projection.weight_scale": torch.tensor(0.001)}
    (weights,) = detect(p.write(tmp_path / "x.safetensors", tensors)).encoders
    scale = torch.tensor(0.001).item()
    assert torch.equal(weights.read(PROJECTION), f.decoded(codes, scale))
    assert not weights.quantized and weights.scales == ["text_projection.weight_scale"]


# Keys


def test_every_code_and_scale_counts(tmp_path):
    c = codes_of(T5)
    bodies = {reference(tmp_path, c).body}
    for name in (QUERY, OUT):
        one_code = {**c.codes, name: c.codes[name].clone()}
        one_code[name].view(torch.uint8)[-1, -1] ^= 1
        changed = [
            f.Codes(one_code, c.weight_scales, c.input_scales, c.rest),
            f.Codes(c.codes, {**c.weight_scales, name: 0.5}, c.input_scales, c.rest),
            f.Codes(c.codes, c.weight_scales, {**c.input_scales, name: 0.5}, c.rest),
            f.Codes(
                c.codes,
                c.weight_scales,
                {n: v for n, v in c.input_scales.items() if n != name},
                c.rest,
            ),
        ]
        bodies |= {reference(tmp_path, other).body for other in changed}
    assert len(bodies) == 9


def test_dequantized_is_another_encoder(tmp_path):
    """Its weights would be quantized anew, so it must not find the other's engines."""
    c = codes_of(T5)
    values = {n + ".weight": f.decoded(t, c.weight_scales[n]) for n, t in c.codes.items()}
    path = p.write(tmp_path / "x.safetensors", {**c.rest, **values})
    assert fingerprint(detect(path).encoders[0]) != reference(tmp_path, c)


# Laziness


def run(code, *arguments):
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_recognition_imports_no_torch(tmp_path):
    path = p.write(tmp_path / "x.safetensors", f.comfy_quant(codes_of(T5)))
    code = """
import sys
from octavo.checkpoints import detect
(weights,) = detect(sys.argv[1]).encoders
heavy = [m for m in ("torch", "numpy", "safetensors") if m in sys.modules]
print(weights.name, weights.dtype, len(weights.quantized), heavy)
"""
    assert run(code, path).strip() == "t5 fp8 21 []"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("plain", [True, False])
def test_hashing_needs_little_memory(plain, tmp_path):
    """A table of umT5's length: 0.13 GB of codes, 0.52 GB if it were widened at once."""
    spec = p.T5Spec(1, 512, 1024, 8, 64, 256384)
    path = p.write_sparse(tmp_path / "x.safetensors", spec.tensors(), "F8_E4M3" if plain else "F16")
    code = """
import re, sys
from octavo.checkpoints import detect, fingerprint
import torch
def private(*_):
    status = open("/proc/self/status").read()
    peaks.append(int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]))
peaks = []
private()
fingerprint(detect(sys.argv[1]).encoders[0], private)
print((max(peaks) - peaks[0]) * 1024)
"""
    assert int(run(code, path)) < 120_000_000
