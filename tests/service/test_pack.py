"""Packing: every spooled capture becomes a sample once, its memory is freed, and specs are never mixed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from factories import make_spec, watch_removals
from sqlalchemy import create_engine, text

from service.checks import problem, record, state, states
from service.running import serving, until
from service.standin import SPEC, StandInServer, publish, put_dump, put_failure
from sglang_capture.catalog import sqlite_url
from sglang_capture.service import monitor
from sglang_capture.shards import CaptureDataset, check_dataset

OTHER = make_spec(layers=(2, 30, 58))
NAME = f"dataset-{SPEC.digest[:8]}"


def spooled(client: httpx.Client, directory: Path, *ids: str, **options: Any) -> None:
    for capture_id in ids:
        put_dump(directory, capture_id, **options)
    until(lambda: all(state(client, capture_id) == "spooled" for capture_id in ids), "the records")


def test_packing_now_writes_a_dataset_and_frees_the_spool(
    service: httpx.Client, spool_dir: Path, tmp_path: Path
) -> None:
    spooled(service, spool_dir, "a", "b")
    answer = service.post("/capture/shards").json()
    assert answer["samples"] == 2
    (shard,) = answer["shards"]
    assert (shard["dataset"], shard["file"], shard["samples"], shard["tokens"]) == (
        NAME,
        "shard-000000.safetensors",
        2,
        10,
    )
    assert Path(shard["path"]).stat().st_size == shard["bytes"]
    assert service.get("/capture/shards").json() == {"items": [shard], "next": None}
    check_dataset(tmp_path / "data" / NAME, deep=True)
    ids = CaptureDataset(tmp_path / "data" / NAME).ids
    assert sorted(ids) == ["a", "b"]
    assert list(spool_dir.glob("*.pt")) == []
    for number, name in enumerate(ids):
        place = {"dump": None, "dataset": NAME, "shard": shard["file"], "sample": number}
        assert record(service, name)["place"] == place


def test_no_dump_is_mapped_any_more_when_it_is_removed(
    service: httpx.Client, spool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooled(service, spool_dir, "a", "b")
    removed = watch_removals(monkeypatch)
    service.post("/capture/shards").raise_for_status()
    assert removed == {"a": False, "b": False}


def test_loss_masks_and_metadata_go_into_the_shard(service: httpx.Client, tmp_path: Path) -> None:
    body = {"input_ids": [1, 2, 3], "capture_id": "a", "loss_mask": [0, 1, 1], "metadata": {"source": "x"}}
    service.post("/capture", json=body).raise_for_status()
    service.post("/capture/shards").raise_for_status()
    dataset = CaptureDataset(tmp_path / "data" / NAME)
    assert dataset[0]["loss_mask"].tolist() == [0, 1, 1]
    assert dataset.metadata(0) == {"source": "x"}


def test_each_spec_gets_a_dataset_of_its_own(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a")
    spooled(service, spool_dir, "b", spec=OTHER)
    shards = service.post("/capture/shards").json()["shards"]
    assert {shard["dataset"]: shard["layers"] for shard in shards} == {
        NAME: [3, 31, 59],
        f"dataset-{OTHER.digest[:8]}": [2, 30, 58],
    }
    only = service.get("/capture/shards", params={"dataset": NAME}).json()["items"]
    assert [shard["dataset"] for shard in only] == [NAME]


def test_mixed_specs_are_refused_with_their_differences(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a")
    spooled(service, spool_dir, "b", spec=OTHER)
    answer = service.post("/capture/shards", json={"ids": ["a", "b"], "dataset": "mine"})
    document = problem(answer, 409, "mixed-specs")
    assert len(document["differences"]) == 1
    assert document["differences"][0].startswith("layers: ")
    assert states(service) == {"a": "spooled", "b": "spooled"}


def test_another_spec_is_refused_by_a_dataset_that_is_there(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a")
    assert service.post("/capture/shards", json={"dataset": "mine"}).json()["samples"] == 1
    spooled(service, spool_dir, "b", spec=OTHER)
    problem(service.post("/capture/shards", json={"dataset": "mine"}), 409, "mixed-specs")
    assert states(service) == {"a": "packed", "b": "spooled"}


def test_only_the_captures_that_are_named_are_packed(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a", "b")
    assert service.post("/capture/shards", json={"ids": ["b"]}).json()["samples"] == 1
    assert states(service) == {"a": "spooled", "b": "packed"}
    assert service.post("/capture/shards", json={"ids": ["b"]}).json() == {"shards": [], "samples": 0}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"ids": ["nobody"]}, 404, "unknown-capture"),
        ({"ids": ["bad"]}, 409, "no-tensors"),
        ({"ids": ["../x"]}, 422, "invalid-request"),
        ({"dataset": "../x"}, 422, "invalid-request"),
        ({"dataset": "exports"}, 422, "invalid-request"),
        ({"dataset": "catalog.sqlite"}, 422, "invalid-request"),
        ({"typo": 1}, 422, "invalid-request"),
    ],
)
def test_bad_requests_get_a_clear_problem(
    service: httpx.Client, spool_dir: Path, body: dict[str, Any], status: int, kind: str
) -> None:
    put_failure(spool_dir, "bad", "why")
    until(lambda: state(service, "bad") == "failed", "the failure")
    problem(service.post("/capture/shards", json=body), status, kind)


def test_a_dataset_that_cannot_be_written_loses_nothing(service: httpx.Client, spool_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / NAME).write_text("a file where the dataset should be")
    spooled(service, spool_dir, "a")
    problem(service.post("/capture/shards"), 507, "cannot-pack")
    assert state(service, "a") == "spooled"
    assert "sglang_capture_pack_failures_total 1.0" in service.get("/metrics").text
    (tmp_path / "data" / NAME).unlink()
    assert service.post("/capture/shards").json()["samples"] == 1


def test_a_dump_that_is_gone_or_bad_does_not_stop_the_others(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a", "b", "c")
    (spool_dir / "a.pt").unlink()
    (spool_dir / "b.pt").unlink()
    (spool_dir / "b.pt").write_bytes(b"no dump")
    assert service.post("/capture/shards").json()["samples"] == 1
    assert states(service) == {"a": "failed", "b": "failed", "c": "packed"}
    assert [record(service, name)["failure"]["kind"] for name in "ab"] == ["vanished", "unreadable"]


@pytest.mark.parametrize(
    "trigger", [{"pack_age": 0.1}, {"pack_count": 3}, {"shard_size": 3 * 5 * SPEC.bytes_per_token}]
)
def test_age_count_and_size_pack_by_themselves(tmp_path: Path, sglang: StandInServer, trigger: dict[str, Any]) -> None:
    with serving(tmp_path, **trigger) as client:
        for capture_id in ("a", "b", "c"):
            put_dump(sglang.spool, capture_id)
        until(lambda: states(client) == dict.fromkeys("abc", "packed"), "the packing")
        until(lambda: sglang.used() == 0, "the spool being freed")


def test_nothing_is_packed_before_its_time(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a")
    spooled(service, spool_dir, "b")
    assert states(service) == {"a": "spooled", "b": "spooled"}


def test_a_shard_holds_no_more_than_its_size(tmp_path: Path, spool_dir: Path) -> None:
    for number in range(5):
        put_dump(spool_dir, f"c{number}")
    with serving(tmp_path, shard_size=2 * 5 * SPEC.bytes_per_token) as client:
        until(lambda: set(states(client).values()) == {"packed"}, "the packing")
        assert [shard["samples"] for shard in client.get("/capture/shards").json()["items"]] == [1, 2, 2]


def test_a_spool_more_than_half_full_is_emptied(tmp_path: Path, sglang: StandInServer) -> None:
    with serving(tmp_path) as client:
        spooled(client, sglang.spool, "a")
        sglang.quota = sglang.used() + 10
        until(lambda: state(client, "a") == "packed", "the packing")


def test_a_clock_that_was_set_back_does_not_hold_packing_up(
    tmp_path: Path, sglang: StandInServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statuses bear an earlier time than the last pack: that they know of it shows after a while all the same."""
    monkeypatch.setattr(monitor, "STATUS_STALE_SECONDS", 0.5)
    with serving(tmp_path) as client:
        spooled(client, sglang.spool, "a")
        client.post("/capture/shards").raise_for_status()
        monkeypatch.setattr(time, "time", lambda: 1e9)
        spooled(client, sglang.spool, "b")
        sglang.quota = sglang.used() + 10
        until(lambda: state(client, "b") == "packed", "the packing")


def test_a_capture_from_the_future_is_old_enough(tmp_path: Path, spool_dir: Path) -> None:
    put_dump(spool_dir, "a")
    with serving(tmp_path) as client:
        until(lambda: state(client, "a") == "spooled", "the record")
    with create_engine(sqlite_url(tmp_path / "data" / "catalog.sqlite")).begin() as connection:
        connection.execute(text("UPDATE captures SET updated = updated + 3600"))
    with serving(tmp_path) as client:
        until(lambda: state(client, "a") == "packed", "the packing")


def test_a_run_ten_times_larger_than_the_spool_is_never_refused(tmp_path: Path, sglang: StandInServer) -> None:
    """Requests are held back by the free space that the status names, and room is made for them."""
    refused = []

    def strict(server: StandInServer, request: Any) -> int:
        if server.used() + 2 * 20_000 > server.quota:
            refused.append(request.capture_id)
        return publish(server, request)

    sglang.behaviour = strict
    sglang.quota = 120_000
    with serving(tmp_path) as client:
        rows = [{"input_ids": [number], "id": f"c{number}"} for number in range(40)]
        job = client.post("/capture/jobs", json={"rows": rows, "concurrency": 16}).json()["id"]
        until(lambda: client.get(f"/capture/jobs/{job}").json()["state"] == "done", "the end of the job")
        assert client.get(f"/capture/jobs/{job}").json()["captured"] == 40
        client.post("/capture/shards").raise_for_status()
        assert set(states(client).values()) == {"packed"}
    assert refused == []
    assert len(CaptureDataset(tmp_path / "data" / NAME).ids) == 40
    assert torch.equal(CaptureDataset(tmp_path / "data" / NAME)[0]["loss_mask"], torch.ones(1, dtype=torch.uint8))
