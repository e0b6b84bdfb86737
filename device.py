# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The machine as frozen facts. `probe()` is the only reader; decisions take a `Device`."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FP8_SM = 89  # Ada; the first NVIDIA generation with FP8 tensor cores


@dataclass(frozen=True)
class Device:
    """One device. `sm` is 10 * major + minor (89, 120); sizes in bytes; None = not known."""

    type: str  # "cuda", "cpu", or another torch device type
    index: int = 0
    name: str = "CPU"
    sm: int | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None  # the CUDA version torch was built for
    torch: str | None = None
    triton: bool = False
    platform: str = sys.platform

    @property
    def has_fp8(self) -> bool:
        return self.type == "cuda" and self.sm is not None and self.sm >= FP8_SM

    def describe(self) -> str:
        sm = f" (SM {self.sm // 10}.{self.sm % 10})" if self.sm is not None else ""
        return f"{self.name}{sm}"


def probe(device: object = None) -> Device:
    """Read the facts of `device` (torch device, string or index; None = the current GPU or CPU)."""
    import importlib.util

    import torch

    triton = importlib.util.find_spec("triton") is not None
    wanted = torch.device(device) if device is not None else None  # type: ignore[call-overload]
    if wanted is None:
        wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.type != "cuda" or torch.version.hip is not None:
        kind = "rocm" if torch.version.hip is not None and wanted.type == "cuda" else wanted.type
        return Device(
            kind, wanted.index or 0, platform.processor() or "CPU",
            torch=torch.__version__, triton=triton,
        )  # fmt: skip
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    facts = torch.cuda.get_device_properties(index)
    return Device(
        "cuda",
        index,
        facts.name,
        facts.major * 10 + facts.minor,
        facts.total_memory,
        _driver_version(),
        torch.version.cuda,
        torch.__version__,
        triton,
    )


def _driver_version() -> str | None:
    """ "580.65.06" as NVIDIA's management library tells, which comes with the driver."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        version = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() != 0:
            return None
        failed = nvml.nvmlSystemGetDriverVersion(version, len(version))
        nvml.nvmlShutdown()
        return None if failed else version.value.decode()
    except (OSError, AttributeError, UnicodeDecodeError):  # no such library, or not NVIDIA's
        return None


def trim_memory() -> None:
    """Give freed memory back to the system, for what comes next may need it in another process.

    glibc keeps freed blocks under 32 MB, which most weights are: 1.9 of CLIP-G's 2.5 GB in FP32.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library has no such function
            ctypes.CDLL(None).malloc_trim(0)


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far, in bytes (0 where the system does not tell)."""
    with suppress(OSError):  # Linux; `ru_maxrss` starts there at the size of the parent process
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        try:
            import psutil
        except ImportError:
            return 0
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
