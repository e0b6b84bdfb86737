# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The node 'FP8 Environment': what is installed, which engines can serve, what the cache holds."""

from __future__ import annotations

from comfy_api.latest import io, ui

from .text_encoder import CATEGORY


class Environment(io.ComfyNode):  # type: ignore[misc]
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OctavoEnvironment",
            display_name="FP8 Environment",
            category=CATEGORY,
            description=(
                "Shows the packages, the GPU, each FP8 engine with the reason if it cannot serve "
                "here, and the cache."
            ),
            search_aliases=["octavo", "doctor", "tensorrt info", "fp8 cache", "engine cache"],
            inputs=[
                io.Combo.Input(
                    "cache",
                    options=["show", "verify"],
                    default="show",
                    tooltip="verify reads every file of the cache and compares its checksum.",
                ),
            ],
            outputs=[io.String.Output(display_name="text")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        return float("nan")  # always run: the answer may have changed

    @classmethod
    def execute(cls, cache: str) -> io.NodeOutput:
        from ..hosts.comfy_compare import environment
        from ..hosts.comfy_texts import belongs, send_text

        text = environment(verify=cache == "verify")
        belongs(cls.hidden.unique_id, cls.hidden.extra_pnginfo)
        send_text(text, cls.hidden.unique_id)
        return io.NodeOutput(text, ui=ui.PreviewText(text))
