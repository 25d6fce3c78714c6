"""Every captured row is the row that transformers computes, whatever else is in the batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.captures import assert_rows_agree, relative_error

pytestmark = pytest.mark.engine


def test_a_server_that_captured_nothing_made_no_copy(server, draw):
    before = server.counts()
    for length in (1, 40):
        server.generate(draw(length), max_new_tokens=3)
    after = server.counts()
    assert after.forwards > before.forwards
    assert (after.copies, after.captured_forwards) == (before.copies, before.captured_forwards)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 700])
def test_one_request(server, oracle6, draw, new_id, length):
    name, prompt = new_id(), draw(length)
    server.capture(prompt, {"capture": name})
    dump = server.dump(name)
    assert dump.spec.layers == (0, 3, 5)
    assert dump.hidden_states.shape == (length, 3, 128)
    assert_rows_agree(dump, oracle6, prompt)


def test_32_at_once_of_many_lengths_marked_and_unmarked(server, oracle6, draw, new_id):
    lengths = [1, 2, 3, 700, 5, 17, 64, 128, 31, 400, 33, 90, 7, 250, 65, 11] * 2
    requests = [(draw(length), new_id() if number % 3 else None) for number, length in enumerate(lengths)]

    def send(request):
        prompt, name = request
        return server.capture(prompt, {"capture": name} if name else None, max_new_tokens=4)

    with ThreadPoolExecutor(len(requests)) as pool:
        assert len(list(pool.map(send, requests))) == 32
    for prompt, name in requests:
        if name:
            assert_rows_agree(server.dump(name), oracle6, prompt)


def test_each_request_of_a_batch_has_its_own_layers(server, oracle6, draw, new_id):
    wishes = [([1], "none"), ([0, 1, 2, 3, 4, 5], "both"), ([5], "pre"), ([2, 4], "post"), (None, None)]
    requests = [(draw(20 + 10 * number), new_id(), *wish) for number, wish in enumerate(wishes)]

    def send(request):
        prompt, name, layers, last_hidden = request
        server.capture(prompt, {"capture": name, "capture_layers": layers, "capture_last_hidden": last_hidden})

    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(send, requests))
    for prompt, name, layers, last_hidden in requests:
        dump = server.dump(name)
        assert dump.spec.layers == tuple(layers or (0, 3, 5))
        assert dump.spec.last_hidden == (last_hidden or "post")
        assert_rows_agree(dump, oracle6, prompt)


def test_a_capture_changes_no_answer(server, draw, new_id):
    prompt = draw(60)
    plain = server.generate(prompt, max_new_tokens=12)
    marked = server.capture(prompt, {"capture": new_id()}, max_new_tokens=12)
    assert marked["output_ids"] == plain["output_ids"]
    assert marked["meta_info"].keys() == plain["meta_info"].keys()


def test_long_prompts_in_chunks_side_by_side_through_61_layers(chunking_server, oracle, new_id):
    import torch

    generator = torch.Generator().manual_seed(3)
    lengths = [200, 64, 65, 333, 1, 128]
    requests = [(oracle.draw_prompt(length, generator), new_id()) for length in lengths]
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(lambda r: chunking_server.capture(r[0], {"capture": r[1]}, max_new_tokens=4), requests))
    for prompt, name in requests:
        dump = chunking_server.dump(name)
        assert dump.spec.layers == (3, 31, 59)
        assert_rows_agree(dump, oracle, prompt)
    assert chunking_server.counts().captured_forwards > len(lengths)


def test_bf16_rows_are_the_engines_own_and_near_its_float32(server, bfloat16_server, draw, new_id):
    """bf16 keeps 8 bits: a rounding is up to 2**-9 = 0.2 % of a value, and six layers add some dozens of them."""
    for prompt in [draw(length) for length in (1, 30, 300)]:
        name = new_id()
        bfloat16_server.capture(prompt, {"capture": name})
        server.capture(prompt, {"capture": name, "capture_last_hidden": "both"})
        bf16, float32 = bfloat16_server.dump(name), server.dump(name)
        assert bf16.spec.dtype == "bfloat16"
        assert bf16.hidden_states.dtype == bf16.last_hidden["last_hidden_state"].dtype
        assert relative_error(bf16.hidden_states[:, 0], float32.hidden_states[:, 0]) < 2**-8
        for layer in (1, 2):
            assert relative_error(bf16.hidden_states[:, layer], float32.hidden_states[:, layer]) < 0.05
        for key, state in bf16.last_hidden.items():
            assert relative_error(state, float32.last_hidden[key]) < 0.05
