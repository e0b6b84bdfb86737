# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The bench's glue for T5, on a CPU: shapes, the baselines' modules, the command."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import fp8_files
import pytest
import torch
from octavo import cli
from octavo.backends.torch_ops import embed_tokens
from octavo.bench import LiveHost, _half, _transformers_model, shapes_of
from octavo.checkpoints import detect
from octavo.encoders import EncoderSpec
from octavo.seeded import CLIP_L, T5_TINY, T5_XXL, TINY, seeded_tensors
from pipeline import ROOT, save

CPU = torch.device("cpu")
SPECS: dict[str, EncoderSpec] = {
    "t5": replace(T5_TINY, vocabulary=1000),
    "umt5": replace(T5_TINY, vocabulary=1000, bias_per_layer=True),
    "v1.0": replace(T5_TINY, vocabulary=1000, gated=False, activation="relu"),
    "clip": TINY,
}


def host(spec: EncoderSpec) -> LiveHost:
    tensors = dict(seeded_tensors(spec, outliers=False, dtype=torch.float32))
    return LiveHost("tiny", spec, tensors, CPU)


def test_shapes() -> None:
    assert shapes_of(T5_XXL, None) == [(1, 256), (1, 512)]
    assert shapes_of(CLIP_L, None) == [(1, 77), (2, 77)]
    said: list[str] = []
    assert shapes_of(CLIP_L, [(1, 77), (3, 5)], said.append) == [(1, 77), (3, 5)] and not said
    assert shapes_of(CLIP_L, [(1, 512), (1, 77), (3, 5)], said.append) == [(1, 77), (3, 5)]
    assert shapes_of(T5_XXL, [(1, 5000)], said.append) == [(1, 1024)]
    assert [text.partition(":")[0] for text in said] == [
        "clip_l takes 77 tokens at most",
        "t5_xxl takes 1024 tokens at most",
    ]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@torch.no_grad()
def test_the_baselines_compute_what_the_host_does(spec: EncoderSpec) -> None:
    """In half precision; what is timed beside the engines has the same weights."""
    live = host(spec)
    ids = torch.randint(2, 900, (2, 20), generator=torch.Generator().manual_seed(0))
    embeds = embed_tokens(live.read, ids.tolist(), spec.token_table)
    _, expected = live.encode(embeds)
    model = _transformers_model(live)
    wanted = torch.bfloat16 if spec.token_table == "shared.weight" else torch.float16
    assert {p.dtype for p in model.parameters()} == {wanted}
    theirs = model(input_ids=ids).last_hidden_state
    _, half = _half(live)(embeds)
    for got in (theirs, half):
        assert got.dtype == wanted
        assert torch.nn.functional.cosine_similarity(got.float(), expected, dim=-1).min() > 0.999


def test_the_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "t5.safetensors", dict(seeded_tensors(SPECS["t5"])))
    code = cli.main(
        ["bench", str(model), "--shapes", "1x5", "--repeats", "5", "--json", "-",
         "--cache", str(tmp_path / "cache")]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    (encoder,) = json.loads(out)["encoders"]
    shapes = [(r["way"], r["batch"], r["tokens"]) for r in encoder["rows"]]
    if not torch.cuda.is_available():
        assert shapes == [("comfyui", 1, 5)]
    assert encoder["rows"][0]["token_min"] > 0.9999


def test_an_fp8_file_is_said_to_be_widened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = SPECS["t5"]
    coded = fp8_files.coded(dict(seeded_tensors(spec, outliers=False)), spec.linears())
    model = save(tmp_path / "t5.safetensors", fp8_files.legacy(coded))
    arguments = ["--shapes", "1x5", "--repeats", "5", "--no-compiled", "--json", "-"]
    assert cli.main(["bench", str(model), *arguments]) == 0
    said = capsys.readouterr().err
    values = sum(math.prod(shape) for shape in spec.linears().values())
    assert f"t5: its FP8 weights are widened to FP32 ({4 * values / 1e6:.1f} MB) and quant" in said
    (host,) = cli._bench_hosts(model, "clip_l", ())
    assert {t.dtype for n, t in host.tensors.items() if n[:-7] in spec.linears()} == {torch.float32}
    plain = save(tmp_path / "plain.safetensors", dict(seeded_tensors(spec)))
    capsys.readouterr()
    assert cli.main(["bench", str(plain), *arguments]) == 0
    assert "widened" not in capsys.readouterr().err


def test_the_benchmark_writes_a_model_one_tensor_at_a_time(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("build", ROOT / "benchmarks" / "build.py")
    assert spec and spec.loader
    build = importlib.util.module_from_spec(spec)
    sys.modules["build"] = build  # its dataclasses look it up
    spec.loader.exec_module(build)
    small = replace(T5_TINY, vocabulary=1000)
    path = tmp_path / "t5.safetensors"
    with path.open("wb") as file:
        build.write_streamed(file, small.tensors(), seeded_tensors(small))
    (encoder,) = detect(path).encoders
    assert encoder.spec == small
    for name, tensor in seeded_tensors(small):
        assert torch.equal(encoder.read(name), tensor), name
    done = build.run("-c", "x = bytearray(200 << 20); print(len(x)); import time; time.sleep(0.3)")
    assert int(done.out) == 200 << 20
    assert done.peak_anonymous > 150 << 20
