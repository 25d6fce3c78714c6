"""OUT DATA: what Model Optimizer's dataset and collator make of DATA, with the masks of the files."""

from __future__ import annotations

import sys
from pathlib import Path

from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from record import rows_of, save_loaded

out, data = sys.argv[1:]
# As `make_speculative_data_module` of its examples finds the files.
dataset = OfflineSupervisedDataset([str(path) for path in Path(data).rglob("*.pt")], answer_only_loss=True)
batch = EagleOfflineDataCollator(train_len=128)([dataset[row] for row in range(len(dataset))])
states = batch.pop("base_model_outputs")
assert states.pop("base_hidden_prenorm") is False
save_loaded(out, rows_of(batch | states))
