"""OUT KIND CACHE: what NeMo Automodel's cached data loaders make of CACHE, all of it in one batch."""

from __future__ import annotations

import sys

import torch
from nemo_automodel.components.datasets.llm import dspark_cache, eagle3_cache
from record import rows_of, save_loaded

out, kind, cache = sys.argv[1:]
if kind == "eagle3":
    count = int(eagle3_cache.read_manifest(cache)["num_samples"])
    build = eagle3_cache.build_cached_eagle3_dataloader
    weights = {"embeddings": eagle3_cache.read_target_embeddings(cache)}
else:
    count = int(dspark_cache.read_manifest(cache)["num_samples"])
    build = dspark_cache.build_cached_dspark_dataloader
    embeddings, head = dspark_cache.read_target_weight_modules(cache)
    weights = {"embeddings": embeddings.weight, "head": head.weight}
(batch,) = build(cache_dir=cache, batch_size=count, shuffle=False)
save_loaded(out, [*rows_of(batch), {name: torch.as_tensor(weight) for name, weight in weights.items()}])
