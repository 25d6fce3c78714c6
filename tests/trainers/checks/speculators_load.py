"""OUT DATA BACKEND LAYERS WIDTH: what speculators' dataset and collator make of DATA; BACKEND is ``file`` or ``fp8``.

First each sample as the dataset gives it, then each as it stands in one pack of all, after EAGLE-3's own shift.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from hs_connectors.transfer import FileTransfer, FP8Transfer
from record import save_loaded
from speculators.data_generation.offline import check_hidden_states
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn

out, data, backend, layers, width = sys.argv[1:]
folder = Path(data, "hidden_states")
transfer = {"file": FileTransfer, "fp8": FP8Transfer}[backend](folder)
dataset = ArrowDataset(4096, data, transfer=transfer, on_missing="raise")
for row in range(len(dataset)):
    check_hidden_states(transfer.get_cached(row), dataset.data[row]["input_ids"].tolist())
whole = [dataset[row] for row in range(len(dataset))]
collate = CollateFn(4096, int(width), int(layers), dtype=torch.bfloat16, preprocess=shift_batch)
pack = collate([dataset[row] for row in range(len(dataset))])
documents = pack["document_ids"]
shifted = [
    {name: tensor[documents == row] for name, tensor in pack.items() if torch.is_tensor(tensor)}
    for row in range(len(dataset))
]
save_loaded(out, whole + shifted)
