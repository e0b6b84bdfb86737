# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Which TensorRT is there, what it can do, and whether it has the names that Octavo uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from octavo import trt
from octavo.errors import EngineUnavailable
from octavo.trt import Capabilities, Installed, Missing, capabilities, installed, load

RECORDED = json.loads((Path(__file__).parent / "data/tensorrt_names.json").read_text())
# Every name of TensorRT's that trt/worker.py uses; "" is the module.
USED = {
    "": "Builder DataType ILogger IProgressMonitor IStreamWriter NetworkDefinitionCreationFlag"
    " OnnxParser ProfilingVerbosity Runtime IRuntimeConfig",
    "Builder": "build_serialized_network_to_stream create_builder_config create_network"
    " create_optimization_profile",
    "DataType": "FP8",
    "IBuilderConfig": "add_optimization_profile profiling_verbosity progress_monitor",
    "ILayer": "get_output num_outputs",
    "ILogger": "ERROR WARNING log",
    "INetworkDefinition": "get_input get_layer num_inputs num_layers",
    "IOptimizationProfile": "set_shape",
    "IProgressMonitor": "phase_finish phase_start step_complete",
    "IStreamWriter": "write",
    "ITensor": "dtype name",
    "NetworkDefinitionCreationFlag": "STRONGLY_TYPED",
    "OnnxParser": "get_error load_initializer load_model_proto num_errors parse parse_model_proto",
    "ParserError": "desc node_name node_operator",
    "ProfilingVerbosity": "DETAILED",
}
USED_AHEAD_OF_TIME = {
    "": "ComputeCapability",
    "ComputeCapability": "SM89 SM120 SM121",
    "IBuilderConfig": "num_compute_capabilities set_compute_capability",
}


@pytest.mark.parametrize("version", list(RECORDED))
def test_names_of_the_full_tensorrt(version: str) -> None:
    names = RECORDED[version]
    missing = {owner: set(used.split()) - set(names[owner]) for owner, used in USED.items()}
    assert not any(missing.values()), missing
    assert "ComputeCapability" not in names[""]


def test_names_of_tensorrt_for_rtx() -> None:
    module = load("tensorrt_rtx")
    for used in (USED, USED_AHEAD_OF_TIME):
        for owner, names in used.items():
            thing = getattr(module, owner) if owner else module
            assert [name for name in names.split() if not hasattr(thing, name)] == []
    assert "__version__" in dir(module)


def test_capabilities() -> None:
    assert capabilities(load("tensorrt_rtx")) == Capabilities(True, True, True, True, True)
    for names in RECORDED.values():
        full = SimpleNamespace(**dict.fromkeys(names[""]))
        for owner in ("Runtime", "IRuntimeConfig"):
            setattr(full, owner, SimpleNamespace(**dict.fromkeys(names[owner])))
        assert capabilities(full) == Capabilities(False, False, False, False, False)


def test_installed_matches_what_loads() -> None:
    found = installed("tensorrt_rtx")
    assert isinstance(found, Installed)
    assert found.version == load("tensorrt_rtx").__version__
    assert found.cuda in ("cu12", "cu13")
    assert load("tensorrt_rtx") is load("tensorrt_rtx")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, octavo.trt.build, octavo.trt.worker; from octavo.trt import installed;"
        "installed('tensorrt_rtx'); heavy = {'tensorrt', 'tensorrt_rtx', 'torch', 'numpy', 'onnx'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    root = Path(trt.__file__).parents[2]
    path = [*sys.path, str(root)] if root.joinpath("octavo").is_dir() else sys.path
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"], check=True)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that packages are found in."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(trt, "_loaded", {})
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def install(site: Path, package: str, code: str, **distributions: str) -> None:
    (site / package).mkdir()
    (site / package / "__init__.py").write_text(code)
    for name, version in distributions.items():
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )


WHOLE = "class Builder: build_serialized_network_to_stream = 0\n"


@pytest.mark.parametrize("flavour", ["tensorrt_rtx", "tensorrt"])
def test_absent(site: Path, flavour: trt.Flavour) -> None:
    assert isinstance(installed(flavour), Missing)
    with pytest.raises(
        EngineUnavailable, match="not installed in this Python; install it with: pip"
    ):
        load(flavour)
    (site / flavour).mkdir()  # as ComfyUI's models/tensorrt
    assert isinstance(installed(flavour), Missing)


def test_absent_in_odd_ways(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for odd in (None, SimpleNamespace(__spec__=None)):
        monkeypatch.setitem(sys.modules, "tensorrt", odd)
        assert isinstance(installed("tensorrt"), Missing)


@pytest.mark.parametrize(
    ("distributions", "expected"),
    [
        ({"tensorrt_rtx": "1.7.1", "tensorrt_rtx_cu12": "1.7.1"}, Installed("1.7.1", "cu12")),
        ({"tensorrt_rtx_cu13": "1.7.1"}, Installed("1.7.1", "cu13")),
        ({"tensorrt_rtx": "1.6.0"}, Installed("1.6.0", None)),
    ],
)
def test_distribution(site: Path, distributions: dict[str, str], expected: Installed) -> None:
    install(site, "tensorrt_rtx", WHOLE, **distributions)
    assert installed("tensorrt_rtx") == expected
    assert load("tensorrt_rtx").Builder


def test_both_cuda_flavours_are_refused(site: Path) -> None:
    install(site, "tensorrt_rtx", WHOLE, tensorrt_rtx_cu12="1.7.1", tensorrt_rtx_cu13="1.7.1")
    with pytest.raises(EngineUnavailable) as caught:
        load("tensorrt_rtx")
    assert "tensorrt_rtx_cu13 and tensorrt_rtx_cu12 are both installed" in str(caught.value)
    assert "pip uninstall tensorrt_rtx_cu13 tensorrt_rtx_cu12 tensorrt_rtx" in caught.value.remedy


def test_no_metadata(site: Path) -> None:
    install(site, "tensorrt", WHOLE)
    with pytest.raises(EngineUnavailable, match="no package metadata that tells its version"):
        load("tensorrt")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import tensorrt_bindings_that_are_not_there", "No module named 'tensorrt_bindings_that"),
        (
            "raise OSError('libnvinfer.so.10: cannot open\\nshared object')",
            "so.10: cannot open shared",
        ),
        ("raise FileNotFoundError('Could not find: nvinfer_11.dll')", "nvinfer_11.dll"),
        ("raise RuntimeError", r"version 11\.4 cannot be imported \(RuntimeError\)"),
        ("syntax error", "cannot be imported"),
        ("", "too old or not whole.*Builder"),
        ("class Builder: pass", "too old or not whole.*to_stream"),
    ],
)
def test_broken(site: Path, code: str, reason: str) -> None:
    counter = site / "imports"
    count = f"open({str(counter)!r}, 'a').write('x')\n" if code != "syntax error" else ""
    install(site, "tensorrt", count + code, tensorrt_cu13="11.4")
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match=reason) as caught:
            load("tensorrt")
        assert 'pip install "tensorrt>=10.13" --force-reinstall' in caught.value.remedy
        assert "\n" not in str(caught.value)
    assert not count or counter.read_text() == "x"  # remembered, not tried again
