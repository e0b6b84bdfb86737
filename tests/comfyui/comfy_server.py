# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A real ComfyUI server in a child process, graphs for its HTTP API, and what they wrote."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
Ref = list[Any]  # [node id, output number]


class Graph:
    """A prompt in API form: `add` gives the reference to a node's first output."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, **inputs: Any) -> Ref:
        number = str(len(self.nodes) + 1)
        self.nodes[number] = {"class_type": kind, "inputs": inputs}
        return [number, 0]

    def clip(self, family: str = "sd1", seed: int = 0, simulate: bool = True) -> Ref:
        return self.add("OctavoTestClip", family=family, seed=seed, simulate=simulate)

    def octavo(self, clip: Ref, **changes: Any) -> Ref:
        chosen = {
            "precision": "auto",
            "engine": "auto",
            "build": "on first use",
            "similarity_floor": 0.0,
        }
        return self.add("OctavoTextEncoder", clip=clip, **{**chosen, **changes})

    def lora(self, clip: Ref, seed: int, strength: float = 1.0, bypass: bool = False) -> Ref:
        return self.add("OctavoTestLora", clip=clip, seed=seed, strength=strength, bypass=bypass)

    def encode(self, clip: Ref, text: str) -> Ref:
        return self.add("CLIPTextEncode", clip=clip, text=text)

    def keep(self, conditioning: Ref, name: str) -> None:
        self.add("OctavoTestKeep", conditioning=conditioning, name=name)


@dataclass
class Server:
    base: Path
    address: str
    process: subprocess.Popen[bytes]
    log: Path
    counter: int = field(default=0)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.address}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        return json.loads(text) if text else None

    def start(self, graph: Graph) -> str:
        return str(self.post("/prompt", {"prompt": graph.nodes})["prompt_id"])

    def wait(self, prompt: str, timeout_s: float = 600) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            found = self.get(f"/history/{prompt}")
            if prompt in found:
                return dict(found[prompt])
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            time.sleep(0.05)
        raise AssertionError(f"no answer in {timeout_s} s")

    def run(self, graph: Graph) -> dict[str, Any]:
        """Outputs by node id; fails with the server's own message."""
        result = self.wait(self.start(graph))
        messages = result["status"]["messages"]
        assert result["status"]["status_str"] == "success", json.dumps(messages)[-4000:]
        return dict(result["outputs"])

    def kept(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.base / "output" / f"{name}.safetensors")

    def facts(self, name: str) -> Any:
        with safe_open(self.base / "output" / f"{name}.safetensors", "pt") as file:
            return json.loads(file.metadata()["facts"])

    def state(self, clip: Ref, after: Ref, graph: Graph) -> dict[str, Any]:
        """Run `graph` and say how Octavo served `clip` in it."""
        node = graph.add("OctavoTestState", clip=clip, after=after)[0]
        return dict(json.loads(self.run(graph)[node]["text"][0]))


@contextmanager
def serve(base: Path, *arguments: str) -> Iterator[Server]:
    """ComfyUI of OCTAVO_COMFYUI on the CPU, with Octavo and the test nodes; stopped at the end.

    OCTAVO_COMFYUI_PYTHON is the Python that has ComfyUI's requirements (default: this one).
    """
    checkout = Path(os.environ["OCTAVO_COMFYUI"]).resolve()
    python = os.environ.get("OCTAVO_COMFYUI_PYTHON", sys.executable)
    nodes = base / "custom_nodes"
    nodes.mkdir(parents=True, exist_ok=True)
    for folder in ("models/loras", "models/embeddings", "models/text_encoders", "output", "input"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    for name, target in (("octavo", ROOT), ("octavo_test", Path(__file__).parent / "pack")):
        link = nodes / name
        if not link.exists():
            try:
                link.symlink_to(target, target_is_directory=True)
            except OSError:  # Windows without the right to make links
                shutil.copytree(target, link, ignore=shutil.ignore_patterns(".*", "build"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = base / "server.log"
    command = [
        python, "main.py", "--disable-api-nodes", "--base-directory", str(base),
        "--database-url", "sqlite:///:memory:", "--port", str(port), *arguments,
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    environment.pop("OCTAVO_CACHE", None)  # it must find its place in the models folder
    environment["OMP_NUM_THREADS"] = "1"  # threads that wait for each other cost more than they do
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=checkout, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        server = Server(base, f"http://127.0.0.1:{port}", process, log)
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text(errors="replace")[-4000:]
                with suppress(OSError):
                    server.get("/system_stats")
                    break
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
