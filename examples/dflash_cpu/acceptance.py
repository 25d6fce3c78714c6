"""How many tokens a DFlash draft gets accepted, worked out without a server. Runs in SpecForge's environment.

It reads answers that the target gave greedily, in SpecForge's own files, and does what a server does: the draft fills a
block behind the last known token at once, seeing the target's hidden states of all tokens before that one. What the
target said too is accepted, and the target's own token behind it comes for free.

Prints one JSON object: ``acceptance_length`` is tokens per verification, the free one included.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from specforge.modeling.draft.dflash import DFlashDraftModel
from torch import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("samples", type=Path, help="an export for SpecForge's DFlash")
    options = parser.parse_args()
    draft = DFlashDraftModel.from_pretrained(options.draft, torch_dtype=torch.float32).eval()
    (file,) = options.target.glob("*.safetensors")
    with safe_open(file, framework="pt") as weights:
        embedding = weights.get_tensor("model.embed_tokens.weight").float()
        head = weights.get_tensor("lm_head.weight").float()
    tokens = verifications = 0
    for file in sorted(options.samples.rglob("*.ckpt")):
        said, times = drafted(draft, embedding, head, torch.load(file, weights_only=True))
        tokens, verifications = tokens + said, verifications + times
    result = {"acceptance_length": tokens / verifications, "tokens": tokens, "verifications": verifications}
    print(json.dumps(result))


@torch.no_grad()
def drafted(draft: DFlashDraftModel, embedding: Tensor, head: Tensor, sample: dict[str, Tensor]) -> tuple[int, int]:
    """Tokens said behind the first of the answer, and how often the target verified for it."""
    ids, states = sample["input_ids"], sample["hidden_states"].float()
    known = int(sample["loss_mask"].argmax()) + 1  # the prefill gave the answer's first token
    first, verifications = known, 0
    while known < len(ids):
        guesses = block(draft, embedding, head, ids[:known], states[:, : known - 1])
        truth = ids[known : known + len(guesses)].tolist()
        pairs = zip(guesses, truth, strict=False)
        accepted = next((n for n, (guess, token) in enumerate(pairs) if guess != token), len(truth))
        known = min(known + accepted + 1, len(ids))
        verifications += 1
    return known - first, verifications


def block(draft: DFlashDraftModel, embedding: Tensor, head: Tensor, ids: Tensor, states: Tensor) -> list[int]:
    """The tokens behind ``ids`` ``[t]``; ``states`` ``[1, t - 1, LH]`` are those the target ran."""
    masks = torch.full((draft.block_size - 1,), draft.mask_token_id)
    out = draft(
        target_hidden=states,
        noise_embedding=embedding[torch.cat([ids[-1:], masks])][None],
        position_ids=torch.arange(len(ids) - 1 + draft.block_size)[None],
        is_causal=False,
    )
    return (out[0, 1:] @ head.T).argmax(dim=-1).tolist()


if __name__ == "__main__":
    main()
