# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What a build costs, beside its targets: time, memory, sizes and similarity of full-size encoders.

    .venv/bin/python benchmarks/build.py [--encoder clip_l] [--quick]
    .venv/bin/python benchmarks/build.py --encoder t5_xxl      (half an hour, 25 GB of disk)

Seeded weights with outlier channels, real processes, an empty cache; no GPU. Memory is the sum of
the resident sets of the command and its children, sampled 20 times a second, so pages that both map
count twice; "anonymous" is of the largest process, without what files back. Writes
results/build.json and results/build.md, for T5 results/build-t5_xxl.json and .md; exits with 1 if a
target is missed.
`--quick` leaves out the recipe fp8-mixed and the embedded plans, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import psutil

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "tensorrt-rtx", "onnx", "onnxruntime", "nvidia-modelopt", "safetensors")
SAMPLE_S = 0.05
REPEATS = 5


@dataclass(frozen=True)
class Limits:
    """Targets of one encoder; None where there is none."""

    job_s: float | None = None
    job_bytes: float | None = None
    compile_s: float | None = None
    compile_bytes: float | None = None
    plan_bytes: float | None = None
    job_anonymous: float | None = None
    embedded_s: float | None = None
    embedded_anonymous: float | None = None


ENCODERS = {
    "clip_l": Limits(60, 3e9, 3, 1e9, 10e6),
    "clip_h": Limits(),
    "clip_g": Limits(240, 8e9, 6, 1e9, 20e6),
    "t5_xxl": Limits(1200, None, 5, 1.5e9, 20e6, 4e9, 60, 8.5e9),
}
SIMILARITY = {
    "fp8": {"token_mean": 0.993, "token_min": 0.98, "pooled": 0.993},
    "fp8-mixed": {"token_mean": 0.995},
}
T5_SIMILARITY = {"token_mean": 0.998, "token_min": 0.99}


@dataclass(frozen=True)
class Row:
    """One number beside its target. `most`: the target is an upper bound."""

    what: str
    value: float
    unit: str
    target: float | None = None
    most: bool = True

    @property
    def passed(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.most else self.value >= self.target

    def cells(self) -> tuple[str, str, str, str]:
        verdict = {None: "-", True: "reached", False: "MISSED"}[self.passed]
        bound = "-" if self.target is None else f"{'<=' if self.most else '>='} {self.target:g}"
        return self.what, f"{self.value:.4g} {self.unit}".strip(), bound, verdict


@dataclass(frozen=True)
class Finished:
    """A command that ended well: seconds of wall time, peak bytes of it and all its children.

    `peak_anonymous`: of the largest of them, without pages that files back.
    """

    out: str
    seconds: float
    peak_bytes: int
    peak_anonymous: int


def run(*command: object) -> Finished:
    """Run a command to its end, watching its memory; raises CalledProcessError with its words."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-P", *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    peak, watched = [0, 0], psutil.Process(process.pid)

    def watch() -> None:
        while process.poll() is None:
            total = anonymous = 0
            try:
                for one in (watched, *watched.children(recursive=True)):
                    memory = one.memory_info()
                    total += memory.rss
                    own = memory.rss - getattr(memory, "shared", 0)  # Linux tells
                    anonymous = max(anonymous, own)
            except psutil.NoSuchProcess:
                continue
            peak[:] = max(peak[0], total), max(peak[1], anonymous)
            time.sleep(SAMPLE_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, err = process.communicate()
    seconds = time.monotonic() - start
    watcher.join()
    if process.returncode:
        print(err, file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, command)
    return Finished(out, seconds, *peak)


def octavo(*arguments: object) -> Finished:
    return run("-m", "octavo", *arguments)


def facts(finished: Finished) -> dict[str, Any]:
    """The only encoder of a `build --json -`."""
    (encoder,) = json.loads(finished.out)["encoders"]
    return dict(encoder)


def write_model(name: str, folder: Path) -> Path:
    """A full-size encoder as ComfyUI holds it, old enough to be remembered by the memo."""
    from octavo import seeded
    from octavo.checkpoints.writing import whole_file, write_safetensors

    path, spec = folder / f"{name}.safetensors", getattr(seeded, name.upper())
    with whole_file(path, "free some space") as file:
        if name == "t5_xxl":
            write_streamed(file, spec.tensors(), seeded.seeded_tensors(spec))
        else:
            write_safetensors(file, dict(seeded.seeded_tensors(spec)), {"format": "pt"})
    time.sleep(2.5)
    return path


def write_streamed(
    file: BinaryIO, shapes: Mapping[str, Sequence[int]], tensors: Iterable[tuple[str, Any]]
) -> None:
    """fp16 tensors in the safetensors format, of which only one is in memory at a time."""
    places, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        places[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **places}).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in tensors:
        file.seek(8 + len(text) + places[name]["data_offsets"][0])
        file.write(tensor.contiguous().numpy().data)


KEY_FROM_MEMO = """
import sys, time
from pathlib import Path
from octavo.checkpoints import detect
from octavo.compile import content_of
from octavo.engine_cache import EngineCache
start = time.perf_counter()
detected = detect(sys.argv[1])
content_of(detected.encoders[0], detected, EngineCache(Path(sys.argv[2])), lambda _: sys.exit(3))
print(time.perf_counter() - start)
"""
IMPORT = "import time; s = time.perf_counter(); import octavo; print(time.perf_counter() - s)"


def median_of(code: str, *arguments: object) -> float:
    """Median of what `code` prints in processes of its own."""
    return statistics.median(float(run("-c", code, *arguments).out) for _ in range(REPEATS))


def measure(name: str, folder: Path, quick: bool) -> list[Row]:
    """Every number of one encoder."""
    limits, model = ENCODERS[name], write_model(name, folder)
    cache = folder / f"{name}-cache"
    build = ("build", model, "--cache", cache, "--json", "-", "--gpu")

    job = octavo(*build, "rtx4090")
    first = facts(job)
    rows = [
        Row(f"{name}: from file to verified plan", job.seconds, "s", limits.job_s),
        Row(f"{name}: its peak memory", job.peak_bytes / 1e9, "GB", _scaled(limits.job_bytes, 1e9)),
        Row(
            f"{name}: of it anonymous",
            job.peak_anonymous / 1e9, "GB", _scaled(limits.job_anonymous, 1e9),
        ),
    ]  # fmt: skip
    rows += similarity(name, "fp8", first)

    compiled = facts(octavo(*build, "rtx5090"))["engines"][0]
    sidecar = json.loads(Path(compiled["path"]).with_suffix(".json").read_text())
    rows += [
        Row(f"{name}: compile step alone", compiled["seconds"], "s", limits.compile_s),
        Row(
            f"{name}: its peak memory, the builder's process",
            sidecar["facts"]["peak_rss_bytes"] / 1e9, "GB", _scaled(limits.compile_bytes, 1e9),
        ),
    ]  # fmt: skip
    for engine in (first["engines"][0], compiled):
        what = f"{name}: shared plan for {engine['gpu']}"
        rows.append(Row(what, engine["bytes"] / 1e6, "MB", _scaled(limits.plan_bytes, 1e6)))
    ratio = first["checkpoint"]["bytes"] / model.stat().st_size
    rows.append(Row(f"{name}: FP8 checkpoint / fp16 file", ratio, "", 0.7))

    rows.append(
        Row(f"{name}: content key from the memo", median_of(KEY_FROM_MEMO, model, cache), "s", 0.3)
    )
    again = [octavo(*build, "rtx4090", "--gpu", "rtx5090") for _ in range(REPEATS)]
    assert all(e["cached"] for a in again for e in facts(a)["engines"])
    seconds = statistics.median(a.seconds for a in again)
    rows.append(Row(f"{name}: the whole command from the cache", seconds, "s", 3))

    if not quick and name == "t5_xxl":
        start = octavo(*build, "rtx4090", "--embed-weights")
        seconds = facts(start)["engines"][0]["seconds"]
        rows.append(Row(f"{name}: embedded plan", seconds, "s", limits.embedded_s))
        what = f"{name}: its peak memory, anonymous"
        most = _scaled(limits.embedded_anonymous, 1e9)
        rows.append(Row(what, start.peak_anonymous / 1e9, "GB", most))
    elif not quick:
        embedded = facts(octavo(*build, "rtx4090", "--embed-weights"))["engines"][0]
        half = int(run(__file__, "--half", model, cache).out)
        what = f"{name}: embedded FP8 plan / FP16 plan"
        rows.append(Row(what, embedded["bytes"] / half, "", 0.56))
        mixed = octavo(*build, "rtx4090", "--recipe", "fp8-mixed")
        rows += similarity(name, "fp8-mixed", facts(mixed))
    return rows


def _scaled(limit: float | None, unit: float) -> float | None:
    return None if limit is None else limit / unit


def similarity(name: str, recipe: str, encoder: dict[str, Any]) -> list[Row]:
    targets = T5_SIMILARITY if name == "t5_xxl" else SIMILARITY[recipe]
    return [
        Row(f"{name}: {recipe} {cosine}", encoder["similarity"][cosine], "", target, most=False)
        for cosine, target in targets.items()
    ]


def half_plan_bytes(model: Path, cache: Path) -> int:
    """The embedded plan of the same encoder without FP8: every linear in FP16."""
    from octavo.compile import build
    from octavo.engine_cache import EngineCache
    from octavo.recipes import load_recipe
    from octavo.trt.gpus import gpu_from_name

    recipe = replace(load_recipe("bf16"), name="fp16", body="float16")
    gpus = [gpu_from_name("rtx4090")]
    result = build(model, gpus, recipe=recipe, cache=EngineCache(cache), embed_weights=True)
    return result.encoders[0].engines[0].bytes


def versions() -> dict[str, str]:
    return {
        "octavo": metadata.version("octavo"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "memory_gb": f"{psutil.virtual_memory().total / 1e9:.0f}",
        **{name: metadata.version(name) for name in PACKAGES},
    }


def markdown(rows: Sequence[Row], found: dict[str, str]) -> str:
    lines = ["| what | measured | target | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    lines += ["", ", ".join(f"{name} {version}" for name, version in found.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", action="append", choices=ENCODERS, help="default: all CLIPs")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="without fp8-mixed and embedded plans; keeps no results",
    )
    parser.add_argument("--half", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.half:
        print(half_plan_bytes(*options.half))
        return 0
    rows = [Row("import octavo", 1e3 * median_of(IMPORT), "ms", 50)]
    print("{:55} {:>12} {:>10} {}".format(*rows[0].cells()))
    with tempfile.TemporaryDirectory(prefix="octavo-benchmark-") as folder:
        for name in options.encoder or [n for n in ENCODERS if n != "t5_xxl"]:
            measured = measure(name, Path(folder), options.quick)
            for row in measured:
                print("{:55} {:>12} {:>10} {}".format(*row.cells()), flush=True)
            rows += measured
    failed = any(row.passed is False for row in rows)
    if options.quick:  # the kept results are of a whole, quiet run
        return int(failed)
    RESULTS.mkdir(exist_ok=True)
    shown = [{**asdict(row), "passed": row.passed} for row in rows]
    document = {"versions": versions(), "rows": shown}
    report = "build-t5_xxl" if options.encoder == ["t5_xxl"] else "build"
    text = json.dumps(document, indent=1) + "\n"
    (RESULTS / f"{report}.json").write_text(text, encoding="utf-8")
    (RESULTS / f"{report}.md").write_text(markdown(rows, versions()), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
