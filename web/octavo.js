// SPDX-FileCopyrightText: The Octavo authors
// SPDX-License-Identifier: Apache-2.0
// Puts the texts back onto Octavo's nodes when a page or a workflow is loaded again. The server
// keeps them (hosts/comfy_texts.py); a node whose result is cached does not run to say them again.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

async function restore() {
  const nodes = (app.graph?.nodes ?? []).filter((node) => node.type?.startsWith("Octavo"));
  if (nodes.length === 0) return;
  const answer = await api.fetchApi("/octavo/texts");
  if (!answer.ok) return;
  const texts = await answer.json();
  for (const node of nodes) {
    const kept = texts[String(node.id)];
    // Another workflow may have a node of the same number.
    if (kept === undefined || kept.workflow !== app.graph.id) continue;
    api.dispatchCustomEvent("progress_text", { nodeId: String(node.id), text: kept.text });
  }
}

app.registerExtension({
  name: "octavo.texts",
  async afterConfigureGraph() {
    try {
      await restore();
    } catch (error) {
      console.warn("Octavo: the texts of its nodes are not restored:", error);
    }
  },
});
