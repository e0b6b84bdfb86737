# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Two roots: `OctavoError`, which the user can act on, and `OctavoBug`, which is ours.

A message is one sentence: subject, what was found, what was needed, what to do. The fields keep the
parts, so that no caller has to read a text. Only the edges (command line, nodes, hosts) catch.
"""

from __future__ import annotations

import errno


def remedy_for(error: OSError, otherwise: str) -> str:
    """What helps against shortages of the process, which are no fault of the file; `otherwise`."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "close some files, or raise the limit of open files (ulimit -n)"
    if error.errno == errno.ENOMEM:
        return "free some memory"
    return otherwise


class OctavoError(Exception):
    """What the user can act on; the command line prints it without a traceback, exit code 2."""


class OctavoBug(Exception):
    """Octavo broke its own rule; please report it."""


class FileError(OctavoError):
    """A model file that cannot be used: `path`, the `fault`, and the `remedy`."""

    def __init__(self, path: object, fault: str, remedy: str) -> None:
        self.path, self.fault, self.remedy = str(path), fault, remedy
        super().__init__(f"{self.path}: {fault}; {remedy}.")


class UnsupportedEncoder(FileError):
    """A file whose encoder was recognised as one that Octavo does not serve, or not at all."""


class EngineUnavailable(OctavoError):
    """An engine that cannot serve here: `engine`, the `reason`, what happens or helps."""

    def __init__(self, engine: str, reason: str, remedy: str) -> None:
        self.engine, self.reason, self.remedy = engine, reason, remedy
        super().__init__(f"{engine}: {reason}; {remedy}.")


class BuildError(OctavoError):
    """TensorRT refused or failed to build a plan; `log` holds its own last messages."""

    def __init__(self, subject: str, reason: str, remedy: str, log: tuple[str, ...] = ()) -> None:
        self.subject, self.reason, self.remedy, self.log = subject, reason, remedy, log
        super().__init__(f"{subject}: {reason}; {remedy}.")


class CacheError(OctavoError):
    """The cache cannot be written or read: `path`, `fault`, `remedy`."""

    def __init__(self, path: object, fault: str, remedy: str) -> None:
        self.path, self.fault, self.remedy = str(path), fault, remedy
        super().__init__(f"cache {self.path}: {fault}; {remedy}.")


class QuantizationError(OctavoError):
    """Calibration or quantization gave something that must not be shipped."""


class SimilarityError(OctavoError):
    """An engine or checkpoint that is not close enough to FP32; the command line exits with 1."""


class Cancelled(BaseException):
    """The user cancelled. Like KeyboardInterrupt no Exception: `except Exception` never eats it."""
