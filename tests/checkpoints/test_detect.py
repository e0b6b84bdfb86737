# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Names, sizes and rules at full size, by headers alone; what a config may and may not say."""

import json
import subprocess
import sys
import time

import packagings as p
import pytest
from octavo import seeded
from octavo.checkpoints import detect
from octavo.encoders.clip import PROJECTION, ClipSpec
from octavo.errors import FileError, OctavoError

CLIP_H_SD2 = ClipSpec(23, 1024, 4096, 16, 77, 49408, "gelu")
FULL_SIZE = {
    "clip_l": seeded.CLIP_L,
    "clip_h": seeded.CLIP_H,
    "clip_g": seeded.CLIP_G,
    "long_clip_l": seeded.LONG_CLIP_L,
}


def hf_shapes(spec, prefix="text_model.", projection=PROJECTION, dtype="F16"):
    shapes = {prefix + n.removeprefix("text_model."): s for n, s in spec.tensors().items()}
    return shapes | ({projection: (spec.width, spec.width)} if projection else {})


def openai_shapes(spec, prefix=""):
    d, f = spec.width, spec.feed_forward
    shapes = {
        "token_embedding.weight": (spec.vocabulary, d),
        "positional_embedding": (spec.positions, d),
        "text_projection": (d, d),
    }
    block = {
        **{"attn.in_proj_weight": (3 * d, d), "attn.in_proj_bias": (3 * d,)},
        **{"attn.out_proj.weight": (d, d), "attn.out_proj.bias": (d,)},
        **{"mlp.c_fc.weight": (f, d), "mlp.c_fc.bias": (f,)},
        **{"mlp.c_proj.weight": (d, f), "mlp.c_proj.bias": (d,)},
    }
    norms = {f"{n}.{x}": (d,) for n in ("ln_1", "ln_2") for x in ("weight", "bias")}
    for i in range(spec.layers):
        for name, shape in (block | norms).items():
            shapes[f"transformer.resblocks.{i}.{name}"] = shape
    shapes |= {"ln_final.weight": (d,), "ln_final.bias": (d,)}
    return {prefix + name: shape for name, shape in shapes.items()}


@pytest.mark.parametrize("family", FULL_SIZE)
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("shapes", [hf_shapes, openai_shapes])
def test_full_size_encoders(family, dtype, shapes, tmp_path):
    spec = FULL_SIZE[family]
    path = p.write_sparse(tmp_path / "x.safetensors", shapes(spec), dtype)
    (weights,) = detect(path).encoders
    assert weights.spec == spec
    assert weights.name == weights.spec.family == family
    assert weights.projection_shape == (spec.width, spec.width)


SINGLE_FILES = {
    "SD1.5": (
        {**hf_shapes(seeded.CLIP_L, "cond_stage_model.transformer.text_model.", "")},
        {"clip_l": seeded.CLIP_L},
    ),
    "SD2": (
        openai_shapes(seeded.CLIP_H, "cond_stage_model.model."),
        {"clip_h": seeded.CLIP_H},
    ),
    "SD2 of ComfyUI": (
        hf_shapes(CLIP_H_SD2, "text_encoders.clip_h.transformer.text_model.", ""),
        {"clip_h": CLIP_H_SD2},
    ),
    "SDXL": (
        {
            **hf_shapes(seeded.CLIP_L, "conditioner.embedders.0.transformer.text_model.", ""),
            **openai_shapes(seeded.CLIP_G, "conditioner.embedders.1.model."),
        },
        {"clip_l": seeded.CLIP_L, "clip_g": seeded.CLIP_G},
    ),
    "SDXL refiner": (
        openai_shapes(seeded.CLIP_G, "conditioner.embedders.0.model."),
        {"clip_g": seeded.CLIP_G},
    ),
    "SD3": (
        {
            **hf_shapes(seeded.CLIP_L, "text_encoders.clip_l.transformer.text_model."),
            **hf_shapes(seeded.CLIP_G, "text_encoders.clip_g.transformer.text_model.", ""),
        },
        {"clip_g": seeded.CLIP_G, "clip_l": seeded.CLIP_L},
    ),
    "FLUX with LongCLIP": (
        hf_shapes(seeded.LONG_CLIP_L, "text_encoders.clip_l.transformer.text_model.", ""),
        {"clip_l": seeded.LONG_CLIP_L},
    ),
    "two of a kind": (
        {
            **hf_shapes(seeded.CLIP_L, "first.text_model.", ""),
            **hf_shapes(seeded.CLIP_L, "second.text_model.", ""),
        },
        {"clip_l": seeded.CLIP_L, "clip_l_2": seeded.CLIP_L},
    ),
}


@pytest.mark.parametrize("kind", SINGLE_FILES)
def test_names_in_single_file_checkpoints(kind, tmp_path):
    shapes, expected = SINGLE_FILES[kind]
    shapes = shapes | {"model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3)}
    start = time.perf_counter()
    detected = detect(p.write_sparse(tmp_path / "x.safetensors", shapes))
    assert time.perf_counter() - start < 2
    assert {w.name: w.spec for w in detected.encoders} == expected
    assert detected.unsupported == ()
    for weights in detected.encoders:
        assert all(n.startswith(weights.prefix) for n in weights.sources(weights.names()[0]))


# Rules and configs


def small(tmp_path, spec=p.SMALL, config=None, name="model.safetensors", kind="config.json"):
    path = p.write_sparse(tmp_path / name, hf_shapes(spec))
    if config is not None:
        (tmp_path / kind).write_text(config if isinstance(config, str) else json.dumps(config))
    return path


HF = {
    "model_type": "clip_text_model",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-6,
}
TEXT_CFG = {"width": 128, "layers": 2, "heads": 4, "norm_kwargs": {"eps": 1e-6}}
OPEN_CLIP = {"model_cfg": {"embed_dim": 64, "quick_gelu": True, "text_cfg": TEXT_CFG}}
CONFIGS = {
    "text model": ("config.json", HF),
    "full model": ("config.json", {"model_type": "clip", "text_config": HF, "vision_config": {}}),
    "full model, old": ("config.json", {"text_config": None, "text_config_dict": HF}),
    "model beside the defaults": (
        "config.json",
        {
            "model_type": "clip",
            "text_config": {k: HF[k] for k in list(HF)[1:4]} | {"layer_norm_eps": 1e-6},
        },
    ),
    "OpenCLIP": ("open_clip_config.json", OPEN_CLIP),
    "defaults left out": (
        "config.json",
        {k: v for k, v in HF.items() if k != "hidden_act"} | {"num_attention_heads": 4},
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_tells_activation_heads_and_eps(kind, tmp_path):
    path = small(tmp_path, config=CONFIGS[kind][1], kind=CONFIGS[kind][0])
    for given in (path, tmp_path):
        spec = detect(given).encoders[0].spec
        assert (spec.activation, spec.heads, spec.layer_norm_eps) == ("quick_gelu", 4, 1e-6)
    spec = detect(path, activation="gelu", heads=1).encoders[0].spec
    assert (spec.activation, spec.heads, spec.layer_norm_eps) == ("gelu", 1, 1e-6)


def test_a_config_counts_only_where_it_is_the_files(tmp_path):
    rule = ("gelu", 2, 1e-5)
    other_name = small(tmp_path, config=HF, name="my_clip.safetensors")
    assert facts(detect(other_name)) == rule
    path = small(tmp_path, config={**HF, "num_hidden_layers": 12})
    assert facts(detect(path)) == rule
    with pytest.raises(FileError, match=r"config.json: says 12 layers of width 128, .* have 2"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "something"}))
    assert facts(detect(tmp_path)) == rule


def facts(detected):
    spec = detected.encoders[0].spec
    return spec.activation, spec.heads, spec.layer_norm_eps


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**HF, "hidden_act": "gelu_pytorch_tanh"}, "names the activation 'gelu_pytorch_tanh'"),
        ({**HF, "model_type": "metaclip_2"}, "'metaclip_2'"),
        ({**HF, "hidden_size": "128"}, "does not describe"),
        ({**HF, "num_attention_heads": 0}, "does not describe"),
        ({**HF, "layer_norm_eps": None}, "does not describe"),
        ({"text_config": [1]}, "does not describe"),
        ({"model_cfg": None}, "does not describe"),
        ({"model_cfg": {"text_cfg": {**TEXT_CFG, "no_causal_mask": True}}}, "not causal"),
        ({"model_cfg": {"text_cfg": {**TEXT_CFG, "pool_type": "last"}}}, "pools by 'last'"),
        (
            {"model_cfg": {"text_cfg": {**TEXT_CFG, "act_kwargs": {"approximate": "tanh"}}}},
            "gelu with",
        ),
        ("{", "not valid JSON"),
        ("[1]", "not an object"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_config_that_cannot_be_followed(config, message, tmp_path):
    path = small(tmp_path, config=config)
    for given in (path, tmp_path):
        with pytest.raises(FileError, match=message) as caught:
            detect(given)
        assert str(caught.value).startswith(str(tmp_path / "config.json"))
        assert "\n" not in str(caught.value)


def test_the_rule_for_activation(tmp_path):
    for width, activation in ((768, "quick_gelu"), (1024, "gelu"), (512, "gelu")):
        spec = ClipSpec(1, width, 64, width // 64, 77, 10, "gelu")
        path = small(tmp_path, spec)
        assert detect(path).encoders[0].spec.activation == activation
        for override in ("gelu", "quick_gelu"):
            assert detect(path, activation=override).encoders[0].spec.activation == override
    with pytest.raises(OctavoError, match="'relu' is not known; use quick_gelu or gelu"):
        detect(path, activation="relu")


def test_the_rule_for_heads(tmp_path):
    path = small(tmp_path, ClipSpec(1, 96, 64, 1, 77, 10, "gelu"))
    with pytest.raises(FileError, match="its width 96 is no multiple of 64"):
        detect(path)
    assert detect(path, heads=3).encoders[0].spec.heads == 3
    for heads in (5, 0, -2):
        with pytest.raises(FileError, match="cannot be split"):
            detect(path, heads=heads)


# Laziness


def run(code, *arguments):
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_recognition_imports_no_torch_and_reads_no_weights(tmp_path):
    path = p.write_sparse(tmp_path / "x.safetensors", hf_shapes(seeded.CLIP_L))
    path.write_bytes(path.read_bytes())  # no longer sparse: reading it would cost its whole size
    assert path.stat().st_size > 240_000_000
    code = r"""
import sys
from octavo.checkpoints import Memo, detect
detected = detect(sys.argv[1])
assert Memo(sys.argv[2]).get(detected.file, detected.encoders[0]) is None
heavy = [m for m in ("torch", "numpy", "safetensors") if m in sys.modules]
print(detected.encoders[0].name, heavy)
import psutil, re
info = psutil.Process().memory_info()
peak = getattr(info, "peak_wset", info.rss)
if sys.platform == "linux":  # not ru_maxrss, which counts the process that forked this one
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
print(peak)
"""
    found, peak = run(code, path, tmp_path).splitlines()
    assert found == "clip_l []"
    assert int(peak) < 80_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_hashing_needs_little_memory(tmp_path):
    path = p.write_sparse(tmp_path / "x.safetensors", hf_shapes(seeded.CLIP_L))
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
