# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The ladder over invented machines, and the doctor that shows it, also on a bare Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import choose, device, doctor
from octavo.choose import Accepted, Packages, Rejected, chosen, ladder, requested
from octavo.device import Device
from octavo.errors import EngineUnavailable, OctavoError
from octavo.trt import Installed, Missing
from pipeline import ROOT, check

RTX = Installed("1.7.1.116", "cu13")
FULL = Installed("11.4.0", "cu12")
ABSENT = Missing("the package is not installed in this Python", "install it with: pip install x")
BOTH = Missing(
    "x_cu13 and x_cu12 are both installed and overwrite each other", "run: pip uninstall"
)
ALL = Packages(RTX, FULL, onnx=True)


def gpu(name: str, sm: int, driver: str | None = "580.65") -> Device:
    return Device("cuda", 0, name, sm, 24 << 30, driver, "13.0", "2.9.0", True)


TURING, AMPERE = gpu("RTX 2080", 75), gpu("RTX 3090", 86)
ADA, BLACKWELL, SPARK = gpu("RTX 4090", 89), gpu("RTX 5090", 120), gpu("GB10", 121)
HOPPER, B200 = gpu("H200", 90), gpu("B200", 100)
CPU, ROCM = Device("cpu"), Device("rocm", 0, "MI300")

# device, packages, which engines can serve, words in the reasons of the others
MACHINES: dict[str, tuple[Device, Packages, set[str], dict[str, str]]] = {
    "Ada": (ADA, ALL, {"tensorrt_rtx", "tensorrt", "torch_fp8"}, {}),
    "Blackwell": (BLACKWELL, ALL, {"tensorrt_rtx", "tensorrt", "torch_fp8"}, {}),
    "Spark": (SPARK, ALL, {"tensorrt_rtx", "tensorrt", "torch_fp8"}, {}),
    "Hopper": (HOPPER, ALL, {"tensorrt", "torch_fp8"}, {
        "tensorrt_rtx": "does not support H200 (SM 9.0); the full 'tensorrt' package serves"}),
    "B200": (B200, ALL, {"tensorrt", "torch_fp8"}, {"tensorrt_rtx": "B200 (SM 10.0)"}),
    "Ampere": (AMPERE, ALL, set(), dict.fromkeys(
        ("tensorrt_rtx", "tensorrt", "torch_fp8"),
        "RTX 3090 (SM 8.6) has no FP8 tensor cores; they come with SM 8.9 (RTX 40)")),
    "Turing": (TURING, ALL, set(), {"torch_fp8": "RTX 2080 (SM 7.5) has no FP8 tensor cores"}),
    "CPU": (CPU, ALL, set(), {"tensorrt_rtx": "needs an NVIDIA GPU", "torch_fp8": "device 'cpu'"}),
    "AMD": (ROCM, ALL, set(), {"tensorrt": "an AMD GPU", "torch_fp8": "an AMD GPU"}),
    "Apple": (Device("mps"), ALL, set(), {"torch_fp8": "the device 'mps'"}),
    "unknown SM": (Device("cuda", name="?"), ALL, set(), {"torch_fp8": "capability of ? is not k"}),
    "no TensorRT": (ADA, Packages(ABSENT, ABSENT, True), {"torch_fp8"}, {
        "tensorrt_rtx": "not installed in this Python; install it with: pip install x"}),
    "both CUDA flavours": (ADA, Packages(BOTH, ABSENT, True), {"torch_fp8"}, {
        "tensorrt_rtx": "both installed and overwrite each other; run: pip uninstall"}),
    "no onnx": (ADA, Packages(RTX, FULL, False), {"torch_fp8"}, {
        "tensorrt_rtx": "'onnx', which writes the graph, is missing; 'pip install onnx'",
        "tensorrt": "'onnx', which writes the graph, is missing"}),
    "old driver": (gpu("RTX 4090", 89, "551.86"), ALL, {"tensorrt", "torch_fp8"}, {
        "tensorrt_rtx": "driver 551.86 is older than 580, which cu13 builds of TensorRT need"}),
    "older driver": (gpu("RTX 4090", 89, "470.2"), ALL, {"torch_fp8"}, {
        "tensorrt": "driver 470.2 is older than 535, which cu12 builds"}),
    "unknown driver": (gpu("RTX 4090", 89, None), ALL, {"tensorrt_rtx", "tensorrt", "torch_fp8"},
        {}),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_ladder(machine: str) -> None:
    found, packages, able, reasons = MACHINES[machine]
    decisions = ladder(found, packages)
    assert [d.engine for d in decisions] == list(choose.ORDER)
    assert {d.engine for d in decisions if isinstance(d, Accepted)} == {*able, "host"}
    for decision in decisions:
        if isinstance(decision, Rejected):
            assert reasons.get(decision.engine, "") in decision.reason
            assert decision.reason and "\n" not in decision.reason
            assert not decision.reason.endswith(".")
            assert str(decision) == f"{decision.engine}: {decision.reason}"


@pytest.mark.parametrize(
    ("found", "able"),
    [
        (TURING, set()),
        (AMPERE, {"tensorrt", "torch_fp8"}),
        (ADA, {"tensorrt_rtx", "tensorrt", "torch_fp8"}),
        (CPU, set()),
    ],
)
def test_ladder_without_fp8(found: Device, able: set[str]) -> None:
    decisions = ladder(found, ALL, fp8=False)
    assert {d.engine for d in decisions if isinstance(d, Accepted)} == {*able, "host"}
    if found is TURING:
        assert "RTX 2080 (SM 7.5) has no bfloat16" in str(decisions[2])


def test_chosen() -> None:
    decisions = ladder(HOPPER, ALL)
    assert chosen(decisions) == chosen(decisions, "fastest") == ["tensorrt", "torch_fp8", "host"]
    assert chosen(decisions, "torch_fp8") == ["torch_fp8"]
    with pytest.raises(EngineUnavailable, match=r"^tensorrt_rtx: .*H200.*use engine 'auto'"):
        chosen(decisions, "tensorrt_rtx")  # a forced engine is never replaced
    with pytest.raises(OctavoError, match="engine 'onnx' does not exist; choose one of auto, f"):
        chosen(decisions, "onnx")


def test_requested() -> None:
    assert requested("auto", None) == requested("auto", "") == requested("auto", "auto") == "auto"
    assert requested("auto", "host") == "host"
    assert requested("torch_fp8", "nonsense") == "torch_fp8"  # the variable is not asked
    with pytest.raises(OctavoError, match=r"^OCTAVO_ENGINE: the engine 'fast' does not exist; un"):
        requested("auto", "fast")
    with pytest.raises(OctavoError, match=r"^engine 'fast' does not exist; choose one of auto, f"):
        requested("fast", "host")


# The doctor

FACTS = {
    "python": str,
    "python_supported": bool,
    "executable": str,
    "platform": str,
    "packages": dict.fromkeys(doctor.PACKAGES, (str, type(None))),
    "device": (dict, type(None)),
    "gpus": [dict],
    "engines": [{"engine": str, "able": bool, "reason": str}],
    "request": {"engine": str, "problem": str},
    "builder": {"able": bool, "reason": str, "gpus": [str]},
    "cache": dict,
}


def test_facts_of_this_machine() -> None:
    facts = json.loads(json.dumps(doctor.examine()))
    check(facts, FACTS)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["builder"]["able"] and "rtx4090" in facts["builder"]["gpus"]
    assert facts["cache"]["root"] == os.environ["OCTAVO_CACHE"] and facts["cache"]["writable"]
    assert not Path(os.environ["OCTAVO_CACHE"]).exists()  # looking makes nothing
    text = doctor.text(facts)
    assert text.count("serves here") == 1 and "works here" in text


@pytest.mark.parametrize("machine", ["Ada", "Hopper", "Ampere", "AMD"])
def test_text_of_other_machines(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, packages, able, reasons = MACHINES[machine]
    monkeypatch.setattr(device, "probe", lambda _=None: found)
    monkeypatch.setattr(choose, "probe_packages", lambda: packages)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    facts = doctor.examine()
    check(json.loads(json.dumps(facts)), FACTS)
    text = doctor.text(facts)
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert text.count(f"Device  {found.name}") == (2 if found.type == "cuda" else 1)
    serves = [name for name in choose.ORDER if "serves here" in lines[name]]
    assert serves == [name for name in choose.ORDER if name in {*able, "host"}][:1]
    for name, reason in reasons.items():
        assert reason in lines[name]


def fail(*_: object) -> Any:
    raise RuntimeError("CUDA error 35: driver is too old\nand more")


def test_what_is_broken_does_not_stop_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "probe", fail)
    monkeypatch.setenv("OCTAVO_CACHE_BUDGET", "lots")
    facts = doctor.examine()
    text = doctor.text(facts)
    assert "torch cannot be used here: CUDA error 35: driver is too old\n" in text
    assert "the cache cannot be used: OCTAVO_CACHE_BUDGET: 'lots' is not a size" in text
    assert "works here" in text  # building needs no GPU
    monkeypatch.delenv("OCTAVO_CACHE_BUDGET")
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "cache"))
    text = doctor.text(doctor.examine())
    assert f"the cache cannot be used: cache {tmp_path}/file: a file and a folder share" in text
    assert "works here" in text
    monkeypatch.setenv("OCTAVO_CACHE", "n" * 300)
    assert "the cache cannot be used: cache /" in doctor.text(doctor.examine())
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    text = doctor.text(doctor.examine())
    assert f"  {tmp_path} (NOT WRITABLE: set OCTAVO_CACHE to a folder that is)" in text


def serving(monkeypatch: pytest.MonkeyPatch, value: str) -> tuple[list[str], str]:
    """What the doctor says serves on an Ada GPU, and the line below its engines."""
    monkeypatch.setattr(device, "probe", lambda _=None: ADA)
    monkeypatch.setattr(choose, "probe_packages", lambda: Packages(ABSENT, FULL, True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("OCTAVO_ENGINE", value)
    facts = doctor.examine()
    check(json.loads(json.dumps(facts)), FACTS)
    lines = doctor.text(facts).splitlines()
    names = [line.split()[0] for line in lines if line.endswith("serves here")]
    at = next(i for i, line in enumerate(lines) if line.startswith("  host "))
    assert "Building plans (no GPU needed)" in lines and "Cache" in lines
    return names, lines[at + 1].strip()


@pytest.mark.parametrize(
    ("value", "serves", "said"),
    [
        ("", ["tensorrt"], ""),
        ("auto", ["tensorrt"], ""),
        ("torch_fp8", ["torch_fp8"], "OCTAVO_ENGINE is torch_fp8: no other is tried"),
        ("host", ["host"], "OCTAVO_ENGINE is host: no other is tried"),
        ("fastest", [], "OCTAVO_ENGINE is fastest: each that is able is timed once"),
        ("tensorrt_rtx", [], "OCTAVO_ENGINE: the engine 'tensorrt_rtx' cannot serve here; unset"),
        ("TensorRT", [], "OCTAVO_ENGINE: the engine 'TensorRT' does not exist; unset it or set it "
         "to one of auto, fastest, tensorrt_rtx, tensorrt, torch_fp8, host."),
    ],
)  # fmt: skip
def test_the_engine_that_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, value: str, serves: list[str], said: str
) -> None:
    found, line = serving(monkeypatch, value)
    assert found == serves
    assert line.startswith(said) and bool(line) == bool(said)


def test_main(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert doctor.main(["--json", str(tmp_path / "facts.json")]) == 0
    check(json.loads((tmp_path / "facts.json").read_text()), FACTS)
    assert doctor.main(["--json", "-"]) == 0
    check(json.loads(capsys.readouterr().out), FACTS)
    assert doctor.main(["--help"]) == 2 == doctor.main(["--json"])
    assert "usage: doctor [--json FILE]" in capsys.readouterr().err
    assert doctor.main(["--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"doctor: {tmp_path}: Is a directory; give another")


@pytest.mark.parametrize(
    ("text", "code"), [("", 0), ('{"packages": {}}', 0), ("# Notes", 2), ("{}", 2), ("[]", 2)]
)
def test_only_facts_are_written_over(
    text: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "facts.json"
    path.write_text(text)
    assert doctor.main(["--json", str(path)]) == code
    if code:
        assert path.read_text() == text
        said = "is there already and holds no result of Octavo's; give another FILE."
        assert capsys.readouterr().err == f"doctor: {path}: {said}\n"
    else:
        check(json.loads(path.read_text()), FACTS)


def test_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is tried there: each import would fail with a reason of its own."""
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 12))
    facts = doctor.examine()
    assert facts.pop("problem") == doctor.OLD_PYTHON == facts["cache"]["problem"]
    check(facts, FACTS)
    assert not facts["python_supported"] and not facts["builder"]["able"]
    assert "This Python is too old: Octavo needs 3.11 or newer." in doctor.text(facts)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Python with nothing installed, and a clone under a name that cannot be imported."""
    folder = tmp_path_factory.mktemp("bare")
    base = Path(sys.base_prefix) / ("python.exe" if os.name == "nt" else "bin/python3")
    subprocess.run([base, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    clone = folder / "custom nodes" / "ComfyUI-Octavo main"
    skipped = shutil.ignore_patterns(".*", "tests", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, clone, ignore=skipped)
    python = folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python3")
    return python, clone


def run_doctor(
    bare: tuple[Path, Path], *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    python, clone = bare
    kept = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
    return subprocess.run(
        [str(python), str(clone / "run.py"), "doctor", *arguments],
        cwd=clone.parent, env={**kept, **environment}, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


def test_a_bare_python(bare: tuple[Path, Path]) -> None:
    done = run_doctor(bare)
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch is not installed in this Python; use the Python of ComfyUI" in done.stdout
    assert (
        "no: tensorrt_rtx: the package is not installed in this Python; install it" in done.stdout
    )
    assert str(bare[0].parent) in done.stdout  # it is this Python that was asked
    facts = json.loads(run_doctor(bare, "--json", "-").stdout)
    assert facts.pop("problem") in done.stdout
    done = run_doctor(bare, OCTAVO_ENGINE="quick")
    assert "OCTAVO_ENGINE: the engine 'quick' does not exist" in done.stdout  # it needs no torch
    check(facts, FACTS)
    assert set(facts["packages"].values()) == {None}
    assert [p.name for p in bare[1].iterdir() if p.name.startswith(".")] == []  # no .venv


def test_a_torch_that_does_not_load(bare: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: not found')")
    done = run_doctor(bare, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch cannot be used here: libcudart.so.13: not found" in done.stdout


def test_modules_of_the_host_are_not_taken(bare: tuple[Path, Path]) -> None:
    """ComfyUI's folder has a `nodes.py` and more, and so has ours."""
    (bare[1].parent / "device.py").write_text("raise SystemExit('the wrong device.py')")
    (bare[1].parent / "doctor.py").write_text("raise SystemExit('the wrong doctor.py')")
    assert run_doctor(bare).returncode == 0
