# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with a file: one sentence with its path, the fault and a remedy."""

import contextlib
import json
import os
import pickle
import sys
import types
from pathlib import Path

import packagings as p
import pytest
import torch
from octavo.checkpoints import detect, fingerprint, open_weights
from octavo.encoders.clip import PROJECTION, TOKENS
from octavo.errors import FileError, UnsupportedEncoder
from test_packagings import shard

BLOCK0 = "text_model.encoder.layers.0."
BLOCK1 = "text_model.encoder.layers.1."
BLOCK2 = "text_model.encoder.layers.2."


def fault_of(path):
    """The fault of the one error that detecting or reading the file ends in."""
    with pytest.raises(FileError) as caught:
        for weights in detect(path).encoders:
            for name in weights.names():
                weights.read(name)
    error = caught.value
    assert str(error) == f"{error.path}: {error.fault}; {error.remedy}."
    assert "\n" not in str(error) and len(error.fault) < 400
    assert error.remedy
    return error.fault


def without(name):
    return {n: t for n, t in p.canonical().items() if n != name}


def with_shape(name, *shape):
    return {**p.canonical(), name: torch.ones(shape, dtype=torch.float16)}


def layer_gap():
    spec = p.ClipSpec(4, 128, 256, 2, 77, 100, "gelu")
    return {n: t for n, t in p.canonical(spec).items() if ".layers.1." not in n}


DAMAGED_LAYERS = {
    "tokens missing": (
        without(TOKENS),
        f"tensor '{TOKENS}' of shape [vocabulary, width] is missing",
    ),
    "first linear missing": (
        without(BLOCK0 + "mlp.fc1.weight"),
        f"tensor '{BLOCK0}mlp.fc1.weight' of shape [feed-forward, 128] is missing",
    ),
    "bias missing": (
        without(BLOCK0 + "mlp.fc2.bias"),
        f"tensor '{BLOCK0}mlp.fc2.bias' of shape [128] is missing",
    ),
    "final norm missing": (
        without("text_model.final_layer_norm.bias"),
        "tensor 'text_model.final_layer_norm.bias' of shape [128] is missing",
    ),
    "a layer missing": (
        layer_gap(),
        f"tensor '{BLOCK1}self_attn.q_proj.weight' of shape [128, 128] is missing",
    ),
    "a hostile layer number": (
        {**p.canonical(), "text_model.encoder.layers.9999.mlp.fc1.weight": torch.ones(256, 128)},
        f"tensor '{BLOCK2}self_attn.q_proj.weight' of shape [128, 128] is missing",
    ),
    "half a layer too many": (
        {**p.canonical(), BLOCK2 + "mlp.fc1.weight": torch.ones(256, 128)},
        f"tensor '{BLOCK2}self_attn.q_proj.weight' of shape [128, 128] is missing",
    ),
    "misshaped linear": (
        with_shape(BLOCK0 + "self_attn.k_proj.weight", 128, 64),
        f"tensor '{BLOCK0}self_attn.k_proj.weight' has the shape [128, 64], expected [128, 128]",
    ),
    "misshaped tokens": (
        with_shape(TOKENS, 128),
        f"tensor '{TOKENS}' has the shape [128], expected [vocabulary, width]",
    ),
    "no rows": (
        with_shape(TOKENS, 0, 128),
        f"tensor '{TOKENS}' has the shape [0, 128], expected [vocabulary, width]",
    ),
    "misshaped projection": (
        with_shape(PROJECTION, 64, 96),
        f"tensor '{PROJECTION}' has the shape [64, 96], expected [projected, 128]",
    ),
    "misshaped fused linear": (
        {**p.openai(p.canonical()), "transformer.resblocks.1.attn.in_proj_bias": torch.ones(128)},
        "tensor 'transformer.resblocks.1.attn.in_proj_bias' has the shape [128], expected [384]",
    ),
    "geometric parametrization": (
        {**without(BLOCK0 + "mlp.fc1.weight"), BLOCK0 + "mlp.fc1.theta": torch.ones(256, 128)},
        f"tensor '{BLOCK0}mlp.fc1.theta' is none of a CLIP text encoder's",
    ),
    "layer scale": (
        {**p.openai(p.canonical()), "transformer.resblocks.0.ls_1.gamma": torch.ones(128)},
        "tensor 'transformer.resblocks.0.ls_1.gamma' is none of a CLIP text encoder's",
    ),
    "LongCLIP too short": (
        {**p.openai(p.canonical()), "positional_embedding_res": torch.ones(20, 128)},
        "tensor 'positional_embedding_res' has 20 positions, more than 20 needed",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED_LAYERS)
def test_a_missing_or_misshaped_layer(kind, tmp_path):
    tensors, fault = DAMAGED_LAYERS[kind]
    assert fault_of(p.write(tmp_path / "x.safetensors", tensors)) == fault
    torch.save(tensors, tmp_path / "x.pt")
    assert fault_of(tmp_path / "x.pt") == fault


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", [p.hugging_face, p.openai])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_that_are_not_finite(value, layout, dtype, tmp_path):
    state = layout(p.canonical(dtype=dtype))
    name = next(n for n in state if n.endswith(("in_proj_weight", "1.self_attn.v_proj.weight")))
    state[name][0, 5] = value
    state[name][100, 7] = value
    (weights,) = detect(p.write(tmp_path / "x.safetensors", state)).encoders
    with pytest.raises(FileError) as caught:
        fingerprint(weights)
    assert caught.value.fault == f"tensor '{name}' holds 2 values that are NaN or infinite"


def entry(**changes):
    return {"dtype": "F16", "shape": [2], "data_offsets": [0, 4], **changes}


HEADERS = {
    "not JSON": (b"{oops", "not valid JSON"),
    "an array": (b"[1]", "does not start with {"),
    "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "a lone surrogate": (b'{"\\ud800": {}}', "not valid JSON"),
    "too deep": (b'{"a":' * 100_000, "not valid JSON"),
    "a number too long": (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
    "a name twice": (b'{"a": {}, "a": {}}', "a name appears twice"),
    "metadata that is no map": ({"__metadata__": []}, "__metadata__ is not a map of strings"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "__metadata__ is not a map of strings"),
    "no description": ({"a": 1}, "does not describe tensor 'a'"),
    "no shape": ({"a": {"dtype": "F16", "data_offsets": [0, 4]}}, "does not describe"),
    "more than a description": ({"a": entry(more=1)}, "does not describe"),
    "unknown dtype": ({"a": entry(dtype="F17")}, "the unknown dtype 'F17'"),
    "dtype that is no text": ({"a": entry(dtype=["F16"])}, "unknown dtype"),
    "negative size": ({"a": entry(shape=[-2])}, "are no sizes"),
    "fraction": ({"a": entry(shape=[2.0])}, "are no sizes"),
    "true": ({"a": entry(shape=[True, 2])}, "are no sizes"),
    "huge size": ({"a": entry(shape=[1 << 70])}, "are no sizes"),
    "overflowing product": ({"a": entry(shape=[1 << 62, 1 << 62])}, "does not fill its 4 bytes"),
    "many axes": ({"a": entry(shape=[1] * 1000 + [2])}, "are no sizes"),
    "shape and bytes differ": ({"a": entry(shape=[3])}, "does not fill its 4 bytes"),
    "backwards": ({"a": entry(data_offsets=[4, 0])}, "does not fill its -4 bytes"),
    "three offsets": ({"a": entry(data_offsets=[0, 4, 8])}, "are no sizes"),
    "overlap": ({"a": entry(), "b": entry(data_offsets=[2, 6])}, "'b' starts at byte 2, not at 4"),
    "hole": ({"a": entry(), "b": entry(data_offsets=[6, 10])}, "'b' starts at byte 6, not at 4"),
    "body too short": ({"a": entry(shape=[8], data_offsets=[0, 16])}, "take 16 bytes"),
    "body too long": ({"a": entry(shape=[1], data_offsets=[0, 2])}, "the file holds"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_bad_header(kind, tmp_path):
    header, fault = HEADERS[kind]
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    assert fault in fault_of(path)


def test_truncated_and_inflated_files(tmp_path):
    path = p.write(tmp_path / "x.safetensors", p.canonical())
    whole = path.read_bytes()
    for size in (1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "header" in fault_of(path) or "the file holds" in fault_of(path)
    path.write_bytes(whole + b"x")
    assert "the file holds" in fault_of(path)
    for length in (0, 1, 1 << 40, (1 << 64) - 1):
        path.write_bytes(length.to_bytes(8, "little") + whole[8:])
        assert fault_of(path) == f"its header claims {length} bytes"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_that_changes_while_it_is_mapped(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    tensors = p.canonical()
    p.write(path, tensors) if suffix != ".pt" else torch.save(tensors, path)
    (weights,) = detect(path).encoders
    weights.read(TOKENS)
    with contextlib.suppress(OSError):  # a file system without hard links
        os.link(path, tmp_path / "link")
    weights.read(TOKENS)  # one more name is no change
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(FileError, match="changed while it was being read; start again"):
        weights.read(TOKENS)
    path.unlink()
    with pytest.raises(FileError, match="changed while it was being read; start again"):
        weights.read(TOKENS)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def torch_script(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "junk", [Evil(), torch.nn.Linear(2, 2), {"a": Evil()}, {"a": 1}, [torch.ones(2)], 5, {}, "x"]
)
def test_torch_files_without_tensors_by_name(junk, legacy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.pt"
    torch.save(junk, path, _use_new_zipfile_serialization=not legacy)
    fault = fault_of(path)
    assert fault.startswith(("cannot be read as tensors alone", "holds no tensors"))
    assert "weights_only" not in fault
    assert not (tmp_path / "evil").exists()


@pytest.mark.filterwarnings("ignore")
def test_files_of_other_kinds(tmp_path):
    torch_script(tmp_path / "script.pt")
    assert fault_of(tmp_path / "script.pt").startswith("is a TorchScript archive")
    contents = {
        "pickle.pt": pickle.dumps(Evil()),
        "noise.ckpt": bytes(range(256)) * 10,
        "zip.pt": b"PK\x03\x04" + bytes(100),
        "empty.safetensors": b"",
        "empty.pt": b"",
        "zeros.safetensors": bytes(1000),
        "page.safetensors": b"<!DOCTYPE html><html></html>",
        "note.txt": b"a note, long enough",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert fault_of(tmp_path / name)
    for name, content, fault in (
        ("x.gguf", b"GGUF\x03\0\0\0" + bytes(100), "is a GGUF file"),
        ("x.safetensors", b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS"),
    ):
        (tmp_path / name).write_bytes(content)
        assert fault_of(tmp_path / name).startswith(fault)
        with pytest.raises(UnsupportedEncoder):
            open_weights(tmp_path / name)


@pytest.mark.parametrize("kind", ["sparse", "meta", "quantized", "complex"])
@pytest.mark.filterwarnings("ignore")
def test_odd_tensors_in_torch_files(kind, tmp_path):
    weight = torch.ones(256, 128)
    odd = {
        "sparse": weight.to_sparse(),
        "meta": weight.to("meta"),
        "quantized": torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        "complex": weight.to(torch.complex64),
    }[kind]
    torch.save({**p.canonical(), BLOCK0 + "mlp.fc1.weight": odd}, tmp_path / "x.pt")
    assert fault_of(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"<!DOCTYPE html><html>", "is a web page, not the file"),
        (b"<html><head>", "is a web page, not the file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the file"),
        (b"hello, world", f"its header claims {int.from_bytes(b'hello, w', 'little')} bytes"),
    ],
)
def test_what_is_no_weights_file_is_named(data, fault, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises((FileError, UnsupportedEncoder)) as caught:
        detect(path)
    assert caught.value.fault == fault


def test_bytes_decide_and_not_the_suffix(tmp_path):
    tensors = p.canonical()
    plain = fingerprint(detect(p.write(tmp_path / "x.safetensors", tensors)).encoders[0])
    assert fingerprint(detect(p.write(tmp_path / "x.pt", tensors)).encoders[0]) == plain
    for legacy in (False, True):
        torch.save(tensors, tmp_path / "y", _use_new_zipfile_serialization=not legacy)
        assert fingerprint(detect(tmp_path / "y").encoders[0]) == plain
        (tmp_path / "y").rename(tmp_path / "y.safetensors")
        assert fault_of(tmp_path / "y.safetensors") == "is a torch file under another name"


def test_paths(tmp_path):
    assert fault_of(tmp_path / "absent.safetensors") == "does not exist"
    assert fault_of(tmp_path) == "is a folder without a recognisable model"
    assert "cannot be opened" in fault_of(tmp_path / ("x" * 5000)) or os.name == "nt"
    assert fault_of(tmp_path / "a\0b")
    (tmp_path / "model_index.json").write_text("{}")
    assert "pipeline folder without" in fault_of(tmp_path)
    folder = tmp_path / "several"
    folder.mkdir()
    for name in ("a", "b"):
        p.write(folder / f"{name}.safetensors", p.canonical())
    assert "holds 2 model files" in fault_of(folder)
    (folder / "b.safetensors").unlink()
    assert detect(folder).encoders[0].spec.width == 128
    deep = tmp_path / "Größe 模型 #1 %20"
    deep.mkdir()
    assert detect(p.write(deep / "模.safetensors", p.canonical())).encoders


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = p.write(tmp_path / "x.safetensors", p.canonical())

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # permissions do not bind root
    assert fault_of(path) == "cannot be opened (Permission denied)"


def test_shards(tmp_path):
    index = shard(tmp_path, p.canonical(), kind="safetensors")
    first = tmp_path / "model-00001-of-00002.safetensors"
    assert fault_of(first) == f"is one shard of several, listed in {index.name}"
    weight_map = json.loads(index.read_text())["weight_map"]

    def indexed(changed):
        index.write_text(json.dumps({"weight_map": changed}))
        return fault_of(index)

    name = next(iter(weight_map))
    assert "is not beside it" in indexed({**weight_map, name: "../x.safetensors"})
    assert "is not beside it" in indexed({**weight_map, name: str(first)})
    assert "is not beside it" in indexed({**weight_map, name: ""})
    assert "is missing" in indexed({**weight_map, name: "model-00003-of-00002.safetensors"})
    assert "listed in model.safetensors.index.json, is missing" in indexed(
        {**weight_map, "more": first.name}
    )
    assert "has no weight_map" in indexed({})
    assert "has no weight_map" in indexed({"a": 1})
    index.write_text("{")
    assert "is not valid JSON" in fault_of(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    first.unlink()
    assert fault_of(tmp_path) == "its shard 'model-00001-of-00002.safetensors' is missing"


def test_inside_comfyui_its_own_loader_reads_torch_files(tmp_path, monkeypatch):
    state = p.canonical()
    calls = []

    def load_torch_file(path, safe_load=False):
        calls.append((path, safe_load))
        if path.endswith("bad.ckpt"):
            raise RuntimeError("no\nsuch luck")
        return state

    module = types.ModuleType("comfy.utils")
    module.load_torch_file = load_torch_file
    monkeypatch.setitem(sys.modules, "comfy.utils", module)
    for name in ("x.ckpt", "bad.ckpt"):
        torch.save({}, tmp_path / name)
    (weights,) = detect(tmp_path / "x.ckpt").encoders
    assert torch.equal(weights.read(TOKENS), state[TOKENS])
    assert calls == [(str(tmp_path / "x.ckpt"), True)]
    assert fault_of(tmp_path / "bad.ckpt") == "cannot be read as tensors alone (no)"
    detect(p.write(tmp_path / "x.safetensors", state))
    assert len(calls) == 2
