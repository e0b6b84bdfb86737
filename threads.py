# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Work for several threads, which is done all the same where the system grants no thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

HASHING = min(8, os.cpu_count() or 1)  # threads; each hashes 1.5 GB/s on a server core of 2023


def submit(
    threads: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    """`threads.submit`, or `call` at once in this thread where no other can be started.

    A container's limit of processes, say. The call may then run twice; the other result is unused.
    """
    try:
        return threads.submit(call, *args, **kwargs)
    except RuntimeError:
        future: Future[T] = Future()
        future.set_result(call(*args, **kwargs))
        return future
