"""Whatever the service dies over: after the next start nothing is lost, and nothing is there twice."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from service.checks import record, same, state, states, tensors
from service.running import ServiceProcess, serving, until
from service.standin import SPEC, Generate, StandInServer, publish, put_dump
from sglang_capture.shards import CaptureDataset, check_dataset

NAME = f"dataset-{SPEC.digest[:8]}"
IDS = ["a", "b", "c"]

DIE = "import os, signal\ndie = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"

PLACES = {
    "before the shard has its name": "from pathlib import Path\nPath.rename = die\n",
    "before the manifest names the shard": (
        "from sglang_capture.shards import writer\n"
        "write = writer.write_manifest\n"
        "writer.write_manifest = lambda path, manifest: die() if manifest.shards else write(path, manifest)\n"
    ),
    "before the catalog knows of the shard": (
        "from sglang_capture.service.datasets import Datasets\nDatasets.record = die\n"
    ),
    "before the dumps are removed": "from sglang_capture import spool\nspool.remove = die\n",
}


@pytest.mark.parametrize("place", PLACES)
def test_dying_in_mid_pack_loses_and_doubles_nothing(tmp_path: Path, spool_dir: Path, place: str) -> None:
    for capture_id in IDS:
        put_dump(spool_dir, capture_id)
    first = ServiceProcess(tmp_path, DIE + PLACES[place])
    before = {capture_id: tensors(first.client, capture_id) for capture_id in IDS}
    with pytest.raises(httpx.HTTPError):
        first.client.post("/capture/shards")
    first.wait()

    with serving(tmp_path) as client:
        client.post("/capture/shards").raise_for_status()
        assert states(client) == dict.fromkeys(IDS, "packed")
        for capture_id in IDS:
            after = tensors(client, capture_id)
            del after["loss_mask"]
            assert same(before[capture_id], after)
    check_dataset(tmp_path / "data" / NAME, deep=True)
    assert sorted(CaptureDataset(tmp_path / "data" / NAME).ids) == IDS
    assert list(spool_dir.glob("*.pt")) == []


def test_a_job_goes_on_after_kill_9_and_does_nothing_twice(tmp_path: Path, sglang: StandInServer) -> None:
    rows, concurrency = 150, 8

    def slow(server: StandInServer, request: Generate) -> int:
        time.sleep(0.01)
        return publish(server, request)

    sglang.behaviour = slow
    first = ServiceProcess(tmp_path, PACK_COUNT="16")
    body = {
        "rows": [{"id": f"c{number}", "input_ids": [number], "loss_mask": [number % 2]} for number in range(rows)],
        "concurrency": concurrency,
    }
    job = first.client.post("/capture/jobs", json=body).json()["id"]
    until(lambda: first.client.get(f"/capture/jobs/{job}").json()["done"] > rows // 3, "a third of the job")
    first.kill()
    sent_before = len(sglang.sent_ids)
    assert sent_before < rows

    with serving(tmp_path, pack_count=16) as client:
        until(lambda: client.get(f"/capture/jobs/{job}").json()["state"] == "done", "the end of the job")
        found = client.get(f"/capture/jobs/{job}").json()
        assert (found["done"], found["failed"]) == (rows, 0)
        client.post("/capture/shards").raise_for_status()
        assert states(client) == {f"c{number}": "packed" for number in range(rows)}
    assert len(sglang.sent_ids) <= rows + concurrency, "only what was under way is sent again"
    dataset = CaptureDataset(tmp_path / "data" / NAME)
    assert sorted(dataset.ids) == sorted(f"c{number}" for number in range(rows))
    for number in range(rows):
        assert dataset.by_id(f"c{number}")["loss_mask"].tolist() == [number % 2]
    check_dataset(tmp_path / "data" / NAME, deep=True)
    assert not list((tmp_path / "data" / "jobs").iterdir())


def test_a_dump_that_came_while_nobody_ran_keeps_its_loss_mask(tmp_path: Path, sglang: StandInServer) -> None:
    sglang.behaviour = lambda _server, _request: time.sleep(20) or 200  # type: ignore[func-returns-value]
    first = ServiceProcess(tmp_path)
    job = {"rows": [{"id": "a", "input_ids": [1, 2], "loss_mask": [1, 0]}]}
    first.client.post("/capture/jobs", json=job).raise_for_status()
    until(lambda: sglang.sent_ids, "the request")
    first.kill()
    put_dump(sglang.spool, "a", input_ids=[1, 2])
    with serving(tmp_path) as client:
        assert state(client, "a") == "spooled"
        assert tensors(client, "a")["loss_mask"].tolist() == [1, 0]
    assert sglang.sent_ids == ["a"]


def test_what_was_under_way_for_nobody_can_be_asked_for_again(tmp_path: Path, sglang: StandInServer) -> None:
    sglang.behaviour = lambda _server, _request: time.sleep(20) or 200  # type: ignore[func-returns-value]
    first = ServiceProcess(tmp_path)
    with pytest.raises(httpx.HTTPError):
        first.client.post("/capture", json={"input_ids": [1], "capture_id": "a"}, timeout=1.0)
    first.kill()
    sglang.behaviour = publish
    with serving(tmp_path) as client:
        failure = record(client, "a")["failure"]
        assert "the service stopped" in failure["reason"]
        assert failure["retriable"]
        assert client.post("/capture", json={"input_ids": [1], "capture_id": "a"}).json()["state"] == "spooled"


def test_a_lost_catalog_is_made_anew_from_the_datasets(tmp_path: Path, sglang: StandInServer) -> None:
    with serving(tmp_path) as client:
        body = {"input_ids": [1, 2], "capture_id": "a", "metadata": {"source": "x"}}
        client.post("/capture", json=body).raise_for_status()
        client.post("/capture/shards").raise_for_status()
        put_dump(sglang.spool, "b")
        until(lambda: state(client, "b") == "spooled", "the dump")
        before = client.get("/capture/shards").json()["items"]
    for path in (tmp_path / "data").glob("catalog.sqlite*"):
        path.unlink()
    with serving(tmp_path) as client:
        assert states(client) == {"a": "packed", "b": "spooled"}
        assert record(client, "a")["metadata"] == {"source": "x"}
        after = client.get("/capture/shards").json()["items"]
        assert [{**shard, "created": 0} for shard in after] == [{**shard, "created": 0} for shard in before]


def test_captures_of_a_dataset_that_was_removed_can_be_captured_again(tmp_path: Path, sglang: StandInServer) -> None:
    import shutil

    body = {"input_ids": [1, 2], "capture_id": "a"}
    with serving(tmp_path) as client:
        client.post("/capture", json=body).raise_for_status()
        client.post("/capture/shards").raise_for_status()
    shutil.rmtree(tmp_path / "data" / NAME)
    with serving(tmp_path) as client:
        assert record(client, "a")["failure"]["kind"] == "vanished"
        assert client.post("/capture", json=body).json()["state"] == "spooled"
        assert client.post("/capture/shards").json()["samples"] == 1


def test_a_damaged_manifest_is_told_and_costs_no_record(tmp_path: Path, sglang: StandInServer) -> None:
    with serving(tmp_path) as client:
        client.post("/capture", json={"input_ids": [1, 2], "capture_id": "a"}).raise_for_status()
        client.post("/capture/shards").raise_for_status()
    (tmp_path / "data" / NAME / "manifest.json").write_text("{")
    with serving(tmp_path) as client:
        assert any("manifest.json" in line for line in client.get("/health").json()["problems"])
        assert state(client, "a") == "packed"


def test_a_dump_of_a_packed_capture_is_removed_as_a_duplicate(service: httpx.Client, spool_dir: Path) -> None:
    put_dump(spool_dir, "a")
    until(lambda: state(service, "a") == "spooled", "the record")
    service.post("/capture/shards").raise_for_status()
    path = put_dump(spool_dir, "a", 9)
    until(lambda: not path.exists(), "the removal")
    assert record(service, "a")["tokens"] == 5, "the first one stands"


def test_a_dump_of_a_packed_capture_whose_shard_is_missing_is_kept(
    service: httpx.Client, spool_dir: Path, tmp_path: Path
) -> None:
    put_dump(spool_dir, "a")
    until(lambda: state(service, "a") == "spooled", "the record")
    service.post("/capture/shards").raise_for_status()
    (tmp_path / "data" / NAME / "shard-000000.safetensors").unlink()
    path = put_dump(spool_dir, "a")
    put_dump(spool_dir, "b")
    until(lambda: state(service, "b") == "spooled", "the next record")
    assert path.exists()
