"""An EAGLE-3 draft, from the target to a server that drafts with it, on a machine without a GPU.

    make example-eagle3

A tiny target learns a tiny language. What it computes for its own answers is captured, SpecForge trains a draft on it,
and how many tokens the draft gets accepted is worked out, and then counted by the real SGLang: the two agree. At last
the same draft is served with its layers shifted, the embeddings in the place of the first, as was done in earnest once.
Fewer tokens are accepted, and `check-draft` says so beforehand.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx

from examples.servers import engine
from examples.steps import (
    Work,
    acceptance,
    capture_answers,
    chosen,
    export_split,
    make_target,
    say,
    sglang_capture,
    train,
)
from sglang_capture.shards import CaptureDataset

HERE = Path(__file__).parent
DRAFTED = 3
"""Tokens that are drafted between two verifications."""
MARGIN = 0.1
"""Of the acceptance length: the server drafts in another precision, and a near tie may fall the other way."""
LOST = 0.05
"""What shifted layers cost of it at the least: nothing, if the draft did not use them; a tenth and more was seen."""


def main() -> None:
    run(*chosen(__doc__, "eagle3"))


def run(work: Work, target_steps: int, draft_steps: int) -> None:
    say(f"teaching a tiny DeepSeek-V3 a tiny language, in {work.target}")
    make_target(work, target_steps)

    say("planning the capture: what must be captured for this draft")
    sglang_capture("plan", HERE / "draft", "--model", work.target)

    say("capturing what the target computes for its own answers")
    dataset = capture_answers(work)

    say("exporting for SpecForge, and checking before any training that SGLang will feed the draft these layers")
    samples, held_out = (export_split(work, dataset, "specforge", split) for split in ("train", "eval"))
    sglang_capture("check-draft", HERE / "draft", dataset)

    say("training the draft with SpecForge")
    draft = train(
        work,
        samples,
        HERE / "draft",
        draft_steps,
        strategy="eagle3",
        batch_size=8,
        learning_rate=0.004,
        ttt_length=DRAFTED,
        attention_backend="sdpa",
    )

    say("working out how many tokens it gets accepted")
    offline = acceptance(work, HERE / "acceptance.py", draft, work.target, held_out, "--steps", str(DRAFTED))

    say("serving it with SGLang")
    served = served_acceptance(work, draft, dataset)

    say("serving it with its layers shifted: check-draft tells, and fewer tokens are accepted")
    shifted = with_shifted_layers(draft, work.out / "draft-shifted")
    sglang_capture("check-draft", shifted, dataset, expect=1)
    report(offline, served, served_acceptance(work, shifted, dataset))


def served_acceptance(work: Work, draft: Path, dataset: Path) -> float:
    """Tokens for each verification that the real SGLang counts, over the conversations that no draft was trained on."""
    chain = ("--speculative-num-steps", DRAFTED, "--speculative-eagle-topk", 1)
    chain += ("--speculative-num-draft-tokens", DRAFTED + 1)
    algorithm = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft)
    tokens = verifications = 0
    with engine(work.target, work.out / f"{draft.name}.log", *algorithm, *map(str, chain)) as url:
        for prompt in prompts(work, dataset):
            body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 128}}
            answer = httpx.post(f"{url}/generate", json=body, timeout=600).raise_for_status().json()
            tokens += answer["meta_info"]["completion_tokens"] - 1  # the first comes from the prompt's own forward
            verifications += answer["meta_info"]["spec_verify_ct"]
    return tokens / verifications


def prompts(work: Work, dataset: Path) -> list[list[int]]:
    """The ids of the requests for evaluation, without what was answered."""
    captures = CaptureDataset(dataset)
    samples = [captures.by_id(name) for name in (work.out / "eval.ids").read_text().split()]
    return [sample["input_ids"][: int(sample["loss_mask"].argmax())].tolist() for sample in samples]


def with_shifted_layers(draft: Path, out: Path) -> Path:
    """The same draft, whose config names the token embeddings and its first two layers."""
    shutil.copytree(draft, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, *ids[:-1]]
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return out


def report(offline: float, served: float, shifted: float) -> None:
    say(f"tokens for each verification (1 is no draft at all, {DRAFTED + 1} the most there can be)")
    print(f"worked out from the captures    {offline:.2f}")
    print(f"served by SGLang                {served:.2f}")
    print(f"served with shifted layers      {shifted:.2f}")
    if abs(offline - served) > MARGIN * offline:
        raise SystemExit(f"what was worked out and what was served differ by more than {MARGIN:.0%}")
    if shifted >= served * (1 - LOST):
        raise SystemExit("shifted layers made no difference: the draft does not use them")


if __name__ == "__main__":
    main()
