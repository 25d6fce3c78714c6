"""A DFlash draft, from the target to the number of tokens it gets accepted, on a machine without a GPU.

    make example-dflash

A tiny target learns a tiny language. What it computes for its own answers is captured, with the layers that `plan`
reads from the draft's config, SpecForge trains a draft on it, and how many tokens are accepted of it is worked out.
Then the same draft is given the layers before its own, as ids of the other convention would have it: fewer tokens are
accepted, and `check-draft` tells the two apart.

SGLang serves no DFlash draft on a CPU, so here the acceptance is not counted by a server.
"""

from __future__ import annotations

import json
from pathlib import Path

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

HERE = Path(__file__).parent
FORMAT = "specforge-dflash"


def main() -> None:
    run(*chosen(__doc__, "dflash"))


def run(work: Work, target_steps: int, draft_steps: int) -> None:
    say(f"teaching a tiny DeepSeek-V3 a tiny language, in {work.target}")
    make_target(work, target_steps)

    say("planning the capture: what must be captured for this draft")
    plan = json.loads(sglang_capture("plan", HERE / "draft", "--model", work.target, "--json"))
    layers = [int(index) for index in plan["settings"]["SGLANG_CAPTURE_LAYERS"].split(",")]

    say("capturing what the target computes for its own answers")
    dataset = capture_answers(work, "--layers", listed(layers))

    say("exporting for SpecForge, and checking before any training that SGLang will feed the draft these layers")
    samples, held_out = (export_split(work, dataset, FORMAT, split) for split in ("train", "eval"))
    sglang_capture("check-draft", HERE / "draft", dataset)

    say("training the draft with SpecForge")
    draft = train(
        work,
        samples,
        HERE / "draft",
        draft_steps,
        strategy="dflash",
        batch_size=8,
        learning_rate=0.004,
        num_anchors=32,
        attention_backend="sdpa",
    )

    say("working out how many tokens it gets accepted")
    right = acceptance(work, HERE / "acceptance.py", draft, work.target, held_out)

    say("the same with shifted layers: check-draft tells, and fewer tokens are accepted")
    report(right, acceptance_of_shifted_layers(work, draft, layers))


def acceptance_of_shifted_layers(work: Work, draft: Path, layers: list[int]) -> float:
    """What a server would get that feeds the draft the layer before each of its own."""
    shifted = Work(work.out / "shifted", work.target, work.specforge)
    shifted.out.mkdir(exist_ok=True)
    dataset = capture_answers(shifted, "--layers", listed([layer - 1 for layer in layers]), splits=["eval"])
    sglang_capture("check-draft", draft, dataset, expect=1)
    samples = export_split(shifted, dataset, FORMAT, "eval")
    return acceptance(work, HERE / "acceptance.py", draft, work.target, samples)


def listed(layers: list[int]) -> str:
    return ",".join(map(str, layers))


def report(right: float, wrong: float) -> None:
    say("tokens for each verification (1 is no draft at all, and 8, the size of a block, the most there can be)")
    print(f"the layers it was trained on    {right:.2f}")
    print(f"shifted layers                  {wrong:.2f}")
    if wrong >= right:
        raise SystemExit("shifted layers made no difference: the draft does not use them")


if __name__ == "__main__":
    main()
