# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The encoders: one file each, a spec and an `encode` over `Ops`. Needs neither torch nor numpy."""

from .clip import ClipSpec, encode
from .ops import Ops

EncoderSpec = ClipSpec  # becomes a union when the next family arrives

__all__ = ["ClipSpec", "EncoderSpec", "Ops", "encode"]
