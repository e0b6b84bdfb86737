# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Octavo: FP8 TensorRT text encoders for ComfyUI and diffusers."""

from __future__ import annotations

__version__ = "0.1.0"
