"""Several processes compute one prompt, or several: each capture is still one dump with the right rows."""

from __future__ import annotations

import pytest

from engine.captures import CapturingServer, Wish, assert_all_agree, send_all, spool_directory
from engine.conftest import FLOAT32
from sglang_capture.spool import read_rank_statuses

pytestmark = pytest.mark.engine


def test_tensor_parallel_ranks_give_one_dump(tiny6_model_dir, oracle6, draw, new_id):
    """Here also without the overlap schedule and without a prefix cache."""
    arguments = (*FLOAT32, "--tp-size", "2", "--disable-overlap-schedule", "--disable-radix-cache")
    with (
        spool_directory() as spool,
        CapturingServer(tiny6_model_dir, spool, *arguments, layers="0,3,5", last_hidden="both") as server,
    ):
        prompts = [draw(length) for length in (1, 40, 200)]
        wishes = [Wish(prompt, new_id()) for prompt in [*prompts, *prompts]]
        wishes.append(Wish(draw(30), None))
        send_all(server, wishes, max_new_tokens=3)
        assert_all_agree(server, oracle6, wishes)
        assert server.counts().published == 6
        assert len(list(spool.glob("*.pt"))) == 6
        assert {status.rank: status.writer for status in read_rank_statuses(spool)} == {
            "dp0-pp0-tp0": True,
            "dp0-pp0-tp1": False,
        }


def test_pipeline_stages_fill_one_dump(tiny6_model_dir, oracle6, draw, new_id):
    arguments = (*FLOAT32, "--pp-size", "2", "--chunked-prefill-size", "64")
    with (
        spool_directory() as spool,
        CapturingServer(tiny6_model_dir, spool, *arguments, layers="0,2,3,5", last_hidden="both") as server,
    ):
        marks = [{}, {"capture_layers": [3]}, {"capture_layers": [1], "capture_last_hidden": "none"}, {}]
        wishes = [Wish(draw(length), new_id(), mark) for length in (1, 40, 200) for mark in marks]
        wishes += [Wish(draw(30), None) for _ in range(3)]
        send_all(server, wishes, max_new_tokens=3)
        assert_all_agree(server, oracle6, wishes)
        assert server.counts().published == 12
        assert {status.rank: status.writer for status in read_rank_statuses(spool)} == {
            "dp0-pp0-tp0": True,
            "dp0-pp1-tp0": False,
        }
        bad = new_id()
        server.capture(draw(10), {"capture": bad, "capture_layers": [99]})
        assert "99 does not exist" in server.failure(bad).reason
        assert not list(spool.glob(".part-*"))


def test_pipeline_stages_of_two_ranks_each_fill_one_dump(tiny6_model_dir, oracle6, draw, new_id):
    arguments = (*FLOAT32, "--pp-size", "2", "--tp-size", "2", "--chunked-prefill-size", "64")
    with (
        spool_directory() as spool,
        CapturingServer(tiny6_model_dir, spool, *arguments, layers="0,2,3,5", last_hidden="both") as server,
    ):
        wishes = [Wish(draw(length), new_id()) for length in (1, 40, 200)] + [Wish(draw(30), None)]
        send_all(server, wishes, max_new_tokens=2)
        assert_all_agree(server, oracle6, wishes)
        assert [status.rank for status in read_rank_statuses(spool) if status.writer] == ["dp0-pp0-tp0"]


def test_ranks_of_attention_data_parallelism_write_their_own_rows(tiny6_model_dir, oracle6, draw, new_id):
    """With an idle rank beside a busy one, with uneven load, and with padded rows."""
    parallel = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--chunked-prefill-size", "128")
    with (
        spool_directory() as spool,
        CapturingServer(tiny6_model_dir, spool, *FLOAT32, *parallel, layers="0,3,5", last_hidden="both") as server,
    ):
        alone = [Wish(draw(length), new_id()) for length in (1, 90)]
        for wish in alone:
            send_all(server, [wish], max_new_tokens=2)
        uneven = [Wish(draw(length), new_id()) for length in (300, 1, 7, 150, 2, 33, 64, 65)]
        uneven += [Wish(draw(length), None) for length in (5, 120, 40)]
        send_all(server, uneven, max_new_tokens=6)
        assert_all_agree(server, oracle6, [*alone, *uneven])
        statuses = [status for status in read_rank_statuses(spool) if status.writer]
        assert [status.rank for status in statuses] == ["dp0-pp0-tp0", "dp1-pp0-tp1"]
        server.counts()
        published = [status.counts.published for status in read_rank_statuses(spool) if status.writer]
        assert sum(published) == 10
        assert min(published) > 0


def test_two_engines_of_one_server_share_a_spool(tiny6_model_dir, oracle6, draw, new_id):
    arguments = (*FLOAT32, "--dp-size", "2", "--load-balance-method", "round_robin")
    with (
        spool_directory() as spool,
        CapturingServer(tiny6_model_dir, spool, *arguments, layers="0,3,5", quota="64MiB") as server,
    ):
        wishes = [Wish(draw(length), new_id()) for length in (1, 20, 200, 65, 33, 2)]
        send_all(server, wishes, max_new_tokens=2)
        assert_all_agree(server, oracle6, wishes)
        assert server.counts().published == 6
        statuses = read_rank_statuses(spool)
        assert {status.rank for status in statuses} == {"dp0-pp0-tp0", "dp1-pp0-tp0"}
        assert min(status.counts.published for status in statuses) > 0
        assert [status.quota_bytes for status in statuses] == [32 << 20, 32 << 20]
