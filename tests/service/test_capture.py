"""POST /capture: one capture for one request, a clear problem for everything else, and nothing sent without need."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.checks import nested, problem, record, state, tensors
from service.running import serving, until
from service.standin import SPEC, Generate, StandInServer, dump_of, publish, put_dump, put_failure
from sglang_capture import spool
from sglang_capture.catalog import origin


def capture(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/capture", json=body)


def test_a_capture_is_answered_with_its_record(service: httpx.Client, sglang: StandInServer) -> None:
    answer = capture(service, input_ids=[1, 2, 3], capture_id="a", loss_mask=[0, 1, 1], metadata={"source": "x"})
    assert answer.status_code == 200
    found = answer.json()
    assert found == record(service, "a")
    assert (found["state"], found["tokens"], found["metadata"]) == ("spooled", 3, {"source": "x"})
    assert found["bytes"] == 3 * SPEC.bytes_per_token
    assert found["layers"] == list(SPEC.layers)
    assert tensors(service, "a")["loss_mask"].tolist() == [0, 1, 1]
    assert [request.input_ids for request in sglang.requests] == [[1, 2, 3]]


def test_text_is_sent_as_it_is(service: httpx.Client, sglang: StandInServer) -> None:
    assert capture(service, text="Über dem Fluss").json()["tokens"] == 3
    assert [request.text for request in sglang.requests] == ["Über dem Fluss"]


def test_layers_and_last_hidden_reach_the_server(service: httpx.Client) -> None:
    found = capture(service, input_ids=[1], layers=[58, 2, 30], last_hidden="both").json()
    assert (found["layers"], found["last_hidden"]) == ([2, 30, 58], "both")


def test_the_same_again_is_answered_without_sending(service: httpx.Client, sglang: StandInServer) -> None:
    first = capture(service, input_ids=[1, 2], capture_id="a").json()
    assert capture(service, input_ids=[1, 2], capture_id="a").json() == first
    service.post("/capture/shards").raise_for_status()
    assert capture(service, input_ids=[1, 2], capture_id="a").json()["state"] == "packed"
    assert sglang.sent_ids == ["a"]


def test_without_an_id_the_same_content_is_the_same_capture(service: httpx.Client, sglang: StandInServer) -> None:
    first, again = (capture(service, input_ids=[1, 2]).json() for _ in range(2))
    other = capture(service, input_ids=[1, 2], layers=[2, 30, 58]).json()
    assert first["id"] == again["id"] != other["id"]
    assert sglang.sent_ids == [first["id"], other["id"]]


def test_the_same_at_the_same_time_is_sent_once(service: httpx.Client, sglang: StandInServer) -> None:
    def slow(server: StandInServer, request: Generate) -> int:
        time.sleep(0.3)
        return publish(server, request)

    sglang.behaviour = slow
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: capture(service, input_ids=[1, 2], capture_id="a"), range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert sglang.sent_ids == ["a"]


@pytest.mark.parametrize(
    "other",
    [
        {"input_ids": [1, 3]},
        {"text": "1 2"},
        {"input_ids": [1, 2], "loss_mask": [1, 0]},
        {"input_ids": [1, 2], "layers": [2, 30, 58]},
        {"input_ids": [1, 2], "last_hidden": "pre"},
    ],
)
def test_an_id_belongs_to_one_capture(service: httpx.Client, sglang: StandInServer, other: dict[str, Any]) -> None:
    capture(service, input_ids=[1, 2], capture_id="a").raise_for_status()
    document = problem(capture(service, **other, capture_id="a"), 409, "id-conflict")
    assert "the id a is taken" in document["detail"]
    assert sglang.sent_ids == ["a"]


def test_a_packed_capture_of_another_spec_says_which_is_which_and_what_to_do(service: httpx.Client) -> None:
    capture(service, input_ids=[1, 2], capture_id="a").raise_for_status()
    ask = {"input_ids": [1, 2], "layers": [2, 30, 58], "capture_id": "a"}
    assert "forget the old capture" in problem(capture(service, **ask), 409, "id-conflict")["detail"]
    service.post("/capture/shards").raise_for_status()
    detail = problem(capture(service, **ask), 409, "id-conflict")["detail"]
    assert "(what it has / what is asked for now: layers: (3, 31, 59) / (2, 30, 58))" in detail
    assert "cannot be forgotten" in detail and "another --data directory" in detail


def test_another_request_for_an_id_under_way_is_a_conflict(service: httpx.Client, sglang: StandInServer) -> None:
    go_on = threading.Event()

    def hang(server: StandInServer, request: Generate) -> int:
        go_on.wait(20)
        return publish(server, request)

    sglang.behaviour = hang
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(capture, service, input_ids=[1, 2], capture_id="a")
        until(lambda: sglang.sent_ids, "the first request")
        assert state(service, "a") == "pending"
        problem(capture(service, input_ids=[9], capture_id="a"), 409, "id-conflict")
        problem(service.delete("/capture/a"), 409, "in-flight")
        go_on.set()
        assert first.result().status_code == 200


def test_a_dump_from_elsewhere_is_reused_only_where_its_id_proves_the_content(
    service: httpx.Client, sglang: StandInServer, spool_dir: Path
) -> None:
    own = capture(service, input_ids=[1, 2]).json()["id"]
    service.delete(f"/capture/{own}").raise_for_status()
    for name, ids in ((own, [1, 2]), ("named", [1, 2]), ("other", [1, 3])):
        put_dump(spool_dir, name, input_ids=ids)
        until(lambda name=name: state(service, name) == "spooled", "the record")
    assert capture(service, input_ids=[1, 2]).status_code == 200
    problem(capture(service, input_ids=[1, 2], capture_id="named"), 409, "id-conflict")
    problem(capture(service, input_ids=[1, 2], capture_id="other"), 409, "id-conflict")
    service.delete(f"/capture/{own}").raise_for_status()
    put_dump(spool_dir, own, input_ids=[1, 3])
    until(lambda: state(service, own) == "spooled", "the record")
    problem(capture(service, input_ids=[1, 2]), 409, "id-conflict")
    assert sglang.sent_ids == [own]


def test_the_id_made_from_a_text_leads_only_to_a_capture_of_that_text(
    service: httpx.Client, sglang: StandInServer, spool_dir: Path
) -> None:
    own = capture(service, text="a b").json()["id"]
    for request_id in ("anybody's", origin.new_request_id(origin.of_text("c d"))):
        service.delete(f"/capture/{own}").raise_for_status()
        put_dump(spool_dir, own, tokens=2, request_id=request_id)
        until(lambda: state(service, own) == "spooled", "the record")
        problem(capture(service, text="a b"), 409, "id-conflict")
    service.delete(f"/capture/{own}").raise_for_status()
    put_dump(spool_dir, own, tokens=2, request_id=origin.new_request_id(origin.of_text("a b")))
    until(lambda: state(service, own) == "spooled", "the record")
    assert capture(service, text="a b").headers["Capture-Reused"] == "true"
    assert sglang.sent_ids == [own]


def test_a_failed_capture_may_be_tried_again(service: httpx.Client, sglang: StandInServer, spool_dir: Path) -> None:
    def refuse(server: StandInServer, request: Generate) -> int:
        put_failure(server.spool, request.capture_id, "image inputs are not supported", kind="refused")
        return 200

    sglang.behaviour = refuse
    document = problem(capture(service, input_ids=[1], capture_id="a"), 422, "capture-refused")
    assert "image inputs are not supported" in document["detail"]
    assert record(service, "a")["failure"]["kind"] == "refused"
    sglang.behaviour = publish
    assert capture(service, input_ids=[1], capture_id="a").json()["state"] == "spooled"
    assert not spool.failure_path(spool_dir, "a").exists()


def test_a_capture_that_fails_on_the_way_is_a_bad_gateway(service: httpx.Client, sglang: StandInServer) -> None:
    def fail(server: StandInServer, request: Generate) -> int:
        put_failure(server.spool, request.capture_id, "the request was aborted")
        return 200

    sglang.behaviour = fail
    problem(capture(service, input_ids=[1]), 502, "capture-failed")
    assert len(sglang.requests) == 1


def test_an_unreadable_dump_makes_way_for_a_new_try(service: httpx.Client, spool_dir: Path) -> None:
    (spool_dir / "a.pt").write_bytes(b"no dump")
    until(lambda: state(service, "a") == "failed", "the record")
    assert capture(service, input_ids=[1], capture_id="a").json()["state"] == "spooled"


def test_a_full_spool_is_tried_again(service: httpx.Client, sglang: StandInServer) -> None:
    def refuse_twice(server: StandInServer, request: Generate) -> int:
        if len(server.requests) > 2:
            return publish(server, request)
        put_failure(server.spool, request.capture_id, spool.SPOOL_FULL, kind="refused", retriable=True)
        return 200

    sglang.behaviour = refuse_twice
    assert capture(service, input_ids=[1], capture_id="a").json()["state"] == "spooled"
    assert sglang.sent_ids == ["a"] * 3


def test_a_loss_mask_must_fit_what_the_engine_ran(
    service: httpx.Client, sglang: StandInServer, spool_dir: Path
) -> None:
    def cut(server: StandInServer, request: Generate) -> int:
        put_dump(server.spool, **{**dump_of(request), "input_ids": (request.input_ids or [])[:-1]})
        return 200

    sglang.behaviour = cut
    document = problem(
        capture(service, input_ids=[1, 2, 3], loss_mask=[1, 1, 1], capture_id="a"), 422, "capture-refused"
    )
    assert "loss_mask has 3 entries, and the engine ran 2 tokens" in document["detail"]
    assert record(service, "a")["failure"]["kind"] == "mask"
    assert not (spool_dir / "a.pt").exists()
    document = problem(capture(service, input_ids=[1, 2, 3], capture_id="b"), 422, "capture-refused")
    assert "the engine ran 2 tokens that are not those it was sent" in document["detail"]
    assert not (spool_dir / "b.pt").exists()


def test_a_mark_that_never_arrives_is_found_out(tmp_path: Path, sglang: StandInServer) -> None:
    sglang.behaviour = lambda _server, _request: 200
    with serving(tmp_path, appear_seconds=0.3) as client:
        document = problem(capture(client, input_ids=[1], capture_id="a"), 504, "capture-timeout")
        assert "neither a dump nor a failure of a appeared" in document["detail"]
        assert record(client, "a")["failure"]["kind"] == "timeout"
        put_dump(sglang.spool, "a", input_ids=[1])
        until(lambda: state(client, "a") == "spooled", "the dump that came late")
        assert capture(client, input_ids=[1], capture_id="a").headers["Capture-Reused"] == "true"


def test_what_the_engine_refuses_is_told(service: httpx.Client, sglang: StandInServer) -> None:
    sglang.behaviour = lambda _server, _request: 400
    document = problem(capture(service, input_ids=[1], capture_id="a"), 502, "engine-error")
    assert "answered 400: no" in document["detail"]
    assert state(service, "a") == "failed"


def test_an_engine_that_is_not_there_is_told(tmp_path: Path, sglang: StandInServer) -> None:
    with serving(tmp_path, server="http://127.0.0.1:9") as client:
        document = problem(capture(client, input_ids=[1], capture_id="a"), 502, "engine-unreachable")
        assert "http://127.0.0.1:9" in document["detail"]
        failure = record(client, "a")["failure"]
        assert (failure["kind"], failure["retriable"]) == ("unreachable", True)


def test_without_the_plugin_nothing_is_sent(tmp_path: Path, spool_dir: Path) -> None:
    with serving(tmp_path) as client:
        document = problem(capture(client, input_ids=[1]), 503, "no-plugin")
        assert "SGLANG_PLUGINS=sglang_capture" in document["detail"]


@pytest.mark.parametrize(
    ("status", "what"),
    [
        ({"state": "refused", "problem": "SGLang 9.9 is not supported"}, "SGLang 9.9 is not supported"),
        ({"time": 0.0}, "has stopped writing its status"),
    ],
)
def test_a_plugin_that_does_not_capture_is_told(
    service: httpx.Client, sglang: StandInServer, status: dict[str, Any], what: str
) -> None:
    sglang.status_changes = status
    sglang.write_status()
    assert what in problem(capture(service, input_ids=[1]), 503, "no-plugin")["detail"]
    assert any(what in line for line in service.get("/health").json()["problems"])
    assert sglang.requests == []


def test_what_is_there_is_answered_without_a_server(service: httpx.Client, sglang: StandInServer) -> None:
    capture(service, input_ids=[1, 2], capture_id="a").raise_for_status()
    sglang.status_changes = {"time": 0.0}
    sglang.write_status()
    assert capture(service, input_ids=[1, 2], capture_id="a").status_code == 200
    problem(capture(service, input_ids=[1, 2], capture_id="a", layers=[2, 30, 58]), 409, "id-conflict")


def test_a_capture_larger_than_the_spool_is_refused_at_once(service: httpx.Client, sglang: StandInServer) -> None:
    sglang.quota = 20_000
    sglang.write_status()
    document = problem(capture(service, input_ids=[1] * 100), 413, "too-large")
    assert "SGLANG_CAPTURE_QUOTA" in document["detail"]
    assert sglang.requests == []


def test_a_text_is_not_too_large_by_its_bytes(service: httpx.Client, sglang: StandInServer) -> None:
    """How many tokens it has is not known yet, and they are far fewer."""
    sglang.quota = 100_000
    sglang.write_status()
    assert capture(service, text="longwords" * 1000).json()["tokens"] == 1


def test_a_request_is_held_back_while_there_is_no_room(tmp_path: Path, sglang: StandInServer) -> None:
    sglang.free = 100
    sglang.write_status()
    with serving(tmp_path, hold_seconds=0.5) as client:
        assert "packer" in problem(capture(client, input_ids=[1]), 503, "spool-full")["detail"]
        assert sglang.requests == []
    with serving(tmp_path, hold_seconds=60) as client, ThreadPoolExecutor(1) as pool:
        held = pool.submit(capture, client, input_ids=[1])
        sglang.free = None
        assert held.result().status_code == 200


@pytest.mark.parametrize(
    ("body", "kind", "what"),
    [
        ({}, "invalid-row", "exactly one of"),
        ({"text": "a", "input_ids": [1]}, "invalid-row", "exactly one of"),
        ({"text": ""}, "invalid-row", "not empty"),
        ({"input_ids": []}, "invalid-row", "one or more"),
        ({"input_ids": [-1]}, "invalid-row", "whole numbers"),
        ({"input_ids": [1, 512]}, "invalid-row", "outside the vocabulary of 512"),
        ({"input_ids": [1], "loss_mask": [1, 1]}, "invalid-row", "loss_mask has 2 entries"),
        ({"text": "a", "loss_mask": [1]}, "invalid-row", "loss_mask needs input_ids"),
        ({"text": "a", "capture_id": "jobs"}, "invalid-row", "name of a route"),
        ({"text": "a", "capture_id": f"{spool.PROBE_PREFIX}1"}, "invalid-row", "doctor and verify"),
        ({"text": "a", "metadata": {"a": nested(64)}}, "invalid-row", "inside each other"),
        ({"text": "a", "metadata": {"a": nested(900)}}, "invalid-row", "inside each other"),
        ({"text": "a", "metadata": {"zero_rows": 1}}, "invalid-row", "zero_rows"),
        ({"text": "a", "capture_id": "../x"}, "invalid-request", "capture_id"),
        ({"text": "a", "capture_id": "x" * 129}, "invalid-request", "capture_id"),
        ({"text": "a", "capture_id": "é"}, "invalid-request", "capture_id"),
        ({"text": "a", "layers": [61]}, "invalid-request", "last hidden state"),
        ({"text": "a", "layers": [3, 3]}, "invalid-request", "named once"),
        ({"text": "a", "layers": []}, "invalid-request", "at least one"),
        ({"text": "a", "last_hidden": "maybe"}, "invalid-request", "last_hidden"),
        ({"text": "a", "metadata": [1]}, "invalid-request", "metadata"),
        ({"text": "a", "typo": 1}, "invalid-request", "typo"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no-tokenizer", "tokenizer"),
    ],
)
def test_bad_requests_get_a_clear_problem(
    service: httpx.Client, sglang: StandInServer, body: dict[str, Any], kind: str, what: str
) -> None:
    assert what in problem(capture(service, **body), 422, kind)["detail"]
    assert sglang.requests == []


def test_a_body_that_is_no_json_gets_a_clear_problem(service: httpx.Client) -> None:
    answer = service.post("/capture", content=b"{", headers={"Content-Type": "application/json"})
    problem(answer, 422, "invalid-request")
