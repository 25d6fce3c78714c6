"""Captures while the server decodes speculatively: prompts alone are captured, and it drafts and verifies as ever.

Every output must be what plain greedy decoding gives, worked out by transformers. One server at a time: each way of
speculating is a class, with what all of them have in common above.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.captures import FLOAT32_TOLERANCE, CapturingServer, assert_rows_agree, relative_error, spool_directory
from engine.drafts import AUX_LAYERS, add_mtp_layer, make_eagle3_draft
from engine.oracle import Oracle, Run
from engine.server import EngineServer
from sglang_capture.drafts.configs import draft_config
from sglang_capture.drafts.served import served

pytestmark = pytest.mark.engine

COMMON = ("--dtype", "float32", "--chunked-prefill-size", "64")
NEW_TOKENS = 16
CLEAR = 1e-4
"""How far the likeliest token must be ahead of the next, in log probability; rounding moves it by some 1e-6."""

Greedy = tuple[list[int], list[int]]
"""A prompt, and what follows it."""


@pytest.fixture(scope="module")
def draw_greedy(oracle6: Oracle) -> Callable[[int], Greedy]:
    """Prompts that no test has used, each with its ``NEW_TOKENS`` greedy tokens, none of them nearly tied."""
    generator = torch.Generator().manual_seed(uuid.uuid4().int % (1 << 60))
    return lambda length: drawn(oracle6, length, generator)


def drawn(oracle: Oracle, length: int, generator: torch.Generator) -> Greedy:
    for _ in range(20):
        prompt = oracle.draw_prompt(length, generator)
        tokens: list[int] = []
        while len(tokens) < NEW_TOKENS:
            best, second = oracle.run([*prompt, *tokens]).logprobs[-1].topk(2).values.tolist()
            if best - second < CLEAR:
                break
            tokens.append(int(oracle.run([*prompt, *tokens]).logprobs[-1].argmax()))
        else:
            return prompt, tokens
    raise RuntimeError(f"20 random prompts of {length} tokens, and each continuation has nearly tied tokens")


def capturing(model: Path, *arguments: str) -> Iterator[CapturingServer]:
    with spool_directory() as spool, CapturingServer(model, spool, *COMMON, *arguments, layers="0,3,5") as server:
        yield server


def drafting(answer: dict[str, Any]) -> tuple[int, list[int]]:
    """How often the target verified, and how many drafts it accepted how often."""
    return answer["meta_info"]["spec_verify_ct"], answer["meta_info"]["spec_correct_drafts_histogram"]


def returned_states(answer: dict[str, Any]) -> tuple[int, Tensor]:
    """Of another client's ``return_hidden_states``: how many rows are the prompt's, and all rows. SGLang gives the
    prompt's last chunk in one piece, then each token that it ran."""
    prompt, *tokens = answer["meta_info"]["hidden_states"]
    return len(prompt), torch.tensor([*prompt, *tokens])


def states_agree(answer: dict[str, Any], expected: Tensor, prompt: list[int], *, of_prompt_only: bool = False) -> bool:
    of_prompt, rows = returned_states(answer)
    assert 0 < of_prompt <= len(prompt)
    rows = rows[:of_prompt] if of_prompt_only else rows
    first = len(prompt) - of_prompt
    return relative_error(rows, expected[first : first + len(rows)]) < FLOAT32_TOLERANCE


def last_hidden(run: Run) -> Tensor:
    return run.hidden_states[-1]


def aux_states(run: Run) -> Tensor:
    return torch.cat([run.hidden_states[index] for index in AUX_LAYERS], dim=-1)


def foretold(target: Path, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The indices that `check-draft` says an EAGLE-3 draft with these ids is fed."""
    config = json.loads((target / "config.json").read_text())
    eagle = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}
    draft = draft_config({"architectures": ["LlamaForCausalLMEagle3"], **eagle})
    return served(draft, config["architectures"][0], config["num_hidden_layers"], version("sglang")).indices


def check_beside_another_client(
    server: CapturingServer,
    oracle: Oracle,
    draw_greedy: Callable[[int], Greedy],
    states: Callable[[Run], Tensor],
    *,
    of_prompt_only: bool = False,
) -> None:
    """Marked requests, another client's ``return_hidden_states``, and both in one request, all at once."""
    requests = [
        (draw_greedy(length), f"test-{uuid.uuid4().hex}" if number % 3 else None, number % 3 != 1)
        for number, length in enumerate([14, 30, 9, 21, 64, 40, 130, 17, 100])
    ]

    def send(request: tuple[Greedy, str | None, bool]) -> dict[str, Any]:
        (prompt, _), name, returning = request
        mark = {"custom_params": {"capture": name}} if name else {}
        answer: dict[str, Any] = server.generate(
            prompt, max_new_tokens=NEW_TOKENS, request={"return_hidden_states": returning}, **mark
        )
        return answer

    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(send, requests))
    for ((prompt, tokens), name, returning), answer in zip(requests, answers, strict=True):
        assert answer["output_ids"] == tokens
        assert ("hidden_states" in answer["meta_info"]) == returning
        if name:
            assert_rows_agree(server.dump(name), oracle, prompt)
        if returning:
            expected = states(oracle.run([*prompt, *tokens]))
            assert states_agree(answer, expected, prompt, of_prompt_only=of_prompt_only)


class AnySpeculation:
    """What holds for every way of speculating; a class of its own has the server."""

    @pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 300])
    def test_rows_and_output_of_a_prompt(self, speculating, oracle6, draw_greedy, new_id, length):
        name, (prompt, tokens) = new_id(), draw_greedy(length)
        plain = speculating.generate(prompt, max_new_tokens=NEW_TOKENS)
        marked = speculating.capture(prompt, {"capture": name}, max_new_tokens=NEW_TOKENS)
        assert plain["output_ids"] == marked["output_ids"] == tokens
        assert_rows_agree(speculating.dump(name), oracle6, prompt)

    def test_many_at_once_marked_and_unmarked(self, speculating, oracle6, draw_greedy, new_id):
        lengths = [1, 150, 5, 20, 64, 65, 33, 90]
        requests = [(*draw_greedy(length), new_id() if number % 3 else None) for number, length in enumerate(lengths)]

        def send(request):
            prompt, _, name = request
            return speculating.capture(prompt, {"capture": name} if name else None, max_new_tokens=NEW_TOKENS)

        for _ in range(2):  # the second time prefixes are cached, and NGRAM has something to draft
            with ThreadPoolExecutor(len(requests)) as pool:
                answers = list(pool.map(send, requests))
            for (prompt, tokens, name), answer in zip(requests, answers, strict=True):
                assert answer["output_ids"] == tokens
                if name:
                    assert_rows_agree(speculating.dump(name), oracle6, prompt)
            accepted = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
            speculating.clear_spool()
        assert accepted > 0

    def test_drafting_and_verifying_copy_nothing(self, speculating, oracle6, draw_greedy, new_id):
        before = speculating.counts()
        name, (prompt, _) = new_id(), draw_greedy(40)
        answer = speculating.capture(prompt, {"capture": name}, max_new_tokens=NEW_TOKENS)
        assert drafting(answer)[0] > 1
        assert_rows_agree(speculating.dump(name), oracle6, prompt)
        after = speculating.counts()
        assert after.captured_forwards - before.captured_forwards == 1
        assert after.copies - before.copies == len([0, 3, 5, "post"])
        assert after.failed == before.failed


class WithDraftModel(AnySpeculation):
    """A draft model has no memory of other requests, so one prompt is always drafted and verified alike."""

    def test_a_capture_changes_no_draft(self, speculating, draw_greedy, new_id):
        for length in (1, 30, 65, 150):
            prompt, tokens = draw_greedy(length)
            plain = speculating.generate(prompt, max_new_tokens=NEW_TOKENS)
            marked = speculating.capture(prompt, {"capture": new_id()}, max_new_tokens=NEW_TOKENS)
            assert plain["output_ids"] == marked["output_ids"] == tokens
            assert drafting(marked) == drafting(plain)


@pytest.mark.skipif(shutil.which("g++") is None, reason="SGLang builds NGRAM with g++ when it starts")
class TestNgram(AnySpeculation):
    @pytest.fixture(scope="class")
    @classmethod
    def speculating(cls, tiny6_model_dir: Path) -> Iterator[CapturingServer]:
        drafts = ("--speculative-num-draft-tokens", "6", "--speculative-ngram-capacity", "100000")
        arguments = ("--speculative-algorithm", "NGRAM", *drafts, "--enable-return-hidden-states")
        yield from capturing(tiny6_model_dir, *arguments)

    def test_beside_another_client_that_wants_hidden_states(self, speculating, oracle6, draw_greedy):
        """Of tokens that it drafted with NGRAM, SGLang 0.5.23 itself returns rows of other drafts now and then."""
        check_beside_another_client(speculating, oracle6, draw_greedy, last_hidden, of_prompt_only=True)


class TestMtp(WithDraftModel):
    """A layer for multi-token prediction in the target's own checkpoint; chains of drafts."""

    @pytest.fixture(scope="class")
    @classmethod
    def speculating(cls, tiny6_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CapturingServer]:
        model = tmp_path_factory.mktemp("mtp") / "model"
        add_mtp_layer(tiny6_model_dir, model)
        yield from capturing(model, "--speculative-algorithm", "NEXTN", *tree(steps=3, branches=1, drafts=4))


class TestEagle3(WithDraftModel):
    """A draft that is fed with hidden states of the target, taken where ours are taken; trees of drafts."""

    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls, tiny6_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
        draft = tmp_path_factory.mktemp("eagle3") / "draft"
        make_eagle3_draft(tiny6_model_dir, draft)
        algorithm = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft))
        return (*algorithm, *tree(steps=3, branches=3, drafts=8), "--enable-return-hidden-states")

    @pytest.fixture(scope="class")
    @classmethod
    def without_us(
        cls, tiny6_model_dir: Path, oracle6: Oracle, arguments: tuple[str, ...]
    ) -> list[tuple[Greedy, dict[str, Any]]]:
        """Prompts and their answers, from a server that knows nothing of our plugin and is gone again."""
        generator = torch.Generator().manual_seed(11)
        prompts = [drawn(oracle6, length, generator) for length in (1, 30, 65, 150)]
        with EngineServer(tiny6_model_dir, *COMMON, *arguments) as server:
            return [(each, asking_for_states(server, each[0])) for each in prompts]

    @pytest.fixture(scope="class")
    @classmethod
    def speculating(
        cls, tiny6_model_dir: Path, arguments: tuple[str, ...], without_us: object
    ) -> Iterator[CapturingServer]:
        """After the server without us, so that there is one at a time."""
        yield from capturing(tiny6_model_dir, *arguments)

    @pytest.mark.parametrize("layers", [None, list(AUX_LAYERS), [0, 1, 2, 3, 4, 5], [1, 3, 5]])
    def test_the_draft_is_fed_as_without_us_whatever_layers_are_captured(
        self, speculating, without_us, oracle6, new_id, layers
    ):
        for (prompt, tokens), reference in without_us:
            name = new_id()
            mark = {"capture": name, "capture_layers": layers, "capture_last_hidden": "both"}
            answer = asking_for_states(speculating, prompt, custom_params=mark)
            assert answer["output_ids"] == reference["output_ids"] == tokens
            assert drafting(answer) == drafting(reference)
            of_prompt, states = returned_states(answer)
            assert of_prompt == returned_states(reference)[0]
            assert relative_error(states, returned_states(reference)[1]) < FLOAT32_TOLERANCE
            dump = speculating.dump(name)
            assert dump.spec.layers == tuple(layers or (0, 3, 5))
            assert_rows_agree(dump, oracle6, prompt)

    def test_beside_another_client_that_wants_hidden_states(self, speculating, tiny6_model_dir, oracle6, draw_greedy):
        """With EAGLE-3 the engine returns what it feeds the draft with, and that is what `check-draft` says."""
        assert foretold(tiny6_model_dir, AUX_LAYERS) == AUX_LAYERS
        check_beside_another_client(speculating, oracle6, draw_greedy, aux_states)


FIRST_IS_1 = (1, 3, 4)
"""Ids of an EAGLE-3 draft that SGLang takes for outputs of layers, because the first of them is 1."""


class TestAuxiliaryHiddenStates:
    """SGLang's own capture: it speculates nothing, the algorithm names the convention of the layer ids only."""

    @pytest.fixture(scope="class")
    @classmethod
    def returning(cls, tiny6_model_dir: Path) -> Iterator[CapturingServer]:
        ids = ("--return-aux-hidden-state-layer-ids", *map(str, FIRST_IS_1))
        arguments = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3", *ids)
        yield from capturing(tiny6_model_dir, *arguments)

    @pytest.fixture(scope="class")
    @classmethod
    def states(cls, tiny6_model_dir: Path) -> Callable[[Run], Tensor]:
        indices = foretold(tiny6_model_dir, FIRST_IS_1)
        assert indices == (2, 4, 5)
        return lambda run: torch.cat([run.hidden_states[index] for index in indices], dim=-1)

    def test_beside_another_client_that_wants_them(self, returning, states, oracle6, draw_greedy):
        check_beside_another_client(returning, oracle6, draw_greedy, states)

    @pytest.mark.parametrize("layers", [[2, 4, 5], [0, 1, 2, 3, 4, 5]])
    def test_the_same_layers_captured_twice(self, returning, states, oracle6, draw_greedy, new_id, layers):
        for length in (30, 150):
            name, (prompt, tokens) = new_id(), draw_greedy(length)
            answer = asking_for_states(returning, prompt, custom_params={"capture": name, "capture_layers": layers})
            assert states_agree(answer, states(oracle6.run([*prompt, *tokens])), prompt)
            assert_rows_agree(returning.dump(name), oracle6, prompt)


def tree(*, steps: int, branches: int, drafts: int) -> tuple[str, ...]:
    return (
        *("--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", str(branches)),
        *("--speculative-num-draft-tokens", str(drafts)),
    )


def asking_for_states(server: EngineServer, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.generate(
        prompt, max_new_tokens=NEW_TOKENS, request={"return_hidden_states": True}, **sampling
    )
    return answer
