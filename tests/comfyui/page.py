# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's page in headless Chromium: load a graph, run it, read what the nodes show.

    python page.py CHROMIUM ADDRESS WORKFLOW.json OUT_FOLDER [LANGUAGE]

Writes page.png and page.json, a picture and the texts. Talks to Chromium over its DevTools
protocol; needs aiohttp, which ComfyUI brings along.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._count = socket, 0

    async def call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(timeout=60)).data)
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]

    async def value(self, expression: str) -> Any:
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait(self, expression: str, seconds: float) -> None:
        for _ in range(int(seconds * 5)):
            if await self.value(f"Boolean({expression})"):
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"not seen in {seconds} s: {expression}")


async def look(chromium: str, address: str, workflow: Any, out: Path, language: str) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                chromium, "--headless=new", "--no-sandbox", "--disable-gpu",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}", "--window-size=1700,1100", "about:blank",
            ],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "DevTools listening on" in line:
                    port = line.split("127.0.0.1:")[1].split("/")[0]
                    break
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    targets = await answer.json(content_type=None)
                place = next(t for t in targets if t["type"] == "page")["webSocketDebuggerUrl"]
                async with session.ws_connect(place, max_msg_size=0) as socket:
                    await _steps(Page(socket), address, workflow, out, language)
        finally:
            process.terminate()
            process.wait(20)


WIDGETS = (
    "window.app.graph._nodes.map(n => ({type: n.type, title: n.title, inputs: "
    "(n.inputs || []).map(i => i.label || i.name), widgets: (n.widgets || []).map("
    "w => ({name: w.name, label: w.label || '', value: String(w.value).slice(0, 2000)}))}))"
)


async def _load(page: Page, address: str, workflow: Any) -> None:
    await page.call("Page.navigate", url=address)
    await page.wait("window.app?.graph && window.app.extensionManager", 90)
    await asyncio.sleep(2)
    await page.value(f"window.app.loadGraphData({json.dumps(workflow)})")
    await asyncio.sleep(1)


async def _steps(page: Page, address: str, workflow: Any, out: Path, language: str) -> None:
    async with aiohttp.ClientSession() as session:
        settings = {
            "Comfy.TutorialCompleted": True,
            "Comfy.InstalledVersion": "1.49.6",
            "Comfy.Locale": language,
            "Comfy.Workflow.ShowMissingModelsWarning": False,
        }
        async with session.post(f"{address}/settings", json=settings) as answer:
            assert answer.status == 200
    await page.call("Page.enable")
    await _load(page, address, workflow)
    await page.value("window.app.queuePrompt(0)")
    done = "fetch('/history').then(r => r.json()).then(h => Object.values(h).length > 0)"
    for _ in range(600):
        if await page.value(done):
            break
        await asyncio.sleep(0.5)
    await asyncio.sleep(2)
    nodes = await page.value(WIDGETS)
    history = await page.value(
        "fetch('/history').then(r => r.json()).then(h => Object.values(h)[0].status)"
    )
    found = {"nodes": nodes, "status": history, "text": await page.value("document.body.innerText")}
    picture = await page.call("Page.captureScreenshot", format="png")
    await _load(page, address, workflow)
    found["again"] = await page.value(WIDGETS)
    await _load(page, address, {**workflow, "id": "another-workflow"})
    found["other"] = await page.value(WIDGETS)
    (out / "page.png").write_bytes(base64.b64decode(picture["data"]))
    (out / "page.json").write_text(
        json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8"
    )


if __name__ == "__main__":
    program, url, graph, folder = sys.argv[1:5]
    asyncio.run(
        look(
            program, url, json.loads(Path(graph).read_text(encoding="utf-8")), Path(folder),
            sys.argv[5] if len(sys.argv) > 5 else "en",
        )
    )  # fmt: skip
