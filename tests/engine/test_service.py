"""The whole way on the real engine: side service, command line, a spool far too small, processes killed."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

from engine.captures import CapturingServer, relative_error, spool_directory
from engine.oracle import Oracle
from engine.side_service import Service, command, packed_samples, run, write_rows
from sglang_capture.commands._processes import Background, free_port, own_command

pytestmark = pytest.mark.engine

QUOTA = 1 << 20


@pytest.fixture(scope="module")
def tight_server(tiny6_model_dir: Path) -> Iterator[CapturingServer]:
    """A spool of 1 MiB: some 400 rows."""
    with (
        spool_directory() as spool,
        CapturingServer(
            tiny6_model_dir, spool, "--dtype", "float32", layers="0,3,5", last_hidden="both", quota=str(QUOTA)
        ) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def an_empty_spool(tight_server: CapturingServer) -> None:
    """A service indexes whatever it finds, the captures of another test too."""
    tight_server.clear_spool()


def assert_sample_agrees(sample: dict[str, Any], oracle: Oracle, prompt: list[int]) -> None:
    expected = oracle.run(prompt)
    assert sample["input_ids"].tolist() == prompt
    for number, index in enumerate((0, 3, 5)):
        assert relative_error(sample["hidden_states"][:, number], expected.hidden_states[index]) < 1e-5
    assert relative_error(sample["last_hidden_state"], expected.hidden_states[-1]) < 1e-5
    assert relative_error(sample["last_hidden_state_prenorm"], expected.prenorm) < 1e-5


def test_a_run_ten_times_larger_than_the_spool_has_nothing_missing(tight_server, tmp_path, oracle6, draw):
    lengths = [1, 30, 90, 150, 200, 90] * 8
    prompts = {f"row-{number}": draw(length) for number, length in enumerate(lengths)}
    file = write_rows(tmp_path / "rows.jsonl", [{"id": name, "input_ids": ids} for name, ids in prompts.items()])
    with Service(tight_server.spool, tmp_path / "data") as service:
        code, summary = run(file, service)
        assert (code, summary["captured"], summary["missing"]) == (0, 48, 0), summary
        assert summary["bytes"] > 10 * QUOTA
        code, again = run(file, service)
        assert (code, again["captured"], again["already_there"]) == (0, 0, 48)
        httpx.post(f"{service.url}/capture/shards", json={}, timeout=60, trust_env=False).raise_for_status()
    samples = packed_samples(tmp_path / "data")
    assert samples.keys() == prompts.keys()
    for name in list(prompts)[::5]:
        assert_sample_agrees(samples[name], oracle6, prompts[name])
    assert not list(tight_server.spool.glob("row-*.pt"))


def test_one_capture_over_http_text_messages_and_ids(tight_server, tmp_path, oracle6, draw):
    prompt = draw(40)
    with (
        Service(tight_server.spool, tmp_path / "data") as service,
        httpx.Client(base_url=service.url, timeout=90, trust_env=False) as http,
    ):
        wished = {"input_ids": prompt, "capture_id": "http-ids", "layers": [1, 2], "last_hidden": "pre"}
        record = http.post("/capture", json={**wished, "loss_mask": [0] * 10 + [1] * 30}).raise_for_status().json()
        assert record["tokens"] == 40
        tensors = load(http.get("/capture/http-ids/data").raise_for_status().content)
        expected = oracle6.run(prompt)
        assert torch.equal(tensors["input_ids"], torch.tensor(prompt))
        assert tensors["loss_mask"].sum() == 30
        assert relative_error(tensors["hidden_states"][:, 0], expected.hidden_states[1]) < 1e-5
        assert relative_error(tensors["hidden_states"][:, 1], expected.hidden_states[2]) < 1e-5
        assert relative_error(tensors["last_hidden_state_prenorm"], expected.prenorm) < 1e-5

        text = http.post("/capture", json={"text": "Hello there", "capture_id": "http-text"})
        assert text.raise_for_status().json()["tokens"] > 1
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
        chat = http.post("/capture", json={"messages": messages, "capture_id": "http-chat"}).raise_for_status().json()
        mask = load(http.get("/capture/http-chat/data").content)["loss_mask"]
        assert 0 < int(mask.sum()) < chat["tokens"]

        bad = http.post("/capture", json={"input_ids": prompt, "layers": [6], "capture_id": "http-bad"})
        assert bad.headers["content-type"].startswith("application/problem+json")
        assert 400 <= bad.status_code < 500
        assert "last_hidden" in bad.json()["detail"]
        outside = http.post("/capture", json={"input_ids": [99999], "capture_id": "http-outside"})
        assert 400 <= outside.status_code < 500
        tight_server.assert_serving()


def test_the_service_killed_in_the_middle_of_a_run_loses_and_doubles_nothing(tight_server, tmp_path, oracle6, draw):
    prompts = {f"kill-{number}": draw(20 + number % 50) for number in range(120)}
    file = write_rows(tmp_path / "rows.jsonl", [{"id": name, "input_ids": ids} for name, ids in prompts.items()])
    data, summaries = tmp_path / "data", []
    first = Service(tight_server.spool, data, SGLANG_CAPTURE_PACK_AGE="0.2")
    port = first.url.rsplit(":", 1)[1]
    runner = threading.Thread(target=lambda: summaries.append(run(file, first)))
    runner.start()
    while not packed_count(data):
        time.sleep(0.02)
    time.sleep(random.random())
    first.kill()
    command_line = own_command("serve", "--spool", str(tight_server.spool), "--data", str(data), "--port", port)
    with Background("the second service", command_line, tmp_path / "second.log"):
        runner.join()
        (code, summary) = summaries[0]
        assert (code, summary["missing"]) == (0, 0), summary
        httpx.post(f"{first.url}/capture/shards", json={}, timeout=60, trust_env=False).raise_for_status()
    samples = packed_samples(data)
    assert samples.keys() == prompts.keys()
    for name in list(prompts)[::20]:
        assert_sample_agrees(samples[name], oracle6, prompts[name])


def test_packed_exported_and_verified_from_the_command_line(tight_server, tmp_path):
    conversations = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "1, 2, 3"}]}
        for n in range(5)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in conversations) + "{not json}\n")
    with Service(tight_server.spool, tmp_path / "data") as service:
        code, summary = run(file, service, "--layers", "1,3,5", "--last-hidden", "post")
        assert (code, summary["captured"], summary["bad_rows"]) == (1, 5, 1)
        assert summary["faults"][0]["line"] == 6
        httpx.post(f"{service.url}/capture/shards", json={}, timeout=60, trust_env=False).raise_for_status()
    (dataset,) = (tmp_path / "data").glob("dataset-*")
    exported = command("export", dataset, "--to", "specforge", tmp_path / "specforge", "--json")
    assert exported.returncode == 0, exported.stderr
    (file, *_) = sorted((tmp_path / "specforge").rglob("*.ckpt"))
    content = torch.load(file, weights_only=True)
    tokens = len(content["input_ids"])
    assert content["aux_hidden_state"].shape == (1, tokens, 3 * 128)
    assert content["hidden_state"].shape == (1, tokens, 128)
    assert 0 < int(content["loss_mask"].sum()) < tokens
    for source in (dataset, tmp_path / "specforge"):
        verified = command("verify", source, "--json")
        assert verified.returncode == 0, verified.stdout + verified.stderr
    refused = command("export", dataset, "--to", "nonsense", tmp_path / "x")
    assert refused.returncode == 2
    assert "specforge" in refused.stderr


def test_a_run_without_a_server_says_so_before_it_starts(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
    data = tmp_path / "data"
    data.mkdir()
    port = free_port()
    serve = own_command("serve", "--spool", str(tmp_path / "spool"), "--data", str(data), "--port", str(port))
    with Background("service", serve, tmp_path / "log") as service:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            service.check()
            done = command("run", file, "--service", f"http://127.0.0.1:{port}")
            assert done.returncode == 1
            if "SGLANG_PLUGINS" in done.stderr:
                return
    raise AssertionError(done.stderr)


def packed_count(data: Path) -> int:
    return len(list(data.glob("dataset-*/shard-*.safetensors")))
