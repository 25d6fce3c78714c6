"""The command as a whole: quick help, exit codes, errors without tracebacks, and documentation that agrees with it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sglang_capture import cli
from sglang_capture.dump import DumpError
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.layers import LayerError
from sglang_capture.mark import MarkError
from sglang_capture.quota import QuotaError
from sglang_capture.settings import SettingsError
from sglang_capture.spec import SpecError
from sglang_capture.spool import SpoolError

DOCS = Path(__file__).parents[1] / "docs" / "cli.md"
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def sections() -> dict[str, str]:
    """The text below each command's heading in the documentation."""
    parts = re.split(r"^## `sglang-capture ([a-z-]+)`\n", DOCS.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters() -> Iterator[tuple[str, str]]:
    """Every command with each of its options and arguments, as they are typed."""
    for name, command in COMMANDS.items():
        for parameter in command.params:
            long = [option for option in parameter.opts if option.startswith("--")]
            if long != ["--help"]:
                yield name, long[0] if long else (parameter.metavar or parameter.name.upper()).strip("[]{}")


def test_every_command_is_documented_and_nothing_else() -> None:
    assert sections().keys() == COMMANDS.keys()


@pytest.mark.parametrize(("command", "option"), list(parameters()))
def test_every_option_is_documented(command: str, option: str) -> None:
    # `run`, `prepare` and `estimate` explain their FILE in sentences.
    assert option == "FILE" or re.search(rf"^\| (`[^|]*, )?`{option}[` ]", sections()[command], re.MULTILINE)


def test_no_option_is_documented_that_is_not_there() -> None:
    documented = {
        (command, option)
        for command, text in sections().items()
        for option in re.findall(r"^\| `(--[a-z0-9-]+)", text, re.M)
    }
    assert documented <= set(parameters())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_that_parses_in_its_help_and_in_the_docs(command: str) -> None:
    shown = re.findall(rf"^(?:Example: )?`?sglang-capture {command}\b(.*?)`?$", COMMANDS[command].help, re.MULTILINE)
    documented = re.findall(rf"^sglang-capture {command}\b(.*)$", sections()[command], re.MULTILINE)
    assert shown and documented
    for example in (*shown, *documented):
        COMMANDS[command].make_context(command, example.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_speaks_json(command: str) -> None:
    assert (command, "--json") in set(parameters())


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['sglang-capture', '--help']\n"
        "from sglang_capture.cli import main\n"
        "try: main()\n"
        "finally: print('HEAVY', [m for m in ('torch', 'transformers', 'fastapi', 'sqlalchemy') if m in sys.modules])\n"
    )
    result = run_python(code)
    assert "HEAVY []" in result.stdout
    assert "tiny-model" in result.stdout


def test_the_command_is_installed_and_knows_its_version() -> None:
    script = Path(sys.executable).with_name("sglang-capture")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=120, check=True)
    assert re.fullmatch(r"sglang-capture \d+\.\d+\S*\n", result.stdout)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CaptureError("what to do"), 1),
        (UsageError("what to do"), 2),
        (LayerError("what to do"), 2),
        (MarkError("what to do"), 2),
        (QuotaError("what to do"), 2),
        (SettingsError("what to do"), 2),
        (SpecError("what to do"), 1),
        (SpoolError("what to do"), 1),
        (DumpError("what to do"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_for_the_user_is_one_line_and_an_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == "error: what to do\n"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run"], ["run", "x.jsonl", "--concurrency", "0"], ["run", "--no"]]
)
def test_what_is_typed_wrongly_ends_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.app, arguments).exit_code == 2


def test_tiny_model_makes_a_model_and_refuses_to_overwrite_another(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    arguments = ["tiny-model", str(directory), "--layers", "1", "--hidden", "32"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert (directory / "model.safetensors.index.json").is_file()
    again = CliRunner().invoke(cli.app, [*arguments, "--seed", "1"])
    assert isinstance(again.exception, UsageError) and "not empty" in str(again.exception)
    odd = CliRunner().invoke(cli.app, ["tiny-model", str(tmp_path / "odd"), "--hidden", "33"])
    assert isinstance(odd.exception, UsageError) and "multiple of 16" in str(odd.exception)
