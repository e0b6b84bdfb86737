# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""ComfyUI takes only one of --cpu, --gpu-only, --lowvram; a test may want a second one's effects.

OCTAVO_TEST_ARGS names them, before anything of ComfyUI has read its arguments.
"""

import os

from comfy.cli_args import args

for _name in os.environ.get("OCTAVO_TEST_ARGS", "").split():
    assert hasattr(args, _name), _name
    setattr(args, _name, True)
