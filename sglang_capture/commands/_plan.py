"""What `plan` does: the settings for a draft's captures, and the room that they take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_capture.commands._count import count_tokens
from sglang_capture.commands._draft import check_trainer, check_version, read_draft
from sglang_capture.commands._estimate import disk_free, shard_bytes
from sglang_capture.commands._model import read_spec
from sglang_capture.commands._output import human_bytes, print_facts, print_json, rows_with_bar, say
from sglang_capture.drafts.plan import Plan, plan_for
from sglang_capture.drafts.releases import NEWEST
from sglang_capture.errors import UsageError
from sglang_capture.prompts import ChatTokenizer, open_source
from sglang_capture.settings import variable


@dataclass(frozen=True)
class PlanOptions:
    """The options of `plan`, by the names it documents them under."""

    draft: str
    model: str
    file: str | None
    samples: int | None
    tokens_per_sample: int | None
    trainer: str | None
    sglang_version: str | None
    trust_remote_code: bool
    data: Path


def run_plan(options: PlanOptions, *, as_json: bool) -> int:
    """Print the plan; the exit code.

    Raises:
        UsageError: a draft, a model or an option that cannot be used.
        LayerError: the target lacks a layer that the draft wants.
        CaptureError: the tokenizer cannot be loaded.
    """
    check_trainer(options.trainer)
    check_version(options.sglang_version)
    draft = read_draft(options.draft)
    tokens = _tokens(options)
    target = read_spec(options.model, None, None)
    plan = plan_for(draft, target, version=options.sglang_version or NEWEST, trainer=options.trainer)
    facts = _facts(plan, tokens, options.data)
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    return 1 if facts["fits"] is False or facts["problems"] else 0


def _tokens(options: PlanOptions) -> int | None:
    """The tokens that will be captured; ``None`` if nobody says how many."""
    if options.file is not None:
        if options.samples or options.tokens_per_sample:
            raise UsageError("give --file, or --samples with --tokens-per-sample, and not both")
        tokenizer = ChatTokenizer(options.model, trust_remote_code=options.trust_remote_code)
        with rows_with_bar(open_source(options.file), "counting") as rows:
            return count_tokens(rows, tokenizer).tokens
    if (options.samples is None) != (options.tokens_per_sample is None):
        raise UsageError("--samples and --tokens-per-sample go together: the disk is their product times bytes")
    if options.samples is None or options.tokens_per_sample is None:
        return None
    return options.samples * options.tokens_per_sample


def _facts(plan: Plan, tokens: int | None, data: Path) -> dict[str, Any]:
    spec = plan.spec
    total = None if tokens is None else tokens * shard_bytes(spec)
    free = disk_free(data)
    return {
        "settings": {
            variable("layers"): ",".join(map(str, spec.layers)),
            variable("last_hidden"): spec.last_hidden,
        },
        "trainer": plan.trainer.name if plan.trainer else None,
        "export": plan.trainer.export if plan.trainer else None,
        "sglang_version": spec.sglang_version,
        "bytes_per_token": shard_bytes(spec),
        "tokens": tokens,
        "bytes": total,
        "free_bytes": free,
        "fits": None if total is None else total <= free,
        "notes": list(plan.notes),
        "problems": list(plan.problems),
    }


def _print(facts: dict[str, Any]) -> None:
    if facts["problems"]:
        say("a guess, for the reasons below:")
    for name, value in facts["settings"].items():
        say(f"{name}={value}")
    shown = [("a token", f"{facts['bytes_per_token']:,} bytes")]
    if facts["export"]:
        shown.append(("export", f"--to {facts['export']} ({facts['trainer']})"))
    if facts["tokens"] is not None:
        shown.append(("tokens", f"{facts['tokens']:,}"))
        shown.append(("dataset", f"{human_bytes(facts['bytes'])}; {human_bytes(facts['free_bytes'])} free"))
    print_facts(shown)
    for note in facts["notes"]:
        say(f"note: {note}")
    for problem in facts["problems"]:
        say(problem, "wrong")
    if facts["fits"] is False:
        say("the disk does not hold it: fewer samples, or another disk with SGLANG_CAPTURE_DATA", "wrong")
