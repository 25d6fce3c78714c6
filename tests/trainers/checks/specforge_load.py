"""OUT ALGORITHM DATA MODEL: what SpecForge's reader, normaliser and collator make of DATA, all of it in one batch."""

from __future__ import annotations

import sys

from record import rows_of, save_loaded
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore

LONGEST = 4096

out, algorithm, data, model = sys.argv[1:]
provider = builtin_algorithm_registry().resolve(algorithm).providers.offline_for("text")
refs = provider.build_reader(data, run_id="check", ttt_length=1, max_len=LONGEST).read()
(batch,) = FeatureDataLoader(
    LocalFeatureStore("check"),
    refs=refs,
    batch_size=len(refs),
    collate_fn=provider.build_collator(),
    per_sample_transform=provider.build_normalizer(LONGEST),
    strategy=algorithm,
)
tensors = dict(batch.tensors)
if algorithm == "eagle3":
    # The trainer's own shift, and its teacher: what the draft is trained towards.
    head = TargetHead.from_pretrained(model)
    ids, target, _ = head.preprocess(tensors["input_ids"], tensors["target"], tensors["loss_mask"])
    tensors |= {"shifted_ids": ids, "teacher": head(target)}
save_loaded(out, rows_of(tensors))
