"""`sglang-capture prepare`: rows that `run` takes, figures that add up, and a view of the mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_capture import cli
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.prompts import ChatTokenizer, parse_row
from sglang_capture.tiny_tokenizer import write_tokenizer

pytest.importorskip("transformers")

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "more?"},
    {"role": "assistant", "content": "no more of that"},
]
ROWS: list[dict[str, Any] | str] = [
    {"id": "chat", "messages": CHAT, "metadata": {"source": "x"}},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    "{",
    {"text": "plain text"},
    {"id": "ids", "input_ids": [5, 6], "loss_mask": [0, 0]},
    {"id": "all", "input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]},
    {"id": "chat", "messages": CHAT, "metadata": {"source": "x"}},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory, max_length=4096)
    return ChatTokenizer(directory)


def prepare(tmp_path: Path, *arguments: str, rows: list[Any] = ROWS) -> tuple[int, dict[str, Any], str]:
    """Exit code, statistics and remarks."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    command = ["prepare", str(file), str(tmp_path / "out.jsonl"), "--model", str(tmp_path / "model"), "--json"]
    result = CliRunner().invoke(cli.app, [*command, *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout), result.stderr


def written(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_what_is_written_is_what_run_would_send(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    code, statistics, remarks = prepare(tmp_path)
    assert code == 1 and f"{tmp_path / 'rows.jsonl'}:3: this line is no JSON" in remarks
    found = written(tmp_path)
    for row, source in zip(found, (ROWS[0], ROWS[1], None, ROWS[4], ROWS[5]), strict=True):
        again = parse_row(row, None)
        if isinstance(source, dict):
            assert again == parse_row(source, tokenizer)
    assert found[2]["input_ids"] == tokenizer.encode_text("plain text") and "loss_mask" not in found[2]
    assert found[0]["metadata"]["prompt_lineage"] == {
        "tokenizer": tokenizer.digest,
        "template": tokenizer.template_digest,
        "mask_rule": "generation-tags/2",
        "max_length": None,
    }
    counts = {key: value for key, value in statistics.items() if isinstance(value, int)}
    assert counts == {
        "rows": 7,
        "written": 5,
        "duplicates": 1,
        "too_long": 0,
        "bad_rows": 1,
        "cut": 0,
        "tokens": sum(len(row["input_ids"]) for row in found),
        "supervised_tokens": sum(sum(row.get("loss_mask", [])) for row in found),
        "longest": max(len(row["input_ids"]) for row in found),
        "without_mask": 1,
        "masks_all_zero": 1,
        "masks_all_one": 1,
    }
    assert [fault["line"] for fault in statistics["faults"]] == [3]


def test_ids_outside_the_models_vocabulary_are_bad_rows(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """Here the tokenizer has more ids than the model: as where tokens were added, and no rows of the embedding."""
    text = tokenizer.encode_text("plain text")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": {"vocab_size": max(text)}}))
    rows = [{"input_ids": [max(text) - 1]}, {"input_ids": [1, max(text)]}, {"text": "plain text"}, {"messages": CHAT}]
    code, statistics, remarks = prepare(tmp_path, rows=rows)
    assert code == 1
    assert [fault["line"] for fault in statistics["faults"]][:2] == [2, 3]
    assert f"token id {max(text)} at position 1 is outside the vocabulary of {max(text)}" in remarks
    assert written(tmp_path)[0]["input_ids"] == [max(text) - 1]
    assert all(max(row["input_ids"]) < max(text) for row in written(tmp_path))
    assert "ids are not compared" not in remarks


def test_without_a_config_it_is_said_that_ids_are_not_compared(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    code, _, remarks = prepare(tmp_path, rows=[{"input_ids": [10**6]}])
    assert (code, remarks.count("ids are not compared")) == (0, 1)


def test_a_column_that_no_row_has_is_told_once(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    with pytest.raises(UsageError) as told:
        prepare(tmp_path, "--column", "chat", rows=[{"id": str(number), "messages": CHAT} for number in range(30)])
    assert str(told.value).endswith("rows.jsonl has such a column; found 'id', 'messages'")
    assert not (tmp_path / "out.jsonl").exists()


def test_rows_without_the_column_that_others_have_are_bad_rows(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"messages": CHAT}, {"chat": CHAT}]
    code, statistics, _ = prepare(tmp_path, "--column", "chat", rows=rows)
    assert (code, statistics["written"], statistics["bad_rows"]) == (1, 1, 1)


def test_long_conversations_are_cut_and_longer_ones_left_out(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    whole, mask = tokenizer.encode_messages(CHAT)
    first = parse_row({"messages": CHAT[:2]}, tokenizer).input_ids or []
    rows = [{"messages": CHAT}, {"text": "word " * 50}, {"messages": [CHAT[0], {**CHAT[1], "content": "x" * 200}]}]
    code, statistics, _ = prepare(tmp_path, "--max-length", str(len(whole) - 1), rows=rows)
    assert (code, statistics["written"], statistics["cut"], statistics["too_long"]) == (0, 2, 2, 1)
    chat, text = written(tmp_path)
    assert chat["input_ids"] == first and chat["metadata"]["cut_from_tokens"] == len(whole)
    assert len(text["input_ids"]) == len(whole) - 1 and text["metadata"]["cut_from_tokens"] > 50
    assert mask is not None


def test_only_the_last_turn(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    prepare(tmp_path, "--only-last-turn", rows=[ROWS[0]])
    (row,) = written(tmp_path)
    start = row["loss_mask"].index(1)
    assert tokenizer.decode(row["input_ids"][start:]) == "no more of that<|eos|>"
    assert row["metadata"]["prompt_lineage"]["mask_rule"] == "generation-tags/2, last turn only"


def test_what_is_supervised_can_be_seen(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    _, _, remarks = prepare(tmp_path, "--show", "1")
    assert "⟦hello there<|eos|>⟧<|user|>more?<|assistant|>⟦no more of that<|eos|>⟧" in remarks
    assert "⟦hello<|eos|>⟧" not in remarks


def test_without_json_the_figures_are_lines_and_doubtful_masks_are_warned_of(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    prepare(tmp_path)
    command = ["prepare", str(tmp_path / "rows.jsonl"), str(tmp_path / "out.jsonl"), "--model", tokenizer.path]
    result = CliRunner().invoke(cli.app, command)
    assert "written       5 conversations" in result.stdout
    assert "1 loss mask all zero" in result.stdout and "1 loss mask all one" in result.stdout


def test_what_cannot_be_read_leaves_what_was_there(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(CaptureError, match="no tokenizer could be loaded"):
        prepare(tmp_path)
    nothing = CliRunner().invoke(cli.app, ["prepare", str(tmp_path / "none.jsonl"), str(out), "--model", "x"])
    assert isinstance(nothing.exception, UsageError) and "cannot be read" in str(nothing.exception)
    assert out.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "rows.jsonl", "out.jsonl"}


def test_the_input_is_never_overwritten(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n")
    before = file.read_bytes()
    result = CliRunner().invoke(cli.app, ["prepare", str(file), str(file), "--model", str(tmp_path / "model")])
    assert isinstance(result.exception, UsageError)
    assert "is the file that is read" in str(result.exception)
    assert file.read_bytes() == before


def test_a_conversation_without_an_answer_teaches_nothing_and_is_counted(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    code, statistics, _ = prepare(tmp_path, rows=[{"messages": CHAT[:1]}])
    assert code == 0
    assert (statistics["masks_all_zero"], statistics["supervised_tokens"]) == (1, 0)
    (row,) = written(tmp_path)
    assert row["loss_mask"] == [0] * len(row["input_ids"])
