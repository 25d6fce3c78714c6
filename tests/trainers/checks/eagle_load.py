"""OUT DATA MAIN: what the dataset and the collator of EAGLE's ``main.py`` make of DATA.

They are cut out of MAIN, since importing it trains.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import Any

import torch
from record import rows_of, save_loaded

out, data, main = sys.argv[1:]
wanted = {"list_files", "CustomDataset", "DataCollatorWithPadding"}
tree = ast.parse(Path(main).read_text())
tree.body = [node for node in tree.body if getattr(node, "name", None) in wanted]
names: dict[str, Any] = {"os": os, "torch": torch, "Dataset": torch.utils.data.Dataset}
names |= {"Any": Any, "Dict": dict, "List": list, "train_config": {"max_len": 2048}}
exec(compile(tree, main, "exec"), names)
dataset = names["CustomDataset"](names["list_files"](data))
save_loaded(out, rows_of(names["DataCollatorWithPadding"]()([dataset[row] for row in range(len(dataset))])))
