# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, JSON, help, and one sentence for whatever is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import cli, compile
from octavo.encoders.clip import TOKENS
from octavo.errors import OctavoBug
from octavo.seeded import TINY
from pipeline import (
    COMMAND,
    artifacts,
    check,
    complaint,
    copy_of,
    environment,
    octavo,
    one_thread,  # noqa: F401 - a fixture
    packagings,
    partial_files,
    save,
    tiny_tensors,
)
from test_compile import BUILD

LAYER = TINY.block(0)
INSPECT = {
    "file": str,
    "encoders": [
        {
            "name": str,
            "family": str,
            "layers": int,
            "width": int,
            "positions": int,
            "prefix": str,
            "dtype": str,
            "key": str,
        }
    ],
}
VERIFY = {
    "file": str,
    "recipe": str,
    "encoders": [
        {
            "name": str,
            "family": str,
            "key": str,
            "similarity": {
                "token_mean": float,
                "token_min": float,
                "pooled": (float, type(None)),
                "max_abs_error": float,
                "prompts": int,
            },
            "judge": str,
            "floor": {"token_mean": float, "token_min": float, "pooled": float},
            "shortfall": (str, type(None)),
            "passed": bool,
        }
    ],
}
CACHE_LIST = {
    "root": str,
    "bytes": int,
    "budget_bytes": int,
    "entries": [
        {"kind": str, "key": str, "path": str, "bytes": int, "last_use": float, "what": str}
    ],
}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """The command line in this process: as in its own, but without the start of torch."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        code = cli.main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "tiny.safetensors", tiny_tensors())


@pytest.fixture(scope="module")
def filled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache, and the JSON of the job that filled it, through a process of its own."""
    folder = tmp_path_factory.mktemp("filled")
    settled = 2.5 - (time.time() - tiny.stat().st_ctime)
    time.sleep(max(0.0, settled))  # a younger file is not remembered
    done = octavo(
        *("build", tiny, "--gpu", "rtx4090", "--prompts", 8),
        *("--cache", folder / "cache", "--json", folder / "build.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "rtx4090" in done.stdout and "similarity to FP32" in done.stdout  # a table as well
    return folder / "cache", json.loads((folder / "build.json").read_text())


@pytest.fixture
def cache(filled: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return copy_of(filled[0], tmp_path / "cache")


# What each command writes


def test_build_json(filled: tuple[Path, dict[str, Any]], tiny: Path) -> None:
    facts = filled[1]
    check(facts, BUILD)
    assert facts["file"] == str(tiny)
    assert 200e6 < facts["peak_rss_bytes"] < 10e9


def test_options_that_do_nothing_to_a_quantized_file(
    run: Callable[..., Result], tiny: Path, cache: Path, tmp_path: Path
) -> None:
    output = tmp_path / "fp8.safetensors"
    plain = ("build", tiny, "--gpu", "rtx4090", "--cache", cache, "--recipe", "fp8")
    assert "did nothing" not in run(*plain, "--output", output).err
    built = run("build", output, "--gpu", "rtx4090", "--cache", cache)
    assert built.code == 0 and "did nothing" not in built.err
    built = run("build", output, "--gpu", "rtx4090", "--cache", cache, "--recipe", "bf16")
    said = "Note: fp8.safetensors is quantized already; --recipe did nothing to it."
    assert built.code == 0 and said in built.err


WITHOUT_TORCH = """
import sys
from octavo.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "numpy", "onnx", "onnxruntime", "modelopt", "tensorrt_rtx", "transformers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
sys.exit(code)
"""


def test_from_the_cache_without_torch(
    filled: tuple[Path, dict[str, Any]], tiny: Path, cache: Path
) -> None:
    arguments = [
        "build",
        tiny,
        "--gpu",
        "rtx4090",
        "--prompts",
        "8",
        "--cache",
        cache,
        "--json",
        "-",
    ]
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, *map(str, arguments)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing was read, calibrated or compiled
    facts = json.loads(done.stdout)  # and nothing but JSON is on standard output
    check(facts, BUILD)
    assert [e["cached"] for e in facts["encoders"][0]["engines"]] == [True]
    assert (
        facts["encoders"][0]["checkpoint"]["key"] == filled[1]["encoders"][0]["checkpoint"]["key"]
    )
    assert seconds < 3
    assert 0 < facts["peak_rss_bytes"] < 150e6  # its own, not that of this large parent


def test_inspect(
    run: Callable[..., Result], tiny: Path, tmp_path: Path, filled: tuple[Path, dict[str, Any]]
) -> None:
    done = run("inspect", tiny, "--json", "-")
    assert done.code == 0
    facts = json.loads(done.out)
    check(facts, INSPECT)
    (encoder,) = facts["encoders"]
    expected = {"name": "clip", "family": "clip", "layers": 2, "width": 128, "positions": 77}
    expected |= {"prefix": "", "dtype": "fp16", "key": filled[1]["encoders"][0]["key"]}
    assert encoder | {"prefix": ""} == expected
    table = run("inspect", tiny, "--json", tmp_path / "deep" / "inspect.json")
    assert json.loads((tmp_path / "deep" / "inspect.json").read_text()) == facts
    assert encoder["key"] in table.out and "2 x 128" in table.out


def test_inspect_names_what_is_left_as_it_is(run: Callable[..., Result], tmp_path: Path) -> None:
    tensors = packagings.ONE_ENCODER["FLUX with T5"](tiny_tensors())
    llama = "text_encoders.llama.transformer.model.layers.{}.{}.weight"
    for part in ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"):
        tensors |= {llama.format(i, part): torch.ones(8, 8) for i in range(2)}
    path = save(tmp_path / "flux.safetensors", tensors)
    done = run("inspect", path)
    assert done.code == 0
    assert "clip_l" in done.out and "t5xxl" in done.out and "language model" in done.out
    facts = json.loads(run("inspect", path, "--json", "-").out)
    found = [(e["name"], e["family"], e["positions"]) for e in facts["encoders"]]
    assert found == [("clip_l", "clip", 77), ("t5xxl", "t5", 1024)]


def test_verify(run: Callable[..., Result], tiny: Path, cache: Path, tmp_path: Path) -> None:
    done = run("verify", tiny, "--prompts", 8, "--cache", cache, "--json", "-")
    assert done.code == 0
    facts = json.loads(done.out)
    check(facts, VERIFY)
    assert facts["encoders"][0]["passed"] and facts["encoders"][0]["shortfall"] is None


def test_similarity_under_the_floor(run: Callable[..., Result], tmp_path: Path) -> None:
    path = save(tmp_path / "outliers.safetensors", tiny_tensors(outliers=True))
    cache = ("--prompts", 8, "--cache", tmp_path / "cache")
    done = run("build", path, "--gpu", "rtx4090", *cache)
    assert done.code == 1
    said = r"clip with recipe fp8: token_min 0"
    assert complaint(done.err).startswith(said) and "try --recipe fp8-mixed" in done.err
    assert artifacts(tmp_path / "cache", "plans") == []
    done = run("verify", path, *cache, "--json", "-")
    assert done.code == 1
    assert complaint(done.err).startswith("recipe fp8, clip: token_min 0")
    facts = json.loads(done.out)
    check(facts, VERIFY)
    assert not facts["encoders"][0]["passed"]


def test_cache_commands(
    run: Callable[..., Result], cache: Path, filled: tuple[Path, dict[str, Any]]
) -> None:
    where = ("--cache", cache)
    (encoder,) = filled[1]["encoders"]
    facts = json.loads(run("cache", "list", *where, "--json", "-").out)
    check(facts, CACHE_LIST)
    assert {e["key"] for e in facts["entries"]} == {
        encoder["checkpoint"]["key"],
        encoder["engines"][0]["key"],
    }
    table = run("cache", "list", *where).out
    assert "SM 8.9" in table and "2 x 128" in table and "2 entries" in table
    assert json.loads(run("cache", "verify", *where, "--json", "-").out)["entries"] == [
        {"kind": e["kind"], "key": e["key"], "ok": True, "fault": ""}
        for e in sorted(facts["entries"], key=lambda e: e["kind"])
    ]
    dry = json.loads(
        run("cache", "prune", "--budget", "1K", "--dry-run", *where, "--json", "-").out
    )
    assert dry["dry_run"] and len(dry["entries"]) == 2 and len(artifacts(cache, "plans")) == 1
    done = run("cache", "prune", "--budget", "5M", *where)
    assert done.code == 0 and "freed" in done.out
    assert run("cache", "clear", "--yes", *where).code == 0
    assert json.loads(run("cache", "list", *where, "--json", "-").out)["entries"] == []


def test_an_empty_budget_is_none(run: Callable[..., Result], cache: Path) -> None:
    done = run("cache", "prune", "--budget", "", "--cache", cache)
    assert done.code == 2 and "--budget: '' is not a size; give bytes, or K, M" in done.err


@pytest.mark.parametrize("command", [("build", "--gpu", "rtx4090"), ("verify",)])
def test_more_prompts_than_there_are(
    command: tuple[str, ...], run: Callable[..., Result], tiny: Path
) -> None:
    done = run(*command, tiny, "--prompts", 5000)
    said = "octavo: --prompts 5000 is more than the 610 calibration prompts there are."
    assert (done.code, complaint(done.err)) == (2, complaint(said))


def test_cache_verify_removes_what_is_damaged(run: Callable[..., Result], cache: Path) -> None:
    (plan,) = artifacts(cache, "plans")
    plan.write_bytes(plan.read_bytes()[:-1])
    done = run("cache", "verify", "--cache", cache)
    assert done.code == 0
    assert "whole: 1, damaged and removed: 1" in done.out and not plan.exists()


def test_cache_verify_tells_what_stays(run: Callable[..., Result], cache: Path) -> None:
    (plan,) = artifacts(cache, "plans")
    manifest = plan.with_suffix(".json")
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "schema": 0}))
    done = run("cache", "verify", "--cache", cache)
    assert done.code == 0 and f"left alone: plan {plan.stem}: its manifest has schema 0" in done.out
    assert "whole: 1, damaged and removed: 0, of another version or unreadable: 1" in done.out
    assert plan.exists() and manifest.exists()


def test_cache_clear_asks(run: Callable[..., Result], cache: Path) -> None:
    done = octavo("cache", "clear", "--cache", cache, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and b"--yes" in done.stderr.encode()
    assert len(artifacts(cache, "plans")) == 1
    done = octavo("cache", "clear", "--cache", cache, input="y\n")
    assert done.returncode == 0 and artifacts(cache, "plans") == []


# Help and usage


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ("octavo build clip_l.safetensors --gpu rtx4090", "OCTAVO_CACHE")),
        (("inspect",), ("shard index",)),
        (("build",), ("--portable", "--embed-weights", "--output", "rtx4060 ... rtx5090")),
        (("verify",), ("ONNX Runtime", "Exit code 1")),
        (("doctor",), ("which engine could serve",)),
        (("bench",), ("torch.compile",)),
        (("cache",), ("list", "verify", "prune", "clear")),
        (("cache", "list"), ("last used first",)),
        (("cache", "verify"), ("damaged",)),
        (("cache", "prune"), ("--dry-run", "5G")),
        (("cache", "clear"), ("--yes",)),
    ],
)
def test_help(run: Callable[..., Result], command: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert (done.code, done.err) == (0, "")
    text = " ".join(done.out.split())
    assert all(word in text for word in words), text
    assert run(*command, "-h").out == done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Usage: octavo"),
        (("buidl",), "No such command 'buidl'"),
        (("build",), "Missing argument 'MODEL'"),
        (("build", "x.safetensors"), "Missing option '--gpu'"),
        (("build", "x", "--gpu", "rtx4090", "--prompts", "0"), "0 is not in the range x>=1"),
        (("inspect", "x", "--activation", "relu"), "'relu' is not one of"),
    ],
)
def test_usage(run: Callable[..., Result], arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.code == 2 and said in done.err and done.out == ""


def test_version(run: Callable[..., Result]) -> None:
    assert run("--version").out.startswith("octavo, version 0.")


# Bad input: one sentence that names the subject, the fault and the remedy


def damaged(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        tensors = tiny_tensors()
        change(tensors)
        return save(folder / "model.safetensors", tensors)

    return make


def bytes_of(make: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        whole = save(folder / "whole.safetensors", tiny_tensors()).read_bytes()
        (folder / "model.safetensors").write_bytes(make(whole))
        return folder / "model.safetensors"

    return write


def folder_of(**files: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "model").mkdir()
        for name, text in files.items():
            (folder / "model" / name.replace("_", ".")).write_text(text)
        return folder / "model"

    return make


def put(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[7:8].fill_(value)


BERT = {f"encoder.layer.{i}.attention.self.query.weight": torch.ones(8, 8) for i in range(2)}
T5_WO = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda p: p / "model.safetensors", "model.safetensors: does not exist; check the"),
    "empty": (bytes_of(lambda _: b""), "model.safetensors: is empty; download or save it again"),
    "truncated": (bytes_of(lambda b: b[:-1000]), "the file holds .*; the file is damaged or incom"),
    "only a header": (bytes_of(lambda b: b[:200]), "its header claims .* bytes; the file is damag"),
    "mutated header": (bytes_of(lambda b: b[:9] + b"\xff" + b[10:]), "header is not valid JSON"),
    "text": (bytes_of(lambda _: b"hello"), "its header claims .* bytes; the file is damaged"),
    "NaN": (damaged(put(LAYER + "mlp.fc2.weight", torch.nan)), "mlp.fc2.weight.* NaN.*;"),
    "infinity": (damaged(put(TOKENS, torch.inf)), "token_embedding.weight.* infinit.*;"),
    "missing layer": (
        damaged(lambda t: t.pop(LAYER + "mlp.fc1.bias")),
        r"fc1\.bias' of shape \[256\] is missing; the file is damaged or incomplete",
    ),
    "misshaped layer": (
        damaged(lambda t: t.update({LAYER + "mlp.fc1.bias": torch.ones(255)})),
        r"fc1\.bias' has the shape \[255\], expected \[256\]; the file is damaged",
    ),
    "folder without a model": (folder_of(notes_txt="x"), "folder without a recognisable model; gi"),
    "empty folder": (folder_of(), "is a folder without a recognisable model; give a model file"),
    "BERT": (
        lambda p: save(p / "model.safetensors", BERT),
        "holds a BERT encoder of 2 layers, which Octavo does not serve; give a file with CLIP-L",
    ),
    "T5, int8": (
        lambda p: save(
            p / "m.safetensors", {**packagings.t5(""), T5_WO: torch.ones(64, 96).char()}
        ),
        "holds a T5 encoder stored as I8, which Octavo does not serve; give the fp16",
    ),
    "unknown": (
        lambda p: save(p / "model.safetensors", {"layer.weight": torch.ones(3)}),
        "holds no text encoder that Octavo knows .its first tensors are 'layer.weight'.; give a fi",
    ),
    "not torch's pickle": (
        lambda p: (p / "model.pt").write_bytes(b"\x80\x02hello") and p / "model.pt",
        "model.pt: cannot be read as tensors alone .*; convert it to safetensors",
    ),
    "name too long": (lambda p: p / ("x" * 300), "cannot be opened .File name too long.; check"),
}


@pytest.mark.parametrize("fault", MODELS)
@pytest.mark.parametrize("command", ["inspect", "build", "verify"])
def test_bad_model(run: Callable[..., Result], command: str, fault: str, tmp_path: Path) -> None:
    make, said = MODELS[fault]
    model, cache = make(tmp_path), tmp_path / "cache"
    arguments = ["--gpu", "rtx4090"] if command == "build" else []
    done = run(command, model, *arguments, "--cache", cache)
    assert done.code == 2 and done.out == ""
    sentence = complaint(done.err)
    assert sentence.startswith(str(model)) or str(tmp_path) in sentence

    assert re.search(said, sentence), sentence
    assert not any(cache.rglob("*.safetensors")) and partial_files(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rtx9090", "'rtx9090' is not a GPU that Octavo knows; did you mean"),
        ("banana", "'banana' is not a GPU that Octavo knows; name it as rtx4090, l40s or sm120"),
        ("", "'' is not a GPU that Octavo knows; name it as"),
        ("rtx3090", "rtx3090 is SM 8.6; FP8 needs SM 8.9 or newer; name an RTX 40 or RTX 50 card"),
        ("sm75", "the GPU is SM 7.5; FP8 needs SM 8.9 or newer; name an RTX 40"),
        ("h100", "h100 is SM 9.0, which TensorRT for RTX does not support; install the full"),
        ("sm100", "the GPU is SM 10.0, which TensorRT for RTX does not support; install the full"),
        ("sm99", "Octavo builds plans for SM 8.9 and 12.0 and 12.1, not for SM 9.9"),
    ],
)
def test_bad_gpu(run: Callable[..., Result], tiny: Path, name: str, said: str) -> None:
    done = run("build", tiny, "--gpu", "rtx4090", "--gpu", name)
    assert done.code == 2 and complaint(done.err).startswith(said)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--recipe", "int4", "recipe 'int4' does not exist; choose one of fp8, fp8-mixed, bf16"),
        ("--algorithm", "gptq", "calibration algorithm 'gptq' cannot be used: .*; use one of max"),
        ("--encoder", "clip_g", "tiny.safetensors: has no encoder 'clip_g'; it has clip"),
        ("--flavour", "tensorrt", "tensorrt: the package is not installed in this Python; install"),
        ("--output", "{tmp}", ": is a folder; name a file in it"),
        ("--json", "{tmp}", ": is a folder; name a file in it"),
        ("--json", "{tmp}/file/x.json", "cannot be written .*file is no folder.; give --json"),
        ("--cache", "{tmp}/file", "cache .*: a file and a folder share this name; move it away"),
        ("--cache", "{tmp}/file/cache", "cache .*: a file and a folder share this name; move"),
    ],
)
def test_bad_option(
    run: Callable[..., Result], tiny: Path, tmp_path: Path, option: str, value: str, said: str
) -> None:

    (tmp_path / "file").touch()
    done = run("build", tiny, "--gpu", "rtx4090", option, value.format(tmp=tmp_path))
    assert done.code == 2 and done.out == ""
    assert re.search(said, complaint(done.err))
    assert (tmp_path / "file").read_bytes() == b"" and partial_files(tmp_path) == []


EVERY_COMMAND = (
    ("inspect", "{tiny}"),
    ("build", "{tiny}", "--gpu", "rtx4090"),
    ("verify", "{tiny}"),
    ("bench",),
    ("cache", "list"),
    ("cache", "verify"),
    ("cache", "prune"),
    ("cache", "clear", "--yes"),
)


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_a_cache_that_cannot_be(
    run: Callable[..., Result],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    """Each command says so, and at once: the work whose result has no place does not begin."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    arguments = [word.format(tiny=tiny) for word in command]
    shared = "file: a file and a folder share this name; move it away, or name a folder"
    said = {
        "": "--cache is empty; name a file or folder, or leave it out.",
        str(tmp_path / "file"): f"cache {tmp_path}/{shared}",
        str(tmp_path / "file" / "cache"): f"cache {tmp_path}/{shared}",
        "~nobody-at-all/cache": "cache ~nobody-at-all/cache: its ~ stands for no home folder",
    }
    for value, expected in said.items():
        done = run(*arguments, "--cache", value)
        assert (done.code, done.out) == (2, "")
        assert complaint(done.err).startswith(expected)
        assert len(done.err.splitlines()) == 1
        if value:
            monkeypatch.setenv("OCTAVO_CACHE", value)
            other = run(*arguments)
            named = shared[-len("name a folder") :]
            assert (other.code, other.out) == (2, "")
            assert complaint(other.err).startswith(expected.replace(named, "set OCTAVO_CACHE"))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect", ""), "MODEL is empty; name a file or folder."),
        (("bench", ""), "MODEL is empty; name a file or folder, or leave it out."),
        (("doctor", "--json", ""), "--json is empty; name a file or folder, or leave it out."),
        (("build", "x", "--gpu", "sm89", "--output", ""), "--output is empty; name a file or"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    run: Callable[..., Result], arguments: tuple[str, ...], said: str
) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint(done.err).startswith(said)


def test_bad_budget(
    run: Callable[..., Result], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("cache", "prune", "--budget", "lots")
    assert done.code == 2
    assert complaint(done.err).startswith("--budget: 'lots' is not a size; give bytes, or K")
    monkeypatch.setenv("OCTAVO_CACHE_BUDGET", "lots")
    for command in (("cache", "list"), ("build", tiny, "--gpu", "rtx4090")):
        done = run(*command)
        assert done.code == 2
        assert complaint(done.err).startswith("OCTAVO_CACHE_BUDGET: 'lots' is not a size")


def test_errors_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As a shell sees it: the code, an empty standard output, one line."""
    done = octavo("build", tmp_path / "none.safetensors", "--gpu", "rtx4090")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert complaint(done.stderr).startswith(f"{tmp_path}/none.safetensors: does not exist; check")
    assert octavo().returncode == 2


# Files that cannot be written, and characters that cannot be shown


def test_json_that_cannot_be_written(run: Callable[..., Result], tiny: Path, cache: Path) -> None:
    arguments = ("build", tiny, "--gpu", "rtx4090", "--prompts", 8, "--cache", cache, "--json")
    done = run(*arguments, "/dev/full")
    assert done.code == 2
    assert complaint(done.err).startswith("/dev/full: cannot be written (No space left on device)")
    command = [*COMMAND, *map(str, arguments), "-"]
    with open("/dev/full", "w") as full:
        done2 = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment()
        )
    assert done2.returncode == 2
    assert complaint(done2.stderr).startswith(
        "No space left on device; check the path and the disk"
    )


def test_a_reader_that_leaves(tiny: Path, cache: Path) -> None:
    """As with `octavo cache list | head -1`: no traceback, no complaint."""
    for arguments in (("cache", "list", "--json", "-"), ("cache", "list"), ("doctor",)):
        where = () if arguments[0] == "doctor" else ("--cache", str(cache))
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [*COMMAND, *arguments, *where],
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=environment(),
        )  # fmt: skip
        os.close(writer)
        assert (done.returncode, done.stderr) == (2, "")


STRANGE = ["Ünïcödé 模型 folder", "with spaces # and % signs", "d" * 200 + "/" + "e" * 200]


@pytest.mark.parametrize("folder", STRANGE)
def test_strange_paths(folder: str, tiny: Path, cache: Path, tmp_path: Path) -> None:
    """Model, cache, output and JSON below a folder whose name people really use."""
    place = tmp_path / folder
    place.mkdir(parents=True)
    model = place / "modèle.safetensors"
    model.write_bytes(tiny.read_bytes())
    where = copy_of(cache, place / "cache")
    for plan in artifacts(where, "plans"):
        plan.unlink()  # so that one is built there
    done = octavo(
        *("build", model, "--gpu", "rtx4090", "--prompts", 8, "--cache", where),
        *("--output", place / "out.safetensors", "--json", place / "out.json"),
        env=environment(PYTHONIOENCODING="ascii"),  # a console that lacks the characters
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((place / "out.json").read_text())
    assert facts["file"] == str(model)
    (engine,) = facts["encoders"][0]["engines"]
    assert not engine["cached"] and Path(engine["path"]).parent == where / "plans"
    assert (place / "out.safetensors").stat().st_size > 10e6
    assert "without Octavo's nodes ignores the scales of such a file" in done.stderr
    assert partial_files(place) == []


@pytest.mark.skipif(sys.platform != "linux", reason="file names there are bytes")
def test_a_name_that_is_no_text(tiny: Path, tmp_path: Path) -> None:
    """Linux allows it, safetensors does not; a sentence, whatever the console can show."""
    model = tmp_path / os.fsdecode(b"b\xff.safetensors")
    model.write_bytes(tiny.read_bytes())
    for path in (model, tmp_path / os.fsdecode(b"\xff")):
        done = octavo("inspect", path)
        assert done.returncode == 2 and "check the path" in complaint(done.stderr)


# Whatever else may be raised


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "cancelled; nothing partial was kept"),
        (MemoryError(), 2, "out of memory; close other programs or use a larger machine"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
            ),
            2,
            "out of memory; close other programs",
        ),
        (OSError(28, "No space left on device", "/x/y"), 2, "/x/y: No space left on device; check"),
        (OSError("no errno"), 2, "no errno; check the path and the disk"),
    ],
)
def test_other_errors(
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(compile, "build", fail)
    done = run("build", "x", "--gpu", "rtx4090")
    assert done.code == code and complaint(done.err).startswith(said)


def test_a_bug_shows_its_traceback(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OctavoBug("it broke its own rule")

    monkeypatch.setattr(compile, "build", fail)
    done = run("build", "x", "--gpu", "rtx4090")
    assert done.code == 2
    assert "Traceback" in done.err and "it broke its own rule" in done.err
    assert done.err.endswith(
        "octavo: this is a bug in Octavo; please report it with the lines above.\n"
    )


def test_progress_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich import console

    screen = io.StringIO()
    real = console.Console
    monkeypatch.setattr(
        console, "Console", lambda **k: real(**{**k, "file": screen, "force_terminal": True})
    )
    with cli._progress(None) as report:
        for done in range(5):
            report(compile.Progress("clip_l", "calibrating", done, 4))
        report(compile.Progress("clip_l", "quantizing"))
    assert "clip_l: calibrating" in screen.getvalue()
    assert "clip_l: quantizing" in screen.getvalue()
