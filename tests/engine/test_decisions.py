"""Questions that never come up on a CPU, put to the plugin on SGLang's own classes: graphs, and refused arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_capture_patches.cpu import environment_of

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).with_name("decisions.py")

REFUSED = {
    "two-batch overlap": (["--enable-two-batch-overlap"], "drop --enable-two-batch-overlap"),
    "context parallelism": (["--attn-cp-size", "2", "--tp-size", "2"], "use --attn-cp-size 1"),
    "scattered attention input": (
        ["--enable-attn-tp-input-scattered", "--tp-size", "2"],
        "drop --enable-attn-tp-input-scattered",
    ),
    "multiplexed prefill": (["--enable-pdmux"], "drop --enable-pdmux"),
    "a hook inside the model": (
        ["--forward-hooks", '[{"target_modules": ["*"], "hook_factory": "a.b:c"}]'],
        "drop --forward-hooks",
    ),
    "pipeline stages on two machines": (
        ["--pp-size", "2", "--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "127.0.0.1:5"],
        "use --nnodes 1",
    ),
}

ACCEPTED = {
    "nothing special": [],
    "tensor and pipeline parallelism": ["--tp-size", "2", "--pp-size", "2"],
    "DP attention": ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
}


@pytest.fixture(scope="module")
def decided(tiny6_model_dir: Path) -> dict:
    flags = [*(flags for flags, _ in REFUSED.values()), *ACCEPTED.values()]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tiny6_model_dir), json.dumps(flags)],
        env=environment_of([], inherited),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_marked_prefill_leaves_its_graph_and_every_other_batch_keeps_it(decided):
    assert decided["graph"] == {"unmarked": True, "marked": False, "refused": True, "marked, in decode": True}


def test_a_rank_with_a_marked_prefill_votes_against_the_graph_of_all_ranks(decided):
    assert decided["vote"] == {
        "unmarked": True,
        "marked": False,
        "refused": True,
        "marked, in decode": True,
        "no batch": True,
    }


def test_a_prompt_is_kept_from_the_cache_until_it_was_captured(decided):
    cached = decided["cached"]
    assert cached["marked"] == 0
    assert cached["unmarked"] == cached["refused"] > 0
    assert cached["marked, in decode"] > 0


def test_a_malformed_mark_is_told_once_and_at_once_for_it_may_be_aborted_while_it_waits(decided):
    (reason,) = decided["told in the queue"].pop("refused")
    assert "99 does not exist" in reason
    assert not any(decided["told in the queue"].values())


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_server_that_would_give_wrong_rows_is_refused_with_the_flag_to_change(decided, case):
    said = decided["configuration"][list(REFUSED).index(case)]
    assert REFUSED[case][1] in said


@pytest.mark.parametrize("case", list(ACCEPTED))
def test_other_servers_are_not_refused(decided, case):
    assert decided["configuration"][len(REFUSED) + list(ACCEPTED).index(case)] == ""


def test_before_the_vote_can_be_hooked_graphs_under_dp_attention_are_refused(decided):
    said = decided["graphs before the vote"]
    assert "add --disable-prefill-cuda-graph" in said.pop("0.5.18, with graphs")
    assert set(said.values()) == {""}


def test_a_request_whose_rows_are_not_the_models_of_these_ids_is_refused(decided):
    said = decided["request"]
    assert said.pop("plain") == ""
    assert "session" in said["a session's"]
    assert "LoRA" in said["with a LoRA adapter"]
    assert "input_embeds" in said["with embeddings"]
    assert "embedding overrides" in said["with some embeddings"]
    assert "several items" in said["several items at once"]
    assert said["an id behind the vocabulary"].endswith("from 0 to 511; found 512")
    assert said["a negative id"].endswith("from 0 to 511; found -1")


def test_where_every_prompt_is_captured_sglangs_own_are_not(decided):
    assert decided["unasked"] == {
        "a client's": True,
        "a health check": False,
        "a health check with a mark": True,
        "a measurement": False,
    }


def test_after_an_update_of_the_weights_images_are_refused_for_what_is_kept_of_them(decided):
    (reason,) = decided["images after an update"]
    assert "what the weights before made of them" in reason


def test_in_a_session_of_updates_a_prompt_is_refused_once_and_for_all_its_chunks(decided):
    (reason,) = decided["in a session of updates"]
    assert "Send it again after end_weight_update" in reason


def test_what_a_server_rounds_beyond_its_files_is_in_the_spec(decided):
    assert decided["rounded"] == {
        "": "",
        "--quantization fp8": "weights fp8",
        "--kv-cache-dtype fp8_e4m3": "kv cache fp8_e4m3",
        "--kv-cache-dtype bf16": "",
        "bf16 in float32": "kv cache bfloat16",
        "--quantization w8a8_int8 --kv-cache-dtype fp8_e5m2": "weights w8a8_int8, kv cache fp8_e5m2",
    }
