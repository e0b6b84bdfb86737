# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The only place that imports TensorRT, in either flavour; nothing is imported until `load`.

The two flavours have one API but for a few names, so no caller asks for the flavour: it asks
`capabilities`. Two distributions of one flavour (cu12 and cu13) share an import name and overwrite each
other, so both together are refused.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Literal

from ..errors import EngineUnavailable

Flavour = Literal["tensorrt_rtx", "tensorrt"]
Cuda = Literal["cu12", "cu13"]

_CUDAS: tuple[Cuda, ...] = ("cu13", "cu12")
_PIP: dict[Flavour, str] = {
    "tensorrt_rtx": 'pip install "tensorrt-rtx>=1.7,<1.8"',
    "tensorrt": 'pip install "tensorrt>=10.13"',
}


@dataclass(frozen=True)
class Installed:
    """A flavour that is there. `cuda` is None where the distribution's name does not tell."""

    version: str
    cuda: Cuda | None


@dataclass(frozen=True)
class Missing:
    """A flavour that cannot be used, and what helps."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Capabilities:
    """What a loaded TensorRT can do, asked of its names."""

    ahead_of_time: bool  # builds for named SMs, without a GPU
    has_plan_stream: bool  # writes a plan in chunks
    has_initializers: bool  # takes weights by address
    has_validity: bool  # judges a plan before it is deserialized
    has_runtime_cache: bool  # keeps the kernels it compiles at run time
    has_cuda_graphs: bool  # captures CUDA graphs by itself
    has_kernel_specialization: bool  # compiles for the shapes it meets


_loaded: dict[Flavour, ModuleType | Missing] = {}


def installed(flavour: Flavour) -> Installed | Missing:
    """Version and CUDA flavour of the distribution, from its metadata; imports nothing heavy."""
    install = f"install it with: {_PIP[flavour]}"
    try:
        spec = importlib.util.find_spec(flavour)
    except (ImportError, ValueError):  # ValueError: a module in sys.modules without a spec
        spec = None
    if spec is None or spec.origin is None:  # no origin: a mere folder of that name
        return Missing("the package is not installed in this Python", install)
    found = {cuda: v for cuda in _CUDAS if (v := _version(f"{flavour}_{cuda}"))}
    if len(found) > 1:
        both = " ".join(f"{flavour}_{cuda}" for cuda in _CUDAS)
        return Missing(
            f"the packages for CUDA 12 and CUDA 13 are both installed (versions"
            f" {' and '.join(found.values())}) and overwrite each other",
            f"run: pip uninstall {both} {flavour}; then {install}",
        )
    for cuda, version in found.items():
        return Installed(version, cuda)
    if version := _version(flavour):
        return Installed(version, None)
    return Missing(f"{spec.origin} has no package metadata that tells its version", install)


def load(flavour: Flavour) -> ModuleType:
    """The module, imported at the first call; success and failure hold for the process.

    Raises `EngineUnavailable` with the cause, whatever the import raised.
    """
    if flavour not in _loaded:
        _loaded[flavour] = _import(flavour)
    found = _loaded[flavour]
    if isinstance(found, Missing):
        raise EngineUnavailable(flavour, found.reason, found.remedy)
    return found


def capabilities(module: ModuleType) -> Capabilities:
    """Feature tests of a loaded module."""
    runtime_config = getattr(module, "IRuntimeConfig", None)
    return Capabilities(
        ahead_of_time=hasattr(module, "ComputeCapability"),
        has_plan_stream=hasattr(module.Builder, "build_serialized_network_to_stream"),
        has_initializers=hasattr(module.OnnxParser, "load_initializer"),
        has_validity=hasattr(module.Runtime, "get_engine_validity"),
        has_runtime_cache=hasattr(runtime_config, "create_runtime_cache"),
        has_cuda_graphs=hasattr(module, "CudaGraphStrategy"),
        has_kernel_specialization=hasattr(module, "DynamicShapesKernelSpecializationStrategy"),
    )


def _import(flavour: Flavour) -> ModuleType | Missing:
    present = installed(flavour)
    if isinstance(present, Missing):
        return present
    repair = f"reinstall it with: {_PIP[flavour]} --force-reinstall"
    try:
        module = importlib.import_module(flavour)
    except Exception as error:  # a broken native library may raise anything
        cause = " ".join(str(error).split()) or type(error).__name__
        return Missing(f"version {present.version} is installed but cannot be imported ({cause})", repair)
    if not hasattr(module, "Builder"):
        return Missing(f"{module.__file__} is not TensorRT, it has no Builder", repair)
    return module


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
