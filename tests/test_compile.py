# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""From a model file to cached engines in one process: real files, real calibration, real plans."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import calibrate as calibrate_module
from octavo import compile as compiler
from octavo.checkpoints import detect
from octavo.checkpoints.quantized import metadata, open_quantized
from octavo.compile import BuildResult, Target, content_of, encoder_key, targets_of, verify
from octavo.encoders.clip import PROJECTION
from octavo.engine_cache import EngineCache
from octavo.errors import (
    BuildError,
    CacheError,
    Cancelled,
    EngineUnavailable,
    FileError,
    OctavoError,
    QuantizationError,
    SimilarityError,
)
from octavo.recipes import Floor, load_recipe
from octavo.seeded import TINY
from octavo.trt import Installed, Missing
from octavo.trt.gpus import Gpu, gpu_from_name
from octavo.trt.header import read_header
from pipeline import (
    NUMBER,
    Recorder,
    artifacts,
    build,
    builders,
    check,
    copy_of,
    one_thread,  # noqa: F401 - a fixture
    packagings,
    partial_files,
    save,
    tiny_tensors,
    walk,
)
from safetensors import safe_open

LAYER = TINY.block(0)
BUILD = {
    "file": str,
    "recipe": str,
    "encoders": [
        {
            "name": str,
            "family": str,
            "layers": int,
            "width": int,
            "positions": int,
            "key": str,
            "checkpoint": {"key": str, "path": str, "bytes": int},
            "engines": [
                {
                    "gpu": str,
                    "sms": [int],
                    "flavour": str,
                    "version": str,
                    "weights": str,
                    "key": str,
                    "path": str,
                    "bytes": int,
                    "seconds": NUMBER,
                    "cached": bool,
                }
            ],
            "similarity": {
                "token_mean": float,
                "token_min": float,
                "pooled": (float, type(None)),
            },
        }
    ],
    "peak_rss_bytes": int,
    "seconds": NUMBER,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "tiny.safetensors", tiny_tensors())


@pytest.fixture(scope="module")
def first(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[BuildResult, Path]:
    """One finished job and its cache; tests work on copies of it."""
    cache = tmp_path_factory.mktemp("first") / "cache"
    return build(tiny, "rtx4090", cache=cache), cache


@pytest.fixture
def cache(first: tuple[BuildResult, Path], tmp_path: Path) -> Path:
    return copy_of(first[1], tmp_path / "cache")


def one(result: BuildResult) -> compiler.Built:
    (built,) = result.encoders
    return built


def checkpoint_key(result: BuildResult) -> str:
    return one(result).checkpoint.manifest.key


def plan_keys(result: BuildResult) -> list[str]:
    return [engine.key for engine in one(result).engines]


def test_the_whole_job(first: tuple[BuildResult, Path], tiny: Path) -> None:
    result, cache = first
    facts = json.loads(json.dumps(result.facts(), allow_nan=False))
    check(facts, BUILD)
    assert (facts["file"], facts["recipe"]) == (str(tiny), "fp8")
    (encoder,) = facts["encoders"]
    assert (encoder["name"], encoder["family"], encoder["layers"]) == ("clip", "clip", 2)
    assert (encoder["width"], encoder["positions"]) == (128, 77)
    (engine,) = encoder["engines"]
    assert (engine["gpu"], engine["sms"], engine["cached"]) == ("rtx4090", [89], False)
    assert (engine["flavour"], engine["weights"]) == ("tensorrt_rtx", "shared")
    for artifact in (encoder["checkpoint"], engine):
        assert Path(artifact["path"]).stat().st_size == artifact["bytes"] > 0
        assert cache in Path(artifact["path"]).parents
    assert 0.99 < encoder["similarity"]["token_mean"] < 1
    assert 0 < engine["seconds"] < facts["seconds"] < 300
    assert 100e6 < facts["peak_rss_bytes"] < 20e9
    header = read_header(Path(engine["path"]))
    assert header and header.sms == (89,)
    assert partial_files(cache) == []


def test_the_plan_is_fp8(first: tuple[BuildResult, Path]) -> None:
    (entry,) = [e for e in EngineCache(first[1]).entries() if e.manifest.kind == "plan"]
    layers = entry.manifest.facts["layers"]
    # per block: q, k and v as one, the output, two of the MLP
    assert layers == {"fp8_gemms": 4 * TINY.layers, "other_gemms": 0, "attentions": TINY.layers}


def test_the_checkpoint_tells_where_it_came_from(first: tuple[BuildResult, Path]) -> None:
    built = one(first[0])
    checkpoint = open_quantized(built.checkpoint.path)
    facts = checkpoint.facts
    assert (facts["recipe"], facts["body"]) == ("fp8", "float16")
    assert facts["calibration"]["prompts"] == 8
    assert "max" in facts["calibration"]["method"]
    assert facts["source"]["key"] == encoder_key(built.encoder.spec, built.fingerprint)
    assert facts["similarity"]["token_mean"] == built.similarity["token_mean"]
    assert facts["similarity"]["prompts"] == compiler.HELD_OUT_PROMPTS
    assert facts["similarity"]["judge"].startswith("onnxruntime 1.")


def test_the_second_run_is_served(tiny: Path, cache: Path) -> None:
    before, report = dict(walk(cache)), Recorder()
    result = build(tiny, "rtx4090", cache=cache, report=report)
    assert one(result).checkpoint_cached
    assert [e.cached for e in one(result).engines] == [True]
    after = dict(walk(cache))
    after.pop("fingerprints.json", None), before.pop("fingerprints.json", None)
    assert {n: d for n, d in after.items() if not n.startswith("locks")} == {
        n: d for n, d in before.items() if not n.startswith("locks")
    }
    assert set(report.phases) <= {"reading"}
    assert result.seconds < 10


# Keys


def same_as(first: BuildResult, path: Path, cache: Path, **options: Any) -> tuple[bool, bool, bool]:
    """Build `path`: (same encoder key, same checkpoint key and a hit, same plan key and a hit)."""
    result = build(path, cache=cache, **options)
    before, after = one(first), one(result)
    keys = [encoder_key(b.encoder.spec, b.fingerprint) for b in (before, after)]
    checkpoint = checkpoint_key(first) == checkpoint_key(result)
    plan = plan_keys(first) == plan_keys(result)
    assert after.checkpoint_cached == checkpoint
    assert all(e.cached == plan for e in after.engines)
    return keys[0] == keys[1], checkpoint, plan


def test_one_changed_value(first: tuple[BuildResult, Path], cache: Path, tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors[LAYER + "mlp.fc1.weight"][3, 5] += 0.25
    path = save(tmp_path / "other.safetensors", tensors)
    assert same_as(first[0], path, cache) == (False, False, True)
    assert len(artifacts(cache, "checkpoints")) == 2
    assert len(artifacts(cache, "plans")) == 1


@pytest.mark.parametrize("projection", ["other", "none"])
def test_another_projection(
    projection: str, first: tuple[BuildResult, Path], cache: Path, tmp_path: Path
) -> None:
    tensors = tiny_tensors()
    if projection == "none":
        del tensors[PROJECTION]
    else:
        tensors[PROJECTION][0, 0] += 1
    path = save(tmp_path / "other.safetensors", tensors)
    assert same_as(first[0], path, cache) == (True, False, True)
    pooled = one(build(path, cache=cache)).facts()["similarity"]["pooled"]
    assert (pooled is None) == (projection == "none")


def _torch_file(path: Path) -> Path:
    torch.save({"state_dict": tiny_tensors()}, path)
    return path


PACKAGINGS: dict[str, Any] = {
    "renamed": lambda p: save(p / "elsewhere" / "b.safetensors", tiny_tensors()),
    "fp32": lambda p: save(p / "a.safetensors", {n: t.float() for n, t in tiny_tensors().items()}),
    "OpenAI": lambda p: save(p / "a.safetensors", packagings.openai(tiny_tensors())),
    "inside SD1.5": lambda p: save(
        p / "a.safetensors",
        {
            **packagings.unet(),
            **packagings.hugging_face(
                tiny_tensors(),
                "cond_stage_model.transformer.text_model.",
                "cond_stage_model.transformer." + PROJECTION,
            ),
        },
    ),
    "torch file": lambda p: _torch_file(p / "a.pt"),
}


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_packaging_changes_no_key(
    packaging: str, first: tuple[BuildResult, Path], cache: Path, tmp_path: Path
) -> None:
    path = PACKAGINGS[packaging](tmp_path)
    assert same_as(first[0], path, cache) == (True, True, True)


def test_activation_changes_every_key(
    first: tuple[BuildResult, Path], tiny: Path, cache: Path
) -> None:
    assert same_as(first[0], tiny, cache, activation="quick_gelu") == (False, False, False)
    assert same_as(first[0], tiny, cache, activation="gelu") == (True, True, True)  # the rule's


def test_calibration_changes_the_checkpoint_only(
    first: tuple[BuildResult, Path], tiny: Path, cache: Path
) -> None:
    assert same_as(first[0], tiny, cache, prompts=9) == (True, False, True)


def test_another_tensorrt(
    first: tuple[BuildResult, Path], tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = one(first[0]).engines[0].version
    keys, build_plan = set(plan_keys(first[0])), compiler.build_plan
    for other in (Installed("1.7.99", "cu13"), Installed(version, "cu12")):
        monkeypatch.setattr(compiler, "installed", lambda _, other=other: other)
        if other.version != version:
            with pytest.raises(BuildError, match=r"while 1\.7\.99 was expected"):
                build(tiny, cache=cache)  # changed under a running process: under neither key
            assert partial_files(cache) == []
        monkeypatch.setattr(
            compiler,
            "build_plan",
            lambda *a, other=other, **k: replace(build_plan(*a, **k), version=other.version),
        )
        result = build(tiny, cache=cache)
        assert [e.cached for e in one(result).engines] == [False]
        assert one(result).checkpoint_cached
        keys |= set(plan_keys(result))
    assert len(keys) == 3 == len(artifacts(cache, "plans"))


# Which plans are built, and which serve


def test_names_map_to_an_sm(tiny: Path, cache: Path) -> None:
    engines = one(build(tiny, "rtx4060", "rtx5090", "RTX 4090", "sm89", cache=cache)).engines
    assert [(e.gpu, e.sms, e.cached) for e in engines] == [
        ("rtx4060", (89,), True),
        ("rtx5090", (120,), False),
        ("rtx4090", (89,), True),
        ("sm89", (89,), True),
    ]
    assert len({e.key for e in engines}) == len(artifacts(cache, "plans")) == 2


def test_portable(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (engine,) = one(build(tiny, "rtx4090", "rtx5090", cache=cache, portable=True)).engines
    assert (engine.gpu, engine.sms, engine.cached) == ("rtx4090+rtx5090", (89, 120), False)
    header = read_header(Path(engine.path))
    assert header and header.sms == (89, 120)
    for gpus in (["rtx4070"], ["rtx5080"], ["rtx5060", "rtx4080"]):
        for portable in (True, False):
            for served in one(build(tiny, *gpus, cache=cache, portable=portable)).engines:
                assert (served.key, served.sms, served.cached) == (engine.key, (89, 120), True)
    (other,) = one(build(tiny, "sm121", cache=cache)).engines
    assert (other.sms, other.cached) == ((121,), False)


def test_targets() -> None:
    gpus = [gpu_from_name(name) for name in ("rtx5090", "rtx4090", "rtx4060", "rtx4090")]
    assert targets_of(gpus, portable=True) == [Target("rtx5090+rtx4090+rtx4060", (89, 120))]
    assert targets_of(gpus, portable=False) == [
        Target("rtx5090", (120,)),
        Target("rtx4090", (89,)),
        Target("rtx4060", (89,)),
    ]


def test_embedded_weights(
    first: tuple[BuildResult, Path], tiny: Path, cache: Path, tmp_path: Path
) -> None:
    (engine,) = one(build(tiny, cache=cache, embed_weights=True)).engines
    (shared,) = one(first[0]).engines
    assert (engine.weights, engine.cached) == ("embedded", False)
    weights = sum(out * inner for out, inner in TINY.linears().values())  # a byte each
    assert weights < engine.bytes - shared.bytes < 4 * weights
    assert one(build(tiny, cache=cache, embed_weights=True)).engines[0].cached
    tensors = tiny_tensors()
    tensors[LAYER + "mlp.fc1.weight"][3, 5] += 0.25
    other = save(tmp_path / "other.safetensors", tensors)
    (bound,) = one(build(other, cache=cache, embed_weights=True)).engines
    assert not bound.cached and bound.key != engine.key
    assert len(artifacts(cache, "plans")) == 3


def test_mask(first: tuple[BuildResult, Path], tiny: Path, cache: Path) -> None:
    (engine,) = one(build(tiny, cache=cache, mask=True)).engines
    assert not engine.cached and [engine.key] != plan_keys(first[0])
    entry = EngineCache(cache).get("plan", engine.key)
    assert entry and entry.manifest.key_facts["profile"]["mask"] is True
    assert b"mask" in Path(engine.path).read_bytes()  # an input's name


@pytest.mark.parametrize("recipe", ["fp8-mixed", "bf16"])
def test_other_recipes(
    recipe: str, first: tuple[BuildResult, Path], tiny: Path, cache: Path
) -> None:
    result = build(tiny, cache=cache, recipe=recipe)
    assert result.facts()["recipe"] == recipe
    built = one(result)
    assert not built.checkpoint_cached and not built.engines[0].cached
    assert plan_keys(result) != plan_keys(first[0])
    checkpoint = open_quantized(built.checkpoint.path)
    entry = EngineCache(cache).get("plan", built.engines[0].key)
    assert entry
    layers = entry.manifest.facts["layers"]
    out = LAYER + "self_attn.out_proj"
    if recipe == "bf16":
        assert set(checkpoint.structure.values()) == {"16bit"}
        assert (checkpoint.facts["body"], layers["fp8_gemms"]) == ("bfloat16", 0)
        assert checkpoint.facts["calibration"]["method"] == "none"
        assert built.similarity["token_mean"] > 0.9999
    else:
        kept = {n for n, p in checkpoint.structure.items() if p == "16bit"}
        assert kept == {n for n in TINY.linears() if n.endswith("out_proj")}
        assert checkpoint.read(out + ".weight").dtype == torch.float16
        assert out + ".weight_scale" not in checkpoint.names
        assert (layers["fp8_gemms"], layers["other_gemms"]) == (6, 2)
        assert built.similarity["token_mean"] > one(first[0]).similarity["token_mean"]


# Files with several encoders


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two encoders, named and packed as in SDXL's single file."""
    larger = replace(TINY, layers=3, width=192, heads=3)
    tensors = {
        **packagings.unet(),
        **packagings.hugging_face(
            tiny_tensors(projection=False), "conditioner.embedders.0.transformer.text_model.", ""
        ),
        **packagings.openai(tiny_tensors(larger), "conditioner.embedders.1.model."),
    }
    return save(tmp_path_factory.mktemp("sdxl") / "sdxl.safetensors", tensors)


def test_every_encoder_of_a_file(sdxl: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    result = build(sdxl, "rtx5090", cache=cache, recipe="bf16")
    assert [(b.encoder.name, b.encoder.spec.width) for b in result.encoders] == [
        ("clip", 128),
        ("clip_2", 192),
    ]
    assert [len(b.engines) for b in result.encoders] == [1, 1]
    assert len(artifacts(cache, "checkpoints")) == 2
    assert len(artifacts(cache, "plans")) == 2
    check(json.loads(json.dumps(result.facts())), BUILD)
    (second,) = build(sdxl, "rtx5090", cache=cache, recipe="bf16", encoders=["clip_2"]).encoders
    assert second.encoder.name == "clip_2" and second.checkpoint_cached
    with pytest.raises(FileError, match=r"has no encoder 'clip_g'; it has clip, clip_2\."):
        build(sdxl, cache=cache, encoders=["clip_g"])


def test_one_output_for_two_encoders(sdxl: Path, tmp_path: Path) -> None:
    output, report = tmp_path / "out.safetensors", Recorder()
    with pytest.raises(FileError, match=r"holds 2 encoders \(clip, clip_2\) for one output file"):
        build(sdxl, cache=tmp_path / "cache", output=output, report=report)
    assert report.events == [] and not output.exists()
    result = build(
        sdxl, cache=tmp_path / "cache", output=output, encoders=["clip_2"], recipe="bf16"
    )
    assert open_quantized(output).spec == one(result).encoder.spec


# The checkpoint for the user


def test_output(first: tuple[BuildResult, Path], tiny: Path, cache: Path, tmp_path: Path) -> None:
    output = tmp_path / "new folder" / ("ä" * 120 + ".safetensors")
    build(tiny, cache=cache, output=output)
    assert output.read_bytes() == one(first[0]).checkpoint.path.read_bytes()
    assert os.listdir(output.parent) == [output.name]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(output.stat().st_mode) == 0o666 & ~umask  # not mkstemp's 0600
    with safe_open(output, "pt") as file:
        names = set(file.keys())
        weight = file.get_tensor(LAYER + "mlp.fc1.weight")
        marker = bytes(file.get_tensor(LAYER + "mlp.fc1.comfy_quant").tolist())
        scales = [file.get_tensor(f"{LAYER}mlp.fc1.{n}") for n in ("weight_scale", "input_scale")]
        assert json.loads(file.metadata()["octavo"])["recipe"] == "fp8"
    assert weight.dtype == torch.float8_e4m3fn
    assert json.loads(marker) == {"format": "float8_e4m3fn"}
    assert all(s.dtype == torch.float32 and s.shape == () and s > 0 for s in scales)
    parts = ("comfy_quant", "weight_scale", "input_scale")
    assert names == {*tiny_tensors()} | {f"{n}.{p}" for n in TINY.linears() for p in parts}
    original = tiny_tensors()[LAYER + "mlp.fc1.weight"].float()
    assert torch.allclose(weight.float() * scales[0], original, rtol=0.07, atol=1e-3)


def test_output_replaces_a_file_and_nothing_else(tiny: Path, cache: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.safetensors"
    build(tiny, cache=cache, output=old, recipe="bf16")  # an earlier checkpoint
    before = old.read_bytes()
    old.chmod(0o640)
    link = tmp_path / "link.safetensors"
    link.symlink_to(old)
    build(tiny, cache=cache, output=link)
    assert link.is_symlink() and stat.S_IMODE(old.stat().st_mode) == 0o640
    assert open_quantized(old).spec.layers == 2 and old.read_bytes() != before


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        (".", "is a folder"),
        ("file/below.safetensors", "no folder"),
        ("x" * 300 + ".safetensors", "cannot be written .File name too long"),
        ("model.safetensors", "is the model itself"),
        ("link.safetensors", "is the model itself"),
        ("notes.md", "is there already and is no checkpoint of Octavo's"),
        ("other.safetensors", "is there already and is no checkpoint of Octavo's"),
        ("new.ckpt", "give --output a name that ends in .safetensors"),
        ("new", "give --output a name that ends in .safetensors"),
    ],
)
def test_output_that_cannot_be(place: str, fault: str, tmp_path: Path) -> None:
    """Refused before the long work, and the model is never overwritten."""
    model = save(tmp_path / "model.safetensors", tiny_tensors())
    (tmp_path / "link.safetensors").symlink_to(model)
    (tmp_path / "file").touch()
    (tmp_path / "notes.md").write_text("what a slip of the shell must not take")
    save(tmp_path / "other.safetensors", tiny_tensors())
    content, report = [p.read_bytes() for p in sorted(tmp_path.iterdir())], Recorder()
    with pytest.raises(FileError, match=fault):
        build(model, cache=tmp_path / "cache", output=tmp_path / place, report=report)
    assert report.events == []
    assert not (tmp_path / "cache").exists()
    assert [p.read_bytes() for p in sorted(tmp_path.iterdir())] == content


# A checkpoint of Octavo's own as the model


@pytest.fixture(scope="module")
def quantized(first: tuple[BuildResult, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "fp8.safetensors"
    shutil.copy(one(first[0]).checkpoint.path, path)
    return path


def test_octavos_own_checkpoint(
    first: tuple[BuildResult, Path], quantized: Path, cache: Path
) -> None:
    result = build(quantized, "rtx4090", cache=cache)
    built = one(result)
    assert (built.encoder.dtype, built.checkpoint_cached) == ("fp8", False)
    assert built.checkpoint.path.read_bytes() == quantized.read_bytes()
    assert [(e.key, e.cached) for e in built.engines] == [(plan_keys(first[0])[0], True)]
    assert built.similarity == one(first[0]).similarity
    again = one(build(quantized, "rtx4090", cache=cache))
    assert again.checkpoint_cached and again.checkpoint.path == built.checkpoint.path
    (verified,) = verify(quantized, recipe=load_recipe("fp8"), cache=EngineCache(cache))
    assert verified.shortfall is None and verified.similarity["token_mean"] > 0.99


def test_octavos_own_checkpoint_names_its_recipe_and_activation(tiny: Path, tmp_path: Path) -> None:
    cache, output = tmp_path / "cache", tmp_path / "out.safetensors"
    build(tiny, cache=cache, output=output, recipe="bf16", activation="quick_gelu")
    result = build(output, cache=cache)
    assert result.facts()["recipe"] == "bf16"
    assert one(result).encoder.spec.activation == "quick_gelu"  # the rule would say gelu
    (verified,) = verify(output, recipe=load_recipe("fp8"), cache=EngineCache(cache))
    assert verified.similarity["token_mean"] > 0.9999
    with pytest.raises(FileError, match="was quantized for another activation"):
        build(output, cache=cache, activation="gelu")


@pytest.mark.parametrize(
    "similarity", [None, [], "good", {}, {"token_mean": "1"}, {"token_mean": float("nan")}]
)
def test_octavos_own_checkpoint_without_a_sound_similarity(
    similarity: object, quantized: Path, tmp_path: Path
) -> None:
    with safe_open(quantized, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = json.loads(file.metadata()["octavo"])
    from safetensors.torch import save_file

    facts.pop("schema")
    path = tmp_path / "doctored.safetensors"
    save_file(tensors, path, metadata({**facts, "similarity": similarity}))
    with pytest.raises(SimilarityError, match=r"token_mean .* is under the floor"):
        build(path, cache=tmp_path / "cache")


# Similarity


def test_under_the_floor(tmp_path: Path) -> None:
    """Outliers at a width of 128 are too much for FP8, and bf16 is what helps."""
    path = save(tmp_path / "outliers.safetensors", tiny_tensors(outliers=True))
    cache = tmp_path / "cache"
    for _ in range(2):  # the second time from the cache
        with pytest.raises(
            SimilarityError,
            match=r"^clip with recipe fp8: token_min 0\.\d+ is under the floor 0\.95; "
            r"try --recipe fp8-mixed\.$",
        ):
            build(path, cache=cache, output=tmp_path / "out.safetensors")
        assert len(artifacts(cache, "checkpoints")) == 1
        assert artifacts(cache, "plans") == []
        assert not (tmp_path / "out.safetensors").exists()
    assert one(build(path, cache=cache, recipe="bf16")).engines
    (verified,) = verify(
        path, recipe=load_recipe("fp8").with_options(None, 8), cache=EngineCache(cache)
    )
    assert verified.shortfall and not verified.facts()["passed"]


def test_a_token_table_that_is_no_tokenizers(tmp_path: Path) -> None:
    model = save(tmp_path / "x.safetensors", tiny_tensors(replace(TINY, vocabulary=49407)))
    with pytest.raises(QuantizationError, match=r"embeddings for 49407 tokens .* 49408 are needed"):
        build(model, cache=tmp_path / "cache")
    assert artifacts(tmp_path / "cache", "checkpoints") == []


def test_the_last_recipe_names_pytorch(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = replace(load_recipe("bf16"), floor=Floor(1.1, 1.1, 1.1))
    with pytest.raises(
        SimilarityError, match=r"token_mean 0\.9\d+ is under .* use PyTorch for it\."
    ):
        compiler.build(tiny, [Gpu("sm89", 89)], recipe=strict, cache=EngineCache(tmp_path))


def test_verify_makes_what_is_missing(tiny: Path, tmp_path: Path) -> None:
    recipe, report = load_recipe("fp8").with_options(None, 8), Recorder()
    cache = EngineCache(tmp_path / "cache")
    (verified,) = verify(tiny, recipe=recipe, cache=cache, report=report)
    assert verified.shortfall is None and verified.judge.startswith("onnxruntime")
    assert verified.similarity["prompts"] > compiler.HELD_OUT_PROMPTS
    assert report.phases[-2:] == ["running the FP32 reference", "running the graph"]
    assert [e.manifest.kind for e in cache.entries()] == ["checkpoint"]
    check(
        verified.facts()["similarity"],
        {
            "token_mean": float,
            "token_min": float,
            "pooled": float,
            "max_abs_error": float,
            "prompts": int,
        },
    )


# Progress and cancelling

PHASES = [
    "reading",
    "loading the FP32 reference",
    "running the FP32 reference",
    "calibrating",
    "quantizing",
    "verifying the graph",
    "writing the FP8 checkpoint",
    "emitting ONNX for rtx4090",
    "compiling for rtx4090: Starting the builder",
    "compiling for rtx4090: Parsing the graph",
    "compiling for rtx4090: Building engine",
]


def test_progress_in_order(tiny: Path, tmp_path: Path) -> None:
    report = Recorder()
    build(tiny, cache=tmp_path / "cache", report=report)
    assert report.phases[: len(PHASES)] == PHASES
    assert "compiling for rtx4090: Compiling the kernels" in report.phases
    assert {e.subject for e in report.events} == {"clip"}
    for phase in ("reading", "running the FP32 reference", "calibrating", "verifying the graph"):
        steps = [(e.done, e.total) for e in report.events if e.phase == phase]
        assert steps == sorted(steps) and len({total for _, total in steps}) == 1
        assert steps[-1][0] == steps[-1][1] > 0
    assert all(0 <= e.done <= e.total or e.total == 0 for e in report.events)


@pytest.mark.parametrize("error", [Cancelled, KeyboardInterrupt])
def test_cancel_in_every_phase(error: type[BaseException], tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    phases = PHASES if error is Cancelled else PHASES[3::4]
    for phase in phases:

        def report(event: compiler.Progress, phase: str = phase) -> None:
            if event.phase == phase:
                raise error(phase)

        with pytest.raises(error):
            build(tiny, cache=cache, report=report)
        assert partial_files(cache) == []
        assert builders() == []
        assert artifacts(cache, "plans") == []
        after_writing = PHASES.index(phase) > PHASES.index("writing the FP8 checkpoint")
        assert len(artifacts(cache, "checkpoints")) == after_writing
    assert not any(lock_is_held(path) for path in (cache / "locks").glob("*.lock"))
    result = build(tiny, cache=cache)
    assert one(result).checkpoint_cached and not one(result).engines[0].cached


def lock_is_held(path: Path) -> bool:
    from filelock import FileLock, Timeout

    try:
        with FileLock(str(path)).acquire(timeout=0):
            return False
    except Timeout:
        return True


def test_waiting_for_another_builder(
    first: tuple[BuildResult, Path], tiny: Path, cache: Path
) -> None:
    """While another holds the lock there is a report to cancel by; then its result is taken."""
    (plan,) = artifacts(cache, "plans")
    sidecar = plan.with_suffix(".json")
    hidden = {path: path.read_bytes() for path in (plan, sidecar)}
    for path in hidden:
        path.unlink()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with EngineCache(cache).lock(plan_keys(first[0])[0]):
            held.set()
            done.wait(60)
            for path, data in hidden.items():
                path.write_bytes(data)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(10)
    waits = Recorder()

    def cancel(event: compiler.Progress) -> None:
        if event.phase == "waiting for another process":
            raise Cancelled

    def release(event: compiler.Progress) -> None:
        waits(event)
        done.set()

    try:
        with pytest.raises(Cancelled):
            build(tiny, cache=cache, report=cancel)
        (engine,) = one(build(tiny, cache=cache, report=release)).engines
    finally:
        done.set()
        other.join()
    assert waits.phases == ["waiting for another process"]
    assert engine.cached and Path(engine.path).read_bytes() == hidden[plan]


# What cannot work is said before the long work


def test_no_tensorrt(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "installed", lambda _: Missing("it is not here", "install it"))
    report = Recorder()
    with pytest.raises(EngineUnavailable, match=r"^tensorrt_rtx: it is not here; install it\.$"):
        build(tiny, cache=tmp_path / "cache", report=report)
    assert report.events == []


def test_full_tensorrt_needs_its_gpu(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "installed", lambda _: Installed("11.4", "cu13"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = Recorder()
    with pytest.raises(EngineUnavailable, match=r"^tensorrt: it builds on the GPU it builds for"):
        build(tiny, cache=tmp_path / "cache", flavour="tensorrt", report=report)
    assert report.events == []


def test_no_onnx(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = compiler.importlib.util.find_spec
    monkeypatch.setattr(
        compiler.importlib.util, "find_spec", lambda name: None if name == "onnx" else find(name)
    )
    assert one(build(tiny, "rtx4090", cache=cache)).engines[0].cached  # nothing is emitted
    with pytest.raises(EngineUnavailable, match=r"'onnx', which writes the graph, is missing"):
        build(tiny, "rtx5090", cache=cache)
    report = Recorder()
    with pytest.raises(EngineUnavailable, match=r"'onnx', which writes the graph, is missing"):
        build(tiny, cache=cache / "new", report=report)
    assert set(report.phases) == {"reading"}, "told after the calibration"


def test_no_modelopt_for_its_algorithm(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.calibrate.has_modelopt", lambda: False)
    report = Recorder()
    for command in (compiler.build, compiler.verify):
        more = {"gpus": [gpu_from_name("rtx4090")]} if command is compiler.build else {}
        with pytest.raises(OctavoError, match="algorithm 'mse' needs NVIDIA ModelOpt"):
            command(
                tiny, recipe=load_recipe("fp8").with_options("mse"),
                cache=EngineCache(tmp_path / "cache"), report=report, **more,
            )  # fmt: skip
    assert report.events == []


def test_unwritable_cache_before_calibration(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = Recorder()
    with pytest.raises(CacheError, match="a file and a folder share this name"):
        build(tiny, cache=tmp_path / "file" / "cache", report=report)
    assert set(report.phases) == {"reading"}


def test_refused_by_tensorrt(tiny: Path, cache: Path) -> None:
    """A GPU that TensorRT does not know: the builder's own refusal, and nothing is left."""
    with pytest.raises(BuildError, match=r"plan for SM 13\.0: that GPU is not supported"):
        compiler.build(
            tiny, [Gpu("sm130", 130)], recipe=load_recipe("fp8").with_options(None, 8),
            cache=EngineCache(cache),
        )  # fmt: skip
    assert partial_files(cache) == [] and len(artifacts(cache, "plans")) == 1


def test_the_cache_folder_vanishes_in_mid_run(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def report(event: compiler.Progress) -> None:
        if event.phase == "verifying the graph":
            shutil.rmtree(cache, ignore_errors=True)

    (engine,) = one(build(tiny, cache=cache, report=report)).engines
    assert Path(engine.path).is_file()


def test_the_model_changes_in_mid_run(tmp_path: Path) -> None:
    """Never a checkpoint that mixes two files."""
    path = save(tmp_path / "model.safetensors", tiny_tensors())

    def report(event: compiler.Progress) -> None:
        if event.phase == "calibrating":
            save(path, tiny_tensors(seed=1))

    with pytest.raises(FileError, match="changed while it was being read; start again"):
        build(path, cache=tmp_path / "cache", report=report)
    assert artifacts(tmp_path / "cache", "checkpoints") == []
    assert partial_files(tmp_path) == []


def test_the_memo_of_a_settled_file(tiny: Path, cache: Path) -> None:
    settled = 3 - (time.time() - tiny.stat().st_ctime)
    time.sleep(max(0.0, settled))
    detected = detect(tiny)
    store = EngineCache(cache)
    (encoder,) = detected.encoders
    content_of(encoder, detected, store)
    start, report = time.monotonic(), Recorder()
    content_of(encoder, detected, store, report)
    assert time.monotonic() - start < 0.3 and report.events == []


def test_importing_modelopt_keeps_nothing_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that keeps an ImportError keeps the stack below it, and what that stack holds."""
    inner = tmp_path / "modelopt" / "torch" / "quantization" / "nn"
    inner.mkdir(parents=True)
    for folder in (inner, *inner.parents[:3]):
        (folder / "__init__.py").touch()
    (inner / "__init__.py").write_text(
        "try:\n    import no_such_solver\nexcept ImportError as error:\n    kept = error\n"
    )
    for name in [n for n in sys.modules if n.partition(".")[0] == "modelopt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def calibrate() -> weakref.ref[torch.nn.Module]:
        weights = torch.nn.Module()
        calibrate_module._import_modelopt()
        return weakref.ref(weights)

    assert calibrate()() is None
    for name in [n for n in sys.modules if n.partition(".")[0] == "modelopt"]:
        assert str(tmp_path) in str(sys.modules.pop(name).__file__)
