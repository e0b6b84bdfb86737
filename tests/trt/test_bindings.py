# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The real bindings have what the session uses, and answer without a GPU as the session expects.

`tensorrt_rtx` is TensorRT for RTX; `tensorrt_lean_bindings` stands for the full TensorRT: its
runtime without a builder, from the same source of bindings, 44 MB and not gigabytes. Both must be
installed (the `dev` extra): nothing here is skipped.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import double
import pytest
import tensorrt_lean_bindings
import tensorrt_rtx
import torch
from octavo.backends.onnx_ops import emit
from octavo.errors import EngineUnavailable
from octavo.seeded import TINY
from octavo.trt import capabilities
from octavo.trt import session as session_module
from octavo.trt.build import BuildRequest, build_plan
from octavo.trt.header import read_header
from octavo.trt.session import session_from_plan

MODULES: list[Any] = [tensorrt_rtx, tensorrt_lean_bindings]
# What only TensorRT for RTX has; session.py reaches it behind `capabilities` alone.
RTX_ONLY = {
    "EngineValidity", "EngineInvalidityDiagnostics", "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy", "get_engine_validity", "cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy", "create_runtime_cache", "set_runtime_cache",
    "serialize", "deserialize",
}  # fmt: skip
# Name of a variable or attribute in session.py -> classes of what it refers to.
RECEIVERS = {
    "module": (None,),
    "runtime": ("Runtime",), "_runtime": ("Runtime",),
    "engine": ("ICudaEngine",), "_engine": ("ICudaEngine",),
    "config": ("IRuntimeConfig",), "_config": ("IRuntimeConfig",),
    "native": ("IExecutionContext",), "_native": ("IRuntimeCache",),
    "mode": ("TensorIOMode",),
}  # fmt: skip
CLASSES = {
    "Runtime": (double._RtxRuntime, double._Runtime),
    "ICudaEngine": (double.Engine,),
    "IRuntimeConfig": (double.RtxRuntimeConfig, double.RuntimeConfig),
    "IExecutionContext": (double.Context,),
    "IRuntimeCache": (double.RuntimeCache,),
    "ILogger": (double.ILogger,),
}
ENUMS = {
    "DataType": double.DataType,
    "TensorIOMode": double.TensorIOMode,
    "TensorLocation": double.TensorLocation,
    "ExecutionContextAllocationStrategy": double.Allocation,
    "EngineValidity": double.EngineValidity,
    "EngineInvalidityDiagnostics": double.Diagnostics,
    "CudaGraphStrategy": double.CudaGraphStrategy,
    "DynamicShapesKernelSpecializationStrategy": double.Specialization,
}


def used_names() -> set[tuple[str | None, str]]:
    """(class or None for the module, attribute) of everything session.py reads from TensorRT."""
    tree = ast.parse(Path(session_module.__file__).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = getattr(owner, "id", None) or getattr(owner, "attr", None)
            found |= {(kind, node.attr) for kind in RECEIVERS.get(str(name), ())}
    return {(kind, name) for kind, name in found if name != "__name__"}


def test_the_list_of_used_names_is_not_empty() -> None:
    names = used_names()
    assert {(None, "Runtime"), ("IExecutionContext", "execute_async_v3")} <= names
    assert len(names) > 30


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_that_the_session_uses_exists(module: Any) -> None:
    missing = set()
    for kind, name in used_names():
        owner = module if kind is None else getattr(module, kind, None)
        if not hasattr(owner, name):
            missing.add(name)
    assert missing == (set() if module is tensorrt_rtx else RTX_ONLY)
    assert hasattr(module.ILogger, "ERROR") and hasattr(module.ILogger, "log")


def public(cls: type) -> dict[str, Any]:
    """What the double offers of an API: everything without an underscore up to `object`."""
    return {
        name: value
        for base in reversed(cls.__mro__[:-1])
        for name, value in vars(base).items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize("name", CLASSES)
def test_the_double_invents_nothing(name: str) -> None:
    for cls, module in zip(CLASSES[name], MODULES, strict=False):
        real = getattr(module, name)
        offered = public(cls)
        assert offered
        for attribute, value in offered.items():
            assert hasattr(real, attribute), f"{module.__name__} has no {name}.{attribute}"
            said = getattr(real, attribute).__doc__ or ""
            if inspect.isfunction(value) and "(self: " in said:
                signature = said.strip().splitlines()[0]
                if "*args" in signature:  # overloaded: the forms follow
                    signature = said
                for parameter in list(inspect.signature(value).parameters.values())[1:]:
                    positions = signature.count(parameter.name + ":")
                    assert positions or parameter.name == "plan", (name, attribute, parameter)


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_real_values(name: str) -> None:
    for module in MODULES:
        if name in RTX_ONLY and module is tensorrt_lean_bindings:
            assert not hasattr(module, name)
            continue
        real = getattr(module, name).__members__
        assert {m.name: m.value for m in ENUMS[name]} == {
            member: int(real[member]) for member in ENUMS[name].__members__
        }
        if name in ("EngineInvalidityDiagnostics", "EngineValidity"):
            assert set(real) == set(ENUMS[name].__members__)
    assert set(session_module._DIAGNOSTICS) == {m.name for m in double.Diagnostics}


def test_dtypes_of_graphs_have_a_counterpart_of_the_same_size() -> None:
    for module in MODULES:
        for dtype, name in session_module._DTYPES.values():
            assert getattr(module.DataType, name).itemsize == dtype.itemsize


def test_capabilities_tell_the_two_apart() -> None:
    rtx, full = (capabilities(module) for module in MODULES)
    features = ("has_validity", "has_runtime_cache", "has_cuda_graphs", "has_kernel_specialization")
    assert all(getattr(rtx, feature) for feature in features)
    assert not any(getattr(full, feature) for feature in features)


# The real answers, without a GPU that TensorRT for RTX supports

# With one, the plan loads, and what is refused next is that there are no weights.
IS_SUPPORTED = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (7, 8, 12)
LOADED = "the weights lack " if IS_SUPPORTED else "TensorRT "


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real plan for SM 8.9 and 12.0."""
    graph = emit(TINY, dict.fromkeys(TINY.linears(), "fp8"))
    shapes = tuple((batch, TINY.positions, TINY.width) for batch in (1, 2, 16))
    request = BuildRequest("tensorrt_rtx", graph.model, (89, 120), {"embeds": shapes})  # type: ignore[dict-item]
    return build_plan(request, target=tmp_path_factory.mktemp("plan") / "tiny.plan").path


def refused(plan: Path | bytes, module: ModuleType, **facts: Any) -> EngineUnavailable:
    place = double.World().place(**facts)
    with pytest.raises(EngineUnavailable) as caught:
        session_from_plan(
            plan,
            module=module,
            graph=emit(TINY, dict.fromkeys(TINY.linears(), "fp8")),
            weights={},
            device=torch.device("cpu"),
            place=place,
        )
    assert caught.value.engine == module.__name__
    return caught.value


def test_the_header_of_a_real_plan(plan: Path) -> None:
    header = read_header(plan)
    assert header is not None
    assert header.version == tensorrt_rtx.__version__ and header.sms == (89, 120)
    data = plan.read_bytes()
    assert "has 1000 of" in refused(data[:1000], tensorrt_rtx).reason
    assert "this GPU is SM 9.0" in refused(plan, tensorrt_rtx, sm=90).reason
    wrong = data[:0x18] + b"\1\6\1\5" + data[0x1C:]
    assert "version 1.6.1.5, installed is" in refused(wrong, tensorrt_rtx).reason
    assert "not a plan" in refused(b"x" + data[1:], tensorrt_rtx).reason


def test_the_real_verdict_becomes_a_reason(plan: Path) -> None:
    reason = refused(plan, tensorrt_rtx).reason
    assert reason.startswith(LOADED), reason
    assert IS_SUPPORTED or "use the plan (" in reason or "support this GPU" in reason, reason


def test_a_null_from_the_real_deserialization_becomes_a_reason(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_check_validity", lambda *_: None)
    reason = refused(plan, tensorrt_rtx).reason
    assert reason.startswith(LOADED), reason
    assert IS_SUPPORTED or "could not load the plan (" in reason, reason
    assert "no reason" not in reason  # its own words reached us through the log


@pytest.mark.parametrize("damage", ["flipped", "empty body", "noise"])
def test_the_real_deserialization_survives_damage(
    plan: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(session_module, "_check_validity", lambda *_: None)
    data = bytearray(plan.read_bytes())
    half = len(data) // 2
    if damage == "flipped":
        data[half] ^= 1
    else:
        data[64:] = bytes(len(data) - 64) if damage == "empty body" else b"\xa5" * (len(data) - 64)
    assert "could not load the plan" in refused(bytes(data), tensorrt_rtx).reason


CRASH_TEST = """
import sys
sys.path.insert(0, {tests!r})
import double, torch, tensorrt_lean_bindings
from octavo.backends.onnx_ops import emit
from octavo.errors import EngineUnavailable
from octavo.seeded import TINY
from octavo.trt.session import session_from_plan
graph = emit(TINY, dict.fromkeys(TINY.linears(), "16bit"))
try:
    session_from_plan(double.plan_from_graph(graph, rtx=False), module=tensorrt_lean_bindings,
        graph=graph, weights={{}}, device=torch.device("cpu"), place=double.World().place())
except EngineUnavailable as error:
    print(error)
"""


def test_the_full_tensorrt_without_a_driver_does_not_crash_the_process() -> None:
    """Its `Runtime(log)` gives an object around a null pointer, which even `del` follows."""
    script = CRASH_TEST.format(tests=str(Path(__file__).parent))
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("tensorrt_lean_bindings: TensorRT could not "), ran.stdout
