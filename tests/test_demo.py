# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""`python run.py demo` behind the set-up: every step, its table, and its exit code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from octavo import cli, demo, seeded
from octavo.checkpoints import detect
from octavo.engine_cache import EngineCache
from octavo.trt.header import read_header
from pipeline import complaint, partial_files, save, tiny_tensors
from safetensors import safe_open


def engine_rows(out: str) -> list[list[str]]:
    """The table's rows: GPU, SM, builder, version, weights, size, unit, time, file."""
    return [line.split() for line in out.splitlines() if re.match(r"\s+rtx\d", line)]


def check_tables(out: str) -> list[Path]:
    """Two builds of two engines, the second from the cache; the plan files."""
    rows = engine_rows(out)
    assert [row[0] for row in rows] == ["rtx4090", "rtx5090"] * 2
    assert [row[1] for row in rows] == ["8.9", "12.0"] * 2
    assert all(row[2] == "tensorrt_rtx" and row[4] == "shared" for row in rows)
    assert ["cached" in row for row in rows] == [False, False, True, True]
    plans = [Path(row[-1]) for row in rows]
    assert plans[:2] == plans[2:]
    headers = [read_header(plan) for plan in plans[:2]]
    assert [h.sms for h in headers if h] == [(89,), (120,)]
    return plans[:2]


def test_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "my model.safetensors", tiny_tensors())
    folder = tmp_path / "demo"
    assert demo.main(["--model", str(model), "--folder", str(folder), "--recipe", "bf16"]) == 0
    out, err = capsys.readouterr()
    titles = re.findall(r"^== (.*)", out, re.MULTILINE)
    assert titles == [
        "What is in the file",
        "FP8 checkpoint and TensorRT engines for rtx4090 and rtx5090, on this machine's CPU",
        "The same again: served from the cache",
        "What the cache holds",
        "What this machine could run",
    ]
    assert f"$ octavo inspect '{model}'" in out  # as a shell takes it
    assert all(folder / "cache" in plan.parents for plan in check_tables(out))
    assert "similarity to FP32: token mean 1.0000" in out and "Engines on" in out
    assert len(EngineCache(folder / "cache").entries()) == 3
    assert "compiling for rtx5090" in err
    assert not (folder / "clip_l.safetensors").exists() and partial_files(tmp_path) == []


def test_seeded_checkpoint_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seeded, "CLIP_L", seeded.TINY)
    arguments = ["--folder", str(tmp_path), "--recipe", "bf16"]
    assert demo.main(arguments) == 0
    out = capsys.readouterr().out
    model = tmp_path / "clip_l.safetensors"
    assert f"Writing a full-size CLIP-L with seeded weights to {model}" in out
    written = model.stat().st_mtime_ns
    with safe_open(model, "pt") as file:
        assert "text_model.encoder.layers.0.self_attn.q_proj.weight" in file.keys()  # noqa: SIM118
        assert file.get_tensor("text_projection.weight").dtype == torch.float16
    assert demo.main([*arguments, "--cache", str(tmp_path / "other")]) == 0
    assert "Writing" not in capsys.readouterr().out
    assert model.stat().st_mtime_ns == written
    assert (tmp_path / "other" / "plans").is_dir()


def test_a_cancelled_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.checkpoints import writing

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seeded, "CLIP_L", seeded.TINY)
    monkeypatch.setattr(writing, "write_safetensors", interrupted)
    assert demo.main(["--folder", str(tmp_path / "demo")]) == 130
    assert list((tmp_path / "demo").iterdir()) == []


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", str(tmp_path / "none")]) == 2
    assert complaint(capsys.readouterr().err).endswith(
        "none: does not exist; check the path; a model must be on this disk."
    )
    assert demo.main(["--no-such-option"]) == 2
    assert "No such option" in capsys.readouterr().err
    assert demo.main(["--help"]) == 0
    assert "--model PATH" in capsys.readouterr().out


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_step_that_fails_ends_it(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def step(arguments: list[str]) -> int:
        seen.append(arguments[0])
        return code if arguments[0] == "build" else 0

    monkeypatch.setattr(cli, "main", step)
    assert demo.main(["--model", "x"]) == code
    assert seen == ["inspect", "build"]


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Full-size CLIP-L with seeded outliers: what a new user sees."""
    assert demo.main(["--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    plans = check_tables(out)
    assert all(1e6 < plan.stat().st_size < 10e6 for plan in plans)
    (encoder,) = detect(tmp_path / "clip_l.safetensors").encoders
    assert (encoder.name, encoder.spec.family, encoder.dtype) == ("clip_l", "clip_l", "fp16")
    assert encoder.spec == seeded.CLIP_L
    found = re.search(r"token mean ([\d.]+), token min ([\d.]+), pooled ([\d.]+)", out)
    assert found
    mean, least, pooled = map(float, found.groups())
    assert mean >= 0.993 and least >= 0.98 and pooled >= 0.993
    assert "clip_l: clip_l, 12 layers x 768, 77 positions, fp16" in out
