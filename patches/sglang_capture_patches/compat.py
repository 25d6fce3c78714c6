"""Which SGLang this is, and whether it has what we hook and read. The one table of it.

``python -m sglang_capture_patches.compat [--json]`` prints the result; ``sglang-capture doctor`` shows it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

OLDEST = "0.5.15"
"""Older releases capture wrong values under all-reduce fusion, or lack the layer's capture keyword."""

NEWEST_TESTED = "0.5.23"


@dataclass(frozen=True)
class Need:
    """A symbol that must be there.

    Attributes:
        target: dotted path; the part up to the first class is a module.
        parameters: leading positional parameters that a hook relies on.
        keywords: parameters that may be passed by name.
        hooked: whether we hook it (else we only read or call it).
    """

    target: str
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    hooked: bool = False


HOOKED = (
    Need("sglang.srt.model_executor.model_runner.ModelRunner.load_model", ("self",), hooked=True),
    Need("sglang.srt.model_executor.model_runner.ModelRunner.forward", ("self", "forward_batch"), hooked=True),
    Need(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("cls", "batch", "model_runner"),
        hooked=True,
    ),
    Need("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", ("self", "input_len"), hooked=True),
    Need(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        ("self", "forward_batch"),
        hooked=True,
    ),
    Need(
        "sglang.srt.managers.scheduler_components.dp_attn._local_prefill_cuda_graph_vote",
        (),
        ("local_batch",),
        hooked=True,
    ),
)

READ = (
    Need("sglang.srt.plugins.hook_registry.HookRegistry.register", (), ("target", "hook", "hook_type")),
    Need("sglang.srt.plugins.hook_registry.HookRegistry._patched"),
    Need("sglang.srt.runtime_context.get_parallel"),
    Need("sglang.srt.managers.schedule_batch.Req.finished", ("self",)),
    Need(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        ("self", "rid"),
        ("origin_input_ids", "sampling_params", "session", "lora_id"),
    ),
    Need("sglang.srt.sampling.sampling_params.SamplingParams.custom_params"),
)

LAYER_KEYWORD = "captured_last_layer_outputs"
"""SGLang's own capture keyword on a decoder layer: what it gets is the residual stream entering the layer, complete.

It belongs to a model's module, which is imported when the model is loaded, and is checked there.
"""


@dataclass
class Report:
    """What :func:`check` found; ``problems`` empty means that capture can work."""

    sglang: str
    problems: list[str] = field(default_factory=list)
    note: str = ""
    hooks: list[str] = field(default_factory=lambda: [need.target for need in HOOKED])

    def message(self) -> str:
        """One message for the log: what was found, what is missing, what to do."""
        missing = "; ".join(self.problems)
        return (
            f"sglang-capture: SGLang {self.sglang} cannot be captured from, and nothing was hooked: {missing}. "
            f"Install an SGLang from {OLDEST} to {NEWEST_TESTED}, a newer sglang-capture, or take sglang_capture out "
            "of SGLANG_PLUGINS (SGLANG_CAPTURE_STRICT=0 starts the server without capture)."
        )


def check() -> Report:
    """Compare this SGLang with the table. Imports only modules that a server's processes import anyway."""
    report = Report(sglang=installed_version())
    if report.sglang == "":
        report.problems.append("the package sglang is not installed")
        return report
    if release(report.sglang) < release(OLDEST):
        report.problems.append(f"version {report.sglang} is older than {OLDEST}")
        return report
    if release(report.sglang) > release(NEWEST_TESTED):
        report.note = (
            f"SGLang {report.sglang} is newer than the newest tested ({NEWEST_TESTED}); its symbols are checked"
        )
    for need in (*HOOKED, *READ):
        report.problems.extend(_faults(need))
    return report


def installed_version() -> str:
    """SGLang's version, or the empty string."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``0.5.10.post1`` gives ``(0, 5, 10)``."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _faults(need: Need) -> Iterator[str]:
    try:
        found = _resolve(need.target)
    except (ImportError, AttributeError) as error:
        yield f"{need.target} is missing ({error})"
        return
    if not need.parameters and not need.keywords:
        return
    names = list(inspect.signature(found).parameters)
    if names[: len(need.parameters)] != list(need.parameters):
        yield f"{need.target} begins with ({', '.join(names)}), and ({', '.join(need.parameters)}) is needed"
    lacking = [keyword for keyword in need.keywords if keyword not in names]
    if lacking:
        yield f"{need.target} has no parameter {', '.join(lacking)}"


def _resolve(target: str) -> Any:
    """The object at a dotted path, a classmethod as its plain function."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name and ".".join(parts[:split]).startswith(error.name):
                continue
            raise
        for name in parts[split:]:
            owner = getattr(owner, name)
        return inspect.unwrap(getattr(owner, "__func__", owner))
    raise ImportError(f"no module of {target} can be imported")


def main() -> int:
    """Print the report; 0 if capture can work."""
    report = check()
    if "--json" in sys.argv[1:]:
        print(json.dumps({"ok": not report.problems, **asdict(report)}))
    else:
        print(report.message() if report.problems else f"SGLang {report.sglang}: all of it is there")
        print("\n".join(report.hooks))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
