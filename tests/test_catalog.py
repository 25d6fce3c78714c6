"""The catalog: what it is told it tells again, its totals are the truth, and a page costs the same at any size."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from factories import make_spec
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, text

from sglang_capture.catalog import (
    Catalog,
    DumpFacts,
    FailureFacts,
    JobError,
    JobProgress,
    SampleFacts,
    origin,
    pack_mask,
    sqlite_url,
    unpack_mask,
)
from sglang_capture.errors import CaptureError
from sglang_capture.spec import CaptureSpec

SPEC = make_spec()
OTHER = make_spec(layers=(2, 30, 58))
SENT = origin.of_ids([1, 2, 3, 4, 5])


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(sqlite_url(tmp_path / "catalog.sqlite"))


def begin(catalog: Catalog, capture_id: str, mask: list[int] | None = None) -> str:
    packed = None if mask is None else pack_mask(mask)
    row = catalog.captures.begin(
        capture_id, request_digest="d", sent=SENT, spec=SPEC, loss_mask=packed, metadata={"n": 1}
    )
    return row.state


def dump(capture_id: str, tokens: int, spec: CaptureSpec, ran: str = SENT) -> DumpFacts:
    return DumpFacts(capture_id, tokens, spec, ran)


def pack(catalog: Catalog, name: str, *ids: str) -> None:
    catalog.shards.record("ds", name, SPEC, size=1000, samples=[SampleFacts(i, 5) for i in ids])


def loss_mask(catalog: Catalog, capture_id: str) -> bytes | None:
    row = catalog.captures.get(capture_id, with_mask=True)
    return row.loss_mask if row else None


def state(catalog: Catalog, capture_id: str) -> str | None:
    row = catalog.captures.get(capture_id)
    return row.state if row else None


@given(st.lists(st.integers(0, 1)))
def test_a_mask_survives_packing(mask: list[int]) -> None:
    assert unpack_mask(pack_mask(mask)).tolist() == mask
    assert unpack_mask(pack_mask(mask)).dtype == np.uint8


def test_a_capture_goes_from_pending_to_packed(catalog: Catalog) -> None:
    assert begin(catalog, "a", [1, 0, 1, 1, 1]) == "pending"
    assert catalog.captures.record_dumps([dump("a", 5, SPEC)]) == {"a": "spooled"}
    assert catalog.captures.record_dumps([dump("a", 5, SPEC)]) == {"a": "known"}
    pack(catalog, "shard-000000.safetensors", "a")
    assert catalog.captures.record_dumps([dump("a", 5, SPEC)]) == {"a": "duplicate"}
    row = catalog.captures.get("a")
    assert row is not None and row.shard is not None
    assert (row.state, row.tokens, row.shard.name, row.sample, row.meta) == (
        "packed",
        5,
        "shard-000000.safetensors",
        0,
        {"n": 1},
    )
    assert loss_mask(catalog, "a") is None, "the shard has it now"


@pytest.mark.parametrize("good", ["spooled", "packed"])
def test_a_late_failure_never_downgrades_a_good_record(catalog: Catalog, good: str) -> None:
    catalog.captures.record_dumps([dump("a", 5, SPEC)])
    if good == "packed":
        pack(catalog, "shard-000000.safetensors", "a")
    catalog.captures.record_failures([FailureFacts("a", "failed", "late")])
    assert state(catalog, "a") == good
    assert begin(catalog, "a") == good


def test_a_dump_mends_a_failure(catalog: Catalog) -> None:
    catalog.captures.record_failures([FailureFacts("a", "refused", "spool full", True)])
    catalog.captures.record_dumps([dump("a", 5, SPEC)])
    row = catalog.captures.get("a")
    assert row is not None and (row.state, row.failure, row.reason, row.retriable) == ("spooled", None, None, False)


def test_a_dump_of_another_length_than_its_loss_mask_fails(catalog: Catalog) -> None:
    begin(catalog, "a", [1, 1])
    assert catalog.captures.record_dumps([dump("a", 5, SPEC)]) == {"a": "mask"}
    row = catalog.captures.get("a")
    assert row is not None and row.reason == "loss_mask has 2 entries, and the engine ran 5 tokens"


@pytest.mark.parametrize("left", ["pending", "failed"])
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(dump("a", 5, SPEC, origin.of_ids([5, 4, 3, 2, 1])), id="other ids"),
        pytest.param(dump("a", 5, OTHER), id="other layers"),
        pytest.param(dump("a", 5, make_spec(last_hidden="pre")), id="another last hidden state"),
    ],
)
def test_a_dump_of_another_request_is_recorded_as_itself(catalog: Catalog, left: str, other: DumpFacts) -> None:
    begin(catalog, "a", [1, 0, 1, 1, 1])
    if left == "failed":
        catalog.captures.interrupt()
    assert catalog.captures.record_dumps([other]) == {"a": "spooled"}
    row = catalog.captures.get("a")
    assert row is not None
    assert (row.request_digest, row.meta, row.mask_tokens) == (None, {}, None)
    assert (row.sent, row.spec_digest) == (other.ran, other.spec.digest)
    assert loss_mask(catalog, "a") is None


def test_a_text_is_known_by_its_requests_id(catalog: Catalog) -> None:
    sent = origin.of_text("a text")
    for name in ("mine", "other"):
        catalog.captures.begin(name, request_digest="d", sent=sent, spec=SPEC, loss_mask=None, metadata={"n": 1})
    others = origin.new_request_id(origin.of_text("another"))
    catalog.captures.record_dumps(
        [
            DumpFacts("mine", 5, SPEC, SENT, origin.new_request_id(sent)),
            DumpFacts("other", 5, SPEC, SENT, others),
        ]
    )
    rows = [catalog.captures.get(name) for name in ("mine", "other")]
    assert [row and row.meta for row in rows] == [{"n": 1}, {}]


def test_packing_twice_changes_nothing(catalog: Catalog) -> None:
    catalog.captures.record_dumps([dump("a", 5, SPEC)])
    pack(catalog, "shard-000000.safetensors", "a")
    pack(catalog, "shard-000000.safetensors", "a")
    pack(catalog, "shard-000001.safetensors", "a", "b")
    row = catalog.captures.get("a")
    assert row is not None and row.shard is not None and row.shard.name == "shard-000000.safetensors"
    assert catalog.captures.totals()["packed"].captures == 2


def test_captures_of_a_lost_shard_can_be_tried_again(catalog: Catalog) -> None:
    pack(catalog, "shard-000000.safetensors", "a")
    pack(catalog, "shard-000001.safetensors", "b")
    assert catalog.shards.lose("ds", ["shard-000000.safetensors"]) == ["a"]
    row = catalog.captures.get("a")
    assert row is not None and (row.state, row.failure, row.retriable) == ("failed", "vanished", True)
    assert catalog.shards.names() == {("ds", "shard-000001.safetensors")}
    assert begin(catalog, "a") == "pending"


def test_a_packed_capture_is_not_forgotten(catalog: Catalog) -> None:
    pack(catalog, "shard-000000.safetensors", "a")
    assert not catalog.captures.forget("a")
    begin(catalog, "b")
    assert catalog.captures.forget("b")
    assert state(catalog, "a") == "packed"
    assert state(catalog, "b") is None


def test_what_a_stopped_service_left_pending_can_be_tried_again(catalog: Catalog) -> None:
    begin(catalog, "a", [1])
    assert catalog.captures.interrupt() == 1
    row = catalog.captures.get("a")
    assert row is not None and (row.state, row.retriable) == ("failed", True)
    assert loss_mask(catalog, "a") == pack_mask([1]), "its dump may still come"


@pytest.mark.parametrize("seed", range(3))
def test_totals_are_what_counting_gives(catalog: Catalog, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for step in range(60):
        some = [f"c{number}" for number in draw.sample(range(12), 3)]
        match draw.randrange(7):
            case 0:
                begin(catalog, some[0])
            case 1:
                catalog.captures.record_dumps([dump(name, draw.randrange(1, 9), SPEC) for name in some])
            case 2:
                catalog.captures.record_failures([FailureFacts(name, "failed", "why") for name in some])
            case 3:
                pack(catalog, f"shard-{step:06d}.safetensors", *some)
            case 4:
                catalog.captures.lose(some, "vanished", "gone")
            case 5:
                catalog.captures.forget(some[0])
            case 6:
                catalog.shards.lose("ds", [name for _, name in list(catalog.shards.names())[:1]])
    counted = {}
    with create_engine(sqlite_url(tmp_path / "catalog.sqlite")).connect() as connection:
        query = "SELECT state, count(*), coalesce(sum(tokens), 0), coalesce(sum(bytes), 0) FROM captures GROUP BY state"
        counted = {row[0]: tuple(row[1:]) for row in connection.execute(text(query))}
    for name, total in catalog.captures.totals().items():
        assert (total.captures, total.tokens, total.size) == counted.get(name, (0, 0, 0)), name


def test_a_failed_transaction_leaves_nothing(catalog: Catalog) -> None:
    with pytest.raises(AttributeError):
        catalog.captures.record_dumps([dump("a", 5, SPEC), dump("b", 5, None)])  # type: ignore[arg-type]
    assert state(catalog, "a") is None
    assert catalog.captures.totals()["spooled"].captures == 0


def test_pages_show_every_capture_once_from_the_newest_on(catalog: Catalog) -> None:
    catalog.captures.record_dumps([dump(f"c{number}", 1, SPEC) for number in range(10)])
    catalog.captures.record_failures([FailureFacts("c3x", "failed", "why")])
    seen: list[str] = []
    before = None
    while rows := catalog.captures.page(before=before, limit=4):
        seen += [row.id for row in rows]
        before = rows[-1].seq
    assert seen == ["c3x", *(f"c{number}" for number in reversed(range(10)))]
    assert [row.id for row in catalog.captures.page(state="failed")] == ["c3x"]


@pytest.mark.parametrize("condition", ["", "state = 'packed' AND"])
def test_a_page_is_found_by_an_index(catalog: Catalog, tmp_path: Path, condition: str) -> None:
    """Neither sorting nor looking at what is not on the page: its cost does not depend on how many there are."""
    query = f"EXPLAIN QUERY PLAN SELECT * FROM captures WHERE {condition} seq < 100 ORDER BY seq DESC LIMIT 10"
    with create_engine(sqlite_url(tmp_path / "catalog.sqlite")).connect() as connection:
        plan = " ".join(row[-1] for row in connection.execute(text(query)))
    assert "SEARCH" in plan
    assert "TEMP B-TREE" not in plan


def test_spooled_captures_are_grouped_by_spec(catalog: Catalog) -> None:
    catalog.captures.record_dumps([dump("a", 1, SPEC), dump("b", 2, OTHER), dump("c", 3, SPEC)])
    groups = {group.spec_digest: (group.captures, group.size) for group in catalog.captures.spooled_groups()}
    assert groups == {
        SPEC.digest: (2, 4 * SPEC.bytes_per_token),
        OTHER.digest: (1, 2 * OTHER.bytes_per_token),
    }
    assert [row.id for row in catalog.captures.spooled(SPEC.digest, limit=9)] == ["a", "c"]
    assert [row.id for row in catalog.captures.spooled(SPEC.digest, limit=9, ids=["c", "b"])] == ["c"]
    assert catalog.captures.spooled_specs(["b"]) == {OTHER.digest: OTHER}


def test_progress_of_a_job_and_its_errors_survive(catalog: Catalog) -> None:
    catalog.jobs.add("job-1", source="x", rows=9, options={})
    error = JobError(4, "c", "why")
    for _ in range(2):  # a restart may tell the same error again
        catalog.jobs.advance("job-1", JobProgress(watermark=5, captured=4, failed=1, tokens=40), [error])
    job = catalog.jobs.get("job-1")
    assert job is not None and (job.watermark, job.captured, job.failed, job.tokens) == (5, 4, 1, 40)
    assert [(row.line, row.capture_id, row.reason) for row in catalog.jobs.errors("job-1")] == [(4, "c", "why")]
    assert [row.id for row in catalog.jobs.running()] == ["job-1"]
    catalog.jobs.end("job-1", "done")
    assert catalog.jobs.running() == []
    assert catalog.jobs.counts() == {"done": 1}


def test_a_catalog_is_found_again(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "catalog.sqlite")
    first = Catalog(url)
    first.captures.record_dumps([dump("a", 5, SPEC)])
    first.close()
    assert state(Catalog(url), "a") == "spooled"


def test_a_catalog_of_the_first_format_is_brought_up_to_this_one(tmp_path: Path) -> None:
    """What its captures sent is not known: a dump that comes for one of them is nobody's."""
    url = sqlite_url(tmp_path / "catalog.sqlite")
    old = Catalog(url)
    old.captures.record_dumps([dump("a", 5, SPEC)])
    begin(old, "b", [1, 1, 1, 1, 1])
    old.close()
    with create_engine(url).begin() as connection:
        connection.execute(text("ALTER TABLE captures DROP COLUMN sent"))
        connection.execute(text("UPDATE catalog_format SET version = 1"))
    for _ in range(2):
        Catalog(url).close()
    new = Catalog(url)
    assert new.captures.states(["a", "b"]) == {"a": "spooled", "b": "pending"}
    new.captures.record_dumps([dump("b", 5, SPEC)])
    assert loss_mask(new, "b") is None
    assert begin(new, "c", [1, 1, 1, 1, 1]) == "pending"
    new.captures.record_dumps([dump("c", 5, SPEC)])
    assert loss_mask(new, "c") is not None


def test_a_newer_catalog_is_refused(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "catalog.sqlite")
    Catalog(url).close()
    with create_engine(url).begin() as connection:
        connection.execute(text("UPDATE catalog_format SET version = 99"))
    with pytest.raises(CaptureError, match="format version 99"):
        Catalog(url)


@pytest.mark.parametrize("url", ["nonsense", "sqlite:////nowhere/at/all/catalog.sqlite", "unknown://x"])
def test_a_catalog_that_cannot_be_opened_is_a_clear_error(url: str) -> None:
    with pytest.raises(CaptureError, match="cannot be opened"):
        Catalog(url)
