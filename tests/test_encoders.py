# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The encoders' definition: what a spec lists, in which order the program runs, what it needs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import octavo
import pytest
import torch
from octavo.encoders import ClipSpec, Ops, encode
from octavo.encoders.clip import END_TOKEN, FINAL_NORM, POSITIONS, PROJECTION, TOKENS
from octavo.seeded import CLIP_G, CLIP_H, CLIP_L, LONG_CLIP_L, TINY
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

SHAPES = {"L": CLIP_L, "H": CLIP_H, "G": CLIP_G, "LongCLIP": LONG_CLIP_L, "tiny": TINY}


def test_sources_import_nothing_but_the_standard_library() -> None:
    folder = Path(octavo.__file__).parent / "encoders"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.partition(".")[0] in sys.stdlib_module_names, f"{path.name}: {name}"


def test_importing_them_loads_no_library() -> None:
    code = (
        "import sys, octavo.encoders;"
        "print(sorted({'torch', 'numpy', 'onnx', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def on_meta(spec: ClipSpec) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        hidden_size=spec.width,
        intermediate_size=spec.feed_forward,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        max_position_embeddings=spec.positions,
        vocab_size=spec.vocabulary,
        hidden_act=spec.activation,
        projection_dim=spec.width,
    )
    with torch.device("meta"):
        return CLIPTextModelWithProjection(config)


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_a_spec_lists_what_transformers_has(spec: ClipSpec) -> None:
    model = on_meta(spec)
    theirs = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert {**spec.tensors(), PROJECTION: (spec.width, spec.width)} == theirs
    modules = dict(model.text_model.named_modules(prefix="text_model"))
    linears = {n: tuple(m.weight.shape) for n, m in modules.items() if type(m) is nn.Linear}
    norms = {n: m.eps for n, m in modules.items() if type(m) is nn.LayerNorm}
    assert spec.linears() == linears
    assert norms == dict.fromkeys(spec.norms(), spec.layer_norm_eps)
    assert len(spec.norms()) == len(set(spec.norms()))


class Listing(Ops[str]):
    """Notes every operation; a value is the text of how it was made, unless that is `brief`."""

    def __init__(self, *, brief: bool = False) -> None:
        self.brief = brief
        self.linears_run: list[str] = []
        self.norms_run: list[str] = []
        self.attentions: list[tuple[str, str, str, int, str | None]] = []
        self.together: list[tuple[str, ...]] = []
        self.gates: list[str] = []
        self.eps: set[float] = set()

    def add(self, a: str, b: str) -> str:
        return "x" if self.brief else f"({a} + {b})"

    def add_positions(self, x: str, name: str) -> str:
        return f"({x} + {name})"

    def linear(self, x: str, name: str) -> str:
        self.linears_run.append(name)
        return f"{name.rsplit('.', 1)[1]}({x})"

    def linears(self, x: str, names: list[str]) -> tuple[str, ...]:
        self.together.append(tuple(names))
        return super().linears(x, names)

    def layer_norm(self, x: str, name: str, eps: float) -> str:
        self.norms_run.append(name)
        self.eps.add(eps)
        return f"{name.rsplit('.', 1)[1]}({x})"

    def attention(self, q: str, k: str, v: str, *, heads: int, mask: str | None) -> str:
        self.attentions.append((q[:6], k[:6], v[:6], heads, mask))
        return "attention"

    def quick_gelu(self, x: str) -> str:
        self.gates.append("quick_gelu")
        return f"quick({x})"

    def gelu(self, x: str) -> str:
        self.gates.append("gelu")
        return f"gelu({x})"


@pytest.mark.parametrize("mask", [None, "mask"])
def test_the_program_runs_everything_once_and_in_the_listed_order(mask: str | None) -> None:
    ops = Listing(brief=True)
    hidden, last = encode(ops, CLIP_H, "embeds", mask)
    assert ops.linears_run == list(CLIP_H.linears())
    assert ops.norms_run == CLIP_H.norms()
    assert ops.eps == {CLIP_H.layer_norm_eps}
    assert ops.attentions == [("q_proj", "k_proj", "v_proj", 16, mask)] * 24
    qkv = [tuple(f"{CLIP_H.block(i)}self_attn.{n}_proj" for n in "qkv") for i in range(24)]
    assert ops.together == qkv
    assert ops.gates == ["gelu"] * 24
    assert len(hidden) == 25
    assert hidden[0] == f"(embeds + {POSITIONS})"
    assert last == "final_layer_norm(x)"


def test_one_block_is_clip() -> None:
    ops = Listing()
    (embedded, block), _ = encode(ops, replace(TINY, layers=1), "e")
    after_attention = f"({embedded} + out_proj(attention))"
    feed_forward = f"fc2(quick(fc1(layer_norm2({after_attention}))))"
    assert block == f"({after_attention} + {feed_forward})"


def test_primitives_must_be_implemented() -> None:
    ops: Ops[int] = Ops()
    for call in (
        lambda: ops.add(1, 2),
        lambda: ops.add_positions(1, "p"),
        lambda: ops.linear(1, "l"),
        lambda: ops.layer_norm(1, "n", 1e-5),
        lambda: ops.attention(1, 2, 3, heads=1, mask=None),
        lambda: ops.quick_gelu(1),
        lambda: ops.gelu(1),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_families() -> None:
    found = {name: spec.family for name, spec in SHAPES.items()}
    assert found == {
        "L": "clip_l",
        "H": "clip_h",
        "G": "clip_g",
        "LongCLIP": "long_clip_l",
        "tiny": "clip",
    }
    assert replace(CLIP_H, layers=23).family == "clip_h"  # as SD2 ships it


def test_padding_is_the_hosts() -> None:
    assert CLIP_L.pad_token == END_TOKEN
    assert CLIP_G.pad_token == CLIP_H.pad_token == 0


def test_facts_hold_every_field_and_are_json() -> None:
    for field in fields(ClipSpec):
        changed: object = "gelu" if field.name == "activation" else 7
        other = replace(TINY, **{field.name: changed})
        assert other.facts() != TINY.facts(), field.name
    assert json.loads(json.dumps(TINY.facts())) == TINY.facts()
    assert TINY.facts()["encoder"] == "clip"


def test_names_outside_the_blocks() -> None:
    outside = {n for n in TINY.tensors() if ".layers." not in n}
    assert outside == {TOKENS, POSITIONS, FINAL_NORM + ".weight", FINAL_NORM + ".bias"}
