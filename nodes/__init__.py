# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The ComfyUI nodes. Importing this needs ComfyUI; nothing heavy is imported before a node runs."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .environment import Environment
from .report import Report
from .save import SaveTextEncoder
from .text_encoder import TextEncoder


class Octavo(ComfyExtension):  # type: ignore[misc]
    async def on_load(self) -> None:
        from ..hosts.comfy_texts import serve

        serve()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TextEncoder, Report, SaveTextEncoder, Environment]
