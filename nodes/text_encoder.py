# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The node 'FP8 Text Encoder'."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

CATEGORY = "model/clip"


class TextEncoder(io.ComfyNode):  # type: ignore[misc]
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OctavoTextEncoder",
            display_name="FP8 Text Encoder",
            category=CATEGORY,
            description=(
                "Runs the CLIP and T5 text encoders of this model in FP8: on TensorRT where it "
                "is installed and supports the GPU, else on the FP8 tensor cores through PyTorch. "
                "Everything is built at the first prompt, checked against FP32 and kept in a "
                "cache. What cannot be served is left to ComfyUI, and the node says why. Place it "
                "before or after LoRA nodes."
            ),
            search_aliases=[
                "octavo",
                "fp8",
                "tensorrt",
                "accelerate clip",
                "fast text encoder",
                "t5xxl fp8",
                "clip fp8",
                "quantize text encoder",
                "speed up prompt",
            ],
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoders, from any loader."),
                io.Combo.Input(
                    "precision",
                    options=["auto", "fp8", "fp8-mixed", "bf16"],
                    default="auto",
                    tooltip=(
                        "Where to start: auto and fp8 try FP8 everywhere, fp8-mixed leaves the "
                        "attention output (of T5 the feed-forward's) in 16 bit, bf16 uses no FP8. "
                        "What misses the similarity floor goes on to the next of them by itself."
                    ),
                ),
                io.Combo.Input(
                    "engine",
                    options=["auto", "fastest", "tensorrt_rtx", "tensorrt", "torch_fp8"],
                    default="auto",
                    advanced=True,
                    tooltip=(
                        "auto takes the first engine that can serve here, in a fixed order; "
                        "fastest times them once. A named engine that cannot serve leaves the "
                        "prompt to PyTorch."
                    ),
                ),
                io.Combo.Input(
                    "build",
                    options=["on first use", "now", "background"],
                    default="on first use",
                    advanced=True,
                    tooltip=(
                        "When to calibrate and compile: at the first prompt, when this node runs, "
                        "or in the background while the first prompts run without TensorRT."
                    ),
                ),
                io.Float.Input(
                    "similarity_floor",
                    default=0.0,
                    min=0.0,
                    max=0.9999,
                    step=0.0001,
                    round=0.0001,
                    advanced=True,
                    tooltip=(
                        "The mean cosine similarity to FP32 that an engine must reach before it is "
                        "used. 0 takes the recipe's own: 0.99 for CLIP, 0.998 for T5."
                    ),
                ),
            ],
            outputs=[io.Clip.Output(tooltip="The same text encoders, served in FP8.")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(
        cls, clip: Any, precision: str, engine: str, build: str, similarity_floor: float
    ) -> io.NodeOutput:
        from ..hosts.comfy import Settings, accelerate
        from ..hosts.comfy_texts import belongs

        belongs(cls.hidden.unique_id, cls.hidden.extra_pnginfo)
        settings = Settings(precision, engine, build == "background", similarity_floor)
        return io.NodeOutput(accelerate(clip, settings, build, cls.hidden.unique_id)[0])
