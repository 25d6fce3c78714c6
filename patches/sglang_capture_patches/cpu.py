"""The test bed: stock SGLang on a machine without a GPU.

``python -m sglang_capture_patches.cpu ARGS…`` starts ``python -m sglang.launch_server ARGS…`` with what the CPU needs:
stand-ins for modules that cannot be imported without a GPU (``patches/cpu``), a few environment variables, and defaults
for the arguments that the machine would otherwise size itself by. Whatever the user sets, in the environment or on the
command line, stands.

In the server's processes `register`, an entry point of its own, corrects two things that SGLang 0.5.23 gets wrong with
the attention backend ``torch_native``, and takes away a wait for a GPU. It does so only in servers started from here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

ENTRY_POINT = "sglang_capture_cpu"
STARTED_HERE = "SGLANG_CAPTURE_CPU"
"""Set by the launcher, so that `register` leaves every other server alone."""

_PLUGIN_GROUP = "sglang.srt.plugins"
_USED_WRONGLY = 2
_FOLDERS = ("PATH", "PYTHONPATH")

_HELP = """\
usage: python -m sglang_capture_patches.cpu ARGUMENTS OF sglang.launch_server

Starts stock SGLang on a machine without a GPU, for trying things out and for tests; far too slow to serve.

  sglang-capture tiny-model ./tiny
  python -m sglang_capture_patches.cpu --model-path ./tiny --port 30000

Added where you did not give them: {arguments}
Set where you did not set them: {environment}

------------------------------ the help of sglang.launch_server ------------------------------
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Become the server: the process id stays, so whoever started this can stop the server by it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    environment = environment_of(given, os.environ)
    if {"-h", "--help"} & set(given):
        print(_HELP.format(arguments=" ".join(defaults_for([])), environment=" ".join(_changed(environment))))
        sys.stdout.flush()
    else:
        _refuse_where_useless()
    command = [sys.executable, "-m", "sglang.launch_server", *given, *defaults_for(given)]
    os.execve(sys.executable, command, environment)


def standins() -> Path:
    """The folder of stand-in modules: inside the installed package, or ``patches/cpu`` in a checkout."""
    package = Path(__file__).resolve().parent
    candidates = [package / "_cpu_standins", package.parent / "cpu"]
    for candidate in candidates:
        if (candidate / "sgl_kernel").is_dir():
            return candidate
    raise FileNotFoundError(f"the CPU stand-ins are missing; looked for {' and '.join(map(str, candidates))}")


def register() -> None:
    """The entry point ``sglang_capture_cpu``: hook the model's loading, in servers started by `main` only."""
    if os.environ.get(STARTED_HERE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang has imported this module already in every process that loads a model.
    target = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(target, _after_load_model, HookType.AFTER)


def _after_load_model(result: Any, *_: Any, **__: Any) -> Any:
    """Correct what is wrong on a CPU once the model's modules are there; doing it again changes nothing."""
    handlers = sys.modules.get("sglang.srt.models.deepseek_common.attention_backend_handler")
    if handlers is not None:
        # As shipped, prefill takes the multi-head path, which reads values that the latent cache does not hold.
        handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)

    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    # DP attention pads its batches and asks for this; the base class raises. 1, as the backend `intel_amx` answers.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = _seq_len_fill_value
    # A DeepSeek model that lends its embeddings to a draft (MTP) waits for the GPU, whatever the device.
    torch.cuda.synchronize = _nothing_to_wait_for
    return result


def _seq_len_fill_value(_: object) -> int:
    return 1


def _nothing_to_wait_for(device: object = None) -> None:
    pass


def _refuse_where_useless() -> None:
    import torch

    if torch.cuda.is_available():
        _refuse(
            "this machine has a GPU, and the test bed is for machines without one; start SGLang itself: "
            "python -m sglang.launch_server …"
        )
    if not entry_points(group=_PLUGIN_GROUP, name=ENTRY_POINT):
        _refuse(
            f"the entry point {ENTRY_POINT} is not installed, and without it SGLang's attention is wrong on the CPU; "
            "install the package (pip install -e . in a checkout), setting PYTHONPATH is not enough"
        )


def _refuse(message: str) -> NoReturn:
    print(f"sglang_capture_patches.cpu: {message}", file=sys.stderr)
    sys.exit(_USED_WRONGLY)


def environment_of(given: Sequence[str], current: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: what the user set, and what the CPU needs beside it."""
    defaults = {
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang wants one entry a rank; without AMX it counts them and binds nothing.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(_ranks(given)))),
        # Two OpenMP threads on busy cores can make one small forward take seconds.
        "OMP_NUM_THREADS": "1",
        # A few small functions would be compiled in C++ at the first request, for eight seconds and with a compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # Ranks talk over gloo; the CUDA build of torch would have SGLang load NCCL, which needs a GPU.
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
        "HF_HUB_OFFLINE": "1",
    }
    environment = {**defaults, **current, STARTED_HERE: "1"}
    paths = [str(standins()), *filter(None, [current.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Where pip puts `ninja`, with which NGRAM builds its table of tokens; found without the environment activated.
    commands = [*filter(None, [current.get("PATH")]), str(Path(sys.executable).parent)]
    environment["PATH"] = os.pathsep.join(commands)
    plugins = [name.strip() for name in current.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if plugins and ENTRY_POINT not in plugins:  # where it is set, it names all plugins there will be
        environment["SGLANG_PLUGINS"] = ",".join([*plugins, ENTRY_POINT])
    return environment


def _changed(environment: Mapping[str, str]) -> list[str]:
    """What is set for the server as ``NAME=value``; of a longer list of folders only what is added to yours."""
    shown = []
    for name, value in environment.items():
        own = os.environ.get(name)
        if own and name in _FOLDERS:
            value = value.replace(own, f"${name}")
        if value not in (own, f"${name}"):
            shown.append(f"{name}={value}")
    return shown


def _ranks(given: Sequence[str]) -> int:
    """How many model processes these arguments start."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in (
        ("--tensor-parallel-size", "--tp-size", "--tp"),
        ("--pipeline-parallel-size", "--pp-size", "--pp"),
        ("--data-parallel-size", "--dp-size", "--dp"),
    ):
        parser.add_argument(*names, type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    known, _ = parser.parse_known_args(given)
    copies = 1 if known.enable_dp_attention else known.data_parallel_size
    ranks: int = known.tensor_parallel_size * known.pipeline_parallel_size * copies
    return max(ranks, 1)


def defaults_for(given: Sequence[str]) -> list[str]:
    """Arguments to add: what the user did not give."""
    options = {argument.split("=", 1)[0] for argument in given}
    defaults: list[tuple[str, ...]] = [
        ("--device", "cpu"),
        ("--attention-backend", "torch_native"),
        # Left to itself SGLang runs a float32 checkpoint in float16, and nothing could be compared closely.
        ("--dtype", "float32"),
        ("--mem-fraction-static", "0.3"),
        ("--max-total-tokens", "16384"),
        # Else an idle server spins on a core, and here the cores are what computes.
        ("--sleep-on-idle",),
    ]
    if "--speculative-algorithm" in options and "--attention-backend" not in options:
        # The only backend for CPUs that verifies drafts. Named as `--attention-backend` it would be passed over where
        # there is no AMX; what it wants of AMX, two kernels, is among the stand-ins.
        defaults += [("--prefill-attention-backend", "intel_amx"), ("--decode-attention-backend", "intel_amx")]
    return [word for default in defaults if default[0] not in options for word in default]


if __name__ == "__main__":
    main()
