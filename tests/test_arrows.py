# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of the source itself: who may import whom, and what only one module may do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import octavo
import pytest

ROOT = Path(octavo.__file__).resolve().parent

# From the edge to the ground: a module imports what stands in a later row, never from its own.
ROWS = (
    ("__init__", "__main__"),
    ("nodes", "demo"),
    ("cli",),
    ("bench",),
    ("hosts",),
    ("accelerated",),
    ("compile",),
    ("doctor",),
    ("choose", "calibrate", "verify", "requantize"),
    ("backends", "trt", "engine_cache"),
    ("checkpoints", "recipes", "prompts"),
    ("seeded",),
    ("encoders", "device", "staging", "threads"),
    ("errors",),
)
EDGES = ("nodes", "demo", "cli", "bench")
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
# Not of the package: a script for a bare Python, and what stands beside it.
BESIDE = {"run.py", "tests", "tools", "benchmarks", "examples", "build", "dist"}


def sources(*, whole: bool = False) -> list[Path]:
    """The package's files; `whole`: of the repository."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if not any(p.startswith(".") for p in parts) and (whole or parts[0] not in BESIDE):
            found.append(path)
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST, parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, name from the package's root) of every relative import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level]
            for alias in node.names:
                tail = node.module.split(".") if node.module else [alias.name]
                yield node.lineno, ".".join((*base, *tail))


def top(name: str) -> str:
    first = name.partition(".")[0]
    return first if first in RANK else "__init__"  # `from . import __version__`


def violations(tree: ast.AST, path: str) -> list[str]:
    parts = tuple(path.removesuffix(".py").split("/"))
    own = top(parts[0])
    return [
        f"{path}:{line} imports {name}"
        for line, name in imported(tree, parts)
        if own != top(name)
        and RANK[top(name)] <= RANK[own]
        and not (own in EDGES and name == "__version__")
    ]


def test_every_module_has_a_row() -> None:
    found = {relative(p).removesuffix(".py").partition("/")[0] for p in sources()}
    assert found - RANK.keys() == set()


def test_imports_point_downwards() -> None:
    assert [v for p in sources() for v in violations(tree_of(p), relative(p))] == []


@pytest.mark.parametrize(
    ("path", "code", "wrong"),
    [
        ("encoders/clip.py", "from ..backends import torch_ops", True),
        ("encoders/clip.py", "from .ops import Ops", False),
        ("encoders/clip.py", "from .. import device", True),  # sideways
        ("encoders/clip.py", "from .. import errors", False),
        ("errors.py", "from . import __version__", True),
        ("cli.py", "from . import __version__", False),
        ("cli.py", "from . import accelerate", True),
        ("accelerated.py", "from .choose import ladder", False),
        ("choose.py", "from .verify import measure", True),  # sideways
        ("verify.py", "def f():\n    from .compile import build", True),
        ("verify.py", "def f():\n    from .backends.onnx_ops import emit", False),
        ("trt/session.py", "from ..backends.plan_inputs import plan_weights", True),
        ("compile.py", "from .trt.build import build_plan", False),
    ],
)
def test_the_arrow_test_itself(path: str, code: str, wrong: bool) -> None:
    assert bool(violations(ast.parse(code), path)) == wrong


def test_own_modules_are_imported_relatively() -> None:
    """Inside ComfyUI the package has another name."""
    for path in sources():
        for node in ast.walk(tree_of(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                where = f"{relative(path)}:{node.lineno} imports {name}"
                assert name.partition(".")[0] != "octavo", where
                assert name.partition(".")[0] not in RANK, where


HEADER = "# SPDX-FileCopyrightText: The Octavo authors\n# SPDX-License-Identifier: Apache-2.0\n"


def test_every_file_has_its_licence() -> None:
    without = []
    for path in sources(whole=True):
        text = path.read_text(encoding="utf-8")
        if text.startswith("#!"):
            text = text.partition("\n")[2]
        if not text.startswith(HEADER):
            without.append(relative(path))
    assert without == []


def called(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every call; whatever is not a plain name becomes `?`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            names: list[str] = []
            target: ast.AST = node.func
            while isinstance(target, ast.Attribute):
                names.insert(0, target.attr)
                target = target.value
            names.insert(0, target.id if isinstance(target, ast.Name) else "?")
            yield node.lineno, ".".join(names)


# The last is a process of its own, whose standard error is its log.
MAY_PRINT = {"cli.py", "demo.py", "doctor.py", "trt/worker.py"}


def test_calls_that_have_one_place_or_none() -> None:
    wrong = []
    for path in sources():
        name = relative(path)
        for line, call in called(tree_of(path)):
            last = call.rpartition(".")[2]
            if (
                call in ("exec", "eval", "compile", "__import__", "breakpoint")
                or (call == "print" and name not in MAY_PRINT)
                or (call == "torch.load" and name != "checkpoints/files.py")
                or call in ("pickle.load", "pickle.loads", "os.system", "os.popen", "os.fork")
                or (last == "cuda" and call != "torch.cuda")
            ):
                wrong.append(f"{name}:{line} calls {call}")
    assert wrong == []


def test_torch_load_reads_tensors_only() -> None:
    calls = [
        node
        for node in ast.walk(tree_of(ROOT / "checkpoints" / "files.py"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    for call in calls:
        options = {k.arg: ast.unparse(k.value) for k in call.keywords}
        assert options["weights_only"] == "True"


def loaded(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, first name) of every absolute import, also through importlib with a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0] if node.args else None
            name = argument.value if isinstance(argument, ast.Constant) else "?"
            yield node.lineno, str(name).partition(".")[0]


OWNERS = {  # who may import it at all, at any depth
    "tensorrt": ("trt/",),
    "tensorrt_rtx": ("trt/",),
    "modelopt": ("calibrate.py",),
    "onnx": ("backends/onnx_ops.py", "verify.py", "compile.py"),
    "onnxruntime": ("verify.py", "compile.py"),
    "triton": ("backends/triton_kernels.py",),
    "comfy": ("hosts/comfy", "nodes/"),
    "comfy_api": ("nodes/",),
    "diffusers": (),
    "transformers": ("bench.py", "hosts/diffusers.py"),
    "pickle": (),
    "?": ("trt/",),  # a computed name: the two flavours
}


def test_each_library_has_its_owner() -> None:
    wrong = []
    for path in sources():
        name = relative(path)
        for line, module in loaded(tree_of(path)):
            if module in OWNERS and not name.startswith(OWNERS[module] or ("-",)):
                wrong.append(f"{name}:{line} imports {module}")
    assert wrong == []


HEAVY = (
    "tensorrt", "tensorrt_rtx", "modelopt", "onnx", "onnxruntime", "transformers", "diffusers",
    "torch", "numpy", "safetensors", "rich", "click",
)  # fmt: skip
CLOCK = f"""
import sys, time
start = time.perf_counter()
import octavo
seconds = time.perf_counter() - start
print(seconds, *(name for name in {HEAVY!r} if name in sys.modules))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_octavo_is_quick_and_loads_nothing(
    record_property: pytest.RecordProperty,
) -> None:
    best = 1.0
    for _ in range(5):
        seconds, *heavy = run(CLOCK).split()
        assert heavy == []
        best = min(best, float(seconds))
    record_property("import_seconds", best)
    assert best < 0.05, f"{best * 1000:.0f} ms"


@pytest.mark.parametrize(
    "module", ["errors", "encoders", "recipes", "prompts", "device", "engine_cache", "checkpoints",
               "backends.onnx_ops", "trt", "trt.gpus", "trt.build", "compile"]
)  # fmt: skip
def test_the_cached_path_imports_no_torch(module: str) -> None:
    code = f"import sys, octavo.{module}; print(*(n for n in {HEAVY[:8]!r} if n in sys.modules))"
    assert run(code).split() == []
