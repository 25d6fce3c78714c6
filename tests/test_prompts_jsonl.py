"""One bad line costs one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_capture.errors import UsageError
from sglang_capture.prompts import RowError, read_jsonl


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
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read: No such file"):
        next(read_jsonl(tmp_path / "none.jsonl"))
