# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Model files: reading them, recognising the text encoders in them, and what they hold.

Importing this imports no torch; reading a tensor does.
"""

from .detect import Detected, EncoderWeights, detect
from .files import FileIdentity, TensorInfo, WeightsFile, open_weights
from .fingerprint import Fingerprint, fingerprint
from .memo import Memo
from .scales import QuantizedLinear

__all__ = [
    "Detected",
    "EncoderWeights",
    "FileIdentity",
    "Fingerprint",
    "Memo",
    "QuantizedLinear",
    "TensorInfo",
    "WeightsFile",
    "detect",
    "fingerprint",
    "open_weights",
]
