# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 with T5-XXL and CLIP in FP8. The first prompt calibrates T5-XXL, which takes a while; its
16-bit weights then wait in host memory, and later starts find the result in the cache."""

from __future__ import annotations

import sys

import octavo
import torch
from diffusers import FluxPipeline


def main() -> None:
    if not torch.cuda.is_available():  # before 34 GB are downloaded
        sys.exit("This example needs an NVIDIA GPU; sdxl_offline.py needs none.")
    pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16)
    pipe.to("cuda")  # 34 GB; on a smaller card pipe.enable_model_cpu_offload() in its place, and
    octavo.accelerate(pipe)  # components="text_encoder" here: T5 gains little under offload

    pipe("a cat holding a sign that says hello world", num_inference_steps=28).images[0].save(
        "hello.png"
    )
    for encoder in octavo.report(pipe).values():
        print(encoder.text())


if __name__ == "__main__":
    main()
