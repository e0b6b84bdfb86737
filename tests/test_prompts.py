# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The shipped prompts: what they cover, that their tokens are theirs, and the rows they make."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from octavo import prompts
from octavo.encoders.clip import END_TOKEN, START_TOKEN
from octavo.errors import FileError
from octavo.prompts import batched_t5, load_tokens, padded, padded_t5, set_id

ROOT = Path(prompts.__file__).resolve().parent.parent
KINDS = {"tags", "caption", "long", "negative", "language", "short", "empty", "weights", "odd"}
SETS = ("calibration", "held_out")


def rows(name: str) -> list[dict[str, str]]:
    data = (ROOT / "prompts" / f"{name}.jsonl").read_bytes().decode("utf-8")
    assert data.endswith("\n")
    return [json.loads(line) for line in data.replace("\r\n", "\n")[:-1].split("\n")]


def texts(name: str) -> list[str]:
    return [row["text"] for row in rows(name)]


def lengths(name: str, count: int | None = None) -> list[int]:
    """Tokens of the rows of CLIP's 77 positions, start and end included."""
    return [min(77, len(ids) + 2) for ids in load_tokens(name)[:count]]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tokenize_prompts", ROOT / "tools" / "tokenize_prompts.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the texts


def test_there_are_enough_prompts_of_every_kind() -> None:
    count = Counter(row["kind"] for row in rows("calibration"))
    assert set(count) == KINDS
    assert sum(count.values()) >= 512
    assert count.pop("empty") == 1
    assert min(count.values()) >= 30
    assert len(rows("held_out")) == 48
    assert {row["kind"] for row in rows("held_out")} == KINDS


@pytest.mark.parametrize("name", SETS)
def test_each_kind_looks_like_itself(name: str) -> None:
    for row in rows(name):
        assert set(row) == {"kind", "text"}
        kind, text = row["kind"], row["text"]
        words = len(text.split())
        assert (text == "") == (kind == "empty")
        assert text == text.strip()
        if kind == "tags":
            assert text.count(",") >= 3, text
        if kind == "long":
            assert words >= 29, text
        if kind == "short":
            assert words <= 3, text
        if kind == "weights":
            assert re.search(r"[()\[\]{}<>|\\]|BREAK|AND|embedding:|:\d", text), text


def test_no_prompt_repeats_another() -> None:
    """Neither inside a set nor across, but for the empty prompt, with which each set opens."""
    everything = [text.lower() for name in SETS for text in texts(name)]
    assert [t for t, n in Counter(everything).items() if n > 1] == [""]
    bags = [frozenset(re.findall(r"\w+", text)) for text in everything]
    for i, bag in enumerate(bags):
        for other in bags[:i]:
            if min(len(bag), len(other)) >= 4:
                assert len(bag & other) < 0.5 * len(bag | other), (sorted(bag), sorted(other))


def test_syntax_and_scripts_are_covered() -> None:
    joined = dict.fromkeys(KINDS, "")
    for row in rows("calibration"):
        joined[row["kind"]] += row["text"] + "\n"
    signs = ["(cat:1.3)", "((cat))", "[dog]", "BREAK", "<lora:", "embedding:", " AND "]
    assert [sign for sign in signs if sign not in joined["weights"]] == []
    assert re.search(r"\\\(\w+\\\)", joined["weights"])
    scripts = {
        "kana": "[\u3040-\u30ff]",
        "han": "[\u4e00-\u9fff]",
        "hangul": "[\uac00-\ud7af]",
        "cyrillic": "[\u0400-\u04ff]",
        "arabic": "[\u0600-\u06ff]",
        "devanagari": "[\u0900-\u097f]",
        "greek": "[\u0370-\u03ff]",
        "german": "umgeben von",
        "spanish": "tejas al atardecer",
        "french": "sous la pluie",
        "portuguese": "praia deserta",
        "italian": "pittura a olio",
        "polish": "jeziorem",
    }
    for script, pattern in scripts.items():
        assert re.search(pattern, joined["language"]), script
    assert re.search("[\U0001f300-\U0001faff]", joined["odd"])
    assert "https://" in joined["odd"]
    assert re.search("[A-Z]{4,} [A-Z]{4,}", joined["odd"])


# -- the order


@pytest.mark.parametrize("count", [16, 64, 128, 256])
def test_calibration_prefixes_are_balanced(count: int) -> None:
    whole, part = rows("calibration"), rows("calibration")[:count]
    share = Counter(row["kind"] for row in whole)
    here = Counter(row["kind"] for row in part)
    assert set(here) == KINDS
    for kind in KINDS - {"empty"}:
        assert abs(here[kind] - share[kind] * count / len(whole)) <= 1.5, kind
    buckets = Counter(length // 10 for length in lengths("calibration"))
    found = Counter(length // 10 for length in lengths("calibration", count))
    assert set(found) == set(range(8))
    for bucket in range(8):
        assert abs(found[bucket] - buckets[bucket] * count / len(whole)) <= 2.5, bucket
    full = sum(length == 77 for length in lengths("calibration", count))
    assert 0.08 <= full / count <= 0.25


def test_the_default_128_hold_many_scripts() -> None:
    text = "".join(r["text"] for r in rows("calibration")[:128] if r["kind"] == "language")
    blocks = ["\u3040-\u30ff", "\u4e00-\u9fff", "\uac00-\ud7af", "\u0400-\u04ff", "\u0600-\u06ff",
              "\u0900-\u097f", "a-z"]  # fmt: skip
    assert [b for b in blocks if not re.search(f"[{b}]", text)] == []


@pytest.mark.parametrize(("count", "kinds"), [(8, 7), (16, 9), (32, 9)])
def test_held_out_prefixes_are_balanced(count: int, kinds: int) -> None:
    part = rows("held_out")[:count]
    assert len({row["kind"] for row in part}) >= kinds
    assert max(Counter(row["kind"] for row in part).values()) <= max(2, count // 4)
    assert {0, 1, 2, 5, 7} <= {length // 10 for length in lengths("held_out", count)}


def test_held_out_begins_with_the_self_check() -> None:
    assert lengths("held_out", 3) == [2, 20, 77]
    assert texts("held_out")[0] == ""
    assert texts("calibration")[0] == ""


# -- the tokens


def test_every_length_from_the_empty_prompt_to_a_full_row() -> None:
    found = Counter(len(ids) for ids in load_tokens("calibration"))
    assert set(range(76)) <= set(found)  # 2 to 77 with start and end
    assert found[75] >= 3  # fills a row without being cut
    assert sum(n for length, n in found.items() if length > 100) >= 30  # for LongCLIP
    assert max(found) == 246  # one is cut even there
    assert {length // 10 for length in lengths("held_out")} == set(range(8))


@pytest.mark.parametrize("name", SETS)
def test_tokens_are_in_range_and_as_many_as_the_texts(name: str) -> None:
    tokens = load_tokens(name)
    assert len(tokens) == len(texts(name))
    assert all(type(i) is int and 0 <= i < START_TOKEN for ids in tokens for i in ids)
    for ids, text in zip(tokens, texts(name), strict=True):
        assert (not ids) == (text == "")
        # a run of letters is at least one token, and a digit is one each
        floor = len(re.findall(r"[^\W\d_]+|\d", text))
        assert min(floor, 246) <= len(ids) <= 246, text


@pytest.mark.parametrize("name", SETS)
def test_token_files_are_fresh(name: str) -> None:
    source = (ROOT / "prompts" / f"{name}.jsonl").read_bytes().replace(b"\r\n", b"\n")
    document = json.loads((ROOT / "prompts" / f"{name}.tokens.json").read_bytes())
    assert list(document) == ["schema", "tokenizer", "source_sha256", "tokens"]
    assert document["schema"] == 1
    assert document["tokenizer"] == "CLIP BPE, 49408 entries"
    assert document["source_sha256"] == hashlib.sha256(source).hexdigest()


def test_known_tokenizations() -> None:
    """Ids as OpenAI's own tokenizer gives them."""
    by_text = dict(zip(texts("calibration"), load_tokens("calibration"), strict=True))
    assert by_text["a cat"] == [320, 2368]
    assert by_text["cat"] == [2368]
    assert by_text["a dog"] == [320, 1929]
    assert by_text["((cat))"][1] == 2368
    assert by_text["A photo of a gray cat asleep in a cardboard box."][:4] == [320, 1125, 539, 320]
    assert by_text["1234567890"] == [272, 273, 274, 275, 276, 277, 278, 279, 280, 271]


# -- the rows


def test_padded_is_what_the_hosts_build() -> None:
    assert padded([[320, 2368]], 6, END_TOKEN) == [[START_TOKEN, 320, 2368] + [END_TOKEN] * 3]
    assert padded([[320, 2368]], 6, 0) == [[START_TOKEN, 320, 2368, END_TOKEN, 0, 0]]
    assert padded([[]], 4, 0) == [[START_TOKEN, END_TOKEN, 0, 0]]
    assert padded([], 77, 0) == []


def test_padded_cuts_the_prompt_and_keeps_the_end() -> None:
    ids = list(range(100))
    (cut,) = padded([ids], 77, 0)
    assert cut == [START_TOKEN, *range(75), END_TOKEN]
    (exact,) = padded([ids[:75]], 77, 0)
    assert exact == cut
    (shorter,) = padded([ids[:74]], 77, 0)
    assert shorter == [START_TOKEN, *range(74), END_TOKEN, 0]
    assert padded([[1, 2]], 2, 0) == [[START_TOKEN, END_TOKEN]]
    assert ids == list(range(100))
    with pytest.raises(ValueError, match="positions is 1"):
        padded([[1]], 1, 0)


@pytest.mark.parametrize("positions", [77, 248])
@pytest.mark.parametrize("pad", [END_TOKEN, 0])
def test_padded_rows_of_the_shipped_sets(positions: int, pad: int) -> None:
    for name in SETS:
        for ids, row in zip(
            load_tokens(name), padded(load_tokens(name), positions, pad), strict=True
        ):
            end = row.index(END_TOKEN)
            assert len(row) == positions
            assert row[0] == START_TOKEN and row.count(START_TOKEN) == 1
            assert row[1:end] == ids[: positions - 2]
            assert set(row[end + 1 :]) <= {pad}


# -- T5's


@pytest.mark.parametrize("name", SETS)
def test_t5_tokens_are_of_the_same_texts(name: str) -> None:
    source = (ROOT / "prompts" / f"{name}.jsonl").read_bytes().replace(b"\r\n", b"\n")
    document = json.loads((ROOT / "prompts" / f"{name}.t5.json").read_bytes())
    assert document["tokenizer"] == "T5 SentencePiece, 32100 entries"
    assert document["source_sha256"] == hashlib.sha256(source).hexdigest()
    tokens = load_tokens(name, "t5")
    assert len(tokens) == len(texts(name))
    for ids, text in zip(tokens, texts(name), strict=True):
        assert (not ids) == (text == "")
        assert all(type(i) is int and 2 <= i < 32100 for i in ids)  # neither pad nor end
        assert len(ids) <= 255
    assert set_id(name, "t5") != set_id(name)


def test_known_t5_tokenizations() -> None:
    by_text = dict(zip(texts("calibration"), load_tokens("calibration", "t5"), strict=True))
    assert by_text["a cat"] == [3, 9, 1712]
    assert by_text["a dog"] == [3, 9, 1782]


def test_t5_rows_end_before_the_pads() -> None:
    rows = padded_t5([[], [5, 6], [7] * 9], 4)
    assert rows == [[1, 0, 0, 0], [5, 6, 1, 0], [7, 7, 7, 1]]
    assert padded_t5([[9, 3]], 3, vocabulary=8) == [[1, 3, 1]]
    with pytest.raises(ValueError, match="length is 0"):
        padded_t5([[1]], 0)


def test_t5_batches_are_of_like_lengths_and_hold_every_prompt() -> None:
    shown = load_tokens("calibration", "t5")[:64]
    batches = batched_t5(shown, 8)
    assert [len(batch) for batch in batches] == [8] * 8
    for batch in batches:
        assert len({len(row) for row in batch}) == 1
        assert 0 not in batch[-1]  # the longest is not padded
    found = sorted(row[: row.index(1)] for batch in batches for row in batch)
    assert found == sorted(shown)
    assert len(batches[-1][0]) > 100 and len(batches[0][0]) < 10
    assert [len(b) for b in batched_t5([[5]] * 5, 2)] == [2, 2, 1]


# -- the identity and faults


def test_set_id_is_stable_and_sensitive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = set_id("calibration")
    assert re.fullmatch("[0-9a-f]{16}", original)
    assert original != set_id("held_out")
    source = ROOT / "prompts" / "calibration.tokens.json"
    document = json.loads(source.read_bytes())
    monkeypatch.setattr(prompts, "_FOLDER", tmp_path)
    copy = tmp_path / source.name

    copy.write_text(json.dumps(document, indent=2).replace("\n", "\r\n"), newline="")
    assert set_id("calibration") == original  # formatting and line endings do not count
    document["source_sha256"] = "0" * 64
    copy.write_text(json.dumps(document))
    assert set_id("calibration") == original

    tokens = document["tokens"]
    for changed in (
        [*tokens[:-1], [*tokens[-1], 1]],
        tokens[:-1],
        [*tokens[1:], tokens[0]],
        [[], [], *tokens[1:]],
        [*tokens[:1], [tokens[1][0] + 1, *tokens[1][1:]], *tokens[2:]],
        [*tokens[:1], tokens[1] + tokens[2], *tokens[3:]],
    ):
        copy.write_text(json.dumps({**document, "tokens": changed}))
        assert set_id("calibration") != original


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[",
        "[]",
        '{"schema": 1}',
        '{"schema": 1, "tokens": 3}',
        '{"schema": 2, "tokens": []}',
    ],
)
def test_a_damaged_installation_is_one_sentence(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_FOLDER", tmp_path)
    if content is not None:
        (tmp_path / "held_out.tokens.json").write_text(content)
    with pytest.raises(FileError, match=r"held_out\.tokens\.json: .*; install Octavo again\.$"):
        load_tokens("held_out")


def test_too_many_open_files_are_no_damaged_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(FileError, match=r"\(Too many open files\); close some files, or raise"):
            load_tokens("held_out")
    assert load_tokens("held_out")


def test_loads_without_torch() -> None:
    heavy = ["torch", "numpy", "transformers", "tensorrt_rtx", "onnx", "modelopt"]
    code = (
        "import sys; from octavo.prompts import load_tokens, padded, set_id\n"
        "padded(load_tokens('calibration'), 77, 0); set_id('held_out')\n"
        f"found = [m for m in {heavy} if m in sys.modules]; sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# -- the tool, with a table in the place of its tokenizer


@pytest.fixture
def folder(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped files, and a tokenizer that knows the shipped texts alone."""
    known = {t: ids for n in SETS for t, ids in zip(texts(n), load_tokens(n), strict=True)}
    monkeypatch.setattr(tool, "clip_encoder", lambda: lambda text: known.get(text, [1, 2, 3]))
    for path in (ROOT / "prompts").glob("*.json*"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_tool_finds_the_shipped_files_fresh(tool: ModuleType, folder: Path) -> None:
    assert tool.main(["--check"], folder=folder) == 0
    for path in folder.glob("*.json*"):  # nor is a checkout with Windows line endings stale
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert tool.main(["--check"], folder=folder) == 0


def test_tool_reports_and_cures_a_stale_file(
    tool: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = folder / "held_out.jsonl", folder / "held_out.tokens.json"
    extra = json.dumps({"kind": "odd", "text": "a line\u2028separator"}, ensure_ascii=False)
    source.write_bytes(source.read_bytes() + extra.encode() + b"\n")
    before = target.read_bytes()
    assert tool.main(["--check"], folder=folder) == 1
    assert target.read_bytes() == before
    assert "held_out.tokens.json is stale" in capsys.readouterr().err
    assert tool.main([], folder=folder) == 0
    assert tool.main(["--check"], folder=folder) == 0
    assert json.loads(target.read_bytes())["tokens"] == [*load_tokens("held_out"), [1, 2, 3]]
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        f"{name}.{kind}" for name in SETS for kind in ("jsonl", "t5.json", "tokens.json")
    )
    target.unlink()
    assert tool.main(["--check"], folder=folder) == 1


def test_tool_cuts_at_long_clips_length(tool: ModuleType) -> None:
    data = tool.token_file(b'{"kind": "long", "text": "x"}\n', lambda text: list(range(300)))
    assert json.loads(data)["tokens"] == [list(range(246))]


def test_tool_refuses_another_t5_tokenizer(tool: ModuleType, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    with pytest.raises(SystemExit, match="not T5's"):
        tool.main(["--t5", str(other)], folder=tmp_path)


def test_tool_writes_t5s_files(
    tool: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {t: ids for n in SETS for t, ids in zip(texts(n), load_tokens(n, "t5"), strict=True)}
    monkeypatch.setattr(tool, "t5_encoder", lambda path: known.__getitem__)
    assert tool.main(["--t5", "x", "--check"], folder=folder) == 0
    (folder / "held_out.t5.json").unlink()
    assert tool.main(["--t5", "x", "--check"], folder=folder) == 1
    assert tool.main(["--t5", "x"], folder=folder) == 0
    assert tool.main(["--t5", "x", "--check"], folder=folder) == 0
