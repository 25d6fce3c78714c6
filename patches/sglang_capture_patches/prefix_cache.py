"""Around ``Req._compute_max_prefix_len``: a marked prompt is computed whole, whatever the prefix cache holds.

It is the mechanism that SGLang itself uses for ``logprob_start_len=0``: the match is capped, the rows are computed
again, and the result goes into the tree as ever. Unmarked requests keep their hits.

SGLang's tree keeps one entry for a prefix: a prompt that comes in chunks reads its earlier chunks from there, whoever
computed them. After the weights of a running server were changed that may be the weights before (SGLang flushes only if
it is asked to, and requests that run meanwhile put theirs back), so from then on marked prompts have a name space of
their own in the tree, a new one with each change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_capture_patches import runtime


def around_max_prefix_len(original: Callable[..., int], req: Any, *args: Any, **kwargs: Any) -> int:
    """0 for a request that is captured, SGLang's own answer for every other."""
    longest = original(req, *args, **kwargs)
    if not runtime.is_captured(req):
        return longest
    # Even where SGLang's own answer is 0 (log probabilities from the start): later chunks read the tree all the same.
    runtime.set_apart(req)
    return 0
