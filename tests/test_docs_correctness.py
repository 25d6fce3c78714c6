"""docs/correctness.md: every test that it names is there, no cell is empty, and each result has its proof."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from documents import DOCS, ROOT

PAGE = DOCS / "correctness.md"
RESULTS = ("proved", "refused", "not runnable here")

_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+(?:::\w+)?)(?:\[[^\]`]*\])?`")


def tables(header: str) -> Iterator[list[str]]:
    """The rows, as cells, of every table with these columns."""
    for table in PAGE.read_text().split(f"\n{header}\n")[1:]:
        for line in table.splitlines()[1:]:
            if not line.startswith("|"):
                break
            yield [cell.strip() for cell in line.strip("|").split("|")]


CONDITIONS = list(tables("| condition | version | result | test |"))
REPORTS = list(tables("| report | symptom | answered by |"))


@cache
def defined(file: str) -> frozenset[str]:
    """The tests of a file: functions, and the methods of classes, those of their bases in the file among them."""
    path = ROOT / file
    body = ast.parse(path.read_text()).body if path.is_file() else []
    methods: dict[str, set[str]] = {}
    for cls in body:
        if isinstance(cls, ast.ClassDef):
            methods[cls.name] = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
            methods[cls.name].update(*(methods.get(base.id, set()) for base in cls.bases if isinstance(base, ast.Name)))
    functions = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return frozenset(functions | {f"{name}::{method}" for name, own in methods.items() for method in own})


def named(text: str) -> list[tuple[str, str]]:
    return _TEST.findall(text)


def test_every_test_that_is_named_is_there() -> None:
    found = named(PAGE.read_text())
    assert len(found) > 100
    assert sorted({f"{file}::{name}" for file, name in found if name not in defined(file)}) == []


def test_nothing_that_looks_like_a_test_escapes_the_check() -> None:
    text = PAGE.read_text().replace("tests/…::name", "")
    assert len(named(text)) == len(re.findall(r"\.py::\w", text))


@pytest.mark.parametrize("row", CONDITIONS, ids=lambda row: row[0])
def test_a_condition_has_a_version_a_result_and_its_proof(row: list[str]) -> None:
    _condition, version, result, test = row
    assert all(row)
    assert result.startswith(RESULTS)
    assert re.search(r"\d\.\d|any", version)
    assert named(test)


@pytest.mark.parametrize("row", REPORTS, ids=lambda row: row[0])
def test_a_report_has_an_answer(row: list[str]) -> None:
    reference, symptom, answer = row
    assert re.fullmatch(r"[\w-]+#\d+", reference) and symptom
    assert named(answer) or re.match(r"cannot apply(?: yet)?: \w", answer)


def test_there_are_a_hundred_reports_and_none_twice() -> None:
    references = [reference for reference, *_ in REPORTS]
    assert len(references) == len(set(references)) >= 100
