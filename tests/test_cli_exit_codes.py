"""Exit code 2 for what was asked wrongly, 1 for what failed; the same in every command."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_dataset, make_dump, make_spec, save_dump
from typer.testing import CliRunner

from sglang_capture import cli
from sglang_capture.export import export_dataset
from sglang_capture.spool import open_directory

constants = pytest.importorskip("huggingface_hub.constants")

SPEC = make_spec()


def call(*arguments: str | Path) -> tuple[int, str]:
    """The exit code as a shell sees it, and the message."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    if isinstance(result.exception, Exception):
        code = cli._exit_code(result.exception)
        assert code is not None, result.exception
        return code, str(result.exception)
    return result.exit_code, result.output


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A dataset, an export of it, a file, and a folder with a file of somebody's."""
    make_dataset(tmp_path / "data", SPEC, [3, 4])
    export_dataset(tmp_path / "data", "specforge", tmp_path / "export")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.mark.parametrize(
    ("out", "options", "told"),
    [
        ("out", ["--to", "specforge", "--draft-vocab-size", "513"], "give another --draft-vocab-size"),
        ("out", ["--to", "automodel-dspark"], "needs --model, --seq-length"),
        ("out", ["--to", "automodel-eagle3", "--seq-length", "4"], "needs --model, --draft-vocab-size"),
        ("out", ["--to", "automodel-dspark", "--seq-length", "4", "--model", "folder"], "is no model's directory"),
        ("export", ["--to", "angelslim"], "holds the specforge export"),
        ("export", ["--to", "specforge", "--seq-length", "3"], "holds an export with no options"),
        ("folder", ["--to", "specforge"], "holds files that no export of ours wrote"),
        ("file", ["--to", "specforge"], "is no folder"),
        ("file/below", ["--to", "specforge"], "cannot be written"),
        ("out", ["--to", "specforge", "--model", "gone"], "there is no directory gone; --model takes the directory"),
        ("out", ["--to", "specforge", "--verify-with", "./gone"], "there is no directory ./gone; --verify-with takes"),
        ("out", ["--to", "specforge", "--verify-with", "folder"], "holds no config.json"),
        ("out", ["--to", "specforge", "--verify-with", "config"], "config holds no weights"),
        (
            "out",
            ["--to", "specforge", "--verify-with", "org/typo"],
            "--verify-with org/typo: there is no such directory",
        ),
    ],
)
def test_an_export_that_cannot_be_asked_for_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, out: str, options: list[str], told: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens there
    before = sorted(place.rglob("*"))
    code, message = call("export", "data", out, *options)
    assert (code, told in message) == (2, True), message
    assert sorted(place.rglob("*")) == before


def test_an_export_that_the_captures_do_not_allow_is_a_failure(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_spec(layers=(1, 2)), [3])
    code, message = call("export", tmp_path / "data", tmp_path / "out", "--to", "specforge")
    assert (code, "takes exactly 3 layers" in message) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["prepare", "rows.jsonl", "out", "--model", "/nosuch"], "there is no directory /nosuch; --model takes"),
        (["prepare", "rows.jsonl", "out", "--model", "file"], "file is a file; --model takes a directory"),
        (["prepare", "rows.jsonl", "out", "--model", "folder"], "no tokenizer could be loaded from folder"),
        (["estimate", "rows.jsonl", "--model", "./nosuch"], "there is no directory ./nosuch; --model takes"),
        (["check-draft", "/nosuch", "data"], "there is no directory /nosuch; DRAFT takes"),
        (["plan", "./nosuch", "--model", "folder"], "there is no directory ./nosuch; DRAFT takes"),
        (["plan", "folder", "--model", "../no/such"], "there is no directory ../no/such; --model takes"),
        (["run", "rows.jsonl", "--tokenizer", "a/b/c"], "there is no directory a/b/c; --tokenizer takes"),
        (["verify", "nosuch"], "nosuch holds no captures"),
        (["verify", "data", "--model", "/nosuch"], "there is no directory /nosuch; --model takes"),
        (["verify", "data", "--model", "folder", "--dtype", "int4"], "--dtype must be one of"),
        (["verify", "data", "--model", "folder", "--device", "abacus"], "--device must be cpu, cuda or auto"),
        (["verify", "data", "--with-server", "http://127.0.0.1:1", "--spool", "/nosuch"], "--spool takes the spool"),
        (["tiny-model", "file/below"], "file/below cannot be written"),
        (["demo", "--out", "file"], "file is a file"),
        (["serve", "--data", "file/below", "--spool", "spool", "--port", "0"], "the data directory"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_name_a_path_or_a_value_that_cannot_be(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(place)
    code, message = call(*arguments)
    assert (code, told in message) == (2, True), message
    assert not (place / "out").exists()


def test_packing_into_a_dataset_of_another_spec(tmp_path: Path) -> None:
    spool = open_directory(tmp_path / "spool")
    save_dump(spool, make_dump(SPEC, "a", 3))
    make_dataset(tmp_path / "data", make_spec(layers=(1,)), [3])
    code, message = call("pack", spool, tmp_path / "data")
    assert (code, "write to another directory" in message) == (2, True), message
