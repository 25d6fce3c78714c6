"""After ``Scheduler._add_request_to_queue`` and ``abort_request``: no marked request that waits ends without a word.

A request that is aborted while it waits never reaches a batch, where everything else here begins. Other ways out of the
queue show when the request is gone from memory, which may take a while.
"""

from __future__ import annotations

from typing import Any

from sglang_capture_patches import runtime


def after_add(_result: Any, _scheduler: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Remember a marked request. Never raises."""
    runtime.expect(req)


def after_abort(_result: Any, scheduler: Any, recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """An abort names requests by how their ids begin; those that still wait behind it were not meant. Never raises."""
    runtime.aborted("" if recv_req.abort_all else str(recv_req.rid), scheduler.waiting_queue)
