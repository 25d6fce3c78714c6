"""Around changes of a running server's weights: what is captured from then on is another model's.

The captures under way end before the change: they would hold rows of both, and a forward that still runs on the device
may read weights that are half written. Later ones get a digest that no other capture has, so that they are never packed
with those of the weights before, or of another update. While a session of updates is open nothing is captured: its
trainer may write into the weights at any time, without a request for it. An update of a draft counts as well: drafts
share the target's embeddings and output head, and write into them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_capture_patches import runtime

_WEIGHTS = "weights"
"""SGLang's tag for the memory that holds them (``constants.GPU_MEMORY_TYPE_WEIGHTS``)."""


def around_update(original: Callable[..., Any], updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Whether it succeeds or not: a failed update may have changed some of the weights."""
    runtime.weights_change()
    path, whole = getattr(recv_req, "model_path", None), False
    try:
        result = original(updater, recv_req, *args, **kwargs)
        whole = bool(result.success)
        return result
    finally:
        runtime.weights_changed(str(path) if path else None, whole=whole)


def around_begin(original: Callable[..., Any], updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """A session of updates opens."""
    runtime.weights_change()
    result = original(updater, recv_req, *args, **kwargs)
    if result.success:
        runtime.session_opened()
    return result


def after_end(_result: Any, _updater: Any, _recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """The session is over, if one was open. Never raises."""
    runtime.session_ended()


def after_resume(_result: Any, _updater: Any, recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Memory that was given back comes without what it held, unless the server kept a copy. Never raises."""
    if not recv_req.tags or _WEIGHTS in recv_req.tags:
        runtime.weights_changed(None)


def after_check(_result: Any, _updater: Any, recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """SGLang's own test of its updates can overwrite the weights with random numbers. Never raises."""
    if recv_req.action == "reset_tensors":
        runtime.weights_changed(None)
