# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Octavo: FP8 TensorRT text encoders for ComfyUI and diffusers."""

from __future__ import annotations

__version__ = "0.1.0"

WEB_DIRECTORY = "./web"  # help pages and a script for ComfyUI, read where this is a node pack


async def comfy_entrypoint():  # type: ignore[no-untyped-def]
    """What ComfyUI calls to get the nodes (API V3)."""
    from .nodes import Octavo

    return Octavo()


_LAZY = ("accelerate", "accelerating", "recipes", "report", "restore")


def __getattr__(name: str) -> object:
    """The functions for diffusers and what they take, imported when they are first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "recipes":
        return import_module(".recipes", __package__)
    return getattr(import_module(".hosts.diffusers", __package__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
