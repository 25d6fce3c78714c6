"""Several processes compute one prompt, or several: each capture is still one dump with the right rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.captures import CapturingServer, assert_rows_agree, spool_directory
from sglang_capture.spool import read_rank_statuses

pytestmark = pytest.mark.engine

FLOAT32 = ("--dtype", "float32")


def send(server, requests, **more):
    """``(prompt, capture id or None, more of the mark)`` each, all at once; the answers in order."""

    def one(request):
        prompt, name, mark = request
        return server.capture(prompt, {"capture": name, **mark} if name else None, **more)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


def assert_all_agree(server, oracle, requests):
    for prompt, name, _ in requests:
        if name:
            assert_rows_agree(server.dump(name), oracle, prompt)


def test_pipeline_stages_fill_one_dump(tiny6_model_dir, oracle6, draw, new_id):
    arguments = (*FLOAT32, "--pp-size", "2", "--chunked-prefill-size", "64")
    with (
        spool_directory() as spool,
        CapturingServer(tiny6_model_dir, spool, *arguments, layers="0,2,3,5", last_hidden="both") as server,
    ):
        wishes = [{}, {"capture_layers": [3]}, {"capture_layers": [1], "capture_last_hidden": "none"}, {}]
        requests = [(draw(length), new_id(), wish) for length in (1, 40, 200) for wish in wishes]
        requests += [(draw(30), None, {}) for _ in range(3)]
        send(server, requests, max_new_tokens=3)
        assert_all_agree(server, oracle6, requests)
        assert server.counts().published == 12
        writers = {status.rank: status.writer for status in read_rank_statuses(spool)}
        assert writers == {"dp0-pp0-tp0": True, "dp0-pp1-tp0": False}
        bad = new_id()
        server.capture(draw(10), {"capture": bad, "capture_layers": [99]})
        assert "99 does not exist" in server.failure(bad).reason
        assert not list(spool.glob(".part-*"))
