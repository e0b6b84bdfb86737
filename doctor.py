# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What this Python has, and which engine could serve here and why not. Standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device import Device
    from .engine_cache import EngineCache

# distribution -> what Octavo needs it for
PACKAGES = {
    "torch": "every engine",
    "safetensors": "reading and writing checkpoints",
    "tensorrt-rtx": "the engine tensorrt_rtx and building plans without a GPU",
    "tensorrt": "the engine tensorrt (data-centre GPUs)",
    "onnx": "building plans",
    "onnxruntime": "verifying graphs on a CPU",
    "nvidia-modelopt": "calibration algorithms beyond 'max'",
    "triton": "the fastest form of torch_fp8",
    "transformers": "the diffusers helper",
    "diffusers": "the diffusers helper",
}
OLD_PYTHON = "this Python is too old: Octavo needs 3.11 or newer"
NO_TORCH = (
    "torch is not installed in this Python; use the Python of ComfyUI, or 'pip install torch'"
)


def examine() -> dict[str, Any]:
    """All facts as JSON-ready values; nothing that is broken stops the rest."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "python_supported": sys.version_info >= (3, 11),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    if not facts["python_supported"]:  # what imports here would fail with another reason
        facts |= {"device": None, "gpus": [], "engines": [], "problem": OLD_PYTHON}
        facts["request"] = {"engine": os.environ.get("OCTAVO_ENGINE") or "auto", "problem": ""}
        facts["builder"] = {"able": False, "reason": OLD_PYTHON, "gpus": []}
        facts["cache"] = {"problem": OLD_PYTHON}
        return facts
    facts |= _device_facts()
    facts["request"] = _request_facts(facts["engines"])
    facts["builder"] = _builder_facts()
    facts["cache"] = cache_facts()
    return facts


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_facts() -> dict[str, Any]:
    """`device` that would be used, all `gpus`, `engines` with their decisions, or the `problem`."""
    facts: dict[str, Any] = {"device": None, "gpus": [], "engines": []}
    if importlib.util.find_spec("torch") is None:
        return {**facts, "problem": NO_TORCH}
    try:
        from .choose import Accepted, ladder, probe_packages
        from .device import probe

        device = probe()
        facts["device"] = _shown(device)
        if device.type == "cuda":
            import torch

            facts["gpus"] = [_shown(probe(i)) for i in range(torch.cuda.device_count())]
        facts["engines"] = [
            {
                "engine": d.engine,
                "able": isinstance(d, Accepted),
                "reason": "" if isinstance(d, Accepted) else d.reason,
            }
            for d in ladder(device, probe_packages())
        ]
    except (
        Exception
    ) as error:  # a broken torch or driver may raise anything, and that is the answer
        facts["problem"] = f"torch cannot be used here: {_first_line(error)}"
    return facts


def _request_facts(engines: list[dict[str, Any]]) -> dict[str, str]:
    """The `engine` that the environment asks for, and the `problem` with it, or ""."""
    value = os.environ.get("OCTAVO_ENGINE") or "auto"
    try:
        from .choose import requested

        requested("auto", value)
    except Exception as error:
        return {"engine": value, "problem": _first_line(error)}
    problem = ""
    if any(e["engine"] == value and not e["able"] for e in engines):
        problem = (
            f"OCTAVO_ENGINE: the engine '{value}' cannot serve here; unset it to let Octavo choose."
        )
    return {"engine": value, "problem": problem}


def _shown(device: Device) -> dict[str, Any]:
    names = ("type", "index", "name", "sm", "memory_bytes", "driver", "cuda")
    return {name: getattr(device, name) for name in names}


def _builder_facts() -> dict[str, Any]:
    """Whether `octavo build` works here; it needs no GPU."""
    try:
        from .trt import Missing, installed
        from .trt.gpus import known_names

        package = installed("tensorrt_rtx")
    except Exception as error:
        return {"able": False, "reason": _first_line(error), "gpus": []}
    missing = [name for name in ("torch", "onnx") if importlib.util.find_spec(name) is None]
    reason = ""
    if isinstance(package, Missing):
        reason = f"tensorrt_rtx: {package.reason}; {package.remedy}"
    elif missing:
        reason = f"not installed: {', '.join(missing)}; 'pip install {' '.join(missing)}'"
    return {"able": not reason, "reason": reason, "gpus": list(known_names())}


def cache_facts(make: Callable[[], EngineCache] | None = None) -> dict[str, Any]:
    """Of the cache that `make` gives (default: the command line's), or the `problem` with it."""
    try:
        from .engine_cache import EngineCache

        cache = make() if make else EngineCache()
        cache.refuse_impossible()
        entries = cache.entries()
    except ImportError as error:
        remedy = "'pip install -r requirements.txt' brings what is missing"
        return {"problem": f"the cache cannot be used: {_first_line(error)}; {remedy}"}
    except Exception as error:  # a file is in the way, OCTAVO_CACHE_BUDGET is no size, ...
        return {"problem": f"the cache cannot be used: {_first_line(error)}"}
    return {
        "root": str(cache.root),
        "entries": len(entries),
        "bytes": sum(entry.manifest.length for entry in entries),
        "budget_bytes": cache.budget_bytes,
        "writable": not cache.root.exists() or os.access(cache.root, os.W_OK | os.X_OK),
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def text(facts: dict[str, Any]) -> str:
    """The facts as a person reads them."""
    lines = [f"Python {facts['python']} ({facts['executable']}) on {facts['platform']}"]
    if not facts["python_supported"]:
        lines.append(f"{OLD_PYTHON[0].upper()}{OLD_PYTHON[1:]}.")
    lines += ["", "Packages"]
    for name, use in PACKAGES.items():
        version = facts["packages"][name]
        lines.append(f"  {name:16} {version or 'not installed':18} {use}")
    lines += ["", *_device_text(facts), "", "Building plans (no GPU needed)"]
    builder, cache = facts["builder"], facts["cache"]
    lines.append("  works here" if builder["able"] else "  no: " + builder["reason"])
    lines += ["", "Cache"]
    if "problem" in cache:
        lines.append("  " + cache["problem"])
    else:
        advice = "NOT WRITABLE: set OCTAVO_CACHE to a folder that is"
        lines.append(f"  {cache['root']} ({'writable' if cache['writable'] else advice})")
        used, budget = cache["bytes"] / 1e9, cache["budget_bytes"] / 1e9
        lines.append(f"  {cache['entries']} entries, {used:.2f} of {budget:.1f} GB")
    return "\n".join(lines)


def _device_text(facts: dict[str, Any]) -> list[str]:
    lines = []
    if facts["device"] is not None:
        for device in facts["gpus"] or [facts["device"]]:
            sm = f", SM {device['sm'] // 10}.{device['sm'] % 10}" if device["sm"] else ""
            driver = f", driver {device['driver']}" if device["driver"] else ""
            lines.append(f"Device  {device['name']} ({device['type']}{sm}{driver})")
        lines += ["", f"Engines on {facts['device']['name']}"]
    request = facts["request"]
    able = [engine["engine"] for engine in facts["engines"] if engine["able"]]
    serves = able[:1] if request["engine"] == "auto" else [request["engine"]]
    for engine in facts["engines"]:
        state = "able" if engine["able"] else "no"
        here = engine["able"] and engine["engine"] in serves
        note = "serves here" if here else engine["reason"]
        lines.append(f"  {engine['engine']:16} {state:5} {note}".rstrip())
    if request["problem"]:
        lines.append("  " + request["problem"])
    elif request["engine"] == "fastest":
        lines.append("  OCTAVO_ENGINE is fastest: each that is able is timed once, the first time")
    elif request["engine"] != "auto":
        lines.append(f"  OCTAVO_ENGINE is {request['engine']}: no other is tried")
    return [*lines, *([facts["problem"]] if "problem" in facts else [])]


def may_replace(path: Path) -> bool:
    """Whether a result may be written to `path`: nothing is there or in it, or another result is.

    A model, its config or the cache's own files must not go because of a slip of the shell.
    """
    try:
        if path.stat().st_size > 64 * 2**20:
            return False
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.strip() else {"packages": {}}
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
        return True  # writing it will tell
    except (OSError, ValueError, RecursionError):
        return False
    results = ("encoders", "entries", "packages", "freed_bytes")
    return isinstance(found, dict) and any(
        isinstance(found.get(name), (list, dict, int)) for name in results
    )


def main(arguments: list[str]) -> int:
    """`--json FILE` (`-` for standard output) writes the facts; otherwise the text is printed."""
    if arguments and (arguments[0] != "--json" or len(arguments) != 2):
        print("usage: doctor [--json FILE]", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):  # a console may lack a character of a path
        sys.stdout.reconfigure(errors="backslashreplace")
    facts = examine()
    if not arguments:
        print(text(facts))
        return 0
    data = json.dumps(facts, indent=1)
    if arguments[1] == "-":
        print(data)
        return 0
    path = Path(arguments[1])
    if not may_replace(path):
        fault = "is there already and holds no result of Octavo's"
        print(f"doctor: {path}: {fault}; give another FILE.", file=sys.stderr)
        return 2
    try:
        path.write_text(data + "\n", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        print(f"doctor: {arguments[1]}: {reason}; give another FILE.", file=sys.stderr)
        return 2
    return 0
