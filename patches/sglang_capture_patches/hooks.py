"""The hooks and their places: registering them, and proving that SGLang attached every one."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_capture_patches import (
    batch_plan,
    beam_search,
    model_forward,
    model_load,
    prefill_graph,
    prefix_cache,
    queued,
    weights_changed,
)
from sglang_capture_patches.compat import installed_version
from sglang_capture_patches.contract import BEAMS, HOOKED, WEIGHT_UPDATER, WEIGHT_UPDATES, needed

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_GRAPHS = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"

HOOKS = {
    f"{_RUNNER}.load_model": (model_load.around_load_model, HookType.AROUND),
    f"{_RUNNER}.forward": (model_forward.around_forward, HookType.AROUND),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (
        batch_plan.after_init_new,
        HookType.AFTER,
    ),
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len": (
        prefix_cache.around_max_prefix_len,
        HookType.AROUND,
    ),
    "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue": (queued.after_add, HookType.AFTER),
    "sglang.srt.managers.scheduler.Scheduler.abort_request": (queued.after_abort, HookType.AFTER),
    **{f"{WEIGHT_UPDATER}.{name}": (weights_changed.around_update, HookType.AROUND) for name in WEIGHT_UPDATES},
    f"{WEIGHT_UPDATER}.begin_weight_update": (weights_changed.around_begin, HookType.AROUND),
    f"{WEIGHT_UPDATER}.end_weight_update": (weights_changed.after_end, HookType.AFTER),
    f"{WEIGHT_UPDATER}.resume_memory_occupation": (weights_changed.after_resume, HookType.AFTER),
    f"{WEIGHT_UPDATER}.check_weights": (weights_changed.after_check, HookType.AFTER),
    f"{BEAMS}.validate_and_init": (beam_search.around_validate_and_init, HookType.AROUND),
    f"{_GRAPHS}.can_run_graph": (prefill_graph.around_can_run_graph, HookType.AROUND),
    "sglang.srt.managers.scheduler_components.dp_attn._local_prefill_cuda_graph_vote": (
        prefill_graph.around_vote,
        HookType.AROUND,
    ),
}


def register_all() -> None:
    """Hand every hook to SGLang's registry, which attaches them when all plugins have registered."""
    model_load.attached = attached
    for target in _targets():
        hook, kind = HOOKS[target]
        HookRegistry.register(target, hook, kind)


def attached() -> dict[str, str]:
    """Each target with ``attached`` or ``missing``: the registry logs a target that it could not patch and goes on."""
    return {target: "attached" if target in HookRegistry._patched else "missing" for target in _targets()}


def _targets() -> list[str]:
    return [need.target for need in needed(HOOKED, installed_version())]
