"""Who is let in: with a key its holders, on loopback who calls the service by its name."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from service.checks import problem
from service.running import serving
from service.standin import StandInServer

KEY = "correct horse"

ROUTES = [
    ("POST", "/capture"),
    ("GET", "/capture"),
    ("GET", "/capture/a"),
    ("GET", "/capture/a/data"),
    ("DELETE", "/capture/a"),
    ("POST", "/capture/jobs"),
    ("GET", "/capture/jobs"),
    ("GET", "/capture/jobs/x"),
    ("GET", "/capture/jobs/x/events"),
    ("DELETE", "/capture/jobs/x"),
    ("POST", "/capture/shards"),
    ("GET", "/capture/shards"),
    ("POST", "/capture/export"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/nowhere"),
]


def test_every_route_but_health_wants_the_key(tmp_path: Path, sglang: StandInServer) -> None:
    with serving(tmp_path, api_key=KEY) as client:
        for method, path in ROUTES:
            answer = client.request(method, path)
            problem(answer, 401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == 200
        for wrong in ("Bearer wrong", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer é"):
            answer = client.get("/capture", headers=[(b"authorization", wrong.encode())])
            problem(answer, 401, "unauthorized")
        assert client.get("/capture", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_the_list_of_routes_is_whole(service: httpx.Client) -> None:
    described = service.get("/openapi.json").json()["paths"]
    routes = {(method.upper(), path) for path, methods in described.items() for method in methods}
    tried = {(method, path.replace("/x", "/{job_id}").replace("/a", "/{capture_id}", 1)) for method, path in ROUTES}
    assert {(method, path) for method, path in routes if path != "/health"} <= tried


@pytest.mark.parametrize("host", ["evil.example", "evil.example:30080", "127.0.0.1.evil.example", "[::2]:1"])
def test_a_page_that_calls_loopback_by_another_name_is_refused(service: httpx.Client, host: str) -> None:
    problem(service.get("/health", headers={"Host": host}), 403, "host-not-allowed")


@pytest.mark.parametrize("host", ["localhost", "localhost:30080", "127.0.0.1:1", "[::1]:30080"])
def test_loopback_has_its_usual_names(service: httpx.Client, host: str) -> None:
    assert service.get("/health", headers={"Host": host}).status_code == 200


def test_off_loopback_clients_name_no_files(tmp_path: Path, sglang: StandInServer) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a"}\n')
    with serving(tmp_path, host="0.0.0.0") as client:
        client.post("/capture", json={"input_ids": [1]}).raise_for_status()
        dataset = client.post("/capture/shards").json()["shards"][0]["dataset"]
        problem(client.post("/capture/jobs", json={"path": str(file)}), 403, "path-not-allowed")
        body = {"dataset": dataset, "to": "specforge", "out": str(tmp_path / "out")}
        problem(client.post("/capture/export", json=body), 403, "path-not-allowed")
        body = {"dataset": dataset, "to": "specforge", "model": str(tmp_path)}
        problem(client.post("/capture/export", json=body), 403, "path-not-allowed")
        assert client.get("/health", headers={"Host": "gpu-17.example"}).status_code == 200
