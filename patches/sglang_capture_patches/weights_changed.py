"""After the weights of a running server were changed: what is captured from now on is another model's.

The captures under way hold rows of both, and fail. Later ones get a digest that no other capture has, so that they are
never packed with those of the weights before, or of another update.
"""

from __future__ import annotations

from typing import Any

from sglang_capture_patches import runtime

_WEIGHTS = "weights"
"""SGLang's tag for the memory that holds them (``constants.GPU_MEMORY_TYPE_WEIGHTS``)."""


def after_update(result: Any, _updater: Any, recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Whether it succeeded or not: a failed update may have changed some of the weights. Never raises."""
    path = getattr(recv_req, "model_path", None)
    runtime.weights_changed(str(path) if path and result.success else None)


def after_session(_result: Any, _updater: Any, _recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """A trainer has written into the weights, maybe without a request for it. Never raises."""
    runtime.weights_changed(None)


def after_resume(_result: Any, _updater: Any, recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Memory that was given back comes without what it held, unless the server kept a copy. Never raises."""
    if not recv_req.tags or _WEIGHTS in recv_req.tags:
        runtime.weights_changed(None)


def after_check(_result: Any, _updater: Any, recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """SGLang's own test of its updates can overwrite the weights with random numbers. Never raises."""
    if recv_req.action == "reset_tensors":
        runtime.weights_changed(None)
