"""The ground the engine tests stand on: stock SGLang on the CPU computes what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from engine.oracle import Oracle
from engine.server import EngineServer

pytestmark = pytest.mark.engine

LENGTHS = (1, 2, 7, 64, 300)
NEW_TOKENS = 6
LOGPROB_BOUND = 2e-5


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    spool = tmp_path_factory.mktemp("nowhere") / "spool"
    with EngineServer(tiny_model_dir, env={"SGLANG_CAPTURE_DIR": str(spool)}) as server:
        yield server
    assert not spool.exists()


@pytest.fixture(scope="module")
def two_ranks(tiny6_model_dir: Path) -> Iterator[EngineServer]:
    """A server of two ranks with DP attention; it is killed in the end, which must leave no process of it."""
    server = EngineServer(tiny6_model_dir, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention").start()
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(family) > 2
    yield server
    server.kill()
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    server.stop()


@pytest.mark.parametrize("length", LENGTHS)
def test_61_layers_equal_transformers(server: EngineServer, oracle: Oracle, length: int) -> None:
    assert_equals_oracle(server, oracle, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_two_ranks_equal_transformers(two_ranks: EngineServer, oracle6: Oracle, length: int) -> None:
    assert_equals_oracle(two_ranks, oracle6, length)


def test_without_our_plugin_a_mark_means_nothing(server: EngineServer) -> None:
    """That no spool comes of it is seen when the server has stopped."""
    answer = server.generate([20, 21], custom_params={"capture": "nobody"})
    assert answer["meta_info"]["completion_tokens"] == 1


def test_a_cached_prefix_changes_nothing(server: EngineServer, oracle: Oracle) -> None:
    """Attention over a prefix from the cache is where `torch_native` as shipped is wrong."""
    generator = torch.Generator().manual_seed(7)
    prefix = oracle.draw_prompt(40, generator)
    whole = [*prefix, *oracle.draw_prompt(20, generator)]
    server.generate(prefix)
    answer = server.generate(whole, max_new_tokens=NEW_TOKENS, request={"return_logprob": True})
    assert answer["meta_info"]["cached_tokens"] > 0
    assert_tokens(oracle, whole, answer)


def test_chat_is_rendered_with_the_models_template(server: EngineServer) -> None:
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Grüße, 世界"}]
    answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 2})
    expected = "<|bos|><|system|>Short.<|user|>Grüße, 世界<|assistant|>"
    ids = server.post("/tokenize", {"model": "tiny", "prompt": expected, "add_special_tokens": False})["tokens"]
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_random_prompts_are_far_from_router_ties(oracle: Oracle) -> None:
    generator = torch.Generator().manual_seed(3)
    for length in (1, 30, 700):
        prompt = torch.randint(16, oracle.vocab_size, (length,), generator=generator).tolist()
        assert oracle.router_margin(prompt) > 0.02


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the server ended while it started"):
        EngineServer(tmp_path / "missing").start()


def assert_equals_oracle(server: EngineServer, oracle: Oracle, length: int) -> None:
    prompt = oracle.draw_prompt(length, torch.Generator().manual_seed(length))
    answer = server.generate(
        prompt, max_new_tokens=NEW_TOKENS, request={"return_logprob": True, "logprob_start_len": 0}
    )
    assert_tokens(oracle, prompt, answer)
    scored = answer["meta_info"]["input_token_logprobs"]
    expected = oracle.run(prompt).logprobs
    for position in range(1, length):
        logprob, token = scored[position][:2]
        assert token == prompt[position]
        assert logprob == pytest.approx(float(expected[position - 1, token]), abs=LOGPROB_BOUND)


def assert_tokens(oracle: Oracle, prompt: list[int], answer: dict) -> None:
    """Each token generated is the oracle's best after the tokens before it, with the oracle's probability."""
    generated = answer["output_ids"]
    rows = oracle.run([*prompt, *generated]).logprobs[len(prompt) - 1 :]
    assert generated == rows[:-1].argmax(-1).tolist()
    for row, (logprob, token, *_) in zip(rows, answer["meta_info"]["output_token_logprobs"], strict=False):
        assert logprob == pytest.approx(float(row[token]), abs=LOGPROB_BOUND)
