# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Write prompts/*.tokens.json from prompts/*.jsonl; a tool for developers, not needed at run time.

    python tools/tokenize_prompts.py            write the files
    python tools/tokenize_prompts.py --check    write nothing; exit 1 if a file is stale
    python tools/tokenize_prompts.py --t5 PATH  the same for prompts/*.t5.json

CLIP's tokenizer is the hosts' own, transformers' CLIPTokenizerFast, on OpenAI's vocabulary as found
in open_clip_torch: in the installed package, else in the wheel that pip downloads into a temporary
folder. T5's is the tokenizer.json at PATH, in ComfyUI comfy/text_encoders/t5_tokenizer/.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PROMPTS = Path(__file__).resolve().parent.parent / "prompts"
SETS = ("calibration", "held_out")
MOST_TOKENS = 246  # LongCLIP's 248 positions less start and end
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
VOCABULARY_SHA256 = "924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a"
VOCABULARY_SIZE = 49408
REQUIREMENT = "open_clip_torch==3.3.0"

MOST_T5_TOKENS = 255  # FLUX.1 schnell's 256 less the end
T5_VOCABULARY_SIZE = 32100
T5_SHA256 = "6cd1badb7467cdab971403bbeb1945070ca385652385a2b6549f672b08089dfc"

Encode = Callable[[str], list[int]]


def clip_encoder() -> Encode:
    """Text -> content ids, without start and end. SystemExit where a package is missing."""
    try:
        from transformers import CLIPTokenizerFast  # type: ignore[attr-defined]
    except ImportError:
        raise SystemExit("tokenize_prompts needs transformers; pip install transformers.") from None
    lines = gzip.decompress(_vocabulary()).decode("utf-8").split("\n")
    # Ids are 256 bytes, the same 256 at the end of a word, the merges in order, start and end.
    # OpenAI's file begins with a comment and holds more merges than CLIP uses.
    merges = lines[1 : 1 + VOCABULARY_SIZE - 2 * 256 - 2]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    entries = [*letters, *(letter + "</w>" for letter in letters)]
    entries += ["".join(merge.split()) for merge in merges]
    entries += ["<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as name:
        vocab, rules = Path(name, "vocab.json"), Path(name, "merges.txt")
        vocab.write_text(json.dumps({entry: i for i, entry in enumerate(entries)}), "utf-8")
        rules.write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
        tokenizer = CLIPTokenizerFast.from_pretrained(name, model_max_length=10**6)
    assert len(tokenizer) == VOCABULARY_SIZE, len(tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert encode("a cat") == [320, 2368], encode("a cat")
    return encode


def t5_encoder(path: Path) -> Encode:
    """Text -> content ids, without the end. SystemExit where the file is not T5's."""
    from tokenizers import Tokenizer

    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != T5_SHA256:
        raise SystemExit(f"{path}: sha256 is {digest}, not T5's {T5_SHA256}.")
    tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    assert tokenizer.get_vocab_size() == T5_VOCABULARY_SIZE, tokenizer.get_vocab_size()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    assert encode("a cat") == [3, 9, 1712], encode("a cat")
    return encode


def _vocabulary() -> bytes:
    """The gzipped merges of CLIP's byte-pair encoding."""
    installed = importlib.util.find_spec("open_clip")  # finds the folder without importing it
    if installed is not None and installed.origin is not None:
        data = (Path(installed.origin).parent / VOCABULARY).read_bytes()
    else:
        with tempfile.TemporaryDirectory() as name:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name]
            subprocess.run([*pip, REQUIREMENT], check=True)
            (wheel,) = Path(name).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(f"open_clip/{VOCABULARY}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != VOCABULARY_SHA256:
        raise SystemExit(f"{VOCABULARY}: sha256 is {digest}, not CLIP's {VOCABULARY_SHA256}.")
    return data


def token_file(
    source: bytes,
    encode: Encode,
    most: int = MOST_TOKENS,
    tokenizer: str = f"CLIP BPE, {VOCABULARY_SIZE} entries",
) -> bytes:
    """The bytes of a `.tokens.json` for those of a `.jsonl`; one prompt a line suits a diff."""
    source = source.replace(b"\r\n", b"\n")  # a checkout on Windows is not a change
    lines = source.decode("utf-8").rstrip("\n").split("\n")  # splitlines() also cuts at U+2028
    texts = [json.loads(line)["text"] for line in lines]
    rows = [json.dumps(encode(text)[:most], separators=(",", ":")) for text in texts]
    head = {
        "schema": 1,
        "tokenizer": tokenizer,
        "source_sha256": hashlib.sha256(source).hexdigest(),
    }
    facts = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join(rows)
    return "\n".join(["{", *facts, '"tokens": [', body, "]", "}", ""]).encode("ascii")


def main(argv: list[str] | None = None, *, folder: Path = PROMPTS) -> int:
    parser = argparse.ArgumentParser(description="Tokenize the calibration prompts.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument("--t5", metavar="PATH", type=Path, help="T5's tokenizer.json; does T5's")
    options = parser.parse_args(argv)
    check: bool = options.check
    suffix, most, tokenizer = "tokens", MOST_TOKENS, f"CLIP BPE, {VOCABULARY_SIZE} entries"
    if options.t5 is not None:
        encode = t5_encoder(options.t5)
        suffix, most = "t5", MOST_T5_TOKENS
        tokenizer = f"T5 SentencePiece, {T5_VOCABULARY_SIZE} entries"
    else:
        encode = clip_encoder()
    stale = 0
    for name in SETS:
        target = folder / f"{name}.{suffix}.json"
        source = (folder / f"{name}.jsonl").read_bytes()
        wanted = token_file(source, encode, most, tokenizer)
        found = target.read_bytes().replace(b"\r\n", b"\n") if target.exists() else None
        if found == wanted:
            print(f"{target.name} is up to date")
        elif check:
            stale += 1
            print(f"{target.name} is stale; run python tools/tokenize_prompts.py", file=sys.stderr)
        else:
            partial = target.with_suffix(".partial")
            partial.write_bytes(wanted)
            os.replace(partial, target)
            print(f"{target.name} written")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
