"""Whatever the prefix cache holds, a marked prompt has all its rows, and an unmarked one keeps its hits."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine.captures import Wish, assert_all_agree, assert_rows_agree, send_all

pytestmark = pytest.mark.engine


def test_the_prefix_cache_is_passed_by_for_marked_requests_alone(server, oracle6, draw, new_id):
    shared = draw(200)
    first = server.generate(shared)
    again = server.generate(shared)
    assert first["meta_info"]["cached_tokens"] < 5  # another prompt may begin alike
    assert again["meta_info"]["cached_tokens"] > 150
    for _ in range(2):
        name = new_id()
        answer = server.capture(shared, {"capture": name})
        assert answer["meta_info"]["cached_tokens"] == 0
        assert answer["output_ids"] == first["output_ids"]
        assert_rows_agree(server.dump(name), oracle6, shared)
    assert server.generate(shared)["meta_info"]["cached_tokens"] > 150


def test_a_marked_and_an_unmarked_request_with_one_prefix_in_one_batch(server, oracle6, draw, new_id):
    shared = draw(150)
    server.generate(shared)
    wishes = [Wish(shared + draw(10 + number), new_id() if number % 2 else None) for number in range(8)]
    answers = send_all(server, wishes)
    assert_all_agree(server, oracle6, wishes)
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert [tokens >= 149 for tokens in cached] == [wish.name is None for wish in wishes]


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_cached_prefix_and_a_token_or_two(server, oracle6, draw, new_id, more):
    prefix = draw(128)
    server.generate(prefix)
    wish = Wish(prefix + draw(2)[:more], new_id())
    unmarked = Wish(wish.prompt, None)
    send_all(server, [wish])
    assert_all_agree(server, oracle6, [wish])
    (answer,) = send_all(server, [unmarked])
    assert answer["meta_info"]["cached_tokens"] >= 127


def test_a_captured_prompt_serves_others_from_the_cache(server, oracle6, draw, new_id):
    shared = draw(140)
    send_all(server, [Wish(shared, new_id())])
    follower = shared + draw(20)
    assert server.generate(follower)["meta_info"]["cached_tokens"] >= 139
    name = new_id()
    server.capture(follower, {"capture": name})
    assert_rows_agree(server.dump(name), oracle6, follower)


def test_the_cache_is_flushed_while_captures_come_and_go(chunking_server, oracle, new_id):
    """SGLang flushes only between requests, and says so; whether it did or not, the rows are right."""
    generator = torch.Generator().manual_seed(21)
    shared = oracle.draw_prompt(100, generator)
    wishes = [
        Wish(shared + oracle.draw_prompt(length, generator), new_id() if length % 3 else None)
        for length in (1, 70, 3, 140, 20, 64)
    ]
    done = threading.Event()
    flushed = []

    def flush():
        while not done.is_set():
            flushed.append(chunking_server.control("flush_cache"))
            time.sleep(0.05)

    flusher = threading.Thread(target=flush)
    flusher.start()
    for several in (wishes[:1], wishes[1:4], wishes[4:]):
        send_all(chunking_server, several, max_new_tokens=2)
        time.sleep(0.2)
    done.set()
    flusher.join()
    assert 200 in flushed
    assert_all_agree(chunking_server, oracle, wishes)
