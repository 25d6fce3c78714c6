"""Whatever the scheduler does with a request: mix it, retract it, prefer another, abort it."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.captures import (
    CapturingServer,
    Wish,
    assert_all_agree,
    assert_rows_agree,
    send_all,
    spool_directory,
)
from engine.conftest import FLOAT32

pytestmark = pytest.mark.engine

RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
"""SGLang's own test switch: every seventh forward it retracts requests that decode, and prefills them again later."""


@pytest.fixture(scope="module")
def busy_server(tiny6_model_dir) -> Iterator[CapturingServer]:
    """Chunks of 64, decodes mixed into them, priorities, and retractions all the time."""
    arguments = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--enable-priority-scheduling")
    with (
        spool_directory() as spool,
        CapturingServer(
            tiny6_model_dir,
            spool,
            *FLOAT32,
            *arguments,
            engine=RETRACTING,
            layers="0,2,5",
            last_hidden="both",
            nonfinite="label",
        ) as running,
    ):
        yield running


def retractions(server):
    return len(re.findall(r"Testing retraction\. #retracted_reqs: [1-9]", server.log_text()))


def test_mixed_chunks_and_retractions_in_mid_decode(busy_server, oracle6, draw, new_id):
    before = retractions(busy_server)
    wishes = [Wish(draw(length), new_id()) for length in (200, 64, 65, 1, 333, 128, 30)]
    wishes += [Wish(draw(length), None) for length in (20, 150, 5)]
    answers = send_all(busy_server, wishes, max_new_tokens=24)
    assert [len(answer["output_ids"]) for answer in answers] == [24] * 10
    assert_all_agree(busy_server, oracle6, wishes)
    assert retractions(busy_server) > before


def test_answers_are_those_of_plain_greedy_decoding(busy_server, oracle6, draw, new_id):
    wishes = [Wish(draw(length), new_id() if length % 2 else None) for length in (70, 41, 133, 20)]
    for wish, answer in zip(wishes, send_all(busy_server, wishes, max_new_tokens=12), strict=True):
        best = oracle6.run([*wish.prompt, *answer["output_ids"]]).logprobs[len(wish.prompt) - 1 : -1].argmax(-1)
        assert answer["output_ids"] == best.tolist()


def test_a_retraction_in_mid_prefill_begins_the_prompt_again(busy_server, oracle6, draw, new_id):
    """A pause in the mode ``retract``, as a trainer makes it, takes back the prompt that is half computed."""
    chunks_of_one = 400 // 64 + 1
    most = 0
    for _ in range(5):
        wish = Wish(draw(400), new_id())
        before = busy_server.counts().captured_forwards
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send_all, busy_server, [wish])
            while not list(busy_server.spool.glob(".part-*")) and not sent.done():
                time.sleep(0.001)
            busy_server.control("pause_generation", mode="retract")
            busy_server.control("continue_generation")
            sent.result()
        assert_rows_agree(busy_server.dump(wish.name), oracle6, wish.prompt)
        most = max(most, busy_server.counts().captured_forwards - before)
    assert most > chunks_of_one


def test_500_requests_at_once(busy_server, oracle6, new_id):
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 40, (500,), generator=generator).tolist()
    prompts = [torch.randint(16, oracle6.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    names = [new_id() if number % 5 else None for number in range(500)]
    sampling = [
        {"max_new_tokens": 2, "temperature": 0, **({"custom_params": {"capture": name}} if name else {})}
        for name in names
    ]
    before = busy_server.counts()
    answers = busy_server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    assert len(answers) == 500
    wishes = [Wish(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    assert_all_agree(busy_server, oracle6, wishes)
    assert busy_server.counts().published - before.published == 400
    busy_server.clear_spool()


def test_a_storm_of_aborts_and_priorities_leaves_right_dumps_or_reasons(busy_server, oracle6, draw, new_id):
    chance = random.Random(5)
    wishes = [Wish(draw(chance.choice((10, 80, 400))), new_id()) for _ in range(60)]

    def send(wish):
        sampling = {"max_new_tokens": 4, "temperature": 0, "custom_params": {"capture": wish.name}}
        body = {
            "rid": wish.name,
            "input_ids": wish.prompt,
            "sampling_params": sampling,
            "priority": chance.randrange(9),
        }
        return busy_server.control("generate", **body)

    def abort():
        for wish in chance.sample(wishes, 40):
            busy_server.control("abort_request", rid=wish.name)
            time.sleep(chance.random() * 0.05)

    aborter = threading.Thread(target=abort)
    with ThreadPoolExecutor(len(wishes)) as pool:
        pool.map(send, wishes)
        aborter.start()
    aborter.join()
    ended = [busy_server.end_of(wish.name) for wish in wishes]
    reasons = {
        busy_server.failure(wish.name).reason for wish, end in zip(wishes, ended, strict=True) if end == "failed"
    }
    assert any("none of it was computed" in reason for reason in reasons), "none was aborted while it waited"
    assert "dump" in ended
    assert_all_agree(busy_server, oracle6, [w for w, end in zip(wishes, ended, strict=True) if end == "dump"])
    assert not list(busy_server.spool.glob(".part-*"))
    busy_server.assert_serving()
