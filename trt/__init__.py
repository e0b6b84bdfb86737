# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The only place that imports TensorRT, in either flavour; nothing is imported until `load`.

The flavours share one API but for a few names, so no caller asks which one it has: it asks for
`capabilities`. The cu12 and cu13 packages of a flavour overwrite each other, so both are refused.
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
_loaded: dict[Flavour, ModuleType | Missing] = {}


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
    has_validity: bool  # judges a plan before it is deserialized
    has_runtime_cache: bool  # keeps the kernels it compiles at run time
    has_cuda_graphs: bool  # captures CUDA graphs by itself
    has_kernel_specialization: bool  # compiles kernels for the shapes it meets


def installed(flavour: Flavour) -> Installed | Missing:
    """Version and CUDA flavour of the distribution, from its metadata; imports nothing heavy."""
    install = f"install it with: {_PIP[flavour]}"
    try:
        spec = importlib.util.find_spec(flavour)
    except (ImportError, ValueError):  # ValueError: a module in sys.modules without a spec
        spec = None
    if spec is None or spec.origin is None:  # no origin: a mere folder of that name
        return Missing("the package is not installed in this Python", install)
    found = {cuda: version for cuda in _CUDAS if (version := _version(f"{flavour}_{cuda}"))}
    if len(found) > 1:
        both = " ".join(f"{flavour}_{cuda}" for cuda in found)
        reason = f"{both.replace(' ', ' and ')} are both installed and overwrite each other"
        return Missing(reason, f"run: pip uninstall {both} {flavour}; then {install}")
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
    return Capabilities(
        ahead_of_time=hasattr(module, "ComputeCapability"),
        has_validity=hasattr(module.Runtime, "get_engine_validity"),
        has_runtime_cache=hasattr(module.IRuntimeConfig, "create_runtime_cache"),
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
        module.Builder.build_serialized_network_to_stream  # noqa: B018 - the youngest name needed
    except AttributeError as error:
        return Missing(f"version {present.version} is too old or not whole ({error})", repair)
    except Exception as error:  # a broken native library may raise anything
        cause = " ".join(str(error).split()) or type(error).__name__
        return Missing(f"version {present.version} cannot be imported ({cause})", repair)
    return module


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
