# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Real builds with TensorRT for RTX, and everything that may go wrong around them."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import psutil
import pytest
from octavo import trt
from octavo.errors import BuildError, CacheError, Cancelled, EngineUnavailable, FileError
from octavo.trt import build
from octavo.trt.build import BuiltPlan, Progress, build_plan
from octavo.trt.header import read_header
from trt_graphs import BLOCK, LINEARS, PROFILE, TOWER, Graph, request_of, write_safetensors

ROOT = Path(trt.__file__).parents[1]
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and devices")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "temporary" / "plan"


@pytest.fixture(autouse=True)
def nothing_is_left(target: Path):
    """After a failed build: no process and no file, partial or temporary."""
    target.parent.mkdir()
    yield
    assert builders() == []
    assert [path.name for path in target.parent.iterdir()] in ([], ["plan"])


def builders(of: int | None = None) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(of).children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "octavo_builder" in " ".join(child.cmdline())
    ]


def once_building(act: Callable[[], object]) -> Callable[[Progress], None]:
    """A progress function that acts once, in mid build."""
    done = threading.Event()

    def progress(at: Progress) -> None:
        if at.phase == "Building engine" and not done.is_set():
            done.set()
            act()

    return progress


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("sms", [(89,), (120,), (120, 89, 89)])
def test_plan(sms: tuple[int, ...], target: Path) -> None:
    seen: list[Progress] = []
    target.write_bytes(b"what was there before")
    built = build_plan(request_of(BLOCK, *sms), target=target, progress=seen.append)
    assert isinstance(built, BuiltPlan)
    assert built.path == target
    assert built.bytes == target.stat().st_size > 100_000
    assert built.sha256 == sha256(target)
    assert built.sms == tuple(sorted(set(sms)))
    assert built.flavour == "tensorrt_rtx"
    header = read_header(target)
    assert header
    assert (header.total_bytes, header.sms) == (built.bytes, built.sms)
    assert header.version == built.version
    assert 0 < built.seconds < 60
    phases = [progress.phase for progress in seen]
    assert phases[:3] == ["Starting the builder", "Parsing the graph", "Building engine"]
    assert "Compiling the kernels" in phases
    assert any(progress.step > 0 for progress in seen)
    assert all(0 <= progress.step <= progress.of for progress in seen)


def test_without_a_target_the_file_is_temporary(target: Path) -> None:
    built = build_plan(request_of(BLOCK, 89))
    built.path.unlink()


def test_memory_is_the_childs_own(target: Path) -> None:
    ballast = b"x" * (700 << 20)
    built = build_plan(request_of(BLOCK, 89), target=target)
    if sys.platform == "linux":
        assert 50 << 20 < built.peak_rss_bytes < len(ballast)


def test_same_request_same_bytes(target: Path) -> None:
    digests = {
        build_plan(request_of(BLOCK, *sms), target=target).sha256
        for sms in ((89, 120), (89, 120), (120, 89))
    }
    assert len(digests) == 1


def embedded(tmp_path: Path) -> tuple[bytes, dict[str, tuple[Path, int, int]]]:
    graph = Graph(embedded=True)
    model = graph.model()
    return model, write_safetensors(tmp_path / "model.safetensors", graph.weights)


def test_embedded_weights_come_from_the_file(tmp_path: Path, target: Path) -> None:
    model, weights = embedded(tmp_path)
    built = build_plan(request_of(model, 89, weights=weights), target=target)
    assert built.layers and built.layers.not_fp8(LINEARS) == ()
    inline = onnx.load_from_string(model)
    for tensor in inline.graph.initializer:
        if tensor.name in weights:
            path, offset, size = weights[tensor.name]
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = path.read_bytes()[offset:][:size]
    expected = build_plan(request_of(inline.SerializeToString(), 89), target=target)
    assert built.sha256 == expected.sha256
    shared = build_plan(request_of(BLOCK, 89), target=target)
    sizes = sum(size for _, _, size in weights.values())
    assert built.bytes - shared.bytes == pytest.approx(sizes, rel=0.1)


def test_bad_weights(tmp_path: Path, target: Path) -> None:
    model, weights = embedded(tmp_path)
    path, offset, size = weights["fc2.weight"]

    def fails(error: type[Exception], match: str, **changed: tuple[Path, int, int]) -> None:
        entries = weights | {name.replace("_", "."): span for name, span in changed.items()}
        with pytest.raises(error, match=match):
            build_plan(request_of(model, 89, weights=entries), target=target)

    fails(FileError, "absent.*cannot be mapped", fc2_weight=(tmp_path / "absent", 0, size))
    (tmp_path / "empty").touch()
    fails(FileError, "empty.*cannot be mapped", fc2_weight=(tmp_path / "empty", 0, size))
    fails(FileError, "ends before the .* of fc2.weight", fc2_weight=(path, offset + 1, size))
    fails(BuildError, "no initializer fc2.weight of 5 bytes", fc2_weight=(path, offset, 5))
    fails(BuildError, "no initializer fc9.weight", fc9_weight=(path, offset, size))
    del weights["fc1.weight"]
    fails(BuildError, "cannot read the graph")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sms": (86,)}, r"plan for SM 8\.6: SM 8\.6 has no FP8, which needs SM 8\.9"),
        ({"sms": (89, 80)}, r"plan for SM 8\.0 and 8\.9: SM 8\.0 has no FP8"),
        ({"sms": (90,)}, r"not supported; name one that TensorRT 1\.\S+ builds for: SM 7\.5 and"),
        ({"sms": ()}, "no GPU is named"),
        ({"onnx": b"no protobuf"}, "cannot read the graph.*Failed to parse the ONNX model"),
        ({"profile": {"tokens": PROFILE["embeds"]}}, "given for tokens, which the graph has not"),
        ({"profile": {"embeds": PROFILE["embeds"][::-1]}}, "refused.*MIN<=OPT<=MAX"),
        ({"profile": {}}, "built none.*no optimization profile"),
    ],
)
def test_refused(changes: dict[str, object], found: str, target: Path) -> None:
    seen: list[Progress] = []
    with pytest.raises(BuildError, match=found):
        build_plan(request_of(BLOCK, 89, **changes), target=target, progress=seen.append)
    assert "Building engine" not in [progress.phase for progress in seen]
    assert not target.exists()


def test_the_parsers_words(target: Path) -> None:
    model = onnx.load_from_string(BLOCK)
    model.graph.node[0].op_type = "NoSuchOperator"
    model.graph.node[0].name = "the_node"
    with pytest.raises(BuildError, match=r"the_node NoSuchOperator .*Plugin not found") as caught:
        build_plan(request_of(model.SerializeToString(), 89), target=target)
    assert any("the_node" in line for line in caught.value.log)


def test_cancel_is_immediate(target: Path) -> None:
    cancel, cancelled_at = threading.Event(), 0.0

    def act() -> None:
        nonlocal cancelled_at
        assert len(builders()) == 1
        cancelled_at = time.monotonic()
        cancel.set()

    with pytest.raises(Cancelled):
        build_plan(request_of(TOWER, 89), target=target, progress=once_building(act), cancel=cancel)
    assert 0 < time.monotonic() - cancelled_at < 1
    assert not target.exists()


def test_cancelled_before_it_starts(target: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        build_plan(request_of(TOWER, 89), target=target, cancel=cancel)


def test_error_in_the_progress_function(target: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        build_plan(request_of(TOWER, 89), target=target, progress=once_building(lambda: 1 // 0))
    assert not target.exists()


def test_too_slow(target: Path) -> None:
    with pytest.raises(BuildError, match=r"stopped after 0\.4 seconds"):
        build_plan(request_of(TOWER, 89), target=target, timeout_s=0.4)


@posix
def test_out_of_memory(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT 1.7.1 then says so, crashes, or waits for ever for a thread of its own."""
    monkeypatch.setattr(build, "STALL_S", 1.5)
    rest = 50 << 20

    def limit() -> None:
        (child,) = builders()
        child.rlimit(psutil.RLIMIT_AS, (child.memory_info().vms + rest, -1))

    with pytest.raises(BuildError, match=r"; close other programs, or build on .* more memory"):
        build_plan(request_of(TOWER, 89), target=target, progress=once_building(limit))
    assert not target.exists()


@posix
@pytest.mark.parametrize(
    ("number", "found"),
    [
        (signal.SIGKILL, r"killed \(SIGKILL\), most likely because memory ran out"),
        (signal.SIGSEGV, r"crashed \(SIGSEGV\)"),
        (signal.SIGTERM, "ended with exit code 0x1"),
    ],
)
def test_killed_child(number: signal.Signals, found: str, target: Path) -> None:
    kill = once_building(lambda: builders()[0].send_signal(number))
    with pytest.raises(BuildError, match=found):
        build_plan(request_of(TOWER, 89), target=target, progress=kill)
    assert not target.exists()


@posix
def test_full_disk(target: Path) -> None:
    target.symlink_to("/dev/full")
    with pytest.raises(
        CacheError, match=r"plan could not be written.*No space left.*free some space"
    ):
        build_plan(request_of(BLOCK, 89), target=target)
    assert Path("/dev/full").exists()


def test_folder_that_is_not_there(target: Path) -> None:
    with pytest.raises(CacheError, match=r"absent.*could not be written"):
        build_plan(request_of(BLOCK, 89), target=target.parent / "absent" / "plan")


@pytest.mark.parametrize("kind", [BuildError, CacheError, EngineUnavailable, FileError])
def test_errors_cross_the_process_boundary(kind: type[Exception]) -> None:
    """They travel as their fields, which are their arguments."""
    error = kind("subject", "found", "remedy")
    assert str(kind(**vars(error))) == str(error)


def test_python_that_does_not_start(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(target / "python"))
    with pytest.raises(BuildError, match="builder process could not be started"):
        build_plan(request_of(BLOCK, 89), target=target)
    monkeypatch.setattr(sys, "executable", shutil.which("true") or sys.executable)
    with pytest.raises(BuildError, match="ended with exit code 0x0"):
        build_plan(request_of(BLOCK, 89), target=target)


# A host: it knows the package's folder only, and not by a name that can be imported.
HOST = """\
import importlib.util, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
folder, onnx, target = map(Path, sys.argv[1:])
spec = importlib.util.spec_from_file_location(
    "custom_nodes.a-b", folder / "__init__.py", submodule_search_locations=[str(folder)])
sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
build = importlib.import_module(spec.name + ".trt.build")
request = build.BuildRequest("tensorrt_rtx", onnx.read_bytes(), (89,), {"embeds": PROFILE})
built = build.build_plan(request, target=target, progress=lambda at: print(at.phase, flush=True))
print(built.sha256)
""".replace("PROFILE", repr(PROFILE["embeds"]))


def start_host(tmp_path: Path, target: Path, model: bytes, folder: Path = ROOT) -> subprocess.Popen:
    (tmp_path / "model.onnx").write_bytes(model)
    command = [sys.executable, "-c", HOST, folder, tmp_path / "model.onnx", target]
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_building(tmp_path: Path, target: Path) -> tuple[subprocess.Popen, psutil.Process]:
    host = start_host(tmp_path, target, TOWER)
    assert host.stdout
    while "Building engine" not in (line := host.stdout.readline()):
        assert line, host.stderr and host.stderr.read()
    (child,) = builders(host.pid)
    return host, child


def assert_gone(child: psutil.Process, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the builder outlived its host"
        time.sleep(0.01)


@posix
def test_ctrl_c_in_a_terminal(tmp_path: Path, target: Path) -> None:
    host, child = start_building(tmp_path, target)
    started = time.monotonic()
    os.killpg(host.pid, signal.SIGINT)
    _, complaint = host.communicate(timeout=5)
    assert time.monotonic() - started < 1
    assert host.returncode == -signal.SIGINT
    assert complaint.rstrip().endswith("KeyboardInterrupt")
    assert_gone(child, 0.1)
    assert not target.exists()


@posix
def test_builder_ignores_ctrl_c(tmp_path: Path, target: Path) -> None:
    host, child = start_building(tmp_path, target)
    child.send_signal(signal.SIGINT)
    output, _ = host.communicate(timeout=60)
    assert output.split()[-1] == sha256(target)


@posix
def test_killed_host_takes_the_builder_along(tmp_path: Path, target: Path) -> None:
    host, child = start_building(tmp_path, target)
    assert target.exists()
    host.kill()
    host.communicate()
    assert_gone(child, 1)
    assert not target.exists()


def test_folder_of_any_name_and_no_torch(tmp_path: Path, target: Path) -> None:
    """As ComfyUI holds it; and modules of the current folder are not taken for the child's."""
    folder = tmp_path / "custom nodes" / "ComfyUI-Octavo (é)"
    shutil.copytree(ROOT / "trt", folder / "trt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "errors.py", folder)
    (folder / "__init__.py").touch()
    for name in ("torch", "ctypes", "hashlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    host = start_host(tmp_path, target, BLOCK, folder)
    output, complaint = host.communicate(timeout=60)
    assert host.returncode == 0, complaint
    assert output.split()[-1] == sha256(target)


@pytest.fixture
def fake_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a full `tensorrt` made of TensorRT for RTX without its ahead-of-time names."""
    site = tmp_path / "site"
    (site / "tensorrt").mkdir(parents=True)
    (site / "tensorrt_cu13-11.4.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: tensorrt_cu13\nVersion: 11.4\n"
    (site / "tensorrt_cu13-11.4.dist-info" / "METADATA").write_text(metadata)
    (site / "torch.py").write_text("raise SystemExit('the builder imports torch')")
    monkeypatch.syspath_prepend(site)
    code = (
        "from tensorrt_rtx import *\nfrom tensorrt_rtx import __version__\ndel ComputeCapability\n"
    )

    def install(more: str) -> None:
        (site / "tensorrt" / "__init__.py").write_text(code + more)

    return install


def test_full_tensorrt_by_its_names(fake_tensorrt: Callable[[str], None], target: Path) -> None:
    fake_tensorrt("")
    built = build_plan(request_of(BLOCK, flavour="tensorrt"), target=target)
    assert (built.flavour, built.sms) == ("tensorrt", ())
    assert built.layers and built.layers.not_fp8(LINEARS) == ()
    with pytest.raises(BuildError, match="full TensorRT builds for the local GPU only"):
        build_plan(request_of(BLOCK, 89, flavour="tensorrt"), target=target)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("make = lambda cls, log: None", "made no builder"),
        ("def make(cls, log): raise TypeError('factory returned nullptr')", "builder.*nullptr"),
        (
            "def make(cls, log):\n log.log(ILogger.ERROR, 'CUDA error 35')\n raise ValueError('n')",
            "made no builder .CUDA error 35; n",
        ),
        (
            "def make(cls, log):\n log.log(ILogger.ERROR, 'CUDA error 35')\n return Fake()",
            "made no builder .CUDA error 35",
        ),
        ("make = lambda cls, log: Fake()\nFake.create_network = lambda s, f: None", "no network"),
        ("def make(cls, log): import os; os.abort()", r"crashed \(SIGABRT\)"),
        ("def make(cls, log): raise SystemExit(3)", "ended with exit code 0x3"),
    ],
)
def test_null_or_crash(
    more: str, found: str, fake_tensorrt: Callable[[str], None], target: Path
) -> None:
    fake_tensorrt(
        f"class Fake: pass\n{more}\n"
        "Builder = type('B', (), {'__new__': make, 'build_serialized_network_to_stream': None})"
    )
    with pytest.raises(BuildError, match=found):
        build_plan(request_of(BLOCK, flavour="tensorrt"), target=target)


def test_builder_that_stands_still(
    fake_tensorrt: Callable[[str], None], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "STALL_S", 0.6)
    fake_tensorrt(
        "import tensorrt_rtx\n"
        "class Builder(tensorrt_rtx.Builder):\n"
        "  def build_serialized_network_to_stream(self, network, config, writer):\n"
        "    import time; time.sleep(600)\n"
    )
    with pytest.raises(BuildError, match="stands still, most likely because memory ran out"):
        build_plan(request_of(BLOCK, flavour="tensorrt"), target=target)


def test_broken_package(fake_tensorrt: Callable[[str], None], target: Path) -> None:
    fake_tensorrt("raise OSError('libnvinfer.so.11: cannot open shared object file')")
    with pytest.raises(EngineUnavailable, match=r"11\.4 cannot be imported .libnvinfer.so.11"):
        build_plan(request_of(BLOCK, flavour="tensorrt"), target=target)


def test_write_that_fails_late(fake_tensorrt: Callable[[str], None], target: Path) -> None:
    """TensorRT reports success although nothing was written, so the size is checked."""
    fake_tensorrt(
        "import tensorrt_rtx\n"
        "class Builder(tensorrt_rtx.Builder):\n"
        "  def build_serialized_network_to_stream(self, network, config, writer):\n"
        "    plan = bytes(self.build_serialized_network(network, config))\n"
        "    return writer.write(plan[:-1]) > 0\n"
    )
    with pytest.raises(BuildError, match=r"only .* bytes of it were written"):
        build_plan(request_of(BLOCK, flavour="tensorrt"), target=target)
