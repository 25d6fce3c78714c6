"""Exports through the service: the command's own, and only where clients may write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.checks import problem


@pytest.fixture
def dataset(service: httpx.Client) -> str:
    for number in range(2):
        body = {"input_ids": [number, 1], "capture_id": f"c{number}"}
        service.post("/capture", json=body).raise_for_status()
    return str(service.post("/capture/shards").json()["shards"][0]["dataset"])


def test_a_dataset_is_exported_below_the_data_directory(service: httpx.Client, dataset: str, tmp_path: Path) -> None:
    summary = service.post("/capture/export", json={"dataset": dataset, "to": "specforge"}).json()
    out = tmp_path / "data" / "exports" / f"{dataset}-specforge"
    assert (summary["samples"], summary["written"], summary["out"]) == (2, 2, str(out))
    assert any(path.is_file() for path in out.rglob("*"))
    again = service.post("/capture/export", json={"dataset": dataset, "to": "specforge"}).json()
    assert (again["samples"], again["written"]) == (2, 0)


def test_only_the_samples_that_are_named_are_exported(service: httpx.Client, dataset: str) -> None:
    body = {"dataset": dataset, "to": "specforge", "out": "some/of/them", "ids": ["c1"]}
    assert service.post("/capture/export", json=body).json()["samples"] == 1


def test_the_options_are_those_of_the_command(service: httpx.Client, dataset: str, tmp_path: Path) -> None:
    service.post("/capture/export", json={"dataset": dataset, "to": "specforge", "seq_length": 2}).raise_for_status()
    lineage = json.loads((tmp_path / f"data/exports/{dataset}-specforge/sglang_capture_export.json").read_text())
    assert lineage["options"] == {"model": None, "draft_vocab_size": None, "seq_length": 2, "fp8": False}


def test_on_loopback_any_folder_may_be_named(service: httpx.Client, dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    body = {"dataset": dataset, "to": "specforge", "out": str(out)}
    assert service.post("/capture/export", json=body).json()["out"] == str(out)


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"out": "../outside"}, 403, "path-not-allowed"),
        ({"out": "a/../../outside"}, 403, "path-not-allowed"),
        ({"out": "a\0b"}, 422, "invalid-request"),
        ({"model": "/a\0b"}, 422, "invalid-request"),
        ({"out": "/a\ud800b"}, 422, "invalid-request"),
        ({"out": "x" * 300}, 422, "export-refused"),
        ({"dataset": "dataset-nobody"}, 404, "unknown-dataset"),
        ({"dataset": "exports"}, 422, "invalid-request"),
        ({"dataset": ".."}, 422, "invalid-request"),
        ({"to": "nonsense"}, 422, "export-refused"),
        ({"ids": ["nobody"]}, 422, "export-refused"),
        ({"fp8": True}, 422, "export-refused"),
        ({"seq_length": 1}, 422, "invalid-request"),
        ({"typo": 1}, 422, "invalid-request"),
    ],
)
def test_bad_requests_get_a_clear_problem(
    service: httpx.Client, dataset: str, tmp_path: Path, change: dict[str, Any], status: int, kind: str
) -> None:
    body = json.dumps({"dataset": dataset, "to": "specforge", **change})
    answer = service.post("/capture/export", content=body, headers={"Content-Type": "application/json"})
    problem(answer, status, kind)
    assert not (tmp_path / "outside").exists()


def test_a_link_does_not_lead_out_of_the_folder(service: httpx.Client, dataset: str, tmp_path: Path) -> None:
    (tmp_path / "data" / "exports" / "link").symlink_to(tmp_path)
    body = {"dataset": dataset, "to": "specforge", "out": "link/outside"}
    problem(service.post("/capture/export", json=body), 403, "path-not-allowed")
    assert not (tmp_path / "outside").exists()
