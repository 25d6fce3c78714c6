"""All that we hook, call or read of SGLang, by version: the one table, as data.

The plugin checks it at start (:mod:`.compat`): symbols and signatures on the imported modules, fields in their source.
The contract tests read the same table against released wheels, without importing them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_capture.drafts.releases import release

OLDEST = "0.5.15"
"""Older releases capture wrong values under all-reduce fusion, or lack the layers' capture keyword."""

NEWEST_TESTED = "0.5.23"


VOTE_SINCE = "0.5.19"
"""The first release in which the ranks' vote for a prefill graph can be hooked."""


@dataclass(frozen=True)
class Need:
    """A function or class that must be there.

    Attributes:
        target: dotted path, the module up to the first class or function.
        parameters: leading positional parameters that we rely on.
        keywords: parameters that are passed or read by name.
        since: the first release that has it; older ones do without.
    """

    target: str
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    since: str = OLDEST


WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""The requests with which the weights of a running server are changed; ``HOOKED`` has more that may change them."""

WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator"

HOOKED = (
    Need("sglang.srt.model_executor.model_runner.ModelRunner.load_model", ("self",)),
    Need("sglang.srt.model_executor.model_runner.ModelRunner.forward", ("self", "forward_batch")),
    Need(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("cls", "batch", "model_runner"),
    ),
    Need("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", ("self", "input_len")),
    Need(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        ("self", "forward_batch"),
    ),
    Need("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", ("self", "req")),
    Need("sglang.srt.managers.scheduler.Scheduler.abort_request", ("self", "recv_req")),
    *(Need(f"{WEIGHT_UPDATER}.{name}", ("self", "recv_req")) for name in WEIGHT_UPDATES),
    Need(f"{WEIGHT_UPDATER}.resume_memory_occupation", ("self", "recv_req")),
    Need(f"{WEIGHT_UPDATER}.check_weights", ("self", "recv_req")),
    # A session in which a trainer writes into the weights without a request for each (RDMA).
    Need(f"{WEIGHT_UPDATER}.begin_weight_update", ("self", "recv_req"), since="0.5.21"),
    Need(f"{WEIGHT_UPDATER}.end_weight_update", ("self", "recv_req"), since="0.5.21"),
    Need(f"{BEAMS}.validate_and_init", ("self", "req"), since="0.5.19"),
    # Before, the vote is no function of its own; `target.check_configuration` refuses where it would be needed.
    Need(
        "sglang.srt.managers.scheduler_components.dp_attn._local_prefill_cuda_graph_vote",
        keywords=("local_batch",),
        since=VOTE_SINCE,
    ),
)

DP_RANK_AT = (
    (OLDEST, "model_runner.dp_rank"),
    ("0.5.16", "model_runner.ps.dp_rank"),
    ("0.5.21", "parallel.dp_rank"),
)
"""Where a process finds which data-parallel engine it is of, by the first release that has it there."""

READ = (
    Need("sglang.srt.plugins.hook_registry.HookRegistry.register", keywords=("target", "hook", "hook_type")),
    Need("sglang.srt.runtime_context.get_parallel"),
)

FIELDS: dict[str, tuple[str, ...]] = {
    "sglang.srt.plugins.hook_registry.HookRegistry": ("_patched",),
    "sglang.srt.managers.scheduler.Scheduler": ("waiting_queue",),
    "sglang.srt.managers.io_struct.AbortReq": ("abort_all",),
    "sglang.srt.managers.io_struct.CheckWeightsReqInput": ("action",),
    "sglang.srt.managers.io_struct.ResumeMemoryOccupationReqInput": ("tags",),
    "sglang.srt.managers.schedule_batch.Req": (
        "rid",
        "origin_input_ids",
        "origin_input_ids_unpadded",
        "output_ids",
        "sampling_params",
        "session",
        "lora_id",
        "extra_key",
        "input_embeds",
        "multimodal_inputs",
        "finished_reason",
        "to_finish",
    ),
    "sglang.srt.sampling.sampling_params.SamplingParams": ("custom_params",),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": (
        "forward_mode",
        "extend_seq_lens_cpu",
        "extend_prefix_lens_cpu",
    ),
    "sglang.srt.model_executor.forward_batch_info.ForwardMode": ("EXTEND", "MIXED"),
    "sglang.srt.model_executor.model_runner.ModelRunner": (
        "model",
        "model_config",
        "server_args",
        "is_draft_worker",
        "device",
        "dtype",
        "dist_port",
    ),
    "sglang.srt.configs.model_config.ModelConfig": ("hf_config", "hf_text_config"),
}
"""Fields that we read, by class: assigned to ``self``, or declared in the class."""

REFUSED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    (
        "enable_two_batch_overlap",
        (None, False),
        "two-batch overlap runs the layers without capture: drop --enable-two-batch-overlap",
    ),
    ("attn_cp_size", (None, 1), "context parallelism re-orders rows: use --attn-cp-size 1"),
    ("enable_pdmux", (None, False), "multiplexed prefill splits the layers over forwards: drop --enable-pdmux"),
    (
        "enable_attn_tp_input_scattered",
        (None, False),
        "scattered attention input leaves rows on other ranks: drop --enable-attn-tp-input-scattered",
    ),
    (
        "enable_layernorm_sp",
        (None, False),
        "sequence parallelism leaves rows on other ranks: drop --enable-layernorm-sp",
    ),
    (
        "forward_hooks",
        (None, []),
        "a hook inside the model may change what its layers hand on: drop --forward-hooks",
    ),
)
"""Server arguments, the values that can be captured with, and what to say of any other.

That SGLang still has each of them is tested; a name that is gone would refuse nothing.
"""

ARGUMENT_SINCE = {"enable_layernorm_sp": "0.5.19"}
"""The first release of an argument that the oldest one lacks."""


def newest(table: tuple[tuple[str, str], ...], version: str) -> str:
    """The entry of a table by releases that holds for ``version``."""
    return [value for since, value in table if release(version) >= release(since)][-1]


def needed(needs: tuple[Need, ...], version: str) -> list[Need]:
    """Those of ``needs`` that this version has."""
    return [need for need in needs if release(version) >= release(need.since)]


def signature_fault(need: Need, names: list[str]) -> Iterator[str]:
    """What is wrong with a function whose parameters are ``names``."""
    if names[: len(need.parameters)] != list(need.parameters):
        yield f"{need.target} begins with ({', '.join(names)}), and ({', '.join(need.parameters)}) is needed"
    lacking = [keyword for keyword in need.keywords if keyword not in names]
    if lacking:
        yield f"{need.target} has no parameter {', '.join(lacking)}"


class Source:
    """SGLang's source, read and never imported.

    Args:
        root: the directory that holds the package ``sglang``.
    """

    def __init__(self, root: Path):
        self._root = root
        self._modules: dict[Path, ast.Module] = {}

    def faults(self, version: str) -> Iterator[str]:
        """All of the contract that this source does not hold."""
        for need in needed((*HOOKED, *READ), version):
            yield from self._need_faults(need)
        yield from self.field_faults(FIELDS)

    def field_faults(self, fields: dict[str, tuple[str, ...]]) -> Iterator[str]:
        """The fields that their classes do not have."""
        for target, names in fields.items():
            found = self._find(target)
            if not isinstance(found, ast.ClassDef):
                yield f"the class {target} is missing"
                continue
            lacking = [name for name in names if name not in _names_of(found)]
            if lacking:
                yield f"{target} has no {', '.join(lacking)}"

    def _need_faults(self, need: Need) -> Iterator[str]:
        found = self._find(need.target)
        if found is None:
            yield f"{need.target} is missing"
        elif isinstance(found, ast.FunctionDef):
            arguments = found.args
            listed = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            yield from signature_fault(need, [argument.arg for argument in listed])

    def _find(self, target: str) -> ast.stmt | None:
        parts = target.split(".")
        for split in range(len(parts) - 1, 0, -1):
            path = self._root.joinpath(*parts[:split]).with_suffix(".py")
            if path.is_file():
                return _descend(self._parse(path), parts[split:])
        return None

    def _parse(self, path: Path) -> ast.Module:
        if path not in self._modules:
            self._modules[path] = ast.parse(path.read_bytes())
        return self._modules[path]


def _descend(module: ast.Module, names: list[str]) -> ast.stmt | None:
    body: list[ast.stmt] = module.body
    found: ast.stmt | None = None
    for name in names:
        found = next((s for s in body if isinstance(s, (ast.FunctionDef, ast.ClassDef)) and s.name == name), None)
        if found is None:
            return None
        body = found.body if isinstance(found, ast.ClassDef) else []
    return found


def _names_of(cls: ast.ClassDef) -> set[str]:
    """What instances of a class have by its own source: declared, assigned in it, defined, or set on ``self``."""
    names = {statement.name for statement in cls.body if isinstance(statement, ast.FunctionDef)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names
