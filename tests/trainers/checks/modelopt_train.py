"""OUT KIND DATA MODEL STEPS RECIPES: ``examples/speculative_decoding/main.py`` itself, on the CPU by ``use_cpu``.

Nothing is replaced. Before Python 3.12 its very last line fails, after the training: it pickles a dataclass that was
made by ``make_dataclass``. Exactly that error is taken for the end.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

from record import save_printed_losses

out, kind, data, model, steps, examples = sys.argv[1:]
recipe = {"eagle3": "eagle3.yaml", "dflash": "dflash.yaml"}[kind]
shutil.copy(Path(examples, "../../modelopt_recipes/general/speculative_decoding", recipe), out)
common = {
    "model.model_name_or_path": model,
    "model.use_fake_base_for_offline": "true",  # of the target, only embeddings and head are loaded
    "data.offline_data_path": data,
    "training.output_dir": f"{out}/run",
    "training.max_steps": steps,
    "training.num_train_epochs": 1000,
    "training.per_device_train_batch_size": 4,
    "training.learning_rate": 2e-3,
    "training.lr_scheduler_type": "constant",
    "training.warmup_steps": 0,
    "training.training_seq_len": 64,
    "training.logging_steps": 1,
    "training.answer_only_loss": "true",
    "training.report_to": "none",
    "training.use_cpu": "true",
    "training.bf16": "false",
    "training.tf32": "false",
    "training.ar_validate_steps": -1,
}
draft = "{num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 4, head_dim: 32, intermediate_size: 256}"
kinds = {
    "eagle3": {
        "eagle.eagle_use_torch_compile": "false",
        "eagle.eagle_architecture_config": "{num_attention_heads: 4, num_key_value_heads: 4, head_dim: 32, "
        "intermediate_size: 256, draft_vocab_size: 512, eagle_aux_hidden_state_layer_ids: [1, 29, 57]}",
    },
    "dflash": {
        "dflash.dflash_mask_token_id": 511,
        "dflash.dflash_block_size": 4,
        "dflash.dflash_num_anchors": 16,
        "dflash.dflash_architecture_config": draft.replace("layers: 1", "layers: 3"),
    },
}
sys.argv = [
    "main.py",
    "--config",
    f"{out}/{recipe}",
    *(f"{key}={value}" for key, value in (common | kinds[kind]).items()),
]
sys.path.insert(0, examples)


def train() -> None:
    try:
        runpy.run_path(f"{examples}/main.py", run_name="__main__")
    except Exception as error:
        if "HfTrainingArguments" not in str(error) or "pickle" not in str(error).lower():
            raise
        print(f"after the training: {error}")


save_printed_losses(out, train)
