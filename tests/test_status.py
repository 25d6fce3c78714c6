"""The status of a server whose spool is taken from under it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from sglang_capture_patches.status import StatusWriter
from sglang_capture_patches.target import Rank

from sglang_capture.claim import claim_spool
from sglang_capture.settings import PluginSettings
from sglang_capture.spool import STATUS_NAME, read_status


def test_a_server_whose_spool_was_moved_away_says_so_unless_another_server_has_it(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    claim = claim_spool(spool, "one")
    arguments = SimpleNamespace(model_path="m", tokenizer_path=None, host="", port=1)
    rank = Rank(dp=0, pp=0, tp=0, fills=True, stages=1, writers=1)
    writer = StatusWriter(spool, rank, PluginSettings(), "one", {}, arguments, claim)

    def state() -> str | None:
        writer.keep()
        found = read_status(spool)
        return found and found.state

    assert state() == "capturing"
    spool.rename(tmp_path / "away")
    spool.mkdir(mode=0o700)
    assert state() == "refused"
    assert "restart the server" in writer.problem
    (spool / STATUS_NAME).unlink()
    other = claim_spool(spool, "two")
    assert state() is None
    claim.close()
    other.close()
