"""Answers that the target writes first: written once, captured as written. (The real engine: tests/engine.)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load

from service.checks import problem
from service.running import serving, until
from service.standin import StandInServer, written
from service.test_jobs import counts, ended, start
from sglang_capture.prompts import ChatTokenizer
from sglang_capture.service.problems import KINDS
from sglang_capture.tiny_tokenizer import EOS, write_tokenizer

pytest.importorskip("transformers")

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "an older answer"},
    {"role": "user", "content": "more?"},
    {"role": "assistant", "content": "another"},
]
GREEDY = {"max_new_tokens": 8, "temperature": 0}


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory, max_length=4096)
    return ChatTokenizer(directory)


@pytest.fixture
def service(tmp_path: Path, sglang: StandInServer, tokenizer: ChatTokenizer) -> Iterator[httpx.Client]:
    with serving(tmp_path, tokenizer=tokenizer.path, hold_seconds=0.2) as client:
        until(lambda: client.get("/health").json()["plugin"], "the plugin's status")
        yield client


def refused(response: httpx.Response, kind: str) -> None:
    problem(response, KINDS[kind].status, kind)


def mask_of(service: httpx.Client, capture_id: str) -> list[int]:
    mask: list[int] = load(service.get(f"/capture/{capture_id}/data").content)["loss_mask"].tolist()
    return mask


def test_the_answer_behind_ids_is_captured_with_them(service: httpx.Client, sglang: StandInServer) -> None:
    body = {"input_ids": [5, 6], "capture_id": "a", "generate": GREEDY, "metadata": {"k": 1}}
    answer = service.post("/capture", json=body)
    assert answer.status_code == 200, answer.text
    assert sglang.prompts == [([5, 6], GREEDY)]
    assert [(request.capture_id, request.input_ids) for request in sglang.requests] == [("a", [5, 6, 7, 1])]
    assert mask_of(service, "a") == [0, 0, 1, 1]
    assert answer.json()["metadata"] == {
        "k": 1,
        "generation": {"finish_reason": "stop", "answers": 1, "max_new_tokens": 8, "temperature": 0.0},
    }


def test_each_answer_of_a_conversation_is_written_behind_the_ones_before(
    service: httpx.Client, sglang: StandInServer, tokenizer: ChatTokenizer
) -> None:
    answers = iter([[*tokenizer.encode("so be it"), EOS], [*tokenizer.encode("no"), EOS]])
    sglang.write = lambda _ids: written(next(answers))
    record = service.post("/capture", json={"messages": CHAT, "generate": GREEDY}).json()
    first, second = (tokenizer.decode(ids) for ids, _ in sglang.prompts)
    assert first == "<|bos|><|user|>hi<|assistant|>"
    assert second == "<|bos|><|user|>hi<|assistant|>so be it<|eos|><|user|>more?<|assistant|>"
    (request,) = sglang.requests
    assert tokenizer.decode(request.input_ids or []) == second + "no<|eos|>"
    assert sum(mask_of(service, record["id"])) == len(tokenizer.encode("so be it")) + len(tokenizer.encode("no")) + 2
    assert record["metadata"]["generation"]["answers"] == 2
    assert record["metadata"]["prompt_lineage"]["mask_rule"] == "generated/1"


def test_an_answer_that_was_cut_ends_the_conversation(
    service: httpx.Client, sglang: StandInServer, tokenizer: ChatTokenizer
) -> None:
    sglang.write = lambda _ids: written([20, 21], "length")
    record = service.post("/capture", json={"messages": CHAT, "capture_id": "c", "generate": GREEDY}).json()
    assert len(sglang.prompts) == 1
    assert (sglang.requests[0].input_ids or [])[-2:] == [20, 21]
    assert record["metadata"]["generation"]["finish_reason"] == "length"


def test_what_was_captured_is_not_written_again(service: httpx.Client, sglang: StandInServer) -> None:
    body = {"messages": CHAT, "generate": GREEDY}
    first = service.post("/capture", json=body)
    again = service.post("/capture", json=body)
    assert (again.json()["id"], again.headers["Capture-Reused"]) == (first.json()["id"], "true")
    assert len(sglang.prompts) == 2 and len(sglang.requests) == 1
    warmer = service.post("/capture", json={**body, "generate": {**GREEDY, "temperature": 1}})
    assert warmer.json()["id"] != first.json()["id"]
    named = {**body, "capture_id": "a"}
    assert service.post("/capture", json=named).status_code == 200
    refused(service.post("/capture", json={**named, "generate": {"temperature": 0.5}}), "id-conflict")


def test_what_was_written_and_found_no_room_is_not_written_again(service: httpx.Client, sglang: StandInServer) -> None:
    sglang.free = 0
    until(lambda: service.get("/health").json()["plugin"]["free_bytes"] == 0, "the status of a full spool")
    body = {"input_ids": [5], "capture_id": "a", "generate": GREEDY}
    refused(service.post("/capture", json=body), "spool-full")
    sglang.free = None
    until(lambda: service.get("/health").json()["plugin"]["free_bytes"] > 0, "the status of a spool with room")
    assert service.post("/capture", json=body).status_code == 200
    assert len(sglang.prompts) == 1


def test_an_answer_fits_into_what_the_server_and_the_client_allow(service: httpx.Client, sglang: StandInServer) -> None:
    sglang.longest_prompt = 9
    service.post("/capture", json={"input_ids": [5, 6], "generate": {"max_new_tokens": 100}}).raise_for_status()
    service.post("/capture", json={"input_ids": [5, 6, 7], "generate": {}, "max_length": 5}).raise_for_status()
    assert [sampling["max_new_tokens"] for _, sampling in sglang.prompts] == [6, 2]
    refused(service.post("/capture", json={"input_ids": [5] * 8, "generate": {}}), "too-long")
    assert len(sglang.prompts) == 2


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"input_ids": [5], "loss_mask": [1]}, "invalid-row"),
        ({"input_ids": [10**6]}, "invalid-row"),
        ({"messages": CHAT[1:2]}, "invalid-row"),
        ({"messages": CHAT, "generate": {"max_new_tokens": 0}}, "invalid-request"),
    ],
    ids=["a mask", "outside the vocabulary", "nothing to answer", "no tokens"],
)
def test_what_cannot_be_answered_is_refused_before_anything_is_sent(
    service: httpx.Client, sglang: StandInServer, body: dict[str, Any], kind: str
) -> None:
    refused(service.post("/capture", json={"generate": GREEDY, **body}), kind)
    assert not sglang.prompts and not sglang.requests


def test_a_job_generates_too(service: httpx.Client, sglang: StandInServer) -> None:
    rows = [{"input_ids": [number]} for number in (5, 6, 7)]
    job = ended(service, start(service, rows=rows, generate=GREEDY))
    assert counts(job)["captured"] == 3
    assert sorted(request.input_ids or [] for request in sglang.requests) == [[5, 6, 1], [6, 7, 1], [7, 8, 1]]


def test_rows_of_every_format_are_captured_by_a_job(
    service: httpx.Client, sglang: StandInServer, tokenizer: ChatTokenizer
) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "an older answer"}]},
        {"instruction": "hi", "output": "an older answer", "id": "alpaca"},
    ]
    job = ended(service, start(service, rows=rows))
    assert counts(job)["captured"] == 2
    expected, mask = tokenizer.encode_messages(CHAT[:2])
    assert [request.input_ids for request in sglang.requests] == [expected, expected]
    assert mask_of(service, "alpaca") == mask
    assert service.get("/capture/alpaca").json()["metadata"]["prompt_lineage"]["mask_rule"] == "generation-tags/2"


def test_the_service_cuts_as_run_does(service: httpx.Client, sglang: StandInServer, tokenizer: ChatTokenizer) -> None:
    whole, _ = tokenizer.encode_messages(CHAT)
    first, _ = tokenizer.encode_messages(CHAT[:2])
    body = {"messages": CHAT, "max_length": len(whole) - 1, "only_last_turn": True, "capture_id": "a"}
    assert service.post("/capture", json=body).status_code == 200
    assert sglang.requests[0].input_ids == first
    refused(service.post("/capture", json={**body, "capture_id": "b", "max_length": 3}), "too-long")
