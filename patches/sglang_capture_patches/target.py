"""The target model: finding what to tap, and whether this server's configuration can be captured from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash
from sglang.srt.runtime_context import get_parallel

from sglang_capture.drafts.releases import release
from sglang_capture.layers import check_layers, default_layers, parse_layers
from sglang_capture.settings import PluginSettings
from sglang_capture.spec import LAST_HIDDEN_KEYS, CaptureSpec
from sglang_capture.weights import weights_digest, with_overrides
from sglang_capture_patches.contract import DP_RANK_AT, REFUSED, VOTE_SINCE, newest
from sglang_capture_patches.search import UnknownModelError, find_inner


class CaptureStartError(RuntimeError):
    """This server cannot capture correctly; the message says why, and what to change."""


@dataclass(frozen=True)
class Target:
    """The modules that are tapped.

    Attributes:
        layers: the decoder layers; a module list of ``num_layers``.
        norm: the final norm.
        held: the layers that this process computes; with pipeline stages a part of them.
        keyword: the capture keyword that the layers take.
        doubt: what to say at the start of a model that was not proved; empty for one that was.
    """

    layers: Any
    norm: Any
    held: range
    keyword: str
    doubt: str

    @property
    def keys(self) -> frozenset[int | str]:
        """What can be tapped here: the indices of the layers held, and the last hidden states behind the last one."""
        last = LAST_HIDDEN_KEYS.values() if self.held.stop == len(self.layers) else ()
        return frozenset([*self.held, *last])


@dataclass(frozen=True)
class Rank:
    """Where this process stands in the server.

    Attributes:
        fills: whether it fills dumps with its layers' rows; one rank of each attention-TP group does.
        stages: how many pipeline stages fill a dump together.
        writers: how many ranks answer for dumps, each with its part of the quota.
    """

    dp: int
    pp: int
    tp: int
    fills: bool
    stages: int
    writers: int

    @property
    def writer(self) -> bool:
        """Whether it answers for dumps: of the ranks that fill one together, that of the first pipeline stage."""
        return self.fills and self.pp == 0

    @property
    def name(self) -> str:
        return f"dp{self.dp}-pp{self.pp}-tp{self.tp}"


def find_target(model: Any) -> Target:
    """The decoder layers and the final norm of ``model``, in it or in a model that it wraps.

    Raises:
        CaptureStartError: there is nothing in it that can be tapped, or its rows would not be what they are called.
    """
    name = type(model).__name__
    try:
        inner = find_inner(model)
    except UnknownModelError as error:
        raise CaptureStartError(
            f"the model {name} is not supported: {error}. docs/models.md says which are. "
            "Start the server without sglang_capture in SGLANG_PLUGINS, or with SGLANG_CAPTURE_MODE=off"
        ) from error
    doubt = "" if inner.state == "proved" else _doubt(name)
    return Target(inner.layers, inner.norm, inner.held, inner.keyword, doubt)


def _doubt(name: str) -> str:
    return (
        f"{name} is not among the models whose rows were compared with transformers; by SGLang's source they are "
        "right. Try it out with sglang-capture doctor --server, and compare its first captures with sglang-capture "
        "verify (docs/models.md)"
    )


def check_configuration(args: Any) -> None:
    """Refuse what would give missing or wrong rows.

    Raises:
        CaptureStartError: names each flag that must change.
    """
    faults = [message for field, usable, message in REFUSED if getattr(args, field, None) not in usable]
    if release(metadata.version("sglang")) < release(VOTE_SINCE) and _graphs_under_dp_attention(args):
        faults.append(
            f"before SGLang {VOTE_SINCE} the ranks of DP attention cannot agree to run a marked prefill without its "
            "CUDA graph: add --disable-prefill-cuda-graph"
        )
    if args.pp_size > 1 and args.nnodes > 1:
        faults.append(
            "pipeline stages fill one dump through shared memory, so they must be on one machine: use --nnodes 1"
        )
    if faults:
        raise CaptureStartError("; ".join(faults))


def _graphs_under_dp_attention(args: Any) -> bool:
    return bool(args.enable_dp_attention) and str(args.device) == "cuda" and not args.disable_prefill_cuda_graph


def build_spec(
    model_runner: Any, target: Target, settings: PluginSettings, rank: Rank, weights_digest: str
) -> CaptureSpec:
    """What a capture of this server holds by default.

    Raises:
        CaptureStartError: the config has another number of layers than the model.
        LayerError: the layers set are not this model's.
    """
    args, config = model_runner.server_args, model_runner.model_config.hf_text_config
    num_layers = len(target.layers)
    if num_layers != int(config.num_hidden_layers):
        raise CaptureStartError(
            f"the model has {num_layers} decoder layers, and its config says {config.num_hidden_layers}"
        )
    layers = parse_layers(settings.layers) if settings.layers else default_layers(num_layers)
    check_layers(layers, num_layers)
    architectures = getattr(model_runner.model_config.hf_config, "architectures", None) or [""]
    return CaptureSpec(
        layers=layers,
        last_hidden=settings.last_hidden,
        hidden_size=int(config.hidden_size),
        num_layers=num_layers,
        vocab_size=int(config.vocab_size),
        dtype=str(model_runner.dtype).removeprefix("torch."),
        architecture=architectures[0],
        model_path=local_path(args.model_path),
        weights_digest=weights_digest,
        quantization=_quantization(args, model_runner.model_config, str(model_runner.dtype).removeprefix("torch.")),
        revision=args.revision or "",
        sglang_version=metadata.version("sglang"),
        plugin_version=metadata.version("sglang-capture"),
        ranks={"tp": int(args.tp_size), "dp": rank.writers, "pp": rank.stages},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


_OF_FILES = frozenset({"auto", "safetensors", "fastsafetensors"})
"""Load formats whose weights are the files at the model's path; random ones, for example, are not."""


def served_weights(args: Any, server: str) -> str:
    """A digest of the files that are served, under the server's arguments; like no others where it is not those files,
    and empty where nothing is known but their name."""
    if args.load_format not in _OF_FILES or getattr(args, "decrypted_config_file", None):
        return f"{args.load_format}-{short_name(server)}"
    files = weights_digest(str(args.model_path), args.revision, args.download_dir)
    digest = with_overrides(files, args.json_model_override_args)
    return f"overridden-{short_name(server)}" if digest and not files else digest


def short_name(server: str) -> str:
    """What tells a server start from others in a digest, and does not give its whole name away."""
    return xxhash.xxh3_64_hexdigest(server.encode())


def _quantization(args: Any, model_config: Any, dtype: str) -> str:
    """What this server rounds further than its files and its dtype say; the checkpoint's own way is in its config."""
    configs = (model_config.hf_config, model_config.hf_text_config)
    in_files = [_method(getattr(config, "quantization_config", None)) for config in configs]
    kv_cache = {"bf16": "bfloat16"}.get(args.kv_cache_dtype, args.kv_cache_dtype)
    rounded = {
        "weights": "" if args.quantization in in_files else args.quantization,
        "torchao": getattr(args, "torchao_config", ""),
        "kv cache": "" if kv_cache in ("auto", dtype) else kv_cache,
        "state": getattr(args, "mamba_ssm_dtype", "") or "",
    }
    return ", ".join(f"{what} {how}" for what, how in rounded.items() if how)


def _method(quantization: Any) -> object:
    """The name of a checkpoint's quantization: SGLang leaves its entry as the dict that is in the file."""
    return quantization.get("quant_method") if isinstance(quantization, dict) else None


def local_path(path: object) -> str:
    """A directory as an absolute path, so that it means the same from anywhere; a Hub id as it is."""
    return str(Path(str(path)).resolve()) if Path(str(path)).is_dir() else str(path)


def rank_of(model_runner: Any) -> Rank:
    """This process's rank. One rank of each attention-TP group fills dumps: they all hold the same rows."""
    parallel, args = get_parallel(), model_runner.server_args
    attention = bool(args.enable_dp_attention)
    return Rank(
        dp=int(parallel.attn_dp_rank) if attention else _engine_of(model_runner, parallel),
        pp=int(parallel.pp_rank),
        tp=int(parallel.tp_rank),
        fills=int(parallel.attn_tp_rank) == 0,
        stages=int(args.pp_size),
        writers=int(parallel.attn_dp_size) if attention else max(1, int(args.dp_size)),
    )


def _engine_of(model_runner: Any, parallel: Any) -> int:
    """Which of the engines of a data-parallel server this is; 0 where there is one only."""
    place = newest(DP_RANK_AT, metadata.version("sglang"))
    found = attrgetter(place)(SimpleNamespace(model_runner=model_runner, parallel=parallel))
    return 0 if found is None else int(found)
