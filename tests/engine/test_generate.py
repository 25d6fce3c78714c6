"""Answers that the real engine writes, and the capture of exactly these tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load

from engine.captures import CapturingServer, relative_error
from engine.oracle import Oracle
from engine.side_service import Service, packed_samples, run, write_rows
from sglang_capture.prompts import ChatTokenizer
from sglang_capture.tiny_tokenizer import EOS

pytestmark = pytest.mark.engine

QUESTIONS = ["Count to three.", "What is a cat?", "Say hello.", "Name a colour.", "Where is it?", "Who are you?"]


@pytest.fixture(scope="module")
def service(server: CapturingServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    server.clear_spool()
    with Service(server.spool, tmp_path_factory.mktemp("generate") / "data") as running:
        yield running


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=120, trust_env=False) as client:
        yield client


def alone(server: CapturingServer, prompt: list[int], tokens: int) -> list[int]:
    """What the engine writes behind a prompt when it is only asked to generate."""
    return server.generate(prompt, max_new_tokens=tokens, ignore_eos=False)["output_ids"]


def capture(http: httpx.Client, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record and the tensors."""
    record = http.post("/capture", json=body).raise_for_status().json()
    return record, load(http.get(f"/capture/{record['id']}/data").raise_for_status().content)


def test_what_is_captured_is_what_generate_alone_writes(
    server: CapturingServer, http: httpx.Client, oracle6: Oracle, tiny6_model_dir: Path
) -> None:
    messages = [{"role": "user", "content": "Count to three."}, {"role": "assistant", "content": "an older answer"}]
    prompt, _mask = ChatTokenizer(tiny6_model_dir).encode_messages(messages[:1])
    answer = alone(server, prompt, 24)
    body = {"messages": messages, "capture_id": "greedy", "generate": {"max_new_tokens": 24, "temperature": 0}}
    record, tensors = capture(http, **body)
    assert tensors["input_ids"].tolist() == [*prompt, *answer]
    assert tensors["loss_mask"].tolist() == [0] * len(prompt) + [1] * len(answer)
    assert record["metadata"]["generation"] == {
        "finish_reason": "stop" if answer[-1] == EOS else "length",
        "answers": 1,
        "max_new_tokens": 24,
        "temperature": 0.0,
    }
    assert record["metadata"]["prompt_lineage"]["mask_rule"] == "generated/1"
    expected = oracle6.run([*prompt, *answer])
    for number, index in enumerate((0, 3, 5)):
        assert relative_error(tensors["hidden_states"][:, number], expected.hidden_states[index]) < 1e-5
    again = http.post("/capture", json=body)
    assert again.headers["Capture-Reused"] == "true"


def test_every_answer_of_a_conversation_is_written_behind_the_ones_before(
    server: CapturingServer, http: httpx.Client, draw
) -> None:
    prompt = draw(30)
    _record, tensors = capture(
        http, input_ids=prompt, capture_id="ids", generate={"max_new_tokens": 9, "temperature": 0}
    )
    assert tensors["input_ids"].tolist() == [*prompt, *alone(server, prompt, 9)]

    turns = [{"role": role, "content": f"{role} {number}"} for number in range(3) for role in ("user", "assistant")]
    record, tensors = capture(http, messages=turns, capture_id="turns", generate={"max_new_tokens": 400})
    ids, mask = tensors["input_ids"].tolist(), tensors["loss_mask"].tolist()
    answers = sum(1 for before, now in zip([0, *mask], mask, strict=False) if now > before)
    assert answers == record["metadata"]["generation"]["answers"]
    ends = [place for place, inside in enumerate(mask) if inside and not (mask[place + 1 :] or [0])[0]]
    finished = ends if record["metadata"]["generation"]["finish_reason"] == "stop" else ends[:-1]
    assert all(ids[place] == EOS for place in finished)


def test_a_run_that_generates_goes_on_and_writes_nothing_twice(
    server: CapturingServer, service: Service, tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    options = ("--generate", "--max-new-tokens", "12", "--temperature", "0.7")
    code, first = run(file, service, *options, "--limit", "2")
    assert (code, first["captured"]) == (0, 2)
    code, second = run(file, service, *options)
    assert (code, second["captured"], second["already_there"]) == (0, 4, 2)
    httpx.post(f"{service.url}/capture/shards", json={}, timeout=60, trust_env=False).raise_for_status()
    samples = [sample for name, sample in packed_samples(service.data).items() if name.startswith("r-")]
    assert len(samples) == 6
    assert all(0 < int(sample["loss_mask"].sum()) <= 12 for sample in samples)
