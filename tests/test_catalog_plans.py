"""How the database finds what it is asked: by an index, so a question costs the same at any size of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from factories import make_spec
from sqlalchemy import Engine, create_engine, event, inspect, text

from sglang_capture.catalog import Catalog, DumpFacts, SampleFacts, sqlite_url
from sglang_capture.catalog.tables import Base

SPEC = make_spec()
OTHER = make_spec(layers=(2, 30, 58))
IDS = [f"c{number}" for number in range(1500)]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(sqlite_url(tmp_path / "catalog.sqlite"))


@contextmanager
def statements(kind: str = "SELECT") -> Iterator[list[tuple[str, Any]]]:
    """The statements that are sent to a database, with their parameters."""
    seen: list[tuple[str, Any]] = []

    def see(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if statement.startswith(kind):
            seen.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", see)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", see)


def plans(directory: Path, ask: Callable[[], object]) -> list[str]:
    """How the database would answer each query that ``ask`` sends."""
    with statements() as seen:
        ask()
    with create_engine(sqlite_url(directory / "catalog.sqlite")).connect() as connection:
        return [
            "; ".join(row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", parameters))
            for query, parameters in seen
        ]


QUESTIONS: dict[str, Callable[[Catalog], object]] = {
    "a capture": lambda catalog: catalog.captures.get("a"),
    "a page": lambda catalog: catalog.captures.page(before=100),
    "a page of a state": lambda catalog: catalog.captures.page(state="packed", before=100),
    "the first page of a state": lambda catalog: catalog.captures.page(state="packed"),
    "a page of shards": lambda catalog: catalog.shards.page(before=100),
    "a page of a dataset's shards": lambda catalog: catalog.shards.page(dataset="ds"),
    "states": lambda catalog: catalog.captures.states(IDS),
    "what waits": lambda catalog: catalog.captures.spooled_groups(),
    "what waits of a spec": lambda catalog: catalog.captures.spooled(SPEC.digest, limit=10),
    "what waits of some ids": lambda catalog: catalog.captures.spooled(SPEC.digest, limit=10, ids=IDS),
    "specs of some ids": lambda catalog: catalog.captures.spooled_specs(IDS),
    "all that is spooled": lambda catalog: catalog.captures.spooled_ids(),
    "a shard again": lambda catalog: catalog.shards.record(
        "ds", "shard-000000.safetensors", SPEC, size=1, samples=[SampleFacts(name, 1) for name in IDS]
    ),
    "a lost shard": lambda catalog: catalog.shards.lose("ds", ["shard-000000.safetensors"]),
    "a dump": lambda catalog: catalog.captures.record_dumps([DumpFacts("b", 1, SPEC, "ids-x")]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_goes_through_a_table_or_sorts(catalog: Catalog, tmp_path: Path, question: str) -> None:
    catalog.captures.record_dumps([DumpFacts(name, 1, SPEC, "ids-x") for name in IDS])
    catalog.shards.record("ds", "shard-000000.safetensors", SPEC, size=1, samples=[SampleFacts(IDS[0], 1)])
    found = plans(tmp_path, lambda: QUESTIONS[question](catalog))
    assert found
    for plan in found:
        assert "SCAN" not in plan
        assert "TEMP B-TREE" not in plan


@pytest.mark.parametrize("question", ["what waits", "what waits of a spec"])
def test_what_the_packer_asks_at_each_tick_is_in_an_index(catalog: Catalog, tmp_path: Path, question: str) -> None:
    """The rows of captures, with their masks and metadata, are not looked at before they are packed."""
    plan, *_ = plans(tmp_path, lambda: QUESTIONS[question](catalog))
    assert "COVERING INDEX captures_spooled" in plan


@pytest.mark.parametrize("question", ["what waits of some ids", "specs of some ids"])
def test_captures_that_are_named_are_found_by_their_names(catalog: Catalog, tmp_path: Path, question: str) -> None:
    """And not among all that is spooled, once for every few names."""
    plan, *_ = plans(tmp_path, lambda: QUESTIONS[question](catalog))
    assert "(id=?)" in plan


def test_a_shards_worth_is_taken_and_no_more_is_read(catalog: Catalog) -> None:
    catalog.captures.record_dumps([DumpFacts(name, 2, SPEC, "ids-x") for name in IDS[:9]])
    size = 2 * SPEC.bytes_per_token
    with statements() as seen:
        rows = catalog.captures.spooled(SPEC.digest, limit=8, most_bytes=3 * size)
    assert [row.id for row in rows] == IDS[:3]
    assert [row.loss_mask for row in rows] == [None] * 3
    assert list(seen[-1][1]) == [row.seq for row in rows], "whole rows are read of these only"
    named = catalog.captures.spooled(SPEC.digest, limit=2, most_bytes=9 * size, ids=[*IDS[3:6], "unknown"])
    assert [row.id for row in named] == IDS[3:5]


def test_one_capture_larger_than_a_shard_is_taken_alone(catalog: Catalog) -> None:
    catalog.captures.record_dumps([DumpFacts(name, 2, SPEC, "ids-x") for name in IDS[:2]])
    assert [row.id for row in catalog.captures.spooled(SPEC.digest, limit=8, most_bytes=1)] == IDS[:1]
    assert catalog.captures.spooled(OTHER.digest, limit=8, most_bytes=1) == []


def test_each_lost_shard_has_a_transaction_of_its_own(catalog: Catalog) -> None:
    """What has to be in memory is one shard's captures; who dies between two has lost nothing of either."""
    names = [f"shard-{number:06d}.safetensors" for number in range(3)]
    for number, name in enumerate(names):
        catalog.shards.record("ds", name, SPEC, size=1, samples=[SampleFacts(f"c{number}", 1)])
    with statements("BEGIN IMMEDIATE") as seen:
        assert catalog.shards.lose("ds", [*names, "shard-000009.safetensors"]) == ["c0", "c1", "c2"]
    assert len(seen) == 4
    assert catalog.shards.names() == set()
    assert catalog.captures.totals()["failed"].captures == 3


def test_a_catalog_without_the_newer_indices_gets_them(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "catalog.sqlite")
    Catalog(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        for name in ("captures_spooled", "shards_by_dataset"):
            connection.execute(text(f"DROP INDEX {name}"))
    Catalog(url).close()
    for table in Base.metadata.sorted_tables:
        there = {index["name"] for index in inspect(engine).get_indexes(table.name)}
        assert there == {index.name for index in table.indexes}
