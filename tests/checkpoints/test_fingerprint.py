# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A fingerprint depends on every value used and on nothing else."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import fp8_files as f
import packagings as p
import pytest
import torch
from octavo import seeded
from octavo.checkpoints import detect, fingerprint
from octavo.compile import fingerprint_of
from octavo.encoders.clip import PROJECTION
from octavo.errors import FileError

MODULE = sys.modules["octavo.checkpoints.fingerprint"]
LAST = 2**24 + 5  # values: a whole part, and a last one


def of(path, **options):
    return fingerprint(detect(path, **options).encoders[0])


def held(tensors, **own):
    """Weights in memory, none of them a projection; `own` replaces what `fingerprint` asks."""
    facts = {
        "spec": SimpleNamespace(tensors=lambda: {n: tuple(t.shape) for n, t in tensors.items()}),
        "projection_shape": None,
        "scales": (),
        "label": "held",
        "stored": tensors.__getitem__,
        "side": None,
        "check": lambda: None,
        "sources": lambda name: (name,),
    }
    return SimpleNamespace(**facts | own)


@pytest.fixture
def parts_of(monkeypatch):
    """Sets how many values a part has, and how many threads there are."""

    def set_sizes(values, workers=3):
        monkeypatch.setattr(MODULE, "_PART", values)
        monkeypatch.setattr(MODULE, "HASHING", workers)

    return set_sizes


def no_thread_is_left():
    return not [t for t in threading.enumerate() if t.name.startswith("octavo-fingerprint")]


def as_described(tensors):
    """The digest as the docstring of `fingerprint` has it."""
    whole = hashlib.sha256(b"octavo weights 2\n")
    for name, tensor in tensors.items():
        sha = hashlib.sha256(json.dumps([name, list(tensor.shape)]).encode() + b"\n")
        values = tensor.float().reshape(-1).numpy().astype("<f4")
        for start in range(0, len(values), 2**24):
            sha.update(hashlib.sha256(values[start : start + 2**24].tobytes()).digest())
        whole.update(sha.digest())
    return whole.hexdigest()


def test_it_is_what_the_docstring_says(tmp_path):
    tensors = p.canonical()
    found = of(p.write(tmp_path / "x.safetensors", tensors))
    body = as_described({name: tensors[name] for name in p.SMALL.tensors()})
    assert (found.body, found.projection) == (body, as_described({PROJECTION: tensors[PROJECTION]}))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_of_several_parts_is_what_the_docstring_says(transposed):
    """One whose rows end elsewhere than its parts; transposed, it does not lie in order."""
    table = torch.arange(4099 * 4097, dtype=torch.int32).to(torch.int16) % 1000
    table = table.half().reshape(4099, 4097)
    assert 2**24 < table.numel() < 2**25
    tensors = {"a": table.T if transposed else table, "b": torch.ones(3), "c": torch.tensor(2.0)}
    assert fingerprint(held(tensors)).body == as_described(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_how_a_tensor_lies_in_memory_does_not_change_it(dtype):
    """A column of a table, say, which a torch file keeps as it was."""
    whole = torch.arange(60, dtype=torch.float32).reshape(5, 4, 3).to(dtype)
    views = [whole[:, 0, 0], whole[:, :, 1], whole[0].T, whole[1, :, :1], whole[:1, 2:3, 2]]
    for view in views:
        want = fingerprint(held({"a": view.contiguous()}))
        assert fingerprint(held({"a": view})) == want, view.stride()


def test_a_file_cut_short_meanwhile_is_told(tmp_path, parts_of):
    """Its memory is gone with it: a thread that touched it would end the process."""
    parts_of(1000, 1)
    path = p.write(tmp_path / "x.safetensors", p.canonical())
    script = """
import os, sys
from octavo.checkpoints import detect, fingerprint
from octavo.errors import FileError
module = sys.modules["octavo.checkpoints.fingerprint"]
module._PART, module.HASHING = 1000, 1
def cut(done, total):
    if done > total // 2:
        os.truncate(sys.argv[1], 1000)
try:
    fingerprint(detect(sys.argv[1]).encoders[0], cut)
except FileError as error:
    print(error)
"""
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{path}: changed while it was being read; start again.\n", done


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
    for block, serial in ((100, 7), (1000, 1000), (12345, 2**14)):
        monkeypatch.setattr(MODULE, "_BLOCK", block)
        monkeypatch.setattr(MODULE, "_SERIAL", serial)
        assert of(path) == plain


def test_threads_do_not_change_it(tmp_path, parts_of):
    path = p.write(tmp_path / "x.safetensors", p.openai(p.canonical()))
    found = set()
    for workers in (1, 2, 9):
        parts_of(1000, workers)
        found.add(of(path))
    assert len(found) == 1
    parts_of(1001, 2)
    assert of(path) not in found  # so there were parts


@pytest.mark.parametrize("packaging", p.ONE_ENCODER)
def test_packaging_does_not_change_the_parts(packaging, tmp_path, parts_of):
    parts_of(1000)
    tensors = p.canonical()
    plain = of(p.write(tmp_path / "x.safetensors", tensors))
    path = p.write(tmp_path / "y.safetensors", p.ONE_ENCODER[packaging](tensors))
    found = next(w for w in detect(path).encoders if w.name != "t5xxl")
    assert fingerprint(found).body == plain.body


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_every_value_is_as_in_fp32(dtype):
    """All finite patterns of a dtype, over blocks; subnormals and both zeros too."""
    size = torch.tensor([], dtype=dtype).element_size()
    bits = torch.arange(256**size).to({1: torch.uint8, 2: torch.int16}[size])
    values = bits.view(dtype)
    values = values[values.float().isfinite()].repeat(2**19 // 256**size)
    wide = fingerprint(held({"x": values.float()}))
    assert fingerprint(held({"x": values})) == wide == fingerprint(held({"x": values.double()}))
    assert fingerprint(held({"x": values.float().abs()})) != wide


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        (torch.float32, (0x7F800000, 0x7F800001, 0x7FFFFFFF, -0x800000, -1)),
        (torch.float16, (0x7C00, 0x7C01, 0x7FFF, -0x400, -1)),
        (torch.bfloat16, (0x7F80, 0x7F81, 0x7FFF, -0x80, -1)),
        (torch.float8_e5m2, (0x7C, 0x7D, 0x7F, 0xFC, 0xFF)),
        (torch.float8_e4m3fn, (0x7F, 0xFF)),
    ],
)
def test_no_other_pattern_passes(dtype, patterns):
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    fingerprint(held({"x": torch.tensor([patterns[0] - 1], dtype=kind).view(dtype)}))
    for pattern in patterns:
        bits = torch.zeros(2**18 + 3, dtype=kind)
        bits[-1] = pattern
        with pytest.raises(FileError, match="'x' holds 1 values that are NaN or infinite"):
            fingerprint(held({"x": bits.view(dtype)}))


def test_every_part_counts():
    """Of a tensor of T5's kind, in parts as they are; and so does their order."""
    plain = torch.zeros(2 * 2**24 + 5, dtype=torch.float16)
    plain[2**24] = 1
    found = {fingerprint(held({"x": plain})).body}
    for place in (0, 2**24 - 1, 2**24 + 1, 2 * 2**24 - 1, 2 * 2**24, -1):
        changed = plain.clone()
        changed[place] = 2
        found.add(fingerprint(held({"x": changed})).body)
    swapped = plain.clone()
    swapped[: 2 * 2**24] = plain[: 2 * 2**24].view(2, -1).flip(0).reshape(-1)
    found.add(fingerprint(held({"x": swapped})).body)
    assert len(found) == 8


def test_which_tensor_holds_what_counts():
    a, b = torch.zeros(3), torch.ones(3)
    bodies = {
        fingerprint(held(tensors)).body
        for tensors in (
            {"a": a, "b": b},
            {"a": b, "b": a},
            {"b": b, "a": a},
            {"a": a[:2], "b": torch.cat([a[2:], b])},
            {"a": a[None], "b": b},
            {"a": a},
        )
    }
    assert len(bodies) == 6


# Threads


def test_parts_of_one_tensor_are_hashed_at_the_same_time(parts_of, monkeypatch):
    parts_of(1000, 3)
    together, digest = threading.Barrier(3), MODULE._digest

    def waiting(part, check):
        together.wait(30)  # raises where not all three come
        return digest(part, check)

    monkeypatch.setattr(MODULE, "_digest", waiting)
    fingerprint(held({"x": torch.ones(6000)}))


def test_the_last_part_is_looked_at():
    table = torch.zeros(LAST, dtype=torch.float16)
    table[-1] = torch.nan
    with pytest.raises(FileError) as caught:
        fingerprint(held({"fine": torch.ones(3), "broken": table}))
    assert caught.value.fault == "tensor 'broken' holds 1 values that are NaN or infinite"


@pytest.mark.parametrize("then", ["another", "unreadable"])
def test_the_first_fault_in_order_is_told(then, parts_of, monkeypatch):
    """However long its part takes, and whatever is wrong with those after it."""
    parts_of(1000, 2)
    digest = MODULE._digest

    def slow(part, check):
        if part[0] == 7:
            time.sleep(0.3)
        return digest(part, check)

    monkeypatch.setattr(MODULE, "_digest", slow)
    broken = torch.full((1500,), torch.nan)
    tensors = {"a": torch.tensor([7, torch.inf, 7, -torch.inf]), "b": torch.ones(3), "c": broken}

    def stored(name):
        if (name, then) == ("c", "unreadable"):
            raise FileError("held", "changed while it was being read", "start again")
        return tensors[name]

    with pytest.raises(FileError) as caught:
        fingerprint(held(tensors, stored=stored))
    assert caught.value.fault == "tensor 'a' holds 2 values that are NaN or infinite"
    assert no_thread_is_left()
    tensors["a"] = torch.tensor([7.0])
    with pytest.raises(FileError) as caught:
        fingerprint(held(tensors, stored=stored))
    fault = {"another": "tensor 'c' holds 1500 values that", "unreadable": "changed while"}[then]
    assert caught.value.fault.startswith(fault)
    assert no_thread_is_left()


def test_progress_may_cancel(parts_of):
    """At once, and nothing stays behind."""
    parts_of(1000, 2)
    read = []

    class Cancelled(BaseException):
        pass

    def progress(done, total):
        raise Cancelled

    tensors = {str(i): torch.ones(1000) for i in range(50)}
    with pytest.raises(Cancelled):
        fingerprint(held(tensors, stored=lambda n: read.append(n) or tensors[n]), progress)
    assert len(read) <= 3 and no_thread_is_left()


def test_a_thread_may_fail(parts_of, monkeypatch):
    parts_of(1000, 2)

    def failing(part, check):
        raise MemoryError

    monkeypatch.setattr(MODULE, "_digest", failing)
    read = []
    tensors = {str(i): torch.ones(1000) for i in range(50)}
    with pytest.raises(MemoryError):
        fingerprint(held(tensors, stored=lambda n: read.append(n) or tensors[n]))
    assert len(read) <= 3 and no_thread_is_left()


def test_only_the_calling_thread_asks_for_anything(tmp_path, parts_of, monkeypatch):
    """Neither files nor hosts need stand several; nor a GPU, which parts are copied from."""
    coded = f.coded(p.t5_canonical(), p.SMALL_T5.linears())
    (weights,) = detect(p.write(tmp_path / "x.safetensors", f.comfy_quant(coded))).encoders
    plain = fingerprint(weights)
    asked = []

    def noted(call):
        def noting(*arguments):
            asked.append((call.__name__, threading.get_ident()))
            return call(*arguments)

        return noting

    copied, cpu = [], torch.Tensor.cpu

    def copy(tensor):
        copied.append((tensor.numel(), threading.get_ident()))
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", copy)
    own = {name: noted(getattr(weights, name)) for name in ("stored", "side")}
    source = SimpleNamespace(
        name="live", spec=weights.spec, projection_shape=None, scales=weights.scales, **own
    )
    report = noted(lambda _: None)
    assert fingerprint_of(source, report) == plain
    assert {name for name, _ in asked} == {"stored", "side", "<lambda>"}
    assert {ident for _, ident in [*asked, *copied]} == {threading.get_ident()}
    copied.clear()
    parts_of(1000)
    fingerprint_of(source)
    assert max(size for size, _ in copied) == 1000  # a table on a GPU is never copied at once


@pytest.mark.parametrize("workers", [1, 4])
def test_few_parts_are_under_way(workers, parts_of, monkeypatch):
    parts_of(10, workers)
    made, finished, most = [], [], []
    parts, digest = MODULE._parts, MODULE._digest

    def making(tensor):
        for part in parts(tensor):
            made.append(1)
            most.append(len(made) - len(finished))
            yield part

    def slow(part, check):
        time.sleep(0.005)
        found = digest(part, check)
        finished.append(1)
        return found

    monkeypatch.setattr(MODULE, "_parts", making)
    monkeypatch.setattr(MODULE, "_digest", slow)
    fingerprint(held({"x": torch.ones(500), "y": torch.ones(7), "z": torch.ones(100)}))
    assert len(finished) == 61 and max(most) == workers + 1


def run(code, *arguments):
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("copied", [False, True])
def test_memory_is_bounded_on_many_threads(copied, tmp_path):
    """A table of 0.8 GB in FP32, 0.4 GB in the file; `copied` as one on a GPU is."""
    spec = p.T5Spec(1, 768, 96, 4, 12, 256384)
    path = p.write_sparse(tmp_path / "x.safetensors", spec.tensors())
    code = """
import re, sys, threading
from octavo.checkpoints import detect, fingerprint
import torch
module = sys.modules["octavo.checkpoints.fingerprint"]
module.HASHING = 6
if sys.argv[2] == "True":
    torch.Tensor.cpu = torch.Tensor.clone
def private():
    status = open("/proc/self/status").read()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]) * 1024
def watch():
    while not ended.wait(0.005):
        peaks.append(private())
ended, peaks = threading.Event(), [private()]
watcher = threading.Thread(target=watch)
watcher.start()
fingerprint(detect(sys.argv[1]).encoders[0])
ended.set()
watcher.join()
print(max(peaks) - peaks[0], len(peaks))
"""
    peak, count = map(int, run(code, path, copied))
    assert count > 10
    assert peak < 60e6 + copied * 7 * 2 * 2**24  # a part of FP16 for each thread and one more


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_torch_starts_no_threads_of_its_own():
    """Eight threads that each widen on all cores would be in each other's way."""
    code = """
import os, sys, threading
import numpy, torch
import octavo.checkpoints.fingerprint
torch.set_num_threads(5)
digest = sys.modules["octavo.checkpoints.fingerprint"]._digest
part = torch.from_numpy(numpy.ones(2**20, numpy.float16))
def work(call):
    before = set(os.listdir("/proc/self/task"))
    call()
    print(len(set(os.listdir("/proc/self/task")) - before))
for call in (lambda: digest(part, lambda: None), lambda: part.float()):
    thread = threading.Thread(target=work, args=[call])
    thread.start()
    thread.join()
"""
    assert run(code) == ["0", "4"]


@pytest.mark.parametrize("coded", [False, True])
def test_progress_counts_to_the_end(coded, tmp_path, parts_of):
    parts_of(1000)
    tensors = p.canonical()
    size = 4 * sum(t.numel() for t in tensors.values())
    if coded:
        codes = f.coded(tensors, p.SMALL.linears())
        tensors = f.comfy_quant(codes)
        size += 4 * (len(codes.weight_scales) + len(codes.input_scales))
    path = p.write(tmp_path / "x.safetensors", tensors)
    seen = []
    fingerprint(detect(path).encoders[0], lambda done, total: seen.append((done, total)))
    assert seen[-1] == (size, size) and {total for _, total in seen} == {size}
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
