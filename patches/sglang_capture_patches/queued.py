"""After ``Scheduler._add_request_to_queue``: marked requests that wait are known, so that none ends without a word.

A request that is aborted while it waits never reaches a batch, where everything else here begins.
"""

from __future__ import annotations

from typing import Any

from sglang_capture_patches import runtime


def after_add(_result: Any, _scheduler: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Remember a marked request. Never raises."""
    runtime.expect(req)
