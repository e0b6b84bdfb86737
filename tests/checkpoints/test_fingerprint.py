# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A fingerprint depends on every value used and on nothing else."""

import hashlib
import json
import subprocess
import sys
import time

import packagings as p
import pytest
import torch
from octavo import seeded
from octavo.checkpoints import detect, fingerprint
from octavo.encoders.clip import PROJECTION


def of(path, **options):
    return fingerprint(detect(path, **options).encoders[0])


def test_it_is_what_the_docstring_says(tmp_path):
    tensors = p.canonical()
    spec = p.SMALL

    def digest(names):
        sha = hashlib.sha256(b"octavo weights 1\n")
        for name in names:
            sha.update(json.dumps([name, list(tensors[name].shape)]).encode() + b"\n")
            sha.update(tensors[name].float().numpy().astype("<f4").tobytes())
        return sha.hexdigest()

    found = of(p.write(tmp_path / "x.safetensors", tensors))
    assert (found.body, found.projection) == (digest(spec.tensors()), digest([PROJECTION]))


def test_every_tensor_counts(tmp_path):
    tensors = p.canonical()
    plain = of(p.write(tmp_path / "x.safetensors", tensors))
    bodies = {plain.body}
    for name in tensors:
        changed = {**tensors, name: tensors[name].clone()}
        flat = changed[name].view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0, dtype=flat.dtype))  # one bit
        found = of(p.write(tmp_path / "y.safetensors", changed))
        assert (found.projection == plain.projection) == (name != PROJECTION)
        bodies.add(found.body)
    assert len(bodies) == len(tensors)  # each but the projection's is another body


def test_what_does_not_count(tmp_path):
    tensors = p.canonical()
    plain = of(p.write(tmp_path / "x.safetensors", tensors))
    shuffled = dict(sorted(tensors.items(), reverse=True))
    torch.save({**shuffled, "logit_scale": torch.tensor(1.0)}, tmp_path / "other name.pt")
    assert of(tmp_path / "other name.pt") == plain
    path = p.write(tmp_path / "y.safetensors", tensors, {"author": "someone"})
    assert of(path, activation="quick_gelu", heads=1) == plain
    bare = of(p.write(tmp_path / "z.safetensors", {n: tensors[n] for n in p.SMALL.tensors()}))
    assert (bare.body, bare.projection) == (plain.body, None)


def test_blocks_do_not_change_it(tmp_path, monkeypatch):
    path = p.write(tmp_path / "x.safetensors", p.openai(p.canonical()))
    plain = of(path)
    module = sys.modules["octavo.checkpoints.fingerprint"]
    for size in (1, 1000, 12345):
        monkeypatch.setattr(module, "_BLOCK_BYTES", size)
        assert of(path) == plain


def test_progress_counts_to_the_end(tmp_path):
    path = p.write(tmp_path / "x.safetensors", p.canonical())
    seen = []
    fingerprint(detect(path).encoders[0], lambda done, total: seen.append((done, total)))
    size = 4 * sum(t.numel() for t in p.canonical().values())
    assert seen[-1] == (size, size)
    assert [s[0] for s in seen] == sorted(s[0] for s in seen)


def test_three_processes_agree(tmp_path):
    path = p.write(tmp_path / "x.safetensors", p.canonical())
    code = (
        "import sys; from octavo.checkpoints import detect, fingerprint;"
        "print(fingerprint(detect(sys.argv[1]).encoders[0]).body)"
    )
    bodies = {of(path).body}
    for seed in ("1", "2"):
        command = [sys.executable, "-P", "-c", code, str(path)]
        done = subprocess.run(
            command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        bodies.add(done.stdout.strip())
    assert len(bodies) == 1


@pytest.mark.parametrize("layout", ["hugging_face", "openai"])
def test_a_full_clip_l_takes_little_time(layout, tmp_path):
    tensors = {n: torch.ones(s, dtype=torch.float16) for n, s in seeded.CLIP_L.tensors().items()}
    path = p.write(tmp_path / "x.safetensors", getattr(p, layout)(tensors))
    (weights,) = detect(path).encoders
    start = time.perf_counter()
    fingerprint(weights)
    assert time.perf_counter() - start < 5  # 0.6 s where two cores are free; SHA-NI or not
