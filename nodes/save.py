# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The node 'Save FP8 Text Encoder'."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from .text_encoder import CATEGORY


class SaveTextEncoder(io.ComfyNode):  # type: ignore[misc]
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OctavoSaveTextEncoder",
            display_name="Save FP8 Text Encoder",
            category=CATEGORY,
            description=(
                "Writes each accelerated text encoder with its FP8 values, LoRA and merges "
                "included, into the text_encoders models folder: T5-XXL in FP8, all others with "
                "the same values in 16 bit, because ComfyUI's CLIP loaders know no FP8 scales."
            ),
            search_aliases=["octavo", "save clip fp8", "export text encoder", "quantize clip"],
            inputs=[
                io.Clip.Input("clip", tooltip="From 'FP8 Text Encoder', with or without LoRA."),
                io.String.Input(
                    "name",
                    default="text_encoder",
                    tooltip="Start of the file names; encoder and recipe are added.",
                ),
            ],
            outputs=[io.String.Output(display_name="files", tooltip="The names of the new files.")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, clip: Any, name: str) -> io.NodeOutput:
        from ..hosts.comfy_compare import save
        from ..hosts.comfy_texts import belongs, send_text

        text = "\n".join(path.name for path in save(clip, name))
        belongs(cls.hidden.unique_id, cls.hidden.extra_pnginfo)
        send_text(text, cls.hidden.unique_id)
        return io.NodeOutput(text, ui=ui.PreviewText(text))
