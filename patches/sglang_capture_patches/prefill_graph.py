"""Prefill CUDA graphs: a marked prefill runs eagerly, every other keeps its graph.

A graph replays kernels, not Python: hooks on layers are not called. Under DP attention all ranks must take the same
way, so the vote taken when a batch is scheduled says no as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_capture_patches import runtime
from sglang_capture_patches.batch_plan import plan_of


def around_can_run_graph(
    original: Callable[..., bool], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> bool:
    """False for a batch with a plan."""
    if plan_of(forward_batch) is not None:
        return False
    return original(runner, forward_batch, *args, **kwargs)


def around_vote(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """This rank's vote for the prefill graph: no, if its batch holds a captured request."""
    batch = kwargs.get("local_batch")
    if batch is not None and any(runtime.is_captured(req) for req in batch.reqs):
        return False
    return original(*args, **kwargs)
