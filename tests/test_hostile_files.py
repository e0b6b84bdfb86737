# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Files that lie, change under our hands, or must not be written over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import cli
from octavo import compile as compiler
from octavo.checkpoints import detect
from octavo.checkpoints.quantized import METADATA_KEY
from octavo.engine_cache import EngineCache
from octavo.errors import FileError
from octavo.recipes import load_recipe
from octavo.seeded import TINY, seeded_tensors
from safetensors import safe_open
from safetensors.torch import save_file

FC1 = "text_model.encoder.layers.0.mlp.fc1"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two encoders and the FP8 file of the first."""
    folder = tmp_path_factory.mktemp("models")
    found = {name: folder / f"{name}.safetensors" for name in ("a", "b", "fp8")}
    for seed, name in enumerate("ab"):
        save_file(dict(seeded_tensors(TINY, seed=seed, outliers=False)), found[name])
    cache = EngineCache(folder / "cache")
    detected = detect(found["a"])
    (encoder,) = detected.encoders
    content = compiler.content_of(encoder, detected, cache)
    entry, _ = compiler.checkpoint_of(encoder, detected, content, load_recipe("fp8"), cache)
    compiler.copy_file(entry.path, found["fp8"])
    return found


def changed(source: Path, target: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> Path:
    with safe_open(source, "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        note = json.loads(file.metadata()[METADATA_KEY])
    metadata = {"format": "pt", METADATA_KEY: json.dumps({**note, **facts})}
    save_file({**held, **tensors}, target, metadata)
    return target


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-40, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["weight_scale", "input_scale"])
def test_an_fp8_file_with_a_bad_scale_is_refused(
    files: dict[str, Path], tmp_path: Path, name: str, value: float, capsys: Any
) -> None:
    scale = {f"{FC1}.{name}": torch.tensor(value)}
    lying = changed(files["fp8"], tmp_path / "lying.safetensors", scale, {})
    output = tmp_path / "out.safetensors"
    arguments = ["build", str(lying), "--gpu", "sm89", "--cache", str(tmp_path / "c")]
    assert cli.main([*arguments, "--output", str(output)]) == 2
    assert not output.exists()
    said = capsys.readouterr().err
    assert name in said or "NaN or infinite" in said


def test_what_the_metadata_says_is_part_of_the_key(files: dict[str, Path], tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    lying = changed(
        files["fp8"], tmp_path / "l.safetensors", {}, {"similarity": {"token_mean": 0.5}}
    )
    keys = []
    for path in (lying, files["fp8"]):
        detected = detect(path)
        (encoder,) = detected.encoders
        content = compiler.content_of(encoder, detected, cache)
        entry, cached = compiler.checkpoint_of(
            encoder, detected, content, load_recipe("fp8"), cache
        )
        assert not cached
        assert entry.path.read_bytes() == path.read_bytes()
        keys.append(entry.manifest.key)
    assert keys[0] != keys[1]


def test_an_fp8_file_replaced_before_it_is_copied(files: dict[str, Path], tmp_path: Path) -> None:
    cache, path = EngineCache(tmp_path / "cache"), tmp_path / "m.safetensors"
    path.write_bytes(files["fp8"].read_bytes())
    detected = detect(path)
    (encoder,) = detected.encoders
    content = compiler.content_of(encoder, detected, cache)
    changed(files["fp8"], tmp_path / "new", {f"{FC1}.weight_scale": torch.tensor(0.5)}, {})
    os.replace(tmp_path / "new", path)
    with pytest.raises(FileError, match="changed while"):
        compiler.checkpoint_of(encoder, detected, content, load_recipe("fp8"), cache)
    assert not cache.entries()


def test_a_model_rewritten_in_place_during_the_build(
    files: dict[str, Path], tmp_path: Path
) -> None:
    cache, path = EngineCache(tmp_path / "cache"), tmp_path / "m.safetensors"
    path.write_bytes(files["a"].read_bytes())
    before = path.stat()
    detected = detect(path)
    (encoder,) = detected.encoders
    content = compiler.content_of(encoder, detected, cache)
    with path.open("r+b") as file:
        file.write(files["b"].read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened
    with pytest.raises(FileError, match="changed while"):
        compiler.checkpoint_of(encoder, detected, content, load_recipe("fp8"), cache)
    assert not cache.entries()


def test_a_folder_is_never_taken_for_one_of_octavos_files(
    files: dict[str, Path], tmp_path: Path
) -> None:
    for name, source in (("text_encoder", "fp8"), ("text_encoder_2", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(files[source].read_bytes())
    (tmp_path / "model_index.json").write_text("{}")
    detected = detect(tmp_path)
    assert not detected.is_octavo
    fp8, plain = detected.encoders
    assert (fp8.dtype, plain.dtype) == ("fp8", "fp16") and not detected.unsupported
    (alone,) = detect(files["b"]).encoders
    assert plain.spec == alone.spec


@pytest.mark.parametrize("name", ["m.safetensors", "config.json"])
def test_json_never_writes_over_what_is_not_a_result(
    files: dict[str, Path], tmp_path: Path, name: str, capsys: Any
) -> None:
    precious = tmp_path / name
    precious.write_bytes(files["a"].read_bytes() if name == "m.safetensors" else b'{"width": 1}')
    held = precious.read_bytes()
    assert cli.main(["inspect", str(files["a"]), "--json", str(precious)]) == 2
    assert precious.read_bytes() == held
    assert "holds no result" in capsys.readouterr().err
    result = tmp_path / "result.json"
    for _ in range(2):  # its own it replaces
        assert cli.main(["inspect", str(files["a"]), "--json", str(result)]) == 0
    assert json.loads(result.read_text())["encoders"]


def test_a_prefix_cannot_write_to_the_terminal(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "m.safetensors"
    odd = "a\nb\x1b[2J."
    save_file({odd + n: t for n, t in seeded_tensors(TINY, outliers=False)}, path)
    assert cli.main(["inspect", str(path)]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
