"""OUT KIND DATA MODEL: what AngelSlim's datasets and collator make of DATA."""

from __future__ import annotations

import sys

from angelslim.compressor.speculative import TargetHead
from angelslim.compressor.speculative.train.data.data_utils import DataCollatorWithPadding
from angelslim.compressor.speculative.train.data.dataset_builder.offline_dataset_builder import OfflineEagle3Dataset
from record import rows_of, save_loaded
from train_dflash_offline import OfflineDFlashDataset

out, kind, data, model = sys.argv[1:]
reader = {"eagle3": OfflineEagle3Dataset, "dflash": OfflineDFlashDataset}[kind]
dataset = reader(data_dir=data, file_pattern="*.ckpt")
batch = DataCollatorWithPadding()([dataset[row] for row in range(len(dataset))])
if kind == "eagle3":
    head = TargetHead.from_pretrained(model, lm_head_key="lm_head.weight")
    batch["teacher"] = head(batch["target_hiddens"].to(next(head.parameters()).dtype))
save_loaded(out, rows_of(batch))
