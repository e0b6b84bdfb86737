# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Real diffusers pipelines in miniature, made without a download: random weights, byte tokenizers.

The classes are diffusers' and transformers' own, so everything that a real pipeline does happens
here too, within a second and on a CPU. The pictures are noise.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5TokenizerFast,
)

_FOLDER = tempfile.TemporaryDirectory(prefix="octavo_tiny_")  # holds the tokenizers' files
VOCABULARY = 49408  # CLIP's: 49406 is the start token and 49407 the end token


def _bytes() -> list[str]:
    """One printable character per byte, as GPT-2's and CLIP's tokenizers write bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


@cache
def _clip_files(pad: str) -> Path:
    folder = Path(_FOLDER.name) / ("clip" if pad == "<|endoftext|>" else "clip_2")
    folder.mkdir()
    tokens = [*_bytes(), *(c + "</w>" for c in _bytes())]
    tokens += [f"<unused {i}>" for i in range(VOCABULARY - 2 - len(tokens))]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": pad,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def clip_tokenizer(pad: str = "<|endoftext|>") -> Any:
    """CLIP's vocabulary without its merges: one token per letter. "!" pads like SDXL's second."""
    return CLIPTokenizer.from_pretrained(_clip_files(pad))


@cache
def _t5_files() -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = Path(_FOLDER.name) / "t5"
    folder.mkdir()
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    text = "The quick brown fox jumps over the lazy dog 0123456789 .,:;!?'()-"
    tokenizer.train_from_iterator([text, text.lower()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "T5TokenizerFast",
        "model_max_length": 512,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "extra_ids": 0,
        "additional_special_tokens": [],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def t5_tokenizer() -> Any:
    return T5TokenizerFast.from_pretrained(_t5_files())


def clip_text(
    width: int = 32,
    layers: int = 3,
    activation: str = "quick_gelu",
    projection: int | None = None,
    end_token: int = 2,
) -> Any:
    """A CLIP text model. `end_token` 2 is what the published configs say (it means argmax)."""
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=77,
        hidden_act=activation,
        bos_token_id=0,
        eos_token_id=end_token,
        pad_token_id=1,
        projection_dim=projection or width,
    )
    kind = CLIPTextModelWithProjection if projection else CLIPTextModel
    return kind(config).eval()


def t5_text(
    width: int = 32,
    kind: str = "T5",
    feed_forward: str = "gated-gelu",
    vocabulary: int = 256,
    layers: int = 2,
) -> Any:
    """A T5 encoder. `kind` "UMT5" has a relative bias in every block; "MT5" is T5 v1.1."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=8,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=4,
        feed_forward_proj=feed_forward,
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{kind}EncoderModel")(config).eval()


def _vae(latent: int = 4, shift: float | None = None) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=[32, 64],
        in_channels=3,
        out_channels=3,
        norm_num_groups=32,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=latent,
        use_quant_conv=shift is None,
        use_post_quant_conv=shift is None,
        shift_factor=shift,
        scaling_factor=0.18215,
    )


def _unet(cross: int, **more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=cross,
        **more,
    )


def _sdxl_unet(cross: int, pooled: int, ids: int) -> Any:
    return _unet(
        cross,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=pooled + 8 * ids,
    )


def sd15(text_encoder: Any = None) -> Any:
    torch.manual_seed(0)
    text_encoder = text_encoder or clip_text()
    return diffusers.StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer(),
        unet=_unet(text_encoder.config.hidden_size, attention_head_dim=8),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sd2() -> Any:
    """Stable Diffusion 2: OpenCLIP's tower, gelu, padded with "!"."""
    torch.manual_seed(0)
    pipe = sd15(clip_text(48, 4, "gelu"))
    pipe.register_modules(tokenizer=clip_tokenizer("!"))
    return pipe


def sdxl(text_encoder: Any = None, text_encoder_2: Any = None) -> Any:
    torch.manual_seed(0)
    one = text_encoder or clip_text(32)
    two = text_encoder_2 or clip_text(48, 4, "gelu", projection=48)
    width, pooled = one.config.hidden_size + two.config.hidden_size, two.config.projection_dim
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=one,
        text_encoder_2=two,
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer("!"),
        unet=_sdxl_unet(width, pooled, 6),
        scheduler=diffusers.EulerDiscreteScheduler(steps_offset=1, timestep_spacing="leading"),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )


def sdxl_refiner() -> Any:
    """The refiner has only the second text encoder; `text_encoder` is None."""
    torch.manual_seed(0)
    return diffusers.StableDiffusionXLImg2ImgPipeline(
        vae=_vae(),
        text_encoder=None,
        text_encoder_2=clip_text(48, 4, "gelu", projection=48),
        tokenizer=None,
        tokenizer_2=clip_tokenizer("!"),
        unet=_sdxl_unet(48, 48, 5),
        scheduler=diffusers.EulerDiscreteScheduler(steps_offset=1),
        requires_aesthetics_score=True,
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )


def sd3() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=8,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=80,
        caption_projection_dim=32,
        pooled_projection_dim=80,
        out_channels=8,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(8, 0.06),
        text_encoder=clip_text(32, projection=32),
        text_encoder_2=clip_text(48, 4, "gelu", projection=48),
        text_encoder_3=t5_text(80),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer("!"),
        tokenizer_3=t5_tokenizer(),
    )


def flux(text_encoder: Any = None, text_encoder_2: Any = None) -> Any:
    torch.manual_seed(0)
    one, two = text_encoder or clip_text(32), text_encoder_2 or t5_text(32)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=two.config.d_model,
        pooled_projection_dim=one.config.hidden_size,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(4, 0.12),
        text_encoder=one,
        text_encoder_2=two,
        tokenizer=clip_tokenizer(),
        tokenizer_2=t5_tokenizer(),
    )


PIPELINES = {f.__name__: f for f in (sd15, sd2, sdxl, sdxl_refiner, sd3, flux)}


def picture(pipe: Any, prompt: Any = "a photo of a cat", **options: Any) -> Any:
    """One step, 32 x 32, as numpy [B, 32, 32, 3]; the same for the same prompt."""
    pipe.set_progress_bar_config(disable=True)
    if isinstance(pipe, diffusers.StableDiffusionXLImg2ImgPipeline):
        options.update(image=torch.zeros(1, 3, 32, 32), strength=1.0)
    else:
        options.update(height=32, width=32)
    if hasattr(pipe, "transformer"):
        options.setdefault("max_sequence_length", 64)
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe(
        prompt, num_inference_steps=1, generator=generator, output_type="np", **options
    ).images
