"""After the weights of a running server were changed: what is captured from now on is another model's.

The captures under way hold rows of both, and fail. Later ones name the checkpoint that was loaded. Where there is none
(weights that came from a trainer's memory, an update that failed half-way) they get a digest that no other capture has,
so that they are never packed with those of the weights before, or of another update.
"""

from __future__ import annotations

from typing import Any

from sglang_capture_patches import runtime


def after_update(result: Any, _updater: Any, recv_req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Whether it succeeded or not: a failed update may have changed some of the weights. Never raises."""
    path = getattr(recv_req, "model_path", None)
    runtime.weights_changed(str(path) if path and result.success else None)
