"""Around ``BeamCoordinator.validate_and_init``: a request for beam search keeps its mark.

SGLang replaces the sampling parameters of such a request by neutral ones, before it enters the queue, where everything
else here begins. Its prompt is computed once, by the leading beam, and is captured as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_capture_patches.marked import keep_params


def around_validate_and_init(original: Callable[..., Any], beams: Any, req: Any, *more: Any, **named: Any) -> Any:
    """Remember ``custom_params`` on the request; SGLang's own answer. Raises nothing of its own."""
    custom = req.sampling_params.custom_params
    result = original(beams, req, *more, **named)
    if custom is not None:
        keep_params(req, custom)
    return result
