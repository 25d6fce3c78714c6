"""Run as a script: what the plugin decides, on SGLang's own classes, where no server on a CPU comes to the question.

The last line printed is one JSON object. SGLang is imported once for all of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components import dp_attn
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import prepare_server_args
from sglang_capture_patches import hooks, runtime, target
from sglang_capture_patches.marked import Refused, Rules, decide, entered_queue
from sglang_capture_patches.target import CaptureStartError, check_configuration

from sglang_capture.spec import CaptureSpec
from sglang_capture.spool import Counts

TOKENS = 8

SPEC = CaptureSpec(
    layers=(3,),
    last_hidden="post",
    hidden_size=8,
    num_layers=6,
    vocab_size=512,
    dtype="float32",
    architecture="DeepseekV3ForCausalLM",
    model_path="/models/tiny",
)


def main(model_dir: str, refused: list[list[str]]) -> None:
    HookRegistry.apply_hooks()
    model_runner = ModelRunner.__new__(ModelRunner)
    rules = Rules(SPEC, frozenset([3, "last_hidden_state"]), every=False, token=None)
    runtime.install(runtime.Runtime(model_runner, None, rules, filler=None))
    cases = {
        "unmarked": {},
        "marked": {"custom_params": {"capture": "a"}},
        "refused": {"custom_params": {"capture": "a", "capture_layers": [99]}},
        "marked, in decode": {"custom_params": {"capture": "a"}, "answer": [5]},
    }
    found = {"graph": {}, "vote": {}, "cached": {}}
    for name, case in cases.items():
        req = request(**case)
        found["graph"][name] = graph_runner().can_run_graph(forward_batch(req, model_runner))
        found["vote"][name] = vote(req)
        found["cached"][name] = req._compute_max_prefix_len(TOKENS)
    found["vote"]["no batch"] = vote(None)
    found["request"] = {name: refusal(rules, **case) for name, case in OTHER_ROWS.items()}
    found["unasked"] = {name: unasked(rules, **case) for name, case in OF_SGLANG_ITSELF.items()}
    found["images after an update"] = images_after_an_update(model_runner, rules)
    found["in a session of updates"] = in_a_session_of_updates(model_runner, rules)
    found["rounded"] = {" ".join(flags): rounded(model_dir, flags) for flags in ROUNDINGS}
    found["rounded"]["bf16 in float32"] = rounded(model_dir, ["--kv-cache-dtype", "bf16"], "float32")
    found["told in the queue"] = told_in_the_queue(model_runner, rules, cases)
    found["graphs before the vote"] = before_the_vote(model_dir)
    found["configuration"] = [configuration(model_dir, flags) for flags in refused]
    print(json.dumps(found))


OTHER_ROWS = {
    "a session's": {"session": "a session"},
    "with a LoRA adapter": {"lora_id": "an adapter"},
    "with embeddings": {"input_embeds": [[0.0] * 8] * TOKENS},
    "with some embeddings": {"positional_embed_overrides": "embeddings and their positions"},
    "several items at once": {"multi_item_delimiter_indices": [3, 5]},
    "an id behind the vocabulary": {"origin_input_ids": [5, 512]},
    "a negative id": {"origin_input_ids": [5, -1]},
    "plain": {},
}
"""What a request may have by which its rows would not be this model's rows of these ids."""


def refusal(rules: Rules, **fields: object) -> str:
    req = request(custom_params={"capture": "a"})
    for name, value in fields.items():
        setattr(req, name, value)
    decision = decide(req, rules)
    return decision.reason if isinstance(decision, Refused) else ""


OF_SGLANG_ITSELF = {
    "a client's": {"queued": True},
    "a health check": {"rid": "HEALTH_CHECK_1", "queued": True},
    "a health check with a mark": {"rid": "HEALTH_CHECK_1", "queued": True, "custom_params": {"capture": "a"}},
    "a measurement": {"queued": False},
}
"""Requests of a server that captures every prompt: unmarked ones that SGLang makes for itself are nobody's data."""


def unasked(rules: Rules, *, queued: bool, rid: str = "rid", custom_params: object = None) -> bool:
    req = request(custom_params)
    req.rid = rid
    if queued:
        entered_queue(req)
    return decide(req, replace(rules, every=True)) is not None


class Told:
    """A writer that takes refusals only."""

    def __init__(self) -> None:
        self.counts, self.reasons = Counts(), []

    def refuse(self, capture_id: str, request_id: str, reason: str) -> None:
        self.reasons.append(reason)


def told_in_the_queue(model_runner: ModelRunner, rules: Rules, cases: dict[str, dict]) -> dict[str, list[str]]:
    """What is recorded of requests that enter the queue, some of them twice."""
    told = {}
    for name, case in cases.items():
        writer, req = Told(), request(**case)
        here = runtime.Runtime(model_runner, None, rules, filler=writer)
        here.expect(req)
        here.expect(req)
        told[name] = writer.reasons
    return told


def images_after_an_update(model_runner: ModelRunner, rules: Rules) -> list[str]:
    """What is recorded of a prompt with images whose turn comes after the weights were changed."""
    writer, req = Told(), request(custom_params={"capture": "a"})
    req.multimodal_inputs = "images"
    here = runtime.Runtime(model_runner, None, rules, filler=writer, weight_updates=1)
    here.admit(req)
    return writer.reasons


def in_a_session_of_updates(model_runner: ModelRunner, rules: Rules) -> list[str]:
    """What is recorded of a prompt whose two chunks come in a session and behind it."""
    writer, req = Told(), request(custom_params={"capture": "a"})
    here = runtime.Runtime(model_runner, None, rules, filler=writer, in_session=True)
    here.expect(req)
    here.admit(req)
    here.in_session = False
    here.admit(req)
    assert here.waiting == {}
    return writer.reasons


ROUNDINGS = (
    [],
    ["--quantization", "fp8"],
    ["--kv-cache-dtype", "fp8_e4m3"],
    ["--kv-cache-dtype", "bf16"],
    ["--quantization", "w8a8_int8", "--kv-cache-dtype", "fp8_e5m2"],
)


def rounded(model_dir: str, flags: list[str], dtype: str = "bfloat16") -> str:
    """What a spec says of it; the checkpoint is in bfloat16."""
    common = ["--model-path", model_dir, "--device", "cpu", "--attention-backend", "torch_native"]
    args = prepare_server_args([*common, *flags])
    return target._quantization(args, ModelConfig.from_server_args(args), dtype)


class Changed:
    """SGLang's arguments, which cannot be set, with a few others."""

    def __init__(self, args: object, **changes: object) -> None:
        self._args, self._changes = args, changes

    def __getattr__(self, name: str) -> object:
        return self._changes[name] if name in self._changes else getattr(self._args, name)


def before_the_vote(model_dir: str) -> dict[str, str]:
    """What is said of DP attention on CUDA, by releases and by whether prefills have graphs."""
    common = ["--model-path", model_dir, "--device", "cpu", "--attention-backend", "torch_native"]
    args = prepare_server_args([*common, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"])
    said = {}
    for version, graphs in (("0.5.18", True), ("0.5.18", False), ("0.5.19", True)):
        on_cuda = Changed(args, device="cuda", disable_prefill_cuda_graph=not graphs)
        with mock.patch.object(target.metadata, "version", lambda _, version=version: version):
            said[f"{version}, {'with' if graphs else 'without'} graphs"] = checked(on_cuda)
    return said


def request(custom_params: object = None, answer: list[int] | None = None) -> Req:
    sampling = SamplingParams(max_new_tokens=4, custom_params=custom_params)
    req = Req("rid", "", list(range(20, 20 + TOKENS)), sampling, vocab_size=512)
    req.output_ids.extend(answer or [])
    return req


def graph_runner() -> PrefillCudaGraphRunner:
    """As far as its question goes: constructing one captures graphs, which needs a GPU."""
    runner = PrefillCudaGraphRunner.__new__(PrefillCudaGraphRunner)
    vars(runner).update(
        max_context_size=None,
        max_seq_len=None,
        enable_lora=False,
        _is_full_backend=False,
        prefill_backend_name="breakable",
        has_mha_companion_layers=False,
        _capture_chunked_prefix=False,
        max_num_tokens=64,
        capture_num_tokens=[TOKENS],
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    return runner


def forward_batch(req: Req, model_runner: ModelRunner) -> ForwardBatch:
    """A prefill of one request, through the plugin's own hook behind ``init_new``."""
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.arange(TOKENS),
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([TOKENS]),
        out_cache_loc=torch.arange(TOKENS),
        seq_lens_sum=TOKENS,
    )
    batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = [TOKENS], [0]
    hook, _ = hooks.HOOKS["sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"]
    hook(batch, ForwardBatch, SimpleNamespace(reqs=[req]), model_runner)
    return batch


def vote(req: Req | None) -> bool:
    batch = None
    if req is not None:
        batch = ScheduleBatch(reqs=[req])
        batch.forward_mode = ForwardMode.EXTEND
    return dp_attn._local_prefill_cuda_graph_vote(
        local_batch=batch,
        num_tokens=TOKENS,
        prefill_graph_runner=None,
        coordinated_prefill=True,
        breakable_prefill=True,
        spec_algorithm=None,
        model_config=None,
    )


def configuration(model_dir: str, flags: list[str]) -> str:
    """What is said of a server with these flags, as SGLang itself parses and resolves them."""
    common = ["--model-path", model_dir, "--device", "cpu", "--attention-backend", "torch_native"]
    return checked(prepare_server_args([*common, *flags]))


def checked(args: object) -> str:
    try:
        check_configuration(args)
    except CaptureStartError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    hooks.register_all()
    main(sys.argv[1], json.loads(sys.argv[2]))
