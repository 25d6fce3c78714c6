"""What `estimate` does: tokens times bytes, held against the disk and the spool."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_capture.client import ServiceClient
from sglang_capture.commands._count import TokenCount, canonical_rows, count_tokens, sample_tokens
from sglang_capture.commands._model import chosen_last_hidden, chosen_layers, read_spec
from sglang_capture.commands._output import (
    error_console,
    human_bytes,
    plural,
    print_facts,
    print_json,
    rows_with_bar,
    say,
)
from sglang_capture.commands._rows import RowOptions
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.prompts import ChatTokenizer, RowSource
from sglang_capture.quota import free_bytes, parse_quota
from sglang_capture.settings import plugin_settings
from sglang_capture.spec import CaptureSpec

_FAULTS_SHOWN = 5
_MASK_BYTES = 1
"""A token in a shard has its payload and one byte of loss mask."""


@dataclass(frozen=True)
class EstimateOptions:
    """The options of `estimate`, by the names it documents them under."""

    rows: RowOptions
    model: str | None
    service: str | None
    layers: str | None
    last_hidden: str | None
    tokenizer: str | None
    trust_remote_code: bool
    sample: int | None
    spool: Path | None
    data: Path


@dataclass(frozen=True)
class Surroundings:
    """What a run would find: what its captures are, and how much room there is; ``None`` where it cannot be known."""

    spec: CaptureSpec
    tokenizer: str
    spool: Path
    quota: int | None
    data: Path
    data_free: int | None


def run_estimate(options: EstimateOptions, *, as_json: bool) -> int:
    """Print the estimate; the exit code.

    Raises:
        UsageError: neither a model nor a service is named, or the file or the model cannot be read.
        CaptureError: the service does not answer or has no server, or the tokenizer cannot be loaded.
    """
    around = _from_service(options) if options.service else _from_model(options)
    tokenizer = ChatTokenizer(options.tokenizer or around.tokenizer, trust_remote_code=options.trust_remote_code)
    source = options.rows.open()
    with rows_with_bar(source, "counting") as found:
        rows = canonical_rows(found, options.rows.column)
        size = around.spec.vocab_size
        if options.sample:
            count = sample_tokens(rows, tokenizer, options.sample, size)
        else:
            count = count_tokens(rows, tokenizer, size)
    facts = _facts(count, around)
    if as_json:
        print_json(facts)
    else:
        _print(source, count, around, facts)
    return 0 if facts["data"]["fits"] is not False and facts["spool"]["longest_fits"] is not False else 1


def _from_model(options: EstimateOptions) -> Surroundings:
    if options.model is None:
        raise UsageError(
            "the bytes depend on the model: name it with --model, or a running side service with --service"
        )
    spec = read_spec(options.model, options.layers, options.last_hidden)
    settings = plugin_settings()
    spool = options.spool or settings.dir
    return Surroundings(
        spec=spec,
        tokenizer=options.model,
        spool=spool,
        quota=parse_quota(settings.quota, free_bytes(existing(spool))),
        data=options.data.absolute(),
        data_free=disk_free(options.data),
    )


def _from_service(options: EstimateOptions) -> Surroundings:
    health = asyncio.run(_health(options.service or ""))
    plugin = health["plugin"]
    if plugin is None:
        raise CaptureError("the side service has seen no server yet: " + "; ".join(health["problems"]))
    served = CaptureSpec.model_validate(plugin["spec"])
    wanted = {
        "layers": chosen_layers(options.layers, served.num_layers),
        "last_hidden": chosen_last_hidden(options.last_hidden),
    }
    data = Path(health["data"])
    return Surroundings(
        spec=served.model_copy(update={name: value for name, value in wanted.items() if value is not None}),
        tokenizer=plugin["tokenizer_path"] or plugin["model_path"],
        spool=Path(health["spool"]),
        quota=plugin["quota_bytes"],
        data=data,
        data_free=disk_free(data) if data.exists() else None,
    )


async def _health(url: str) -> dict[str, Any]:
    async with ServiceClient(url) as client:
        return await client.health()


def existing(path: Path) -> Path:
    """``path``, or the nearest directory above it that is there: where it would be made."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def disk_free(path: Path) -> int:
    """Bytes that a user may still write at ``path``."""
    found = os.statvfs(existing(path))
    return found.f_bavail * found.f_frsize


def shard_bytes(spec: CaptureSpec) -> int:
    """What a token takes on the disk: its payload and its loss mask."""
    return spec.bytes_per_token + _MASK_BYTES


def _facts(count: TokenCount, around: Surroundings) -> dict[str, Any]:
    spec = around.spec
    per_token = shard_bytes(spec)
    total, longest = count.tokens * per_token, count.longest * spec.bytes_per_token
    return {
        "rows": count.rows,
        "duplicates": count.duplicates,
        "bad_rows": count.bad_rows,
        "sampled_rows": count.sampled,
        "tokens": count.tokens,
        "longest_tokens": count.longest,
        "layers": list(spec.layers),
        "last_hidden": spec.last_hidden,
        "hidden_size": spec.hidden_size,
        "dtype": spec.dtype,
        "bytes_per_token": per_token,
        "bytes": total,
        "longest_bytes": longest,
        "data": {
            "path": str(around.data),
            "free_bytes": around.data_free,
            "fits": None if around.data_free is None else total <= around.data_free,
        },
        "spool": {
            "path": str(around.spool),
            "quota_bytes": around.quota,
            "longest_fits": None if around.quota is None else longest <= around.quota,
        },
        "faults": [{"line": line, "reason": reason} for line, reason in count.faults],
    }


def _print(source: RowSource, count: TokenCount, around: Surroundings, facts: dict[str, Any]) -> None:
    for line, reason in count.faults[:_FAULTS_SHOWN]:
        say(f"{source.place(line)}: {reason}", "wrong", console=error_console())
    if count.bad_rows > _FAULTS_SHOWN:
        say(f"and {plural(count.bad_rows - _FAULTS_SHOWN, 'more bad row')}; --json lists them", console=error_console())
    spec, about = around.spec, "" if count.sampled is None else "about "
    sampled = "" if count.sampled is None else f" (estimated from {plural(count.sampled, 'row')} drawn at random)"
    states = f"layers {', '.join(map(str, spec.layers))}, last hidden state {spec.last_hidden}"
    left_out = [(count.duplicates, "duplicate"), (count.bad_rows, "bad row")]
    beside = "".join(f", and {plural(number, what)}" for number, what in left_out if number)
    print_facts(
        [
            ("conversations", f"{count.rows:,}{beside}"),
            ("tokens", f"{about}{count.tokens:,}; the longest conversation {about}{count.longest:,}{sampled}"),
            (
                "a token",
                f"{facts['bytes_per_token']:,} bytes: {states}, {spec.dtype}, hidden size {spec.hidden_size:,}",
            ),
            ("dataset", f"{about}{human_bytes(facts['bytes'])}"),
            ("longest", f"{about}{human_bytes(facts['longest_bytes'])}"),
        ]
    )
    _say_disk(around, facts)
    _say_spool(around, facts)


def _say_disk(around: Surroundings, facts: dict[str, Any]) -> None:
    if around.data_free is None:
        say(f"disk: {around.data} is on the service's machine, so its room is not known here", "warn")
        return
    room = f"disk: {human_bytes(around.data_free)} free at {around.data}"
    if facts["data"]["fits"]:
        say(f"{room}: it fits", "ok")
    else:
        short = human_bytes(facts["bytes"] - around.data_free)
        say(f"{room}: {short} too little; name another disk with SGLANG_CAPTURE_DATA, or fewer --layers", "wrong")


def _say_spool(around: Surroundings, facts: dict[str, Any]) -> None:
    if around.quota is None:
        return
    room = f"spool: {human_bytes(around.quota)} may be used at {around.spool}"
    if not facts["spool"]["longest_fits"]:
        say(
            f"{room}: the longest conversation does not fit; raise SGLANG_CAPTURE_QUOTA, or name fewer --layers",
            "wrong",
        )
    elif facts["bytes"] > around.quota:
        say(f"{room}: less than the dataset, which is normal: it only holds what is not packed yet", "ok")
    else:
        say(f"{room}: it would even hold all of it", "ok")
