# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m octavo` is the command line."""

import sys

from .cli import main

sys.exit(main())
