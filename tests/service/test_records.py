"""Looking captures up, downloading and forgetting them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from service.checks import nested, problem, same, state, states, tensors
from service.running import serving, until
from service.standin import SPEC, put_dump, put_failure
from sglang_capture.catalog import Catalog, sqlite_url
from sglang_capture.dump import load_dump


def spooled(client: httpx.Client, directory: Path, *ids: str) -> None:
    for capture_id in ids:
        put_dump(directory, capture_id)
    until(lambda: all(state(client, capture_id) == "spooled" for capture_id in ids), "the records")


def test_metadata_too_deep_for_an_answer_are_cut_in_it(tmp_path: Path) -> None:
    """As an earlier version took them. One record must not cost the whole page."""
    (tmp_path / "data").mkdir()
    catalog = Catalog(sqlite_url(tmp_path / "data" / "catalog.sqlite"))
    for name, levels in (("deep", 900), ("flat", 1)):
        catalog.captures.begin(
            name, request_digest="d", sent="", spec=SPEC, loss_mask=None, metadata={"a": nested(levels), "b": 1}
        )
    catalog.close()
    with serving(tmp_path) as client:
        found = {item["id"]: item["metadata"] for item in client.get("/capture").json()["items"]}
        assert found["flat"] == {"a": [], "b": 1}
        assert found["deep"]["b"] == 1
        assert "…" in str(found["deep"])
        assert client.get("/capture/deep").json()["metadata"] == found["deep"]


def test_the_data_are_those_of_the_dump_and_stay_so_in_the_shard(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a", "b")
    dump = load_dump(spool_dir / "b.pt")
    before = tensors(service, "b")
    assert same(before, {"input_ids": dump.input_ids, "hidden_states": dump.hidden_states, **dump.last_hidden})
    service.post("/capture/shards").raise_for_status()
    assert not (spool_dir / "b.pt").exists()
    after = tensors(service, "b")
    assert torch.equal(after.pop("loss_mask"), torch.ones(5, dtype=torch.uint8)), "no mask: every token counts"
    assert same(before, after)


def test_a_page_leads_to_the_next(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a", "b", "c")
    first = service.get("/capture", params={"limit": 2}).json()
    second = service.get("/capture", params={"limit": 2, "cursor": first["next"]}).json()
    assert {item["id"] for item in first["items"] + second["items"]} == {"a", "b", "c"}
    assert second["next"] is None


def test_captures_are_listed_by_state(service: httpx.Client, spool_dir: Path) -> None:
    put_failure(spool_dir, "bad", "why")
    spooled(service, spool_dir, "a")
    until(lambda: state(service, "bad") == "failed", "the failure")
    assert [item["id"] for item in service.get("/capture", params={"state": "failed"}).json()["items"]] == ["bad"]
    assert service.get("/capture", params={"state": "packed"}).json() == {"items": [], "next": None}


@pytest.mark.parametrize("query", [{"state": "lost"}, {"limit": 0}, {"limit": 1001}, {"cursor": "x"}, {"cursor": 0}])
def test_a_bad_query_gets_a_clear_problem(service: httpx.Client, query: dict[str, str]) -> None:
    assert next(iter(query)) in problem(service.get("/capture", params=query), 422, "invalid-request")["detail"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_unknown_capture_is_not_found(service: httpx.Client, method: str) -> None:
    problem(service.request(method, "/capture/nobody"), 404, "unknown-capture")


def test_an_unknown_capture_has_no_data(service: httpx.Client) -> None:
    problem(service.get("/capture/nobody/data"), 404, "unknown-capture")


@pytest.mark.parametrize("name", ["..%2Fx", ".hidden", "x" * 129, "%00"])
def test_a_name_that_is_no_id_never_becomes_a_path(service: httpx.Client, name: str) -> None:
    for path in (f"/capture/{name}", f"/capture/{name}/data"):
        assert service.get(path).status_code in (404, 422)


def test_a_failed_capture_has_no_data(service: httpx.Client, spool_dir: Path) -> None:
    put_failure(spool_dir, "bad", "the reason")
    until(lambda: state(service, "bad") == "failed", "the failure")
    assert "the reason" in problem(service.get("/capture/bad/data"), 409, "no-tensors")["detail"]


def test_forgetting_frees_the_memory(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a", "b")
    assert service.delete("/capture/a").status_code == 204
    assert not (spool_dir / "a.pt").exists()
    assert states(service) == {"b": "spooled"}


def test_forgetting_a_failure_removes_its_file(service: httpx.Client, spool_dir: Path) -> None:
    put_failure(spool_dir, "bad", "why")
    until(lambda: state(service, "bad") == "failed", "the failure")
    assert service.delete("/capture/bad").status_code == 204
    assert states(service) == {}
    assert not list(spool_dir.glob("*.failed.json"))


def test_a_packed_capture_stays(service: httpx.Client, spool_dir: Path) -> None:
    spooled(service, spool_dir, "a")
    service.post("/capture/shards").raise_for_status()
    assert "shard-000000.safetensors" in problem(service.delete("/capture/a"), 409, "already-packed")["detail"]
    assert state(service, "a") == "packed"


def test_routes_that_are_not_there_get_a_problem(service: httpx.Client) -> None:
    problem(service.get("/nowhere"), 404, "not-found")
    problem(service.put("/capture"), 405, "method-not-allowed")
