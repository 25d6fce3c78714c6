"""Whatever appears in the spool is in the catalog soon after, whoever asked for it; what cannot be read says why."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest
from factories import make_spec

from service.checks import problem, record, state, states
from service.running import serving, until
from service.standin import StandInServer, put_dump, put_failure
from sglang_capture import spool
from sglang_capture.service import indexer as indexing
from sglang_capture.service.core import Service
from sglang_capture.service.settings import ServiceSettings


def test_a_thousand_dumps_are_indexed_at_the_start(tmp_path: Path, spool_dir: Path) -> None:
    ids = {f"dump-{number:04d}" for number in range(1000)}
    for capture_id in ids:
        put_dump(spool_dir, capture_id)
    with serving(tmp_path) as client:
        assert states(client) == dict.fromkeys(ids, "spooled")


def test_a_dump_of_some_other_client_is_indexed(service: httpx.Client, spool_dir: Path) -> None:
    spec = make_spec(layers=(0, 60), last_hidden="both")
    put_dump(spool_dir, "stranger", 7, spec)
    until(lambda: state(service, "stranger") == "spooled", "the record")
    found = record(service, "stranger")
    assert found["tokens"] == 7
    assert found["layers"] == [0, 60]
    assert found["shapes"] == {
        "input_ids": [7],
        "hidden_states": [7, 2, 8],
        "last_hidden_state": [7, 8],
        "last_hidden_state_prenorm": [7, 8],
    }
    assert found["spec_digest"] == spec.digest
    assert found["place"]["dump"] == str(spool_dir / "stranger.pt")


def test_a_failure_is_indexed_with_its_reason(service: httpx.Client, spool_dir: Path) -> None:
    put_failure(spool_dir, "bad", "the client went away")
    until(lambda: state(service, "bad") == "failed", "the record")
    assert record(service, "bad")["failure"] == {
        "kind": "failed",
        "reason": "the client went away",
        "retriable": False,
    }


def test_a_failure_after_a_dump_changes_nothing(service: httpx.Client, spool_dir: Path) -> None:
    put_dump(spool_dir, "a")
    until(lambda: state(service, "a") == "spooled", "the record")
    put_failure(spool_dir, "a", "the second of n = 2 was refused")
    put_dump(spool_dir, "b")
    until(lambda: state(service, "b") == "spooled", "the next record")
    assert state(service, "a") == "spooled"


def test_a_dump_that_cannot_be_read_fails_and_stays_where_it_is(service: httpx.Client, spool_dir: Path) -> None:
    (spool_dir / "broken.pt").write_bytes(b"PK no zip")
    until(lambda: state(service, "broken") == "failed", "the record")
    failure = record(service, "broken")["failure"]
    assert failure["kind"] == "unreadable"
    assert "no readable dump" in failure["reason"]
    assert (spool_dir / "broken.pt").exists()
    assert 'sglang_capture_indexed_total{outcome="unreadable"}' in service.get("/metrics").text


def test_a_renamed_dump_is_not_taken_for_another(service: httpx.Client, spool_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    put_dump(tmp_path / "elsewhere", "a").rename(spool_dir / "b.pt")
    until(lambda: state(service, "b") == "failed", "the record")
    assert "is the dump of 'a'" in record(service, "b")["failure"]["reason"]


def test_files_that_are_no_captures_are_left_alone(service: httpx.Client, spool_dir: Path) -> None:
    for name in (".part-x.pt", "..pt", "notes.txt", "sp ace.pt"):
        (spool_dir / name).write_bytes(b"?")
    put_dump(spool_dir, "a")
    until(lambda: state(service, "a") == "spooled", "the record")
    assert states(service) == {"a": "spooled"}


def test_a_look_at_the_server_is_nobodys_capture(service: httpx.Client, spool_dir: Path) -> None:
    put_dump(spool_dir, f"{spool.PROBE_PREFIX}1")
    put_failure(spool_dir, f"{spool.PROBE_PREFIX}2", "spool full")
    put_dump(spool_dir, "a")
    until(lambda: state(service, "a") == "spooled", "the record")
    spool.remove(spool_dir, f"{spool.PROBE_PREFIX}1")
    put_dump(spool_dir, "b")
    until(lambda: state(service, "b") == "spooled", "the next record")
    assert states(service) == {"a": "spooled", "b": "spooled"}


def test_looks_that_were_killed_are_cleared(tmp_path: Path, spool_dir: Path) -> None:
    old, new = (put_dump(spool_dir, f"{spool.PROBE_PREFIX}{name}") for name in ("old", "new"))
    os.utime(old, (0, 0))
    with serving(tmp_path):
        until(lambda: not old.exists(), "the clearing")
    assert new.exists()


def test_a_pipe_by_the_name_of_a_dump_stops_nobody(service: httpx.Client, spool_dir: Path) -> None:
    for name in ("pipe.pt", "pipe.failed.json", "bad.failed.json"):
        os.mkfifo(spool_dir / name)
    put_dump(spool_dir, "a")
    until(lambda: state(service, "a") == "spooled", "the record")


def test_a_dump_that_vanishes_is_recorded_as_gone(tmp_path: Path, service: httpx.Client, spool_dir: Path) -> None:
    put_dump(spool_dir, "a")
    until(lambda: state(service, "a") == "spooled", "the record")
    (spool_dir / "a.pt").unlink()
    until(lambda: state(service, "a") == "failed", "the vanishing")
    failure = record(service, "a")["failure"]
    assert (failure["kind"], failure["retriable"]) == ("vanished", True)
    problem(service.get("/capture/a/data"), 409, "no-tensors")


def test_a_spool_may_be_made_later_and_made_anew(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    with serving(tmp_path) as client:
        assert any("no spool" in line for line in client.get("/health").json()["problems"])
        for name in ("first", "second"):
            directory.mkdir(mode=0o700)
            put_dump(directory, name)
            until(lambda name=name: state(client, name) == "spooled", f"the {name} record")
            (directory / f"{name}.pt").unlink()
            directory.rename(tmp_path / f"gone-{name}")
            until(lambda name=name: state(client, name) == "failed", f"the {name} vanishing")


def test_a_later_spool_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    with serving(tmp_path) as client:
        directory.mkdir()
        directory.chmod(0o777)
        put_dump(directory, "a")
        until(lambda: any("writable by others" in line for line in client.get("/health").json()["problems"]), "it")
        assert states(client) == {}
        directory.chmod(0o700)
        until(lambda: state(client, "a") == "spooled", "the record")


def test_old_failures_are_cleared_once_the_catalog_has_them(
    tmp_path: Path, spool_dir: Path, sglang: StandInServer
) -> None:
    put_failure(spool_dir, "old", "long ago")
    put_failure(spool_dir, "new", "just now")
    long_ago = time.time() - 7200
    os.utime(spool.failure_path(spool_dir, "old"), (long_ago, long_ago))
    with serving(tmp_path) as client:
        until(lambda: not spool.failure_path(spool_dir, "old").exists(), "the clearing")
        assert spool.failure_path(spool_dir, "new").exists()
        assert states(client) == {"old": "failed", "new": "failed"}


def test_who_asks_during_a_long_scan_waits_for_a_batch_and_not_for_all(
    tmp_path: Path, spool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        put_dump(spool_dir, f"old-{number}")
    monkeypatch.setattr(indexing, "_BATCH", 10)
    batches: list[list[str]] = []
    index = indexing.Indexer._index

    async def scan() -> None:
        loop = asyncio.get_running_loop()
        service = Service(ServiceSettings(dir=spool_dir, data=tmp_path / "data"))

        def observed(indexer: indexing.Indexer, ids: list[str]) -> list[str]:
            batches.append(ids)
            if len(batches) == 1:
                put_dump(spool_dir, "new")
                asked.append(asyncio.run_coroutine_threadsafe(indexer.index(["new"]), loop))
            return index(indexer, ids)

        asked: list[Future[None]] = []
        monkeypatch.setattr(indexing.Indexer, "_index", observed)
        await service.indexer.scan()
        await asyncio.wrap_future(asked[0])
        service.close()

    asyncio.run(scan())
    place = next(number for number, ids in enumerate(batches) if "new" in ids)
    assert place <= 2
    assert len(batches) >= 20
    assert all(len(ids) <= 10 for ids in batches)
