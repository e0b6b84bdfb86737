# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Mutated files end in a result or in an OctavoError of one line, quickly, and in nothing else."""

import json
import random
import warnings

import fp8_files as f
import packagings as p
import pytest
import torch
from octavo.checkpoints import detect, fingerprint
from octavo.encoders.clip import ClipSpec
from octavo.errors import OctavoError
from safetensors.torch import save

SPEC = ClipSpec(2, 64, 128, 1, 32, 50, "gelu")
T5 = p.T5Spec(2, 32, 48, 2, 12, 40)
LAYOUTS = [
    p.hugging_face,
    p.openai,
    lambda t: {**p.hugging_face(t, "clip_l.transformer.text_model.", ""), **p.t5("t5xxl.", T5)},
    lambda t: f.comfy_quant(f.coded(t, SPEC.linears())),
    lambda _: f.legacy(f.coded(p.t5_canonical(T5), T5.linears())),
]
HUGE = [-1, 0, 1, 2, 3, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, 1e300, 0.5, True]
HUGE += [None, "2", [], {}, [2]]
DTYPES = ["F16", "BF16", "F32", "F64", "I8", "U8", "I64", "BOOL", "F8_E4M3", "F4", "C64", "F17", ""]


def flip(data, random, count=3):
    data = bytearray(data)
    for _ in range(random.randint(1, count)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def split(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 : 8 + length], data[8 + length :]


def joined(header, body):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + body


# Each takes whole safetensors bytes and a Random, and gives a mutated file.


def flip_header(data, random):
    _, header, body = split(data)
    return joined(flip(header, random), body)


def flip_body(data, random):
    _, header, body = split(data)
    body = bytearray(body)
    for _ in range(random.randint(1, 60)):
        body[random.randrange(len(body))] = random.choice([0x7C, 0xFC, random.randrange(256)])
    return joined(header, bytes(body))


def truncate(data, random):
    end = random.choice([len(data) - 1, random.randrange(len(data)), random.randrange(3000)])
    return data[:end]


def lengthen(data, random):
    return data + random.randbytes(random.randint(1, 64))


def inflate_length(data, random):
    length = int.from_bytes(data[:8], "little")
    more = random.choice([1, -1, 8, -8, 1000, 1 << 20, 99_999_999, (1 << 63) - length, -length])
    return (length + more).to_bytes(8, "little", signed=False) + data[8:]


def swap_dtype(data, random):
    entries, _, body = split(data)
    entry = entries[random.choice(sorted(entries))]
    entry["dtype"] = random.choice(DTYPES)
    return joined(entries, body)


def consistent_dtype(data, random):
    """Another dtype of the same width everywhere: what was damaged is then the meaning only."""
    return data.replace(b'"F16"', random.choice([b'"BF16"', b'"I16"', b'"U16"']))


def change_shape(data, random):
    entries, _, body = split(data)
    shape = entries[random.choice(sorted(entries))]["shape"]
    what = random.randrange(4)
    if what == 0:
        shape.append(random.choice(HUGE))
    elif what == 1:
        shape.reverse()
    elif what == 2:
        shape.clear()
    elif shape:
        shape[random.randrange(len(shape))] = random.choice(HUGE)
    return joined(entries, body)


def transpose_shape(data, random):
    """Shapes that still fit the bytes, but no encoder."""
    entries, _, body = split(data)
    for name in random.sample(sorted(entries), 3):
        shape = entries[name]["shape"]
        entries[name]["shape"] = random.choice([shape[::-1], [*shape, 1], [1, *shape], shape])
    return joined(entries, body)


def change_offsets(data, random):
    entries, _, body = split(data)
    entry = entries[random.choice(sorted(entries))]
    entry["data_offsets"][random.randrange(2)] = random.choice([*HUGE, len(body), len(body) + 1])
    return joined(entries, body)


def exchange_offsets(data, random):
    entries, _, body = split(data)
    one, two = random.sample(sorted(entries), 2)
    a, b = entries[one], entries[two]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]
    return joined(entries, body)


def duplicate_name(data, random):
    _, header, body = split(data)
    entries = json.loads(header)
    name = random.choice(sorted(entries))
    again = json.dumps({name: entries[random.choice(sorted(entries))]}).encode()
    return joined(b"{" + again[1:-1] + b"," + header.lstrip()[1:], body)


def rename(data, random):
    entries, _, body = split(data)
    name = random.choice(sorted(entries))
    parts = name.split(".")
    words = ["0", "1", "7", "9999", "99999", "-1", "", "\n", "\ud800", "weight_scale", "x" * 500]
    parts[random.randrange(len(parts))] = random.choice(words)
    entries[".".join(parts)] = entries.pop(name)
    return joined(entries, body)


def drop_tensor(data, random):
    """Leave one out and close the gap."""
    entries, _, body = split(data)
    start, end = entries.pop(random.choice(sorted(entries)))["data_offsets"]
    for entry in entries.values():
        if entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [x - (end - start) for x in entry["data_offsets"]]
    return joined(entries, body[:start] + body[end:])


def strange_json(data, random):
    _, header, body = split(data)
    deep = random.choice([10, 1000, 200_000])
    return joined(
        random.choice(
            [
                b"[" * deep,
                b'{"a":' * deep + b"1" + b"}" * deep,
                b'{"a":' + b"1" * random.choice([10, 5000]) + b"}",
                b'{"a":1e' + b"9" * 10 + b"}",
                b'{"a":NaN}',
                b"{}",
                b"",
                b"null",
                b" " + header,
                header + b" " * 1000,
                header + b"x",
                header[:-1],
                b"\xef\xbb\xbf" + header,
                header.decode().encode("utf-16"),
                random.randbytes(len(header)),
            ]
        ),
        body,
    )


METADATA = [{"octavo": 1}, {"_quantization_metadata": "{"}, {"_quantization_metadata": "{}"}]


def strange_metadata(data, random):
    entries, _, body = split(data)
    entries["__metadata__"] = random.choice([*HUGE, {"a": 1}, {"octavo": "{}"}, *METADATA])
    return joined(entries, body)


def change_scale(data, random):
    """Other bytes, another dtype or another name for what stands beside FP8 weights."""
    entries, _, body = split(data)
    sides = [n for n in sorted(entries) if "scale" in n or n.endswith("comfy_quant")]
    if not sides:
        return flip_body(data, random)
    name = random.choice(sides)
    start, stop = entries[name]["data_offsets"]
    what = random.randrange(4)
    if what == 0:
        noise = bytes(
            random.choice([0, 0x7F, 0xFF, random.randrange(256)]) for _ in body[start:stop]
        )
        body = body[:start] + noise + body[stop:]
    elif what == 1:
        entries[name] |= {"dtype": "BF16", "shape": [(stop - start) // 2]}
    elif what == 2:
        stem = name.rpartition(".")[0]
        kind = random.choice(["weight_scale", "scale_input", "comfy_quant", "x_scale", "weight"])
        entries[f"{stem}.{kind}"] = entries.pop(name)
    else:
        entries[random.choice(sides)], entries[name] = entries[name], entries[random.choice(sides)]
    return joined(entries, body)


def insert_tensor(data, random):
    entries, _, body = split(data)
    known = [
        "logit_bias",
        "cls_emb",
        "text_projection.bias",
        "positional_embedding_res",
        "text_model.embeddings.position_embedding_res.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "model.layers.0.input_layernorm.weight",
        "encoder.layers.0.self_attn.q_proj.weight",
        "transformer.resblocks.0.attn.in_proj_weight",
        "text_projection",
        "shared.weight",
        "scaled_fp8",
        "encoder.block.0.layer.1.DenseReluDense.wo.scale_weight",
        "text_model.encoder.layers.1.mlp.fc2.comfy_quant",
    ]
    shape = random.choice([[], [0], [1], [2, 2], [40, 64], [1] * 16])
    size = 2 * torch.Size(shape).numel()
    span = [len(body), len(body) + size]
    entry = {"dtype": "F16", "shape": shape, "data_offsets": span}
    entries[random.choice(known)] = entry
    return joined(entries, body + bytes(size))


MUTATIONS = [
    *(flip_header, flip_body, truncate, lengthen, inflate_length, swap_dtype, consistent_dtype),
    *(change_shape, transpose_shape, change_offsets, exchange_offsets, duplicate_name, rename),
    *(drop_tensor, strange_json, strange_metadata, insert_tensor, change_scale),
]
ROUNDS = 75  # 18 mutations: 1350 safetensors files, and 300 torch files below


def outcome(path):
    """ "ok", or the kind of error; anything but an OctavoError is the test's failure."""
    try:
        for weights in detect(path).encoders:
            fingerprint(weights)
            for name in weights.names():
                assert weights.read(name).shape == (
                    weights.spec.tensors().get(name) or weights.projection_shape
                )
    except OctavoError as error:
        assert "\n" not in str(error) and str(error).endswith(".")
        return type(error).__name__
    return "ok"


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_mutated_safetensors(mutate, tmp_path):
    sound = [save(layout(p.canonical(SPEC))) for layout in LAYOUTS]
    outcomes = set()
    for i in range(ROUNDS):
        seeded = random.Random(f"{mutate.__name__} {i}")
        path = tmp_path / f"{i}.safetensors"
        path.write_bytes(mutate(sound[i % len(sound)], seeded))
        outcomes.add(outcome(path))
        path.unlink()
    assert outcomes <= {"ok", "FileError", "UnsupportedEncoder"}
    assert outcomes != {"ok"}, "the mutation does nothing"


@pytest.mark.parametrize("legacy", [False, True])
def test_mutated_torch_files(legacy, tmp_path):
    path = tmp_path / "x.pt"
    torch.save(p.canonical(SPEC), path, _use_new_zipfile_serialization=not legacy)
    sound = path.read_bytes()
    assert outcome(path) == "ok"
    outcomes = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(150):
            seeded = random.Random(i)
            where = random.Random(i).choice([3000, 3000, len(sound)])
            if i % 4 == 0:
                mutated = truncate(sound, seeded)
            elif i % 4 == 1:
                mutated = sound[:-where] + flip(sound[-where:], seeded, 8)
            else:
                mutated = flip(sound[:where], seeded, 8) + sound[where:]
            path = tmp_path / f"{i}.pt"
            path.write_bytes(mutated)
            outcomes.add(outcome(path))
            path.unlink()
    assert outcomes <= {"ok", "FileError", "UnsupportedEncoder"} and len(outcomes) > 1


def test_mutated_indices_and_configs(tmp_path):
    tensors = p.canonical(SPEC)
    p.write(tmp_path / "a.safetensors", tensors)
    index = json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}).encode()
    config = json.dumps(
        {"text_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}}
    ).encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    (tmp_path / "config.json").write_bytes(config)
    assert outcome(tmp_path) == "ok"
    outcomes = set()
    for i in range(200):
        seeded = random.Random(i)
        changed = [index, config]
        changed[i % 2] = (flip if i % 3 else truncate)(changed[i % 2], seeded)
        (tmp_path / "model.safetensors.index.json").write_bytes(changed[0])
        (tmp_path / "config.json").write_bytes(changed[1])
        outcomes.add(outcome(tmp_path))
    assert "FileError" in outcomes
