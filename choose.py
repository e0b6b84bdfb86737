# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Which engine may serve: pure decisions over facts, each with its reason in one sentence.

The order is fixed, so that equal machines give equal pictures; speed is asked only with "fastest".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .device import FP8_SM, Device
from .errors import EngineUnavailable, OctavoError
from .trt import Installed, Missing

EngineName = Literal["tensorrt_rtx", "tensorrt", "torch_fp8", "host"]
ORDER: tuple[EngineName, ...] = ("tensorrt_rtx", "tensorrt", "torch_fp8", "host")
REQUESTS = ("auto", "fastest", *ORDER)
VARIABLE = "OCTAVO_ENGINE"  # of the environment; says what "auto" is

# NVIDIA's documented minimum drivers for the CUDA a wheel is built against (TensorRT 11.4 docs).
_MINIMUM_DRIVER = {"cu13": 580, "cu12": 535}
# What TensorRT for RTX 1.7 supports among GPUs with FP8; data-centre parts are the full package's.
_RTX_SMS = (89, 120, 121)


@dataclass(frozen=True)
class Accepted:
    engine: EngineName
    note: str = ""

    def __str__(self) -> str:
        return f"{self.engine}: can serve{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class Rejected:
    engine: EngineName
    reason: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.reason}"


Decision = Accepted | Rejected


@dataclass(frozen=True)
class Packages:
    """What is installed: each flavour of TensorRT, and whether `onnx` is there to build plans."""

    tensorrt_rtx: Installed | Missing
    tensorrt: Installed | Missing
    onnx: bool


def probe_packages() -> Packages:
    """Read what is installed, importing none of it."""
    import importlib.util

    from .trt import installed

    return Packages(
        installed("tensorrt_rtx"),
        installed("tensorrt"),
        importlib.util.find_spec("onnx") is not None,
    )


def ladder(device: Device, packages: Packages, *, fp8: bool = True) -> list[Decision]:
    """Every engine in order with its decision. `fp8=False`: for the bf16 recipe, without FP8."""
    decisions: list[Decision] = []
    for name in ORDER:
        reason = _refusal(name, device, packages, fp8)
        decisions.append(Accepted(name) if reason is None else Rejected(name, reason))
    return decisions


def _refusal(name: EngineName, device: Device, packages: Packages, fp8: bool) -> str | None:
    if name == "host":
        return None
    if device.type != "cuda":
        where = "an AMD GPU" if device.type == "rocm" else f"the device '{device.type}'"
        return f"it needs an NVIDIA GPU and the encoder is on {where}"
    if device.sm is None:
        return f"the compute capability of {device.name} is not known"
    if fp8 and device.sm < FP8_SM:
        return (
            f"{device.describe()} has no FP8 tensor cores; they come with SM 8.9 (RTX 40) and newer"
        )
    if not fp8 and device.sm < 80:
        return f"{device.describe()} has no bfloat16; it comes with SM 8.0 (RTX 30) and newer"
    if name == "torch_fp8":
        return None
    package = packages.tensorrt_rtx if name == "tensorrt_rtx" else packages.tensorrt
    if isinstance(package, Missing):
        return f"{package.reason}; {package.remedy}"
    if not packages.onnx:
        return "the package 'onnx', which writes the graph, is missing; 'pip install onnx'"
    if name == "tensorrt_rtx" and device.sm not in _RTX_SMS:
        return (
            f"TensorRT for RTX does not support {device.describe()}; "
            "the full 'tensorrt' package serves data-centre GPUs"
        )
    return _driver_refusal(device, package)


def _driver_refusal(device: Device, package: Installed) -> str | None:
    needed = _MINIMUM_DRIVER.get(package.cuda or "")
    major = re.match(r"\d+", device.driver or "")
    if needed is None or major is None or int(major[0]) >= needed:
        return None
    return (
        f"the driver {device.driver} is older than {needed}, which {package.cuda} builds of "
        "TensorRT need; update the NVIDIA driver"
    )


def requested(engine: str, variable: str | None) -> str:
    """One of `REQUESTS`: `engine`, or for "auto" the value of `VARIABLE`, if it has one.

    Raises OctavoError where that does not exist.
    """
    if engine != "auto" or not variable:
        if engine not in REQUESTS:
            known = ", ".join(REQUESTS)
            raise OctavoError(f"engine '{engine}' does not exist; choose one of {known}.")
        return engine
    if variable not in REQUESTS:
        raise OctavoError(
            f"{VARIABLE}: the engine '{variable}' does not exist; unset it or set it to one of "
            f"{', '.join(REQUESTS)}."
        )
    return variable


def chosen(decisions: Sequence[Decision], request: str = "auto") -> list[EngineName]:
    """The engines to try, in order. A forced engine is the only one; raises if it cannot serve."""
    request = requested(request, None)
    if request in ("auto", "fastest"):
        return [d.engine for d in decisions if isinstance(d, Accepted)]
    for decision in decisions:
        if decision.engine == request:
            if isinstance(decision, Rejected):
                raise EngineUnavailable(
                    request, decision.reason, "use engine 'auto' to let Octavo choose"
                )
            return [decision.engine]
    raise OctavoError(f"engine '{request}' is not in the ladder.")
