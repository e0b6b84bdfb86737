# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The programs whose text encoders Octavo serves, one module each; only these know their hosts."""
