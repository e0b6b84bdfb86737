# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What this Python has, and which engine could serve here and why not. Standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

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


def examine() -> dict[str, Any]:
    """All facts as JSON-ready values; nothing that is broken stops the rest."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    if importlib.util.find_spec("torch") is None:
        facts["device"] = None
        facts["problem"] = "torch is not installed in this Python; use the Python of ComfyUI, or 'pip install torch'"
        facts["engines"] = []
    else:
        from .choose import Accepted, ladder, probe_packages
        from .device import probe

        device = probe()
        facts["device"] = {
            "type": device.type,
            "name": device.name,
            "sm": device.sm,
            "memory_bytes": device.memory_bytes,
            "driver": device.driver,
            "cuda": device.cuda,
        }
        facts["engines"] = [
            {
                "engine": d.engine,
                "able": isinstance(d, Accepted),
                "reason": "" if isinstance(d, Accepted) else d.reason,
            }
            for d in ladder(device, probe_packages())
        ]
    facts["cache"] = _cache_facts()
    return facts


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache_facts() -> dict[str, Any]:
    try:
        from .engine_cache import EngineCache

        cache = EngineCache()
        entries = cache.entries()
    except ImportError as error:
        return {"problem": f"the cache cannot be used: {error}"}
    return {
        "root": str(cache.root),
        "entries": len(entries),
        "bytes": sum(entry.manifest.length for entry in entries),
        "budget_bytes": cache.budget_bytes,
        "writable": _is_writable(cache.root),
    }


def _is_writable(path: Path) -> bool:
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK)


def text(facts: dict[str, Any]) -> str:
    """The facts as a person reads them."""
    lines = [f"Python {facts['python']} ({facts['executable']}) on {facts['platform']}", "", "Packages"]
    for name, use in PACKAGES.items():
        version = facts["packages"][name]
        lines.append(f"  {name:16} {version or 'not installed':18} {use}")
    device = facts["device"]
    if device is None:
        lines += ["", facts["problem"]]
    else:
        sm = f", SM {device['sm'] // 10}.{device['sm'] % 10}" if device["sm"] else ""
        driver = f", driver {device['driver']}" if device["driver"] else ""
        lines += ["", f"Device  {device['name']} ({device['type']}{sm}{driver})", "", "Engines"]
        serving = False
        for engine in facts["engines"]:
            state = "able" if engine["able"] else "no"
            first = engine["able"] and not serving
            serving |= engine["able"]
            note = "serves here" if first else engine["reason"]
            lines.append(f"  {engine['engine']:16} {state:5} {note}".rstrip())
    cache = facts["cache"]
    lines += ["", "Cache"]
    if "problem" in cache:
        lines.append("  " + cache["problem"])
    else:
        state = "writable" if cache["writable"] else "NOT WRITABLE: set OCTAVO_CACHE to a folder that is"
        lines.append(f"  {cache['root']} ({state})")
        used, budget = cache["bytes"] / 1e9, cache["budget_bytes"] / 1e9
        lines.append(f"  {cache['entries']} entries, {used:.2f} of {budget:.1f} GB")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """`--json FILE` (`-` for standard output) writes the facts; otherwise the text is printed."""
    facts = examine()
    if arguments[:1] == ["--json"] and len(arguments) == 2:
        data = json.dumps(facts, indent=1)
        if arguments[1] == "-":
            print(data)
        else:
            Path(arguments[1]).write_text(data + "\n", encoding="utf-8")
        return 0
    if arguments:
        print("usage: doctor [--json FILE]", file=sys.stderr)
        return 2
    print(text(facts))
    return 0
