# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The node 'FP8 Report': PyTorch and FP8 side by side on prompts of the user's choice."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from .text_encoder import CATEGORY

PROMPTS = "a photo of a cat\na (red:1.3) car in the rain, masterpiece, best quality"


class Report(io.ComfyNode):  # type: ignore[misc]
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OctavoReport",
            display_name="FP8 Report",
            category=CATEGORY,
            description=(
                "Encodes each line with ComfyUI's own PyTorch and with the FP8 engines and shows "
                "how similar the results are, token by token, and how long both take."
            ),
            search_aliases=["octavo", "compare fp8", "benchmark clip", "similarity", "heat map"],
            inputs=[
                io.Clip.Input("clip", tooltip="From 'FP8 Text Encoder', with or without LoRA."),
                io.String.Input(
                    "prompts",
                    multiline=True,
                    default=PROMPTS,
                    tooltip="One prompt a line, 16 at most.",
                ),
                io.Int.Input(
                    "repeats",
                    default=5,
                    min=1,
                    max=100,
                    advanced=True,
                    tooltip="How often each prompt is timed; the median is shown.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="picture", tooltip="Heat map and latency bars."),
                io.String.Output(display_name="text", tooltip="The tables."),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, clip: Any, prompts: str, repeats: int) -> io.NodeOutput:
        from ..hosts.comfy_compare import compare
        from ..hosts.comfy_texts import belongs, send_text
        from .picture import draw

        lines = [line for line in prompts.splitlines() if line.strip()][:16] or [""]
        comparison = compare(clip, lines, repeats)
        text, picture = comparison.text(), draw(comparison.rows)
        belongs(cls.hidden.unique_id, cls.hidden.extra_pnginfo)
        send_text(text, cls.hidden.unique_id)
        preview = ui.PreviewImage(picture, cls=cls).as_dict()
        return io.NodeOutput(picture, text, ui={"text": (text,), **preview})
