"""A dump that was exchanged for another of the same id after it was recorded, live or while no service ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from factories import make_spec

from service.checks import problem, record, state, states, tensors
from service.running import serving, until
from service.standin import SPEC, StandInServer, publish, put_dump
from sglang_capture import spool
from sglang_capture.shards import CaptureDataset

ASK: dict[str, Any] = {"input_ids": [1, 2, 3], "capture_id": "a", "loss_mask": [0, 0, 1], "metadata": {"of": "A"}}
INNOCENT: dict[str, Any] = {"input_ids": [4, 5], "capture_id": "b", "loss_mask": [1, 0], "metadata": {"of": "b"}}
OTHERS = [7, 8, 9]
OTHER = make_spec(layers=(2, 30, 58))


def swap(directory: Path, **dump: Any) -> None:
    """What a person does who removes the dump and captures the id again; no scan comes in between."""
    put_dump(directory.parent, "a", **dump).replace(spool.dump_path(directory, "a"))


def both(service: httpx.Client) -> None:
    for ask in (ASK, INNOCENT):
        service.post("/capture", json=ask).raise_for_status()


def samples(data: Path) -> dict[str, tuple[str, dict[str, torch.Tensor], Any]]:
    """Everything packed: id to dataset, tensors and metadata."""
    found = {}
    for manifest in data.glob("*/manifest.json"):
        dataset = CaptureDataset(manifest.parent)
        for number, name in enumerate(dataset.ids):
            found[name] = (manifest.parent.name, dataset[number], dataset.metadata(number))
    return found


def check_packed(data: Path, *, ids: list[int], spec: Any = SPEC) -> None:
    """``a`` is the other dump with nothing of the first one; ``b`` has its own mask and metadata."""
    packed = samples(data)
    dataset, sample, metadata = packed["a"]
    assert dataset == f"dataset-{spec.digest[:8]}"
    assert sample["input_ids"].tolist() == ids
    assert sample["hidden_states"].shape[1] == len(spec.layers)
    assert sample["loss_mask"].tolist() == [1] * len(ids)
    assert metadata == {}
    dataset, sample, metadata = packed["b"]
    assert dataset == f"dataset-{SPEC.digest[:8]}"
    assert (sample["loss_mask"].tolist(), metadata) == ([1, 0], {"of": "b"})


DUMPS = [
    pytest.param({"input_ids": OTHERS}, id="as long"),
    pytest.param({"input_ids": [7, 8]}, id="shorter"),
    pytest.param({"input_ids": OTHERS, "spec": OTHER}, id="other prompt and layers"),
    pytest.param({"input_ids": [1, 2, 3], "spec": OTHER}, id="other layers"),
    pytest.param({"input_ids": [1, 2, 3], "spec": make_spec(last_hidden="both")}, id="more last hidden states"),
]


@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("dataset_is_there", [False, True])
def test_another_dump_is_packed_as_what_it_is(
    tmp_path: Path, service: httpx.Client, spool_dir: Path, dump: dict[str, Any], dataset_is_there: bool
) -> None:
    if dataset_is_there:
        service.post("/capture", json={"input_ids": [6], "capture_id": "first"}).raise_for_status()
        service.post("/capture/shards").raise_for_status()
    both(service)
    swap(spool_dir, **dump)
    service.post("/capture/shards").raise_for_status()
    service.post("/capture/shards").raise_for_status()
    assert {state(service, name) for name in "ab"} == {"packed"}
    check_packed(tmp_path / "data", ids=dump["input_ids"], spec=dump.get("spec", SPEC))
    assert record(service, "a")["metadata"] == {}


@pytest.mark.parametrize("dump", DUMPS)
def test_what_was_exchanged_while_no_service_ran_is_packed_as_what_it_is(
    tmp_path: Path, sglang: StandInServer, dump: dict[str, Any]
) -> None:
    with serving(tmp_path) as client:
        both(client)
    swap(sglang.spool, **dump)
    with serving(tmp_path, pack_age=0.0) as client:
        until(lambda: set(states(client).values()) == {"packed"}, "both in shards")
        assert client.get("/health").json()["problems"] == []
    check_packed(tmp_path / "data", ids=dump["input_ids"], spec=dump.get("spec", SPEC))


def test_another_dump_of_a_text_is_no_more_that_texts(tmp_path: Path, service: httpx.Client, spool_dir: Path) -> None:
    service.post("/capture", json=INNOCENT).raise_for_status()
    service.post("/capture", json={"text": "a b c", "capture_id": "a", "metadata": {"of": "A"}}).raise_for_status()
    swap(spool_dir, input_ids=OTHERS)
    service.post("/capture/shards").raise_for_status()
    check_packed(tmp_path / "data", ids=OTHERS)


def test_the_same_rows_again_keep_their_mask(tmp_path: Path, service: httpx.Client, spool_dir: Path) -> None:
    both(service)
    swap(spool_dir, input_ids=[1, 2, 3])
    service.post("/capture/shards").raise_for_status()
    _, sample, metadata = samples(tmp_path / "data")["a"]
    assert (sample["loss_mask"].tolist(), metadata) == ([0, 0, 1], {"of": "A"})


@pytest.mark.parametrize(("ran", "kind"), [([1, 2], "mask"), (OTHERS, "refused")])
def test_a_dump_of_the_same_request_that_was_run_otherwise_is_refused(
    tmp_path: Path, service: httpx.Client, sglang: StandInServer, ran: list[int], kind: str
) -> None:
    """As the indexer refuses it when it comes first."""
    both(service)
    swap(sglang.spool, input_ids=ran, request_id=sglang.requests[0].request_id)
    service.post("/capture/shards").raise_for_status()
    assert record(service, "a")["failure"]["kind"] == kind
    assert set(samples(tmp_path / "data")) == {"b"}
    until(lambda: not spool.dump_path(sglang.spool, "a").exists(), "the removal of what was refused")


def test_a_renamed_dump_is_no_sample_of_another_id(tmp_path: Path, service: httpx.Client, spool_dir: Path) -> None:
    both(service)
    renamed = put_dump(spool_dir.parent, "c", input_ids=[1, 2, 3])
    renamed.replace(spool.dump_path(spool_dir, "a"))
    service.post("/capture/shards").raise_for_status()
    assert "was it renamed?" in record(service, "a")["failure"]["reason"]
    assert set(samples(tmp_path / "data")) == {"b"}


@pytest.mark.parametrize("dump", DUMPS)
def test_another_dump_is_never_read_beside_the_mask(
    service: httpx.Client, spool_dir: Path, dump: dict[str, Any]
) -> None:
    service.post("/capture", json=ASK).raise_for_status()
    swap(spool_dir, **dump)
    document = problem(service.get("/capture/a/data"), 409, "no-tensors")
    assert "was replaced by another" in document["detail"]
    found = tensors(service, "a")
    assert found["input_ids"].tolist() == dump["input_ids"]
    assert "loss_mask" not in found
    assert (record(service, "a")["state"], record(service, "a")["metadata"]) == ("spooled", {})
    problem(service.post("/capture", json=ASK), 409, "id-conflict")


def test_a_client_may_have_the_id_back(service: httpx.Client, sglang: StandInServer) -> None:
    service.post("/capture", json=ASK).raise_for_status()
    swap(sglang.spool, input_ids=OTHERS)
    problem(service.get("/capture/a/data"), 409, "no-tensors")
    service.delete("/capture/a").raise_for_status()
    sglang.behaviour = publish
    service.post("/capture", json=ASK).raise_for_status()
    assert tensors(service, "a")["loss_mask"].tolist() == [0, 0, 1]
