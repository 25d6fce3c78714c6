"""Whose rows stand under an id: never those of one request beside the loss mask and the metadata of another."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from factories import make_spec

from service.checks import problem, record, state, tensors
from service.running import ServiceProcess, serving, until
from service.standin import SPEC, Behaviour, Generate, StandInServer, publish, put_dump, put_failure
from sglang_capture import spool
from sglang_capture.shards import CaptureDataset

ASK: dict[str, Any] = {"input_ids": [1, 2, 3], "capture_id": "a", "loss_mask": [0, 0, 1], "metadata": {"of": "me"}}
OTHERS = [7, 8, 9]


def first(**dump: Any) -> Behaviour:
    """The engine takes another client's request of the same id before this one."""

    def both(server: StandInServer, request: Generate) -> int:
        put_dump(server.spool, request.capture_id, **dump)
        return publish(server, request)

    return both


@pytest.mark.parametrize(
    ("ask", "dump"),
    [
        pytest.param(ASK, {"input_ids": OTHERS}, id="other ids"),
        pytest.param(ASK, {"input_ids": [1, 2, 3], "spec": make_spec(layers=(2, 30, 58))}, id="other layers"),
        pytest.param(ASK, {"input_ids": [1, 2, 3], "spec": make_spec(last_hidden="pre")}, id="another last hidden"),
        pytest.param({"text": "a b c", "capture_id": "a", "metadata": {"of": "me"}}, {"tokens": 3}, id="text"),
        pytest.param({"text": "a b c", "capture_id": "a", "last_hidden": "both"}, {"tokens": 3}, id="text and more"),
    ],
)
def test_a_direct_clients_capture_of_the_same_id_stays_its_own(
    tmp_path: Path, service: httpx.Client, sglang: StandInServer, ask: dict[str, Any], dump: dict[str, Any]
) -> None:
    sglang.behaviour = first(**dump)
    document = problem(service.post("/capture", json=ask), 409, "id-conflict")
    assert "the id a is taken" in document["detail"]
    problem(service.post("/capture", json=ask), 409, "id-conflict")
    found, spec = record(service, "a"), dump.get("spec", SPEC)
    assert (found["state"], found["metadata"]) == ("spooled", {})
    assert (found["layers"], found["last_hidden"]) == (list(spec.layers), spec.last_hidden)
    theirs = tensors(service, "a")
    assert "loss_mask" not in theirs
    if "input_ids" in dump:
        assert theirs["input_ids"].tolist() == dump["input_ids"]
    shard = service.post("/capture/shards").json()["shards"][0]
    sample = CaptureDataset(tmp_path / "data" / shard["dataset"]).by_id("a")
    assert sample["loss_mask"].tolist() == [1, 1, 1]
    assert len(sglang.sent_ids) == 1


def test_the_same_rows_are_the_same_capture_whoever_asked(service: httpx.Client, sglang: StandInServer) -> None:
    sglang.behaviour = first(input_ids=[1, 2, 3])
    service.post("/capture", json=ASK).raise_for_status()
    assert tensors(service, "a")["loss_mask"].tolist() == [0, 0, 1]
    assert record(service, "a")["metadata"] == {"of": "me"}


def under_way_when_killed(tmp_path: Path, sglang: StandInServer, ask: dict[str, Any]) -> Generate:
    """A request that the engine still has while the service that sent it is dead."""
    sglang.behaviour = lambda _server, _request: time.sleep(20) or 200  # type: ignore[func-returns-value]
    service = ServiceProcess(tmp_path)
    with pytest.raises(httpx.HTTPError):
        service.client.post("/capture", json=ask, timeout=1.0)
    service.kill()
    return sglang.requests[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ASK, {**ASK, "input_ids": OTHERS, "loss_mask": [1, 1, 0]}),
        ({"text": "a b", "capture_id": "a"}, {"text": "c d", "capture_id": "a"}),
    ],
)
def test_after_kill_9_other_content_gets_no_rows_of_what_was_under_way(
    tmp_path: Path, sglang: StandInServer, one: dict[str, Any], other: dict[str, Any]
) -> None:
    old = under_way_when_killed(tmp_path, sglang, one)
    sglang.behaviour = behind(old)
    with serving(tmp_path) as client:
        problem(client.post("/capture", json=other), 409, "id-conflict")
        assert "loss_mask" not in tensors(client, "a")
        assert record(client, "a")["metadata"] == {}
        assert record(client, "a")["tokens"] == old.tokens
        client.delete("/capture/a").raise_for_status()
        sglang.behaviour = publish
        assert client.post("/capture", json=other).json()["state"] == "spooled"


@pytest.mark.parametrize("ask", [ASK, {"text": "a b", "capture_id": "a", "metadata": {"of": "me"}}])
def test_after_kill_9_what_was_under_way_is_taken_for_the_same_content(
    tmp_path: Path, sglang: StandInServer, ask: dict[str, Any]
) -> None:
    old = under_way_when_killed(tmp_path, sglang, ask)
    sglang.behaviour = behind(old)
    with serving(tmp_path) as client:
        client.post("/capture", json=ask).raise_for_status()
        assert record(client, "a")["metadata"] == {"of": "me"}
        assert ("loss_mask" in tensors(client, "a")) == ("loss_mask" in ask)
    assert old.request_id != sglang.requests[1].request_id, "the engine refuses an id that it has already"


def behind(old: Generate) -> Behaviour:
    """The engine comes to an earlier request first."""

    def both(server: StandInServer, request: Generate) -> int:
        publish(server, old)
        return publish(server, request)

    return both


def test_after_a_timeout_other_content_gets_no_rows_of_the_first(tmp_path: Path, sglang: StandInServer) -> None:
    sglang.behaviour = lambda _server, _request: 200
    with serving(tmp_path, appear_seconds=0.3) as client:
        problem(client.post("/capture", json=ASK), 504, "capture-timeout")
        sglang.behaviour = behind(sglang.requests[0])
        problem(client.post("/capture", json={**ASK, "input_ids": OTHERS}), 409, "id-conflict")
        assert tensors(client, "a")["input_ids"].tolist() == [1, 2, 3]


def fails(of: int) -> Behaviour:
    """The engine reports that request number ``of`` failed, and answers."""

    def fail(server: StandInServer, _request: Generate) -> int:
        put_failure(server.spool, "a", "aborted", request_id=server.requests[of].request_id or "")
        return 200

    return fail


def test_a_late_failure_of_an_earlier_request_does_not_end_the_one_that_is_under_way(
    service: httpx.Client, sglang: StandInServer
) -> None:
    sglang.behaviour = fails(0)
    assert "aborted" in problem(service.post("/capture", json=ASK), 502, "capture-failed")["detail"]
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(service.post, "/capture", json=ASK)
        until(lambda: len(sglang.requests) == 2, "the second request")
        until(lambda: spool.failure_path(sglang.spool, "a").exists(), "the failure of the first")
        for look in ("one", "two", "three"):
            put_failure(sglang.spool, look, "tells that the spool was looked at since")
            until(lambda look=look: service.get(f"/capture/{look}").status_code == 200, "the look")
        publish(sglang, sglang.requests[1])
        second.result().raise_for_status()
    assert record(service, "a")["metadata"] == {"of": "me"}


def test_a_dump_from_elsewhere_does_not_mend_the_failure_of_another_request(
    tmp_path: Path, sglang: StandInServer
) -> None:
    sglang.behaviour = lambda _server, _request: 200
    with serving(tmp_path, appear_seconds=0.3) as client:
        problem(client.post("/capture", json=ASK), 504, "capture-timeout")
        put_dump(sglang.spool, "a", input_ids=OTHERS)
        until(lambda: state(client, "a") == "spooled", "the dump that came late")
        assert record(client, "a")["metadata"] == {}
        assert "loss_mask" not in tensors(client, "a")
        problem(client.post("/capture", json=ASK), 409, "id-conflict")
