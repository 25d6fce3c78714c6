"""OUT DATA MODEL STEPS: ``eagle/train/main.py`` itself, on the CPU, ended after STEPS steps.

Replaced: ``wandb``, which it logs to and which is not installed, and which ends the run here. Its learning rate rises
over 2000 steps, so the one given is for then; its samples are given many times, since it tests after each epoch.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

os.environ |= {"ACCELERATE_USE_CPU": "true"}

from record import save_losses, stand_in

out, data, model, steps = sys.argv[1:]
losses: list[float] = []


class EnoughError(Exception):
    pass


def log(values: dict[str, float]) -> None:
    losses.append(values["train/loss"])
    if len(losses) == int(steps):
        raise EnoughError


stand_in("wandb", init=lambda **_: None, log=log)
for copy in range(2 * int(steps)):
    shutil.copytree(data, f"{out}/samples/{copy}")
config = json.loads(Path(model, "config.json").read_text())
draft = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": config["hidden_size"],
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": config["vocab_size"],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
Path(out, "draft.json").write_text(json.dumps(draft))
sys.argv = ["main.py", "--basepath", model, "--configpath", f"{out}/draft.json", "--bs", "4", "--lr", "0.1"]
sys.argv += ["--tmpdir", f"{out}/samples", "--cpdir", f"{out}/run"]
try:
    runpy.run_module("eagle.train.main", run_name="__main__")
except EnoughError:
    save_losses(out, losses)
