# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents say exists: commands, options, files, extras, and JSON keys."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest
from octavo.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def fenced_lines() -> list[str]:
    blocks = re.findall(r"```[a-z]*\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("octavo ")]


@pytest.mark.parametrize("line", fenced_lines())
def test_every_command_of_the_readme_parses(line: str) -> None:
    line, _, others = line.partition(" | ")
    words = shlex.split(line)[1:]
    command: click.Command = app
    context = app.make_context("octavo", ["doctor"])
    while isinstance(command, click.Group):
        name, words = words[0], words[1:]
        for other in [name, *others.split(" | ")] if others and not words else [name]:
            found = command.get_command(context, other.strip())
            assert found is not None, other
        command = command.get_command(context, name)  # type: ignore[assignment]
    command.make_context(
        command.name, words, parent=context
    )  # raises for an unknown option or a missing argument


def test_the_readme_shows_commands() -> None:
    assert len(fenced_lines()) >= 8


def test_every_command_is_in_the_readme() -> None:
    for name in app.list_commands(app.make_context("octavo", ["doctor"])):
        assert f"octavo {name}" in README, name


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_links_and_paths_exist(text: str) -> None:
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|toml|json|md))`", text)
    assert linked or named
    for path in [*linked, *named]:
        assert (ROOT / path).exists(), path


def test_extras_named_in_the_readme_exist() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    groups = re.findall(r"\.\[([a-z,]+)\]", README)
    assert groups
    for group in groups:
        assert set(group.split(",")) <= extras


def test_numbers_of_prompts_are_true() -> None:
    from octavo.prompts import load_tokens
    from octavo.recipes import load_recipe

    assert f"of the {len(load_tokens('calibration'))} shipped" in README
    assert f"{load_recipe('fp8').prompts} of the" in README


def test_documented_json_keys_are_those_of_the_code() -> None:
    from octavo import doctor
    from octavo.verify import Similarity

    rows = dict(re.findall(r"^\| `([a-z ]+)` \| `(\{.*\})` \|$", README, re.MULTILINE))
    assert set(rows) >= {"inspect", "build", "verify", "doctor", "cache list"}
    for key in doctor.examine():
        assert f'"{key}"' in rows["doctor"], key
    for key in Similarity.__dataclass_fields__:
        assert f'"{key}"' in rows["verify"], key


def test_versions_agree() -> None:
    import octavo

    assert octavo.__version__ == PROJECT["project"]["version"]
    pins = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8")
    ruff = re.search(r"ruff==([\d.]+)", pins)
    assert ruff is not None
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert f"rev: v{ruff[1]}" in hooks
    assert f"ruff=={ruff[1]}" in PROJECT["project"]["optional-dependencies"]["dev"]
