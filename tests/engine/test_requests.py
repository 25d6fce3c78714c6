"""Every way in which a request reaches the engine, and leaves it early."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from engine.captures import assert_rows_agree
from sglang_capture.dump import reserved_bytes
from sglang_capture.mark import is_capture_id

pytestmark = pytest.mark.engine


def test_completions_take_the_mark_at_the_top_level(server, oracle6, draw, new_id):
    name, prompt = new_id(), draw(30)
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "custom_params": {"capture": name}}
    assert server.post("/v1/completions", body)["usage"]["prompt_tokens"] == 30
    assert_rows_agree(server.dump(name), oracle6, prompt)


def test_chat_completions_hold_the_ids_that_the_engine_ran(server, oracle6, new_id):
    name = new_id()
    body = {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße! 你好"}],
        "max_tokens": 2,
        "temperature": 0,
        "custom_params": {"capture": name},
    }
    tokens = server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    dump = server.dump(name)
    assert dump.tokens == tokens
    assert_rows_agree(dump, oracle6, dump.input_ids.tolist())


def test_a_streamed_request_is_captured(server, oracle6, draw, new_id):
    name, prompt = new_id(), draw(25)
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "custom_params": {"capture": name}},
    }
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60, trust_env=False) as answer:
        assert sum(line.startswith("data: {") for line in answer.iter_lines()) >= 1
    assert_rows_agree(server.dump(name), oracle6, prompt)


def test_several_answers_to_one_prompt_are_one_capture(server, oracle6, draw, new_id):
    name, prompt = new_id(), draw(40)
    before = server.counts()
    assert len(server.capture(prompt, {"capture": name}, n=2, temperature=1.0, max_new_tokens=4)) == 2
    assert_rows_agree(server.dump(name), oracle6, prompt)
    after = server.counts()
    assert after.published - before.published == 1
    assert after.duplicates > before.duplicates


def test_a_request_for_beam_search_is_captured_as_its_mark_says(server, oracle6, draw, new_id):
    """SGLang puts its own sampling parameters in the place of the client's."""
    name, prompt = new_id(), draw(70)
    mark = {"capture": name, "capture_layers": [1, 4], "capture_last_hidden": "both"}
    server.capture(prompt, mark, beam_width=2, max_new_tokens=4)
    dump = server.dump(name)
    assert (dump.spec.layers, dump.spec.last_hidden) == ((1, 4), "both")
    assert_rows_agree(dump, oracle6, prompt)


def test_one_mark_over_a_batched_body_is_one_whole_capture(server, oracle6, draw, new_id):
    name, prompts = new_id(), [draw(length) for length in (20, 30, 40)]
    assert len(server.capture(prompts, {"capture": name})) == 3
    dump = server.dump(name)
    assert dump.input_ids.tolist() in prompts
    assert_rows_agree(dump, oracle6, dump.input_ids.tolist())


def test_a_batched_body_can_mark_each_request(server, oracle6, draw, new_id):
    requests = [(draw(length), new_id()) for length in (20, 30, 40)]
    sampling = [{"max_new_tokens": 1, "temperature": 0, "custom_params": {"capture": name}} for _, name in requests]
    server.post("/generate", {"input_ids": [prompt for prompt, _ in requests], "sampling_params": sampling})
    for prompt, name in requests:
        assert_rows_agree(server.dump(name), oracle6, prompt)


@pytest.mark.parametrize("max_new_tokens", [0, 1, 5])
def test_however_few_tokens_are_asked_for(server, oracle6, draw, new_id, max_new_tokens):
    name, prompt = new_id(), draw(20)
    server.capture(prompt, {"capture": name}, max_new_tokens=max_new_tokens)
    assert_rows_agree(server.dump(name), oracle6, prompt)


def test_a_mark_without_an_id_is_named_after_the_request(server, oracle6, draw, new_id):
    name, prompt = new_id(), draw(20)
    server.capture(prompt, {"capture": True}, request={"rid": name})
    assert_rows_agree(server.dump(name), oracle6, prompt)


def test_the_same_id_again_leaves_the_first_dump(server, oracle6, draw, new_id):
    name, first = new_id(), draw(20)
    server.capture(first, {"capture": name})
    server.dump(name)
    server.capture(draw(25), {"capture": name})
    server.counts()
    assert_rows_agree(server.dump(name), oracle6, first)


def test_a_prompt_that_is_too_long_is_no_capture_and_no_harm(server, new_id):
    name = new_id()
    with pytest.raises(RuntimeError, match="40"):
        server.capture([20] * 5000, {"capture": name})
    server.assert_serving()
    assert not (server.spool / f"{name}.pt").exists()


MALFORMED = {
    "a number": {"capture": 7},
    "an empty id": {"capture": ""},
    "a path": {"capture": "../x"},
    "an absolute path": {"capture": "/tmp/x"},
    "a hidden file": {"capture": ".x"},
    "200 characters": {"capture": "x" * 200},
    "unicode": {"capture": "naïve-名前"},
    "layers that are text": {"capture_layers": "3,5"},
    "no layers": {"capture_layers": []},
    "the index of the layer count": {"capture_layers": [6]},
    "a layer behind the model": {"capture_layers": [99]},
    "a layer twice": {"capture_layers": [3, 3]},
    "an unknown last state": {"capture_last_hidden": "final"},
}


@pytest.mark.parametrize("fault", MALFORMED, ids=list(MALFORMED))
def test_a_malformed_mark_is_served_and_refused_with_its_reason(server, draw, new_id, fault):
    rid = new_id()
    mark = {"capture": True, **MALFORMED[fault]}
    answer = server.capture(draw(10), mark, request={"rid": rid})
    assert answer["meta_info"]["completion_tokens"] == 1
    failure = server.failure(rid)
    assert (failure.kind, failure.retriable) == ("refused", False)
    assert failure.reason
    assert all(is_capture_id(path.name.split(".")[0]) for path in server.spool.glob("*.*") if path.name[0] != ".")
    assert not (server.spool.parent / "x.pt").exists()


def test_a_bad_mark_costs_its_batch_mates_nothing(server, oracle6, draw, new_id):
    requests = [(draw(30), new_id(), [2] if number % 2 else [99]) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda r: server.capture(r[0], {"capture": r[1], "capture_layers": r[2]}), requests))
    for prompt, name, layers in requests:
        if layers == [2]:
            assert_rows_agree(server.dump(name), oracle6, prompt)
        else:
            assert "99 does not exist" in server.failure(name).reason


def test_a_request_of_a_session_is_refused(server, draw, new_id):
    session = server.post("/open_session", {"capacity_of_str_len": 1000})
    name = new_id()
    request = {"session_params": {"id": session}}
    server.capture(draw(10), {"capture": name}, request=request)
    assert "session" in server.failure(name).reason


def test_what_a_client_sends_without_bound_is_not_kept_without_bound(server, oracle6, draw, new_id):
    """A request's id is in its dump, a mark's mistake in its failure, and neither is in the quota."""
    name, refused, prompt = new_id(), new_id(), draw(20)
    server.capture(prompt, {"capture": name}, request={"rid": new_id() + "r" * 100_000})
    server.capture(prompt, {"capture": refused, "capture_layers": [3] * 100_000}, request={"rid": "s" * 100_000})
    dump = server.dump(name)
    assert_rows_agree(dump, oracle6, prompt)
    assert len(dump.request_id) == 256
    assert (server.spool / f"{name}.pt").stat().st_size <= reserved_bytes(20, dump.spec)
    assert "may be named once" in server.failure(refused).reason
    assert (server.spool / f"{refused}.failed.json").stat().st_size < 4096


def _send_and_leave(server, body, after):
    """Begin a request, and close the connection in the middle of it."""
    with httpx.Client(timeout=60, trust_env=False) as client, pytest.raises(httpx.TimeoutException):
        client.post(f"{server.url}/generate", json=body, timeout=httpx.Timeout(60, read=after))


def test_a_client_that_leaves_in_mid_prefill_leaves_nothing(chunking_server, oracle, new_id):
    name, prompt = new_id(), [20 + n % 200 for n in range(2500)]
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "custom_params": {"capture": name}}}
    _send_and_leave(chunking_server, body, after=0.3)
    failure = chunking_server.failure(name)
    assert "are missing" in failure.reason
    _assert_parts_are_gone(chunking_server)
    chunking_server.assert_serving()


def test_an_aborted_request_leaves_nothing(chunking_server, new_id):
    name, rid = new_id(), new_id()
    prompt = [20 + n % 200 for n in range(2500)]
    sampling = {"max_new_tokens": 1, "custom_params": {"capture": name}}
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
    sender = threading.Thread(
        target=lambda: httpx.post(f"{chunking_server.url}/generate", json=body, timeout=60, trust_env=False)
    )
    sender.start()
    while not list(chunking_server.spool.glob(".part-*")):
        time.sleep(0.005)
    httpx.post(f"{chunking_server.url}/abort_request", json={"rid": rid}, timeout=60, trust_env=False)
    sender.join()
    assert "are missing" in chunking_server.failure(name).reason
    _assert_parts_are_gone(chunking_server)


def _assert_parts_are_gone(server):
    for _ in range(500):
        if not list(server.spool.glob(".part-*")):
            return
        time.sleep(0.02)
    raise AssertionError(json.dumps([path.name for path in server.spool.iterdir()]))
