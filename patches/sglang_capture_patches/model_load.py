"""Around ``ModelRunner.load_model``: the one place where it is decided whether this server can capture.

SGLang swallows a plugin's exceptions while plugins load, but not those of a hook that runs later. So this is where a
server that could not capture correctly is stopped (``SGLANG_CAPTURE_STRICT=1``), with a message that says why.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sglang_capture.claim import Claim, claim_spool
from sglang_capture.filler import Filler
from sglang_capture.follower import Follower
from sglang_capture.layers import eagle3_layers, output_of
from sglang_capture.quota import Account, free_bytes, parse_quota
from sglang_capture.recorder import Recorder
from sglang_capture.settings import PluginSettings, plugin_settings
from sglang_capture.spec import CaptureSpec
from sglang_capture.spool import dumps
from sglang_capture.writer_thread import HOUSEKEEPING_SECONDS
from sglang_capture_patches import SERVER_ID, runtime
from sglang_capture_patches.marked import Rules
from sglang_capture_patches.status import StatusWriter
from sglang_capture_patches.target import (
    CaptureStartError,
    Rank,
    build_spec,
    check_configuration,
    find_target,
    rank_of,
    served_weights,
    short_name,
)

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

attached: Callable[[], dict[str, str]] = dict
"""Each hook's state; set by :mod:`.hooks`, which imports this module."""

_claims: list[Claim] = []
"""Held for the life of the process: the kernel's lock on the spool goes with it."""


def around_load_model(original: Callable[..., Any], model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Load, then make ready to capture; a draft's model is left alone. What can be refused before loading is: that may
    take many minutes.

    Raises:
        CaptureStartError: the server cannot capture, and ``SGLANG_CAPTURE_STRICT`` is on.
    """
    if model_runner.is_draft_worker:
        return original(model_runner, *args, **kwargs)
    settings = plugin_settings()
    prepared = _or_refuse(settings, lambda: _prepare(model_runner, settings))
    result = original(model_runner, *args, **kwargs)
    if prepared is not None:
        _or_refuse(settings, lambda: _start(model_runner, settings, *prepared))
    return result


def _or_refuse(settings: PluginSettings, step: Callable[[], _Result]) -> _Result | None:
    """``step``, or the end of the server; without ``SGLANG_CAPTURE_STRICT`` an error in the log and ``None``."""
    try:
        return step()
    except Exception as error:
        message = f"sglang-capture: this server cannot capture: {error}"
        if settings.strict:
            raise CaptureStartError(message) from error
        logger.error("%s (SGLANG_CAPTURE_STRICT=0: it starts all the same)", message)
        return None


def _prepare(model_runner: Any, settings: PluginSettings) -> tuple[StatusWriter, str]:
    """All that needs no weights: the claim on the spool, the hooks, the server's arguments, the digest of the files."""
    server_id = f"{os.environ.get(SERVER_ID, os.getpid())}{_engine_of(model_runner)}"
    claim = claim_spool(settings.dir, server_id)
    _claims.append(claim)
    hooks = attached()
    rank, args = rank_of(model_runner), model_runner.server_args
    status = StatusWriter(settings.dir, rank, settings, server_id, hooks, args, claim)
    missing = [target for target, state in hooks.items() if state != "attached"]
    with _told_in(status):
        if missing:
            raise CaptureStartError(f"SGLang did not attach the hooks on {', '.join(missing)}: see its log above")
        check_configuration(args)
        return status, served_weights(args, claim.start)


def _engine_of(model_runner: Any) -> str:
    """What tells two engines that one Python process has started; those of one data-parallel server belong together."""
    args = model_runner.server_args
    return "" if args.dp_size > 1 and not args.enable_dp_attention else f"-{model_runner.dist_port}"


def _start(model_runner: Any, settings: PluginSettings, status: StatusWriter, weights_before: str) -> None:
    """The model is there: find its layers, and begin.

    Args:
        weights_before: the digest of the files before they were loaded, which takes minutes; empty if unknown.
    """
    rank = status.rank
    with _told_in(status):
        target = find_target(model_runner.model)
        spec = build_spec(model_runner, target, settings, rank, _loaded(model_runner, status, weights_before))
    status.quota = parse_quota(settings.quota, free_bytes(settings.dir)) // rank.writers
    rules = Rules(spec, target.keys, settings.mode == "all", settings.secret)
    status.runtime = runtime.Runtime(model_runner, target, rules, None, status.claim.start)
    status.runtime.filler = _filler(settings, rank, str(model_runner.device), status)
    if status.runtime.filler is None:
        _keep_writing(status)
    else:
        status.write()
    runtime.install(status.runtime)
    _announce(spec, settings, rank, status.quota)
    if rank.writer and target.doubt:
        logger.warning("sglang-capture: %s", target.doubt)


def _loaded(model_runner: Any, status: StatusWriter, before: str) -> str:
    """The digest of what was loaded; like no others where the files were changed meanwhile."""
    after = served_weights(model_runner.server_args, status.claim.start)
    if before in ("", after):  # empty: the loading itself has brought the files here
        return after
    logger.warning(
        "sglang-capture: the weight files in %s were changed while they were loaded: captures will be of weights that "
        "no other server has",
        model_runner.server_args.model_path,
    )
    return f"changed-{short_name(status.claim.start)}"


@contextmanager
def _told_in(status: StatusWriter) -> Iterator[None]:
    """What goes wrong inside is also said in the status, for a server that starts all the same."""
    try:
        yield
    except Exception as error:
        status.problem = str(error)
        _keep_writing(status)
        raise


def _filler(settings: PluginSettings, rank: Rank, device: str, status: StatusWriter) -> Filler | None:
    """What this rank writes with, if it writes."""
    if not rank.fills:
        return None
    # Pipeline stages of one data-parallel rank meet under one name; else no two processes share a file.
    group = f"dp{rank.dp}" if rank.stages > 1 else f"{rank.name}-{os.getpid()}"
    if not rank.writer:
        return Follower(settings.dir, group=group, stage=rank.pp, device=device, housekeeping=status.keep)
    account = Account(status.quota)
    if rank.dp == 0:
        for path in dumps(settings.dir):
            account.adopt(path)
    return Recorder(
        settings.dir,
        account,
        rank=group,
        device=device,
        stages=rank.stages,
        on_full=settings.on_full,
        wait_seconds=settings.wait_seconds,
        nonfinite=settings.nonfinite,
        housekeeping=status.keep,
    )


def _keep_writing(status: StatusWriter) -> None:
    """A rank that does not write dumps has no writer's thread; it still says once a second that it is there."""
    status.write()

    def work() -> None:
        pause = threading.Event()
        while not pause.wait(HOUSEKEEPING_SECONDS):
            try:
                status.keep()
            except OSError as error:
                logger.warning("sglang-capture: the status cannot be written: %s", error)

    threading.Thread(target=work, name="sglang-capture-status", daemon=True).start()


def _announce(spec: CaptureSpec, settings: PluginSettings, rank: Rank, quota: int) -> None:
    if not rank.writer:
        return
    logger.info(
        "sglang-capture: capturing %s requests of %s (%d layers): hidden-state indices %s (= outputs of layers %s), "
        "last hidden state %s, %d bytes a token, into %s, at most %.1f GiB. "
        "Most published EAGLE-3 drafts use indices [2, n//2, n-3], here %s: check what your draft wants.",
        settings.mode,
        spec.architecture,
        spec.num_layers,
        list(spec.layers),
        list(output_of(spec.layers)),
        spec.last_hidden,
        spec.bytes_per_token,
        Path(settings.dir),
        quota / (1 << 30),
        list(eagle3_layers(spec.num_layers)),
    )
