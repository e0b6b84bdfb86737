# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion XL with both text encoders in FP8, and a LoRA on top."""

from __future__ import annotations

import sys

import octavo
import torch
from diffusers import StableDiffusionXLPipeline


def main(lora: str | None = None) -> None:
    if not torch.cuda.is_available():  # before 8 GB are downloaded
        sys.exit("This example needs an NVIDIA GPU; sdxl_offline.py needs none.")
    pipe = StableDiffusionXLPipeline.from_pretrained(
        "stabilityai/stable-diffusion-xl-base-1.0", torch_dtype=torch.float16, variant="fp16"
    ).to("cuda")

    octavo.accelerate(pipe)
    pipe("an astronaut riding a horse on mars").images[0].save("horse.png")
    for encoder in octavo.report(pipe).values():
        print(encoder.text())

    if lora is not None:  # the engines take the adapted weights at once
        pipe.load_lora_weights(lora)
        pipe("an astronaut riding a horse on mars").images[0].save("horse-lora.png")
        pipe.unload_lora_weights()


if __name__ == "__main__":
    main(*sys.argv[1:2])
