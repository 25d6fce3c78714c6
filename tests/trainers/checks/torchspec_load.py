"""OUT DATA: what TorchSpec's offline dataset and collator make of DATA.

Replaced: ``wandb``, which it imports and which is not installed.
"""

from __future__ import annotations

import sys

from record import rows_of, save_loaded, stand_in

stand_in("wandb")

from torchspec.data.preprocessing import build_offline_eagle3_dataset  # noqa: E402
from torchspec.data.utils import DataCollatorWithPadding  # noqa: E402

out, data = sys.argv[1:]
dataset = build_offline_eagle3_dataset(data)
save_loaded(out, rows_of(DataCollatorWithPadding()([dataset[row] for row in range(len(dataset))])))
