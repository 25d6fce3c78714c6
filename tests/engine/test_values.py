"""What the numbers are: in the engine's own precision, of the weights that are loaded, and NaN never unnoticed."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.captures import (
    CapturingServer,
    Wish,
    assert_all_agree,
    assert_rows_agree,
    relative_error,
    send_all,
    spool_directory,
)
from engine.conftest import FLOAT32
from engine.oracle import Oracle
from sglang_capture.spool import dump_path
from sglang_capture.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

NAN_TOKEN, ZERO_TOKEN = 14, 15
"""Below the ids that prompts are drawn from."""


@pytest.fixture(scope="module")
def poisoned_model_dir(tiny6_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual six layers, but for the embeddings of two tokens: NaN, and zeros."""
    directory = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(tiny6_model_dir, directory)
    (weights,) = directory.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")
    tensors["model.embed_tokens.weight"][ZERO_TOKEN] = 0
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def refusing(poisoned_model_dir: Path) -> Iterator[CapturingServer]:
    arguments = (*FLOAT32, "--chunked-prefill-size", "64")
    with (
        spool_directory() as spool,
        CapturingServer(poisoned_model_dir, spool, *arguments, layers="0,3,5", last_hidden="both") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def labelling(poisoned_model_dir: Path) -> Iterator[CapturingServer]:
    arguments = ("--dtype", "float16")
    with (
        spool_directory() as spool,
        CapturingServer(poisoned_model_dir, spool, *arguments, layers="0,3,5", nonfinite="label") as running,
    ):
        yield running


def test_a_capture_with_nan_is_refused_and_its_batch_mates_are_right(refusing, oracle6, draw, new_id):
    good = [Wish(draw(length), new_id()) for length in (1, 30, 90, 150)]
    bad = [Wish([*draw(5), NAN_TOKEN, *draw(length)], new_id()) for length in (1, 80)]
    send_all(refusing, [*bad, *good, *bad, *good])
    assert_all_agree(refusing, oracle6, good)
    for wish in bad:
        failure = refusing.failure(wish.name)
        # How many beside and behind it: the test bed's attention multiplies what is masked by zero, and NaN stays NaN.
        told = rf"\d+ of {len(wish.prompt)} tokens have NaN or Inf \(first: index 0, position 5\)"
        assert re.match(told, failure.reason), failure.reason
        assert not failure.retriable
    refusing.assert_serving()


def test_rows_of_zeros_are_published_and_noticed(refusing, draw, new_id):
    name, before = new_id(), refusing.counts().zero_rows
    refusing.capture([*draw(5), ZERO_TOKEN, *draw(9)], {"capture": name})
    dump = refusing.dump(name)
    assert dump.hidden_states[5, 0].abs().sum() == 0
    assert refusing.counts().zero_rows == before + 1


def test_or_published_with_a_label(labelling, draw, new_id):
    bad, good = Wish([*draw(5), NAN_TOKEN, *draw(20)], new_id()), Wish(draw(20), new_id())
    send_all(labelling, [bad, good])
    dump = labelling.dump(bad.name)
    finite = torch.cat([dump.hidden_states.flatten(1), dump.last_hidden["last_hidden_state"]], dim=1).isfinite().all(1)
    assert (dump.nonfinite_rows, dump.zero_rows) == (int((~finite).sum()), 0)
    assert dump.nonfinite_rows >= 21
    assert dump.hidden_states[:, 0].isnan().all(1).nonzero().tolist() == [[5]]
    assert labelling.dump(good.name).nonfinite_rows == 0


def test_float16_rows_are_the_engines_own_and_near_its_float32(labelling, server, draw, new_id):
    """float16 keeps 11 bits: a rounding is up to 2**-12 = 0.02 % of a value, and six layers add some dozens of them."""
    for length in (1, 30, 300):
        wish = Wish(draw(length), new_id())
        send_all(labelling, [wish])
        send_all(server, [wish])
        half, exact = labelling.dump(wish.name), server.dump(wish.name)
        assert half.spec.dtype == "float16"
        assert half.hidden_states.dtype == half.last_hidden["last_hidden_state"].dtype == torch.float16
        assert relative_error(half.hidden_states[:, 0], exact.hidden_states[:, 0]) < 2**-11
        for layer in (1, 2):
            assert relative_error(half.hidden_states[:, layer], exact.hidden_states[:, layer]) < 0.01
        assert relative_error(half.last_hidden["last_hidden_state"], exact.last_hidden["last_hidden_state"]) < 0.01


@contextlib.contextmanager
def paused_in_mid_prefill(server: CapturingServer, pool: ThreadPoolExecutor, wish: Wish) -> Iterator[None]:
    """The server stands still with some chunks of a prompt computed; a prompt that was faster is sent again."""
    while True:
        sent = pool.submit(send_all, server, [wish])
        while not sent.done() and not list(server.spool.glob(".part-*")):
            time.sleep(0.001)
        server.control("pause_generation", mode="in_place")
        server.counts()  # a status later than this: what was complete is published
        if list(server.spool.glob(".part-*")):
            break
        server.control("continue_generation")
        sent.result()
        dump_path(server.spool, wish.name).unlink()
    yield
    server.control("continue_generation")
    sent.result()


def test_weights_that_are_changed_in_a_running_server_are_other_weights(refusing, draw, new_id, tmp_path):
    """The server serves another model from here on."""
    other = tmp_path / "other"
    make_tiny_model(other, layers=6, seed=1)
    before = Wish(draw(40), new_id())
    send_all(refusing, [before])
    split = Wish(draw(400), new_id())
    update = {"model_path": str(other), "flush_cache": False}
    with ThreadPoolExecutor(1) as pool, paused_in_mid_prefill(refusing, pool, split):
        assert refusing.post("/update_weights_from_disk", update)["success"]
    assert "weights were changed" in refusing.failure(split.name).reason
    after = Wish(draw(40), new_id())
    send_all(refusing, [after])
    assert_rows_agree(refusing.dump(after.name), Oracle(other), after.prompt)
    old, new = refusing.dump(before.name).spec, refusing.dump(after.name).spec
    assert old.digest != new.digest
    assert new.model_path == str(other)
    assert new.weights_digest.startswith(f"{old.weights_digest}+")


def test_rows_in_chunks_are_those_of_the_new_weights_whatever_is_in_the_cache(refusing, draw, new_id, tmp_path):
    """The cache holds the same prompts, computed with the weights before, and the update leaves it alone."""
    newest = tmp_path / "newest"
    make_tiny_model(newest, layers=6, seed=2)
    known = [draw(length) for length in (300, 150)]
    for prompt in known:
        refusing.generate(prompt)
    refusing.control("pause_generation", mode="in_place")
    assert refusing.post("/update_weights_from_disk", {"model_path": str(newest), "flush_cache": False})["success"]
    refusing.control("continue_generation")
    wishes = [Wish(prompt, new_id()) for prompt in [*known, [*known[0][:200], 20, 21]]]
    send_all(refusing, wishes)
    # Log probabilities from the first token on: SGLang itself looks for no prefix, and yet reads the earlier chunks.
    scored = [Wish(prompt, new_id()) for prompt in known]
    for wish in scored:
        refusing.capture(wish.prompt, {"capture": wish.name}, request={"return_logprob": True, "logprob_start_len": 0})
    assert_all_agree(refusing, Oracle(newest), [*wishes, *scored])


def test_weights_that_no_checkpoint_has_are_like_no_others(refusing, draw, new_id):
    before, after = Wish(draw(5), new_id()), Wish(draw(5), new_id())
    send_all(refusing, [before])
    assert refusing.control("update_weights_from_disk", model_path="/nowhere") == 400
    send_all(refusing, [after])
    old, new = refusing.dump(before.name).spec, refusing.dump(after.name).spec
    assert new.weights_digest != old.weights_digest
    assert new.weights_digest.partition("+")[0] == old.weights_digest.partition("+")[0]


def test_while_a_session_of_updates_is_open_nothing_is_captured(refusing, draw, new_id):
    """A trainer may write into the weights at any time, without a request for it."""
    before, during, after = (Wish(draw(5), new_id()) for _ in range(3))
    send_all(refusing, [before])
    split = Wish(draw(400), new_id())
    with ThreadPoolExecutor(1) as pool, paused_in_mid_prefill(refusing, pool, split):
        assert refusing.control("begin_weight_update") == 200
    assert "weights were changed" in refusing.failure(split.name).reason
    refusing.capture(during.prompt, {"capture": during.name})
    assert "after end_weight_update" in refusing.failure(during.name).reason
    assert refusing.control("end_weight_update") == 200
    send_all(refusing, [after])
    assert refusing.dump(after.name).spec.weights_digest != refusing.dump(before.name).spec.weights_digest


def test_an_update_of_a_draft_counts_too_for_it_shares_the_targets_embeddings(refusing, draw, new_id):
    before, during, after = (Wish(draw(5), new_id()) for _ in range(3))
    send_all(refusing, [before])
    assert refusing.control("begin_weight_update", selector="draft") == 200
    refusing.capture(during.prompt, {"capture": during.name})
    assert "after end_weight_update" in refusing.failure(during.name).reason
    assert refusing.control("end_weight_update") == 200
    send_all(refusing, [after])
    assert refusing.dump(after.name).spec.weights_digest != refusing.dump(before.name).spec.weights_digest


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("resume_memory_occupation", {"tags": ["weights"]}),
        ("weights_checker", {"action": "reset_tensors"}),
    ],
)
def test_other_ways_to_other_weights(refusing, draw, new_id, route, body):
    """The last test of this server: afterwards its weights are random."""
    before, after = Wish(draw(5), new_id()), Wish(draw(5), new_id())
    send_all(refusing, [before])
    if route == "resume_memory_occupation":
        assert refusing.control("release_memory_occupation", **body) == 200
    else:
        assert refusing.control(route, action="checksum") == 200  # a look changes nothing
        send_all(refusing, [Wish(draw(5), before_look := new_id())])
        assert refusing.dump(before_look).spec.digest == refusing.dump(before.name).spec.digest
    assert refusing.control(route, **body) == 200
    send_all(refusing, [after])
    assert refusing.dump(before.name).spec.digest != refusing.dump(after.name).spec.digest
