"""sglang-capture: a dump laid out once, its pages reserved, rows copied to their place, published by a link."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import HIDDEN_SIZE, LAYERS, Rows
from sglang_capture.dump import DumpFile
from sglang_capture.spec import CaptureSpec

SPEC = CaptureSpec(
    layers=LAYERS,
    last_hidden="post",
    hidden_size=HIDDEN_SIZE,
    num_layers=61,
    vocab_size=163840,
    dtype="bfloat16",
    architecture="DeepseekV3ForCausalLM",
    model_path="benchmark",
)


def write(rows: Rows, directory: Path, number: int) -> Path:
    dump = DumpFile(directory / f".part-{number}", f"ours-{number}", "request", SPEC, rows.input_ids)
    for position, layer in enumerate(rows.layers):
        dump.hidden_states[:, position].copy_(layer)
    dump.last_hidden["last_hidden_state"].copy_(rows.last)
    final = directory / f"ours-{number}.pt"
    dump.publish(final)
    return final
