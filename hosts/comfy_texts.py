# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The texts on the nodes: sent to the page, and kept for a page that is loaded again.

ComfyUI forgets them with the page, and a node whose result is cached does not run to say it again.
`web/octavo.js` asks for them by `/octavo/texts`. Imports neither torch nor ComfyUI.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

ROUTE = "/octavo/texts"
KEPT = 256

_texts: OrderedDict[str, str] = OrderedDict()  # node id -> what it shows
_workflows: OrderedDict[str, str] = OrderedDict()  # node id -> the workflow that it is a part of


def belongs(node: str | None, extra: Mapping[str, Any] | None) -> None:
    """Note the workflow of a node: another one may have a node of the same number.

    `extra` is ComfyUI's EXTRA_PNGINFO; a prompt that no page sent has none.
    """
    workflow = (extra or {}).get("workflow")
    name = workflow.get("id") if isinstance(workflow, Mapping) else None
    if node is not None and isinstance(name, str):
        _put(_workflows, node, name)


def send_text(text: str, node: str) -> None:
    """Show `text` on a node of the page; without a running server nothing happens."""
    _put(_texts, node, text)
    send = getattr(_server(), "send_progress_text", None)
    if send is None:  # used as a library, or another ComfyUI
        log.debug("%s", text)
    else:
        send(text, node)


def kept() -> dict[str, dict[str, str]]:
    """Node id -> its workflow and its text, for all that a page could show."""
    known = ((node, _workflows.get(node), text) for node, text in _texts.items())
    return {node: {"workflow": w, "text": text} for node, w, text in known if w is not None}


def serve() -> None:
    """Answer the page's question for the texts, if this is a ComfyUI with a server."""
    routes = getattr(_server(), "routes", None)
    if routes is None:
        return
    web: Any = importlib.import_module("aiohttp.web")  # ComfyUI's own server

    async def answer(_: Any) -> Any:
        return web.json_response(kept())

    routes.get(ROUTE)(answer)


def _server() -> Any:
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def _put(table: OrderedDict[str, str], key: str, value: str) -> None:
    table.pop(key, None)
    table[key] = value
    while len(table) > KEPT:
        table.popitem(last=False)
