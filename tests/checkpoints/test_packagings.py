# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The same weights in every packaging are the same encoder, tensor by tensor and by fingerprint."""

import json

import packagings as p
import pytest
import torch
from octavo.checkpoints import detect, fingerprint, open_weights
from octavo.encoders.clip import POSITIONS, PROJECTION

FACTS = (p.SMALL.layers, p.SMALL.width, p.SMALL.feed_forward, p.SMALL.heads, p.SMALL.positions)


def assert_same(weights, expected, *, projected=True):
    spec = weights.spec
    assert (spec.layers, spec.width, spec.feed_forward, spec.heads, spec.positions) == FACTS
    names = [n for n in expected if projected or n != PROJECTION]
    assert set(weights.names()) == set(names)
    assert weights.names()[: len(spec.tensors())] == list(spec.tensors())
    assert weights.projection_shape == ((64, 128) if projected else None)
    for name in names:
        read = weights.read(name)
        assert read.dtype == expected[name].dtype
        assert torch.equal(read, expected[name]), name


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = p.write(tmp_path_factory.mktemp("reference") / "x.safetensors", p.canonical())
    return fingerprint(detect(path).encoders[0])


@pytest.mark.parametrize("packaging", p.ONE_ENCODER)
def test_every_packaging_gives_the_same_encoder(packaging, tmp_path, reference):
    tensors = p.canonical()
    path = p.write(tmp_path / "x.safetensors", p.ONE_ENCODER[packaging](tensors))
    detected = detect(path)
    weights = next(w for w in detected.encoders if w.name != "t5xxl")
    assert len(detected.encoders) == (2 if "T5" in packaging else 1)
    projected = not packaging.startswith("SD1.5")
    assert_same(weights, tensors, projected=projected)
    found = fingerprint(weights)
    assert found.body == reference.body
    assert found.projection == (reference.projection if projected else None)
    assert (weights.dtype, detected.is_octavo) == ("fp16", False)
    assert not detected.unsupported and not weights.quantized and not weights.scales


@pytest.mark.parametrize("layout", [p.hugging_face, p.openai])
@pytest.mark.parametrize(
    ("container", "suffix"),
    [
        ("zip", ".pt"),
        ("legacy", ".bin"),
        ("nested", ".ckpt"),
        ("lightning", ".ckpt"),
        ("twice nested", ".pth"),
        ("parameters", ".pt"),
        ("safetensors in disguise", ".ckpt"),
    ],
)
def test_torch_files(container, suffix, layout, tmp_path, reference):
    tensors = p.canonical()
    state = layout(tensors)
    path = tmp_path / ("x" + suffix)
    if container == "zip":
        torch.save(state, path)
    elif container == "legacy":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif container == "nested":
        torch.save({"state_dict": state, "epoch": 3, "step": torch.tensor(1)}, path)
    elif container == "lightning":
        write_lightning(path, state)
    elif container == "twice nested":
        torch.save({"model": {"state_dict": state}}, path)
    elif container == "parameters":
        torch.save({k: torch.nn.Parameter(v) for k, v in state.items()}, path)
    else:
        p.write(path, state)
    (weights,) = detect(path).encoders
    assert_same(weights, tensors)
    assert fingerprint(weights) == reference
    weights.file.close()
    assert torch.equal(weights.read(POSITIONS), tensors[POSITIONS])  # opens again


def write_lightning(path, state):
    """As SD1.x checkpoints are: a class and numpy scalars beside the tensors."""
    import sys
    import types

    import numpy as np

    name = "pytorch_lightning.callbacks.model_checkpoint"
    module = types.ModuleType(name)
    module.ModelCheckpoint = type("ModelCheckpoint", (), {"__module__": name})
    parts = name.split(".")
    packages = [".".join(parts[: i + 1]) for i in range(len(parts))]
    try:
        for package in packages:
            sys.modules[package] = module
        callbacks = {module.ModelCheckpoint: {"best_model_score": np.float64(0.1)}}
        torch.save({"state_dict": state, "callbacks": callbacks}, path)
    finally:
        for package in packages:
            del sys.modules[package]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [p.hugging_face, p.openai])
def test_the_dtype_does_not_change_the_fingerprint(dtype, layout, tmp_path):
    exact = p.canonical(dtype=torch.bfloat16)  # small enough a mantissa for all three
    exact = {name: t.to(torch.float16).to(torch.bfloat16) for name, t in exact.items()}
    wide = p.write(tmp_path / "wide.safetensors", {n: t.float() for n, t in exact.items()})
    path = p.write(tmp_path / "x.safetensors", layout({n: t.to(dtype) for n, t in exact.items()}))
    (weights,) = detect(path).encoders
    assert fingerprint(weights) == fingerprint(detect(wide).encoders[0])
    expected = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    assert weights.dtype == expected[dtype]


@pytest.mark.parametrize("layout", [p.hugging_face, p.openai])
@pytest.mark.parametrize("parts", [1, 2])
def test_long_clip(layout, parts, tmp_path):
    tensors = p.canonical(p.LONG)
    state = {name: t.clone() for name, t in layout(tensors).items()}
    if parts == 2:  # LongCLIP's own files: rows 0..19 of one table, 20.. of the other
        name = next(n for n in state if "position" in n)
        more = name.replace("embedding.weight", "embedding_res.weight")
        more = more if more != name else name + "_res"
        state[more] = state[name].clone()
        state[more][:20] = 7
        state[name][20:] = 9
    (weights,) = detect(p.write(tmp_path / "x.safetensors", state)).encoders
    assert weights.spec.positions == 248
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name), tensor), name
    plain = detect(p.write(tmp_path / "plain.safetensors", tensors)).encoders[0]
    assert fingerprint(weights) == fingerprint(plain)


def shard(folder, state, *, kind, name="model"):
    items = list(state.items())
    half = len(items) // 2
    weight_map = {}
    for i, part in enumerate((items[:half], items[half:])):
        suffix = "safetensors" if kind == "safetensors" else "bin"
        file = f"{name}-{i + 1:05}-of-00002.{suffix}"
        if kind == "safetensors":
            p.write(folder / file, dict(part))
        else:
            torch.save(dict(part), folder / file)
        weight_map |= dict.fromkeys(dict(part), file)
    suffix = "safetensors" if kind == "safetensors" else "bin"
    index = folder / f"{name}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("layout", [p.hugging_face, p.openai])
def test_shards(kind, layout, tmp_path, reference):
    tensors = p.canonical()
    name = "model" if kind == "safetensors" else "pytorch_model"
    index = shard(tmp_path, layout(tensors), kind=kind, name=name)
    for path in (index, tmp_path):
        (weights,) = detect(path).encoders
        assert_same(weights, tensors)
        assert fingerprint(weights) == reference
        assert len(weights.file.identities) == 3


SEVERAL = {
    "SDXL": (
        lambda small, larger: {
            **p.unet(),
            **p.hugging_face(small, "conditioner.embedders.0.transformer.text_model.", ""),
            **p.openai(larger, "conditioner.embedders.1.model."),
        },
        {"clip": None, "clip_2": (64, 192)},
    ),
    "SD3": (
        lambda small, larger: (
            {
                f"text_encoders.{encoder}.{name}": tensor
                for encoder, tensors in (("clip_l", small), ("clip_g", larger))
                for name, tensor in p.hugging_face(
                    tensors, "transformer.text_model.", "transformer." + PROJECTION
                ).items()
            }
            | p.t5("text_encoders.t5xxl.transformer.")
        ),
        {"clip_g": (64, 192), "clip_l": (64, 128), "t5xxl": None},
    ),
    "two of one name": (
        lambda small, larger: {
            **p.hugging_face(small, "a.clip_l.text_model.", "a.clip_l." + PROJECTION),
            **p.hugging_face(larger, "b.clip_l.text_model.", "b.clip_l." + PROJECTION),
        },
        {"clip_l": (64, 128), "clip_l_2": (64, 192)},
    ),
}


@pytest.mark.parametrize("packaging", SEVERAL)
def test_several_encoders_in_one_file(packaging, tmp_path):
    assemble, expected = SEVERAL[packaging]
    small, larger = p.canonical(seed=1), p.canonical(p.LARGER, seed=2)
    detected = detect(p.write(tmp_path / "x.safetensors", assemble(small, larger)))
    assert {w.name: w.projection_shape for w in detected.encoders} == expected
    for weights in detected.encoders:
        tensors = {64: p.t5_canonical(), 128: small, 192: larger}[weights.spec.width]
        for name in weights.names():
            assert torch.equal(weights.read(name), tensors[name])
    assert len({fingerprint(w).body for w in detected.encoders}) == len(expected)


def config_of(spec, **more):
    return {
        "model_type": "clip_text_model",
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "hidden_act": "gelu",
        **more,
    }


def test_a_pipeline_folder(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    small, larger = p.canonical(seed=1), p.canonical(p.LARGER, seed=2)
    contents = {"text_encoder": small, "text_encoder_2": larger, "text_encoder_3": p.t5("")}
    for name, tensors in contents.items():
        (tmp_path / name).mkdir()
        p.write(tmp_path / name / "model.fp16.safetensors", tensors)
    (tmp_path / "unet").mkdir()
    for name, spec, act in (("", p.SMALL, "gelu"), ("_2", p.LARGER, "quick_gelu")):
        config = config_of(spec, hidden_act=act)
        (tmp_path / f"text_encoder{name}" / "config.json").write_text(json.dumps(config))
    detected = detect(tmp_path)
    assert [w.name for w in detected.encoders] == ["clip", "clip_2", "t5"]
    assert [w.spec.activation for w in detected.encoders] == ["gelu", "quick_gelu", "gelu_tanh"]
    assert [w.prefix for w in detected.encoders] == [
        "text_encoder/text_model.",
        "text_encoder_2/text_model.",
        "text_encoder_3/",
    ]
    assert not detected.unsupported
    for weights, tensors in zip(detected.encoders, contents.values(), strict=True):
        assert all(torch.equal(weights.read(n), tensors[n]) for n in weights.names())


@pytest.mark.parametrize("kind", ["CLIPTextModel", "CLIPTextModelWithProjection", "CLIPModel"])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_transformers_saves(kind, sharded, tmp_path):
    import transformers

    text = {
        **config_of(p.SMALL, hidden_act="quick_gelu", layer_norm_eps=1e-6),
        **{"vocab_size": 1000, "intermediate_size": 256, "projection_dim": 64},
        **{"bos_token_id": 998, "eos_token_id": 999},
    }
    torch.manual_seed(0)
    if kind == "CLIPModel":
        vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 1, "image_size": 32, "patch_size": 16}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    else:
        config = transformers.CLIPTextConfig(**text)
    model = getattr(transformers, kind)(config)
    model.save_pretrained(tmp_path, max_shard_size="400KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    state = model.state_dict()
    for path in (tmp_path, tmp_path / f"model.safetensors{'.index.json' if sharded else ''}"):
        (weights,) = detect(path).encoders
        assert weights.spec == p.SMALL.__class__(
            2, 128, 256, 2, 77, 1000, "quick_gelu", layer_norm_eps=1e-6
        )
        for name in weights.names():
            saved = state[name] if name in state else state[name.removeprefix("text_model.")]
            assert torch.equal(weights.read(name), saved)
        assert weights.projection_shape == (None if kind == "CLIPTextModel" else (64, 128))


def test_reading_maps_the_file(tmp_path):
    path = p.write(tmp_path / "x.safetensors", p.openai(p.canonical()))
    with open_weights(path) as file:
        (weights,) = detect(file).encoders
        fused = file.read("transformer.resblocks.0.attn.in_proj_weight")
        k = weights.read("text_model.encoder.layers.0.self_attn.k_proj.weight")
        size = fused.untyped_storage().nbytes()
        assert k.untyped_storage().nbytes() == size  # a view of the file, not a copy of the rows
        assert weights.sources(PROJECTION) == ("text_projection",)
        assert file.config is None
