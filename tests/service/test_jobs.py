"""Jobs: every row ends as a capture or as an error with its line, at any pace of the server."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.checks import nested, problem, record, states
from service.running import serving, until
from service.standin import Generate, StandInServer, publish, put_failure
from sglang_capture import spool


def start(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/capture/jobs", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def ended(client: httpx.Client, job: str) -> dict[str, Any]:
    """The record of a job once it has ended."""
    url = f"/capture/jobs/{job}"
    until(lambda: client.get(url).json()["state"] != "running", "the end of the job")
    found: dict[str, Any] = client.get(url).json()
    return found


def counts(job: dict[str, Any]) -> dict[str, Any]:
    return {name: job[name] for name in ("state", "rows", "done", "captured", "reused", "failed")}


def test_rows_that_a_service_cannot_keep_cost_their_line_only(service: httpx.Client, sglang: StandInServer) -> None:
    rows = [
        {"id": f"{spool.PROBE_PREFIX}1", "input_ids": [1]},
        {"id": "deep", "input_ids": [1], "metadata": {"a": nested(300)}},
        {"id": "deepest", "input_ids": [1], "metadata": {"a": nested(800)}},
        {"id": "label", "input_ids": [1], "metadata": {"nonfinite_rows": 3}},
        {"id": "good", "input_ids": [1], "metadata": {"a": nested(63)}},
    ]
    answer = service.post(
        "/capture/jobs",
        content=b"\n".join(json.dumps(row).encode() for row in rows),
        headers={"Content-Type": "application/x-ndjson"},
    )
    job = ended(service, answer.json()["id"])
    assert counts(job) == {"state": "done", "rows": 5, "done": 5, "captured": 1, "reused": 0, "failed": 4}
    reasons = [error["reason"] for error in job["errors"]]
    assert "doctor and verify" in reasons[0]
    assert "inside each other" in reasons[1] and "inside each other" in reasons[2]
    assert "nonfinite_rows" in reasons[3]
    assert sglang.sent_ids == ["good"]


def test_bad_rows_cost_their_line_only(service: httpx.Client) -> None:
    lines = [
        b'{"id": "a", "input_ids": [1, 2, 3]}',
        b"not json",
        b"",
        b'{"id": "b", "prompt": "two words"}',
        b'{"id": "c", "input_ids": [1], "text": "both"}',
        b'{"id": "d", "input_ids": [999999]}',
        b'{"id": "a", "input_ids": [4]}',
        b'{"id": "../../x", "input_ids": [5]}',
    ]
    answer = service.post(
        "/capture/jobs",
        content=b"\n".join(lines),
        headers={"Content-Type": "application/x-ndjson"},
        params={"layers": "2,30,58", "last_hidden": "none", "concurrency": 2},
    )
    assert answer.json()["options"] == {
        "layers": [2, 30, 58],
        "last_hidden": "none",
        "concurrency": 2,
        "max_length": None,
        "only_last_turn": False,
        "generate": None,
    }
    job = ended(service, answer.json()["id"])
    assert counts(job) == {"state": "done", "rows": 7, "done": 7, "captured": 3, "reused": 0, "failed": 4}
    assert {error["line"]: error["capture_id"] for error in job["errors"]} == {2: None, 5: None, 6: "d", 7: None}
    reasons = {error["line"]: error["reason"] for error in job["errors"]}
    assert "no JSON" in reasons[2]
    assert "vocabulary" in reasons[6]
    assert record(service, "a")["layers"] == [2, 30, 58]
    made = [capture_id for capture_id in states(service) if capture_id.startswith("x-")]
    assert record(service, made[0])["metadata"] == {"id": "../../x"}
    assert [
        error["line"] for error in service.get(f"/capture/jobs/{job['id']}", params={"after": 5}).json()["errors"]
    ] == [6, 7]


def test_a_job_on_a_file_survives_the_file(service: httpx.Client, sglang: StandInServer, tmp_path: Path) -> None:
    go_on = threading.Event()

    def wait(server: StandInServer, request: Generate) -> int:
        go_on.wait(20)
        return publish(server, request)

    sglang.behaviour = wait
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"input_ids": [number]}) + "\n" for number in range(100)))
    job = start(service, path=str(file), concurrency=2)
    file.unlink()
    go_on.set()
    found = ended(service, job)
    assert counts(found) == {"state": "done", "rows": 100, "done": 100, "captured": 100, "reused": 0, "failed": 0}
    assert (found["source"], found["tokens"]) == (str(file), 100)


def test_a_job_run_again_reuses_everything(service: httpx.Client, sglang: StandInServer) -> None:
    rows = [{"input_ids": [number]} for number in range(5)]
    assert ended(service, start(service, rows=rows))["captured"] == 5
    again = ended(service, start(service, rows=rows))
    assert (again["captured"], again["reused"], again["tokens"]) == (0, 5, 5)
    assert len(sglang.requests) == 5


def test_no_more_than_asked_for_are_in_flight(service: httpx.Client, sglang: StandInServer) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def count(server: StandInServer, request: Generate) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.02)
        with lock:
            running -= 1
        return publish(server, request)

    sglang.behaviour = count
    ended(service, start(service, rows=[{"input_ids": [number]} for number in range(20)], concurrency=3))
    assert most == 3


def test_what_can_be_retried_is_and_the_rest_is_an_error(service: httpx.Client, sglang: StandInServer) -> None:
    seen: set[str] = set()

    def moody(server: StandInServer, request: Generate) -> int:
        if request.capture_id == "never":
            put_failure(server.spool, "never", "unsupported", kind="refused")
        elif request.capture_id in seen:
            return publish(server, request)
        else:
            seen.add(request.capture_id)
            put_failure(server.spool, request.capture_id, spool.SPOOL_FULL, kind="refused", retriable=True)
        return 200

    sglang.behaviour = moody
    job = ended(service, start(service, rows=[{"id": name, "input_ids": [1]} for name in ("a", "never")]))
    assert (job["captured"], job["failed"]) == (1, 1)
    assert job["errors"][0]["capture_id"] == "never"
    assert "unsupported" in job["errors"][0]["reason"]


def test_a_job_waits_while_the_server_is_away(service: httpx.Client, sglang: StandInServer) -> None:
    go_on = threading.Event()

    def wait(server: StandInServer, request: Generate) -> int:
        go_on.wait(20)
        return publish(server, request)

    sglang.behaviour = wait
    job = start(service, rows=[{"input_ids": [number]} for number in range(4)], concurrency=1)
    until(lambda: sglang.sent_ids, "the first request")
    sglang.status_changes = {"state": "refused", "problem": "no hooks"}
    sglang.write_status()
    go_on.set()
    until(lambda: "no hooks" in service.get(f"/capture/jobs/{job}").json()["waiting"], "the waiting")
    sglang.status_changes = {}
    sglang.write_status()
    assert counts(ended(service, job))["captured"] == 4


def test_a_cancelled_job_keeps_what_it_captured(service: httpx.Client, sglang: StandInServer, tmp_path: Path) -> None:
    def hang_on_third(server: StandInServer, request: Generate) -> int:
        if request.capture_id == "c2":
            threading.Event().wait(1)
        return publish(server, request)

    sglang.behaviour = hang_on_third
    job = start(service, rows=[{"id": f"c{n}", "input_ids": [n]} for n in range(9)], concurrency=1)
    until(lambda: "c2" in sglang.sent_ids, "the third row")
    answer = service.delete(f"/capture/jobs/{job}")
    assert answer.json()["state"] == "cancelled"
    assert answer.json()["captured"] == 2
    assert service.delete(f"/capture/jobs/{job}").json()["state"] == "cancelled"
    assert not list((tmp_path / "data" / "jobs").iterdir())
    until(lambda: states(service) == dict.fromkeys(["c0", "c1", "c2"], "spooled"), "what was under way")
    assert sglang.sent_ids == ["c0", "c1", "c2"]


def test_a_job_that_no_row_of_can_be_captured_fails_as_a_whole(service: httpx.Client) -> None:
    job = ended(service, start(service, rows=[{"messages": [{"role": "user", "content": "hi"}]}] * 3))
    assert job["state"] == "failed"
    assert "tokenizer" in job["problem"]


def test_events_tell_the_progress_and_the_end(service: httpx.Client) -> None:
    job = start(service, rows=[{"input_ids": [number]} for number in range(5)] + [{"nothing": 1}])
    events: list[tuple[str, dict[str, Any]]] = []
    with service.stream("GET", f"/capture/jobs/{job}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                events.append((name, json.loads(line.removeprefix("data: "))))
    names = [name for name, _ in events]
    assert names == ["progress"] * (len(names) - 1) + ["end"]
    assert events[-1][1]["state"] == "done"
    assert [error["line"] for error in events[-1][1]["errors"]] == [6]
    done = [record["done"] for _, record in events]
    assert done == sorted(done)


def test_jobs_are_listed_from_the_newest_on(service: httpx.Client) -> None:
    jobs = [start(service, rows=[{"input_ids": [1]}]) for _ in range(3)]
    first = service.get("/capture/jobs", params={"limit": 2}).json()
    second = service.get("/capture/jobs", params={"limit": 2, "cursor": first["next"]}).json()
    assert [job["id"] for job in first["items"] + second["items"]] == jobs[::-1]


@pytest.mark.parametrize(
    ("request_", "status", "kind"),
    [
        ({"json": {}}, 422, "invalid-request"),
        ({"json": {"rows": []}}, 422, "invalid-request"),
        ({"json": {"rows": [{"text": "a"}], "path": "/x"}}, 422, "invalid-request"),
        ({"json": {"rows": [{"text": "a"}], "layers": [61]}}, 422, "invalid-request"),
        ({"json": {"rows": [{"text": "a"}], "concurrency": 0}}, 422, "invalid-request"),
        ({"json": {"rows": [{"text": "a"}], "typo": 1}}, 422, "invalid-request"),
        ({"json": {"path": "relative.jsonl"}}, 422, "invalid-request"),
        ({"json": {"path": "/nowhere.jsonl"}}, 422, "invalid-request"),
        ({"json": {"path": "/" + "x" * 5000}}, 422, "invalid-request"),
        ({"json": {"path": "/dev/zero"}}, 422, "invalid-request"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 422, "invalid-request"),
        ({"content": b"\n\n", "headers": {"Content-Type": "application/x-ndjson"}}, 422, "invalid-request"),
        ({"content": b"a=b", "headers": {"Content-Type": "text/plain"}}, 415, "unsupported-media-type"),
    ],
)
def test_bad_requests_get_a_clear_problem(
    service: httpx.Client, tmp_path: Path, request_: dict[str, Any], status: int, kind: str
) -> None:
    problem(service.post("/capture/jobs", **request_), status, kind)
    assert service.get("/capture/jobs").json()["items"] == []
    assert not list((tmp_path / "data" / "jobs").iterdir())


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("DELETE", ""), ("GET", "/events")])
def test_an_unknown_job_is_not_found(service: httpx.Client, method: str, path: str) -> None:
    problem(service.request(method, f"/capture/jobs/job-nobody{path}"), 404, "unknown-job")


def test_without_the_plugin_no_job_starts(tmp_path: Path, spool_dir: Path) -> None:
    with serving(tmp_path) as client:
        problem(client.post("/capture/jobs", json={"rows": [{"text": "a"}]}), 503, "no-plugin")
