"""Rows come from files and datasets of every kind, one after the other, and one bad row costs one row."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.prompts import RowError, canonical, jsonl, open_source, read_jsonl, tables

ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "hi é\u2028"}, {"role": "assistant", "content": "yes"}]},
    {"id": "b", "messages": [{"role": "user", "content": "x" * 500}]},
    {"id": "c", "messages": [{"role": "user", "content": '[{\\"]'}]},
]


def read(*lines: str | bytes) -> list[tuple[int, dict[str, Any] | str]]:
    return [(number, str(row) if isinstance(row, RowError) else row) for number, row in read_jsonl(lines)]


def test_rows_come_with_the_number_of_their_line() -> None:
    assert read('{"text": "a"}\n', "\n", "   \n", '{"text": "b"}') == [(1, {"text": "a"}), (4, {"text": "b"})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "no JSON"),
        ("[1, 2]", "must be a JSON object; found [1, 2]"),
        ("null", "must be a JSON object"),
        (b'{"text": "\xff"}', "not UTF-8"),
        ("[" * 200_000, "no JSON"),
        ('{"input_ids": [' + "9" * 5000 + "]}", "no JSON"),
        ('{"text": "x", "id": [1]}', "an id must be text"),
    ],
    ids=["cut off", "list", "null", "latin-1", "deep", "huge number", "odd id"],
)
def test_a_bad_line_is_reported_and_the_rest_goes_on(line: str | bytes, message: str) -> None:
    (first, error), rest = read(line, '{"text": "b"}')
    assert first == 1 and isinstance(error, str) and message in error
    assert rest == (2, {"text": "b"})


def test_an_id_may_come_again_only_with_the_same_content() -> None:
    rows = read(
        '{"id": "a", "text": "x"}',
        '{"id": "a", "text": "x", "score": 1}',
        '{"id": "a", "prompt": "y"}',
        '{"id": 1, "input_ids": [1, 2], "loss_mask": [0, 1]}',
        '{"id": "1", "input_ids": [1, 2], "loss_mask": [1, 1]}',
        '{"text": "x"}',
    )
    refused = [number for number, row in rows if isinstance(row, str)]
    assert refused == [3, 5]
    assert "id 'a' stands on an earlier line with other content" in str(rows[2][1])


def test_a_file_is_read_line_by_line_whatever_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    # A line separator of Unicode inside a text is no end of a line, and Windows' marks are no content.
    file.write_bytes(b"\xef\xbb\xbf" + '{"text": "a\u2028b"}\r\n{"text": "é"}'.encode())
    assert list(read_jsonl(file)) == [(1, {"text": "a\u2028b"}), (2, {"text": "é"})]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.json", "none.parquet", "none"):
        with pytest.raises(UsageError, match=rf"{name} cannot be read: No such file.*hf:NAME"):
            open_source(str(tmp_path / name))


def contents(source: object) -> list[object]:
    """The rows in one shape, numbered as they are found."""
    rows = list(source.rows())  # type: ignore[attr-defined]
    assert [number for number, _ in rows] == list(range(1, len(rows) + 1))
    return [canonical(row) for _, row in rows]


@pytest.fixture
def table() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(ROWS)


def test_a_json_list_is_read_as_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("\ufeff" + json.dumps(ROWS, indent=1, ensure_ascii=False))
    source = open_source(str(file))
    read: list[int] = []
    assert contents(source) == ROWS
    assert source.count(read.append) == 3
    assert sum(read) == source.size == file.stat().st_size
    assert source.place(2) == f"{file}, row 2"


def test_json_lines_may_be_named_json(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = open_source(str(file))
    assert contents(source) == ROWS and source.count() == 3
    assert source.place(2) == f"{file}:2"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4), max_size=6), st.integers(1, 9), st.booleans())
def test_a_list_is_read_the_same_in_pieces_of_any_size(rows: list[dict[str, Any]], size: int, ascii_only: bool) -> None:
    text = json.dumps(rows, ensure_ascii=ascii_only, indent=size % 3 or None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK", size)
        assert list(jsonl.read_list(io.StringIO(text))) == list(enumerate(rows, start=1))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('[{"text": "a"}, 3, {"text": "b"}]', [{"text": "a"}, "a row must be a JSON object; found 3", {"text": "b"}]),
        ('[{"text": "a"}, {"text": oops}, {"text": "b"}]', [{"text": "a"}, "cannot be read from here on: Expecting"]),
        ('[{"text": "a"}, {"text": "b', [{"text": "a"}, "cannot be read from here on: Unterminated"]),
        ('[{"text": "a"}', [{"text": "a"}, "cannot be read from here on"]),
        ('{"text": "a"}', ["must hold a list of objects"]),
        ("[]", []),
    ],
    ids=["no object", "fault", "cut in a text", "not closed", "object", "empty"],
)
def test_a_fault_in_a_list_is_reported_where_it_is(text: str, rows: list[dict[str, Any] | str]) -> None:
    found = [row for _, row in jsonl.read_list(io.StringIO(text))]
    assert len(found) == len(rows)
    for row, expected in zip(found, rows, strict=True):
        assert expected in str(row) if isinstance(expected, str) else row == expected


def test_a_parquet_file(tmp_path: Path, table: Any) -> None:
    table.to_parquet(tmp_path / "rows.parquet")
    source = open_source(str(tmp_path / "rows.parquet"))
    assert contents(source) == ROWS and source.count() == 3


def test_a_saved_dataset_whatever_its_format(tmp_path: Path, table: Any) -> None:
    table.add_column("input_ids", [[1, 2]] * 3).with_format("torch", ["input_ids"]).save_to_disk(tmp_path / "saved")
    source = open_source(str(tmp_path / "saved"))
    assert source.count() == 3
    rows = [row for _, row in source.rows()]
    assert [canonical(row, "messages") for row in rows] == ROWS
    assert canonical(rows[0], "input_ids")["input_ids"] == [1, 2]


def test_a_saved_dataset_of_several_splits_wants_one_named(tmp_path: Path, table: Any) -> None:
    import datasets

    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match="has the splits train, test, and none is named: name one with --split"):
        open_source(str(tmp_path / "saved")).count()
    with pytest.raises(UsageError, match="there is no dev"):
        open_source(str(tmp_path / "saved"), split="dev").count()
    assert contents(open_source(str(tmp_path / "saved"), split="test")) == ROWS[:1]


def test_a_directory_of_files_is_a_dataset_too(tmp_path: Path, table: Any) -> None:
    (tmp_path / "files").mkdir()
    table.to_parquet(tmp_path / "files" / "train.parquet")
    source = open_source(str(tmp_path / "files"), split="train")
    assert contents(source) == ROWS
    assert source.count() in (None, 3)


def test_a_dataset_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch, table: Any) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str | None, streaming: bool) -> Any:
        asked.append((name, subset, split, streaming))
        return table.to_iterable_dataset()

    monkeypatch.setattr(tables, "find", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert contents(open_source("hf:org/name:train_sft", subset="en")) == ROWS
    assert contents(open_source("hf:org/name", split="test")) == ROWS
    assert asked == [("org/name", "en", "train_sft", True), ("org/name", None, "test", True)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf:", {}, "hf:NAME or hf:NAME:SPLIT"),
        ("hf:a/b:train", {"split": "test"}, "names the split train, and --split test"),
        ("rows.jsonl", {"split": "train"}, "--split is for datasets"),
        ("rows.jsonl", {"subset": "en"}, "--subset is for datasets of the Hub"),
    ],
)
def test_options_that_do_not_go_with_the_name(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(name, **options)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(CaptureError, match=r"pip install 'sglang-capture\[data\]'"):
        open_source("hf:org/name").count()


def test_the_same_id_twice_is_noticed_in_every_source(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"id": 1, "text": "x"}, {"id": 1, "text": "y"}]))
    _, (_, second) = open_source(str(tmp_path / "rows.json")).rows()
    assert isinstance(second, RowError) and "id '1' stands on an earlier line" in str(second)
