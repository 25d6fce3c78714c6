"""Around ``Req._compute_max_prefix_len``: a marked prompt is computed whole, whatever the prefix cache holds.

It is the mechanism that SGLang itself uses for ``logprob_start_len=0``: the match is capped, the rows are computed
again, and the result goes into the tree as ever. Unmarked requests keep their hits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_capture_patches import runtime


def around_max_prefix_len(original: Callable[..., int], req: Any, *args: Any, **kwargs: Any) -> int:
    """0 for a request that is captured, SGLang's own answer for every other."""
    longest = original(req, *args, **kwargs)
    return 0 if longest and runtime.is_captured(req) else longest
