# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What is no CLIP or T5 in a format that is served is named, and never taken for one."""

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


def note(name):
    text = bytearray(b'{"format": "%s"}' % name.encode())
    return torch.frombuffer(text, dtype=torch.uint8)


BLOCK = "text_model.encoder.layers.0.mlp.fc1."
FP8_FC1 = torch.ones(256, 128).to(torch.float8_e4m3fn)
QUANTIZED = {
    "mxfp8": (
        clip(
            **{
                BLOCK + "weight": FP8_FC1,
                BLOCK + "weight_scale": torch.ones(256, 4, dtype=torch.uint8),
            }
        ),
        "stored as mxfp8",
    ),
    "mxfp8, said so": (
        fp8(clip(), **{BLOCK + "comfy_quant": note("mxfp8"), BLOCK + "weight_scale": ONE}),
        "stored as mxfp8",
    ),
    "one scale per row": (
        clip(**{BLOCK + "weight": FP8_FC1, BLOCK + "weight_scale": torch.ones(256, 1)}),
        "stored as FP8 with one scale per row",
    ),
    "one scale per row, flat": (
        clip(**{BLOCK + "weight": FP8_FC1, BLOCK + "scale_weight": torch.ones(256)}),
        "stored as FP8 with one scale per row",
    ),
    "one scale per block": (
        clip(**{BLOCK + "weight": FP8_FC1, BLOCK + "weight_scale": torch.ones(2, 1)}),
        "stored as FP8 with one scale per block",
    ),
    "DeepSeek's FP8": (
        clip(**{BLOCK + "weight": FP8_FC1, BLOCK + "weight_scale_inv": torch.ones(2, 1)}),
        "stored as weight_scale_inv",
    ),
    "E5M2 with scales": (
        clip(**{BLOCK + "weight": FP8_FC1.to(torch.float8_e5m2), BLOCK + "scale_weight": ONE}),
        "stored as FP8 E5M2 with scales",
    ),
    "E5M2, said so": (
        clip(
            **{
                BLOCK + "weight": FP8_FC1.to(torch.float8_e5m2),
                BLOCK + "comfy_quant": note("float8_e5m2"),
            }
        ),
        "stored as float8_e5m2",
    ),
    "FP8 that is not NVIDIA's": (
        clip(**{BLOCK + "weight": FP8_FC1.to(torch.float8_e4m3fnuz)}),
        "stored as F8_E4M3FNUZ",
    ),
    "nvfp4, said so": (
        clip(
            **{
                BLOCK + "weight": torch.ones(256, 64).to(torch.uint8),
                BLOCK + "weight_scale_2": ONE,
                BLOCK + "comfy_quant": note("nvfp4"),
            }
        ),
        "stored as nvfp4",
    ),
    "AWQ": (clip(**{BLOCK + "pre_quant_scale": torch.ones(128)}), "stored as pre_quant_scale"),
    "int8": (clip(**{BLOCK + "weight": torch.ones(256, 128).to(torch.int8)}), "stored as I8"),
    "nvfp4": (
        clip(**{BLOCK + "weight": torch.ones(256, 64).to(torch.uint8)}),
        "stored as U8",
    ),
    "nvfp4, not said": (
        clip(
            **{BLOCK + "weight": torch.ones(256, 64).to(torch.uint8), BLOCK + "weight_scale_2": ONE}
        ),
        "stored as U8 and weight_scale_2",
    ),
    "bitsandbytes": (
        clip(**{BLOCK + "weight.quant_state.bitsandbytes__nf4": ONE.to(torch.uint8)}),
        "stored as bitsandbytes__nf4",
    ),
    "double precision": (clip(**{BLOCK + "bias": torch.ones(256).double()}), "stored as F64"),
    "int8 projection": (
        clip(**{PROJECTION: torch.ones(64, 128).to(torch.int8)}),
        "stored as I8",
    ),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_clip_is_refused_by_name(kind, tmp_path):
    tensors, message = QUANTIZED[kind]
    with pytest.raises(UnsupportedEncoder) as caught:
        detect(p.write(tmp_path / "x.safetensors", tensors))
    assert message in caught.value.fault
    assert caught.value.remedy == "give the fp16, bf16 or fp32 file it was made from"


def test_what_is_left_names_its_format(tmp_path):
    t5 = p.t5("t5xxl.transformer.")
    t5["t5xxl.transformer.encoder.block.1.layer.1.DenseReluDense.wo.weight"] = torch.ones(
        64, 96, dtype=torch.int8
    )
    path = p.write(tmp_path / "x.safetensors", {**t5, **p.hugging_face(p.canonical(), "")})
    detected = detect(path)
    plain = p.write(tmp_path / "plain.safetensors", p.canonical())
    (weights,) = detected.encoders
    assert fingerprint(weights) == fingerprint(detect(plain).encoders[0])
    assert detected.unsupported == (
        "A T5 encoder at 't5xxl.transformer.' stored as I8 is left as it is: "
        "Octavo serves CLIP and T5 in 16 or 32 bit or E4M3.",
    )
    with pytest.raises(UnsupportedEncoder, match=r"holds a T5 encoder at '.*' stored as I8, which"):
        detect(p.write(tmp_path / "t5.safetensors", t5))


def test_blocks_under_another_name_are_not_left_out(tmp_path):
    """Of the last ones, that is; without the others a block would be missing."""
    last = ".1."
    named = [p.hugging_face(p.canonical(), ""), p.openai(p.canonical())]
    for first, second in (named, named[::-1]):
        mixed = {n: t for n, t in first.items() if last not in n}
        mixed |= {n: t for n, t in second.items() if last in n}
        with pytest.raises(FileError, match="two text encoders, or parts of them"):
            detect(p.write(tmp_path / "x.safetensors", mixed))


def test_two_layouts_under_one_prefix(tmp_path):
    both = {**p.openai(p.canonical()), **p.hugging_face(p.canonical(), "")}
    with pytest.raises(FileError, match="two text encoders, or parts of them, under the prefix ''"):
        detect(p.write(tmp_path / "x.safetensors", both))
