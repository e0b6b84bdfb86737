# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Accelerate a tiny SDXL, use it, look at the report, and undo it. Downloads nothing, needs no GPU.

Without an NVIDIA GPU that has FP8 the report says why, and PyTorch serves as before.
"""

from __future__ import annotations

import octavo
import torch
from tiny_pipelines import picture, sdxl


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = sdxl().to(device)

    octavo.accelerate(pipe)
    image = picture(pipe, "a photo of a cat")
    print("picture:", image.shape)
    for encoder in octavo.report(pipe).values():
        print(encoder.text())

    octavo.restore(pipe)
    with octavo.accelerating(pipe, components="text_encoder_2"):
        picture(pipe, "a photo of a dog")


if __name__ == "__main__":
    main()
