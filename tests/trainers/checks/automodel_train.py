"""OUT CACHE STEPS: NeMo Automodel's EAGLE-3 draft and trainer module, stepped by AdamW on its cached data loader.

The recipe around them (``recipes/llm/train_eagle3.py``) is not run: it asks for packages that need a GPU. What it does
with the manifest, the embeddings and the draft's config is done here.
"""

from __future__ import annotations

import sys

import torch
from nemo_automodel.components.datasets.llm.eagle3_cache import (
    build_cached_eagle3_dataloader,
    read_manifest,
    read_target_embeddings,
)
from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
from record import save_losses
from transformers import LlamaConfig

out, cache, steps = sys.argv[1:]
torch.manual_seed(0)
manifest = read_manifest(cache)
embeddings = read_target_embeddings(cache)
vocabulary, hidden = embeddings.shape
selected = torch.tensor(manifest["selected_token_ids"])
config = LlamaConfig(
    hidden_size=hidden,
    intermediate_size=2 * hidden,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=1,
    vocab_size=vocabulary,
    draft_vocab_size=len(selected),
    target_hidden_size=hidden,
    tie_word_embeddings=False,
    attn_implementation="eager",
)
draft = LlamaEagle3DraftModel(config).to(torch.float32)
draft.copy_embeddings_from_target(torch.nn.Embedding.from_pretrained(embeddings))
draft.set_vocab_mapping(selected)
draft.freeze_embeddings()
chosen = torch.zeros(vocabulary, dtype=torch.bool)
chosen[selected] = True
trainer = Eagle3TrainerModule(draft, selected_token_ids=selected, selected_token_mask=chosen, ttt_steps=2)
optimizer = torch.optim.AdamW((weight for weight in draft.parameters() if weight.requires_grad), lr=2e-3)
loader = build_cached_eagle3_dataloader(cache_dir=cache, batch_size=int(manifest["num_samples"]), shuffle=False)
losses = []
for _ in range(int(steps)):
    for batch in loader:
        given = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
        loss = trainer(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
save_losses(out, losses)
