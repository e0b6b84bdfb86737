# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What is kept of the texts on the nodes, and for whom."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from octavo.hosts import comfy_texts as texts

HERE = {"workflow": {"id": "here", "nodes": []}}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    texts._texts.clear()
    texts._workflows.clear()
    yield
    texts._texts.clear()
    texts._workflows.clear()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    sent: list[tuple[str, str]] = []
    routes: dict[str, Any] = {}
    instance = SimpleNamespace(
        send_progress_text=lambda text, node: sent.append((text, node)),
        routes=SimpleNamespace(get=lambda path: lambda handler: routes.update({path: handler})),
    )
    module = SimpleNamespace(PromptServer=SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "server", module)
    return SimpleNamespace(sent=sent, routes=routes)


def test_a_text_is_sent_and_the_last_one_kept(server: Any) -> None:
    texts.belongs("3", HERE)
    texts.send_text("calibrating", "3")
    texts.send_text("served", "3")
    assert server.sent == [("calibrating", "3"), ("served", "3")]
    assert texts.kept() == {"3": {"workflow": "here", "text": "served"}}


@pytest.mark.parametrize(
    "extra", [None, {}, {"workflow": None}, {"workflow": {}}, {"workflow": {"id": 5}}]
)
def test_a_node_of_no_known_workflow_is_shown_to_no_page(extra: Any) -> None:
    texts.belongs("3", extra)
    texts.belongs(None, HERE)
    texts.send_text("served", "3")
    assert texts.kept() == {}


def test_a_node_belongs_to_the_workflow_that_ran_last() -> None:
    for name in ("first", "second"):
        texts.belongs("3", {"workflow": {"id": name}})
        texts.send_text(f"by {name}", "3")
    assert texts.kept() == {"3": {"workflow": "second", "text": "by second"}}


def test_what_is_kept_is_bounded() -> None:
    for i in range(3 * texts.KEPT):
        texts.belongs(str(i), HERE)
        texts.send_text("x", str(i))
    assert len(texts.kept()) == texts.KEPT == len(texts._workflows)
    assert str(3 * texts.KEPT - 1) in texts.kept()


def test_without_a_server_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "server", raising=False)
    texts.send_text("x", "1")
    texts.serve()
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace())
    texts.send_text("x", "1")
    texts.serve()


def test_the_page_is_answered_where_its_script_asks(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = SimpleNamespace(json_response=lambda value: value)
    monkeypatch.setitem(sys.modules, "aiohttp.web", web)
    texts.serve()
    (path,) = server.routes
    script = Path(__file__).resolve().parents[2] / "web" / "octavo.js"
    assert path == texts.ROUTE and f'"{path}"' in script.read_text(encoding="utf-8")
    texts.belongs("3", HERE)
    texts.send_text("served", "3")
    assert asyncio.run(server.routes[path](None)) == texts.kept() != {}
