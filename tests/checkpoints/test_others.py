# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What is not a CLIP text encoder in 16 or 32 bit is named, and never taken for one."""

import packagings as p
import pytest
import torch
from octavo.checkpoints import detect, fingerprint
from octavo.encoders.clip import PROJECTION
from octavo.errors import FileError, UnsupportedEncoder


def llm(prefix, *more):
    names = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", *more]
    named = {f"{prefix}layers.{i}.{n}.weight": torch.ones(8, 8) for i in range(3) for n in names}
    return named | {prefix + "embed_tokens.weight": torch.ones(20, 8)}


def bert(prefix, vocabulary=21128):
    attention = prefix + "encoder.layer.0.attention.self."
    return {
        prefix + "embeddings.word_embeddings.weight": torch.ones(vocabulary, 1),
        **{f"{attention}{x}.weight": torch.ones(8, 8) for x in ("query", "key", "value")},
    }


def clip(**more):
    return {**p.hugging_face(p.canonical()), **more}


def openai(**more):
    return {**p.openai(p.canonical()), **more}


ONE = torch.ones(1)
UNSUPPORTED = {
    "T5": (p.t5(""), "holds a T5 encoder of 2 layers, which"),
    "mT5": (p.t5("", vocabulary=250112), "an mT5 encoder of 2 layers"),
    "mT5, short": (p.t5("", vocabulary=250100), "an mT5 encoder"),
    "umT5": (p.t5("umt5xxl.transformer.", bias_per_layer=True), "a umT5 encoder"),
    "BERT": (bert("bert."), "a BERT encoder of 1 layer at 'bert.'"),
    "Chinese-CLIP": ({**bert("text_model."), **p.image_tower()}, "a BERT encoder"),
    "AltCLIP": ({**bert("text_model.roberta.", 250002), **p.image_tower()}, "an XLM-RoBERTa"),
    "Llama": (llm("model."), "a language model of the Llama or Mistral type of 3 layers"),
    "Qwen3": (llm("model.", "self_attn.q_norm"), "of the Qwen type"),
    "Qwen2.5 in ComfyUI": (
        {
            **llm("text_encoders.qwen25_7b.transformer.model."),
            "text_encoders.qwen25_7b.transformer.model.layers.0.self_attn.q_proj.bias": ONE,
        },
        "of the Qwen type of 3 layers at 'text_encoders.qwen25_7b.transformer.model.'",
    ),
    "Gemma": (llm("", "pre_feedforward_layernorm", "self_attn.q_norm"), "of the Gemma type"),
    "ChatGLM": (
        {
            f"transformer.encoder.layers.0.{name}.weight": torch.ones(8, 8)
            for name in ("input_layernorm", "self_attention.query_key_value")
        },
        "of the ChatGLM type",
    ),
    "SigLIP": (
        clip(**{"text_model.head.weight": torch.ones(8, 8), "logit_bias": ONE}),
        "a SigLIP text encoder at 'text_model.', whose attention is not causal",
    ),
    "SigLIP in OpenCLIP": (
        {**p.openai(p.canonical(), "text."), "logit_bias": ONE},
        "a SigLIP text encoder at 'text.'",
    ),
    "CoCa": (openai(cls_emb=ONE), "a CoCa text encoder"),
    "projection with a bias": (
        clip(**{"text_projection.bias": torch.ones(64)}),
        "a text encoder at 'text_model.' whose projection has a bias",
    ),
    "image tower": (p.image_tower(), "an image tower at 'vision_model.'"),
    "image tower, OpenAI": (p.openai_image_tower(), "an image tower at 'visual.'"),
    "image tower, flat": (p.image_tower(""), "holds an image tower, which"),
    "diffusion model": (p.unet(), "a diffusion model without a text encoder"),
    "FLUX transformer": (
        {"double_blocks.0.img_attn.qkv.weight": ONE},
        "a diffusion model without a text encoder",
    ),
    "LoRA": (
        {"lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight": ONE},
        "a LoRA",
    ),
    "LoRA of PEFT": (
        {"text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight": ONE},
        "a LoRA",
    ),
    "BART": (
        {
            "model.encoder.layers.0.self_attn.q_proj.weight": torch.ones(8, 8),
            "model.encoder.embed_tokens.weight": torch.ones(8, 8),
        },
        "no text encoder that Octavo knows (its first tensors are 'model.encoder.embed_tokens",
    ),
    "something": ({"weight": ONE}, "no text encoder that Octavo knows"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_named_and_refused(kind, tmp_path):
    tensors, message = UNSUPPORTED[kind]
    path = p.write(tmp_path / "x.safetensors", tensors)
    with pytest.raises(UnsupportedEncoder) as caught:
        detect(path)
    assert message in str(caught.value)
    assert caught.value.path == str(path) and caught.value.remedy.startswith("give a file with")


@pytest.mark.parametrize("kind", [k for k in UNSUPPORTED if "image" not in k])
def test_left_alone_beside_a_clip(kind, tmp_path):
    tensors, message = UNSUPPORTED[kind]
    moved = {"other." + name: tensor for name, tensor in tensors.items()}
    path = p.write(tmp_path / "x.safetensors", {**moved, **p.openai(p.canonical(), "clip_l.")})
    detected = detect(path)
    assert [w.name for w in detected.encoders] == ["clip_l"]
    silent = message.startswith("no text") or "diffusion" in message or "LoRA" in message
    assert len(detected.unsupported) == (0 if silent else 1)
    assert all("is left as it is: Octavo serves CLIP" in x for x in detected.unsupported)


def fp8(tensors, **more):
    cast = {
        n: t.to(torch.float8_e4m3fn) if "_proj." in n and t.dim() == 2 else t
        for n, t in tensors.items()
    }
    return {**cast, **more}


BLOCK = "text_model.encoder.layers.0.mlp.fc1."
QUANTIZED = {
    "plain FP8": (fp8(clip()), "stored as FP8"),
    "FP8 in OpenAI's names": (fp8(openai()), "stored as FP8"),
    "legacy scaled FP8": (
        fp8(clip(), **{BLOCK + "scale_weight": ONE, "scaled_fp8": ONE}),
        "stored as FP8 and scale_weight",
    ),
    "comfy_quant": (
        fp8(clip(), **{BLOCK + "weight_scale": ONE, BLOCK + "comfy_quant": ONE.to(torch.uint8)}),
        "stored as FP8, comfy_quant and weight_scale",
    ),
    "int8": (clip(**{BLOCK + "weight": torch.ones(256, 128).to(torch.int8)}), "stored as I8"),
    "nvfp4": (
        clip(**{BLOCK + "weight": torch.ones(256, 64).to(torch.uint8)}),
        "stored as U8",
    ),
    "bitsandbytes": (
        clip(**{BLOCK + "weight.quant_state.bitsandbytes__nf4": ONE.to(torch.uint8)}),
        "stored as bitsandbytes__nf4",
    ),
    "double precision": (clip(**{BLOCK + "bias": torch.ones(256).double()}), "stored as F64"),
    "FP8 projection": (
        clip(**{PROJECTION: torch.ones(64, 128).to(torch.float8_e5m2)}),
        "stored as FP8",
    ),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_clip_is_refused_by_name(kind, tmp_path):
    tensors, message = QUANTIZED[kind]
    with pytest.raises(UnsupportedEncoder) as caught:
        detect(p.write(tmp_path / "x.safetensors", tensors))
    assert message in caught.value.fault
    assert caught.value.remedy == "give the fp16, bf16 or fp32 file it was made from"


def test_quantized_t5_does_not_matter_to_clip(tmp_path):
    t5 = p.t5("t5xxl.transformer.")
    query = "t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q."
    t5 |= {
        query + "weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        query + "weight_scale": ONE,
        "t5xxl.transformer.scaled_fp8": ONE,
    }
    path = p.write(tmp_path / "x.safetensors", {**t5, **p.hugging_face(p.canonical(), "")})
    plain = p.write(tmp_path / "plain.safetensors", p.canonical())
    (weights,) = detect(path).encoders
    assert weights.scales == []
    assert fingerprint(weights) == fingerprint(detect(plain).encoders[0])


def test_a_checkpoint_of_octavos_own(tmp_path):
    tensors = p.canonical()
    weight = tensors[BLOCK + "weight"]
    scale = weight.float().abs().max() / 448
    tensors[BLOCK + "weight"] = (weight.float() / scale).to(torch.float8_e4m3fn)
    more = {
        BLOCK + "weight_scale": scale,
        BLOCK + "input_scale": torch.tensor(0.5),
        BLOCK + "comfy_quant": torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8),
    }

    def written(name, more, metadata):
        return detect(p.write(tmp_path / name, tensors | more, metadata))

    detected = written("a.safetensors", more, {"octavo": "{}"})
    (weights,) = detected.encoders
    assert detected.is_octavo and weights.dtype == "fp8"
    assert weights.read(BLOCK + "weight").dtype == torch.float8_e4m3fn
    assert weights.scales == sorted(more)
    other = written(
        "b.safetensors", more | {BLOCK + "input_scale": torch.tensor(0.25)}, {"octavo": "{}"}
    )
    assert fingerprint(weights) == fingerprint(weights)
    assert fingerprint(weights) != fingerprint(other.encoders[0])  # scales are content
    with pytest.raises(UnsupportedEncoder):
        written("c.safetensors", more, {"other": "{}"})


def test_two_layouts_under_one_prefix(tmp_path):
    both = {**p.openai(p.canonical()), **p.hugging_face(p.canonical(), "")}
    with pytest.raises(FileError, match="two text encoders under the prefix ''"):
        detect(p.write(tmp_path / "x.safetensors", both))
