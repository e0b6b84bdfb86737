# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 on a small card: CLIP in FP8, offloading as ever. Encoders that Octavo does not know keep
PyTorch, and the report names them."""

from __future__ import annotations

import octavo
import torch
from diffusers import FluxPipeline


def main() -> None:
    pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16)
    pipe.enable_model_cpu_offload()
    octavo.accelerate(pipe)  # before or after the offloading, as you like

    pipe("a cat holding a sign that says hello world", num_inference_steps=28).images[0].save(
        "hello.png"
    )
    for encoder in octavo.report(pipe).values():
        print(encoder.text())


if __name__ == "__main__":
    main()
