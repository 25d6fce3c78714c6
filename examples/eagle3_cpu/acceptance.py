"""How many tokens an EAGLE-3 draft gets accepted, worked out without a server. Runs in SpecForge's environment.

It reads answers that the target gave greedily, in SpecForge's own files, and does what a server does with a chain of
drafts: from the tokens there are so far the draft says the next ``--steps``; those that the target said too are
accepted, and the target's own token behind them comes for free. The draft's layer sees the target's hidden states up to
the last verified token, and its own behind that.

Prints one JSON object: ``acceptance_length`` is tokens per verification, the free one included.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from specforge.modeling.auto import AutoDraftModelConfig
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3, prepare_decoder_attention_mask
from torch import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("samples", type=Path, help="an export for SpecForge")
    parser.add_argument("--steps", type=int, default=3, help="tokens that are drafted at once")
    options = parser.parse_args()
    draft = load_draft(options.draft, options.target)
    tokens = verifications = 0
    for file in sorted(options.samples.rglob("*.ckpt")):
        sample = torch.load(file, weights_only=True)
        said, times = drafted(draft, sample, options.steps)
        tokens, verifications = tokens + said, verifications + times
    result = {"acceptance_length": tokens / verifications, "tokens": tokens, "verifications": verifications}
    print(json.dumps(result))


def load_draft(directory: Path, target: Path) -> LlamaForCausalLMEagle3:
    """The draft in float32, with the target's embeddings, as a server lends them.

    Not by ``from_pretrained``, which leaves SpecForge's tables of rotary embeddings unset.
    """
    draft = LlamaForCausalLMEagle3(AutoDraftModelConfig.from_file(str(directory / "config.json")))
    weights = load_file(directory / "model.safetensors")
    (file,) = target.glob("*.safetensors")
    with safe_open(file, framework="pt") as of_target:
        weights["embed_tokens.weight"] = of_target.get_tensor("model.embed_tokens.weight")
    draft.load_state_dict(weights)
    return draft.float().eval()


@torch.no_grad()
def drafted(draft: LlamaForCausalLMEagle3, sample: dict[str, Tensor], steps: int) -> tuple[int, int]:
    """Tokens said behind the first of the answer, and how often the target verified for it."""
    ids = sample["input_ids"]
    states = draft.project_hidden_states(sample["aux_hidden_state"].float())
    known = int(sample["loss_mask"].argmax()) + 1  # the prefill gave the answer's first token
    first, verifications = known, 0
    while known < len(ids):
        guesses = chain(draft, ids[:known], states[:, : known - 1], steps)
        truth = ids[known : known + steps].tolist()
        pairs = zip(guesses, truth, strict=False)
        accepted = next((n for n, (guess, token) in enumerate(pairs) if guess != token), len(truth))
        known = min(known + accepted + 1, len(ids))
        verifications += 1
    return known - first, verifications


def chain(draft: LlamaForCausalLMEagle3, ids: Tensor, states: Tensor, steps: int) -> list[int]:
    """The next ``steps`` tokens of ``ids`` ``[t]``; ``states`` ``[1, t - 1, H]`` are those the target ran."""
    guesses: list[int] = []
    tokens = ids[1:]  # a state goes with the token behind it
    for _ in range(steps):
        out = layer(draft, tokens, states)[:, -1:]
        token = draft.compute_logits(out)[0, 0].argmax()
        token = token + draft.d2t[token]
        guesses.append(int(token))
        tokens, states = torch.cat([tokens, token[None]]), torch.cat([states, out], dim=1)
    return guesses


def layer(draft: LlamaForCausalLMEagle3, tokens: Tensor, states: Tensor) -> Tensor:
    shape = (1, len(tokens))
    mask = prepare_decoder_attention_mask(torch.ones(shape, dtype=torch.bool), shape, states, 0)
    return draft.backbone(
        input_embeds=draft.embed_input_ids(tokens[None]),
        hidden_states=states,
        cache_hidden=None,
        attention_mask=mask,
        position_ids=torch.arange(len(tokens))[None],
        use_cache=False,
    )


if __name__ == "__main__":
    main()
