"""What the tests of documentation and deployment share: the pages, and the commands and variables that they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer

from sglang_capture import cli
from sglang_capture.service.settings import ServiceSettings
from sglang_capture.settings import PluginSettings, variable

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DEPLOY = ROOT / "deploy"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DEPLOY.glob("*.md")])
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
VARIABLES = {variable(field) for settings in (PluginSettings, ServiceSettings) for field in settings.model_fields}

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"sglang-capture ([a-z-]+(?: .*)?)$")


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of code of one language."""
    return [code for found, code in _FENCED.findall(page.read_text()) if found == language]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCED.sub("", page.read_text())


def commands_in(code: str) -> list[list[str]]:
    """Each ``sglang-capture`` command in lines of shell, as words, without variables before it or a comment behind."""
    lines = code.replace("\\\n", " ").splitlines()
    found = (_COMMAND.search(line) for line in lines if not line.lstrip().startswith("#"))
    return [shlex.split(match[1], comments=True) for match in found if match]


def check_command(words: list[str]) -> None:
    """Fail if a command, one of its options or the number of its arguments is not what the command line takes."""
    name, *arguments = words
    assert name in COMMANDS, f"there is no `sglang-capture {name}`"
    try:
        COMMANDS[name].make_context(name, arguments)
    except typer.Exit:
        pass
    except Exception as error:
        raise AssertionError(f"sglang-capture {shlex.join(words)}: {error}") from error


def unknown_variables(text: str) -> set[str]:
    """Names that look like settings of ours, and are none."""
    return set(re.findall(r"\bSGLANG_CAPTURE_[A-Z][A-Z_]*[A-Z]\b", text)) - VARIABLES
