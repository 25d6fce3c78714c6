"""Examples for OpenAPI: one capture, one shard, one job, as they really look."""

from __future__ import annotations

from typing import Any

RECORD: dict[str, Any] = {
    "id": "conv-0001",
    "state": "spooled",
    "tokens": 5,
    "bytes": 286760,
    "spec_digest": "8da275804b4dfe51",
    "layers": [3, 31, 59],
    "last_hidden": "post",
    "shapes": {"input_ids": [5], "hidden_states": [5, 3, 7168], "last_hidden_state": [5, 7168]},
    "dtype": "bfloat16",
    "place": {"dump": "/dev/shm/sglang_capture/conv-0001.pt", "dataset": None, "shard": None, "sample": None},
    "failure": None,
    "metadata": {"source": "sharegpt"},
    "created": 1767225600.0,
    "updated": 1767225600.2,
}

SHARD: dict[str, Any] = {
    "dataset": "dataset-8da27580",
    "file": "shard-000000.safetensors",
    "path": "/data/captures/dataset-8da27580/shard-000000.safetensors",
    "samples": 512,
    "tokens": 1048576,
    "bytes": 60146384896,
    "spec_digest": "8da275804b4dfe51",
    "layers": [3, 31, 59],
    "last_hidden": "post",
    "created": 1767225660.0,
}

JOB: dict[str, Any] = {
    "id": "job-5f0c2a9be1d4",
    "state": "running",
    "problem": "",
    "waiting": "",
    "source": "/data/train.jsonl",
    "options": {
        "layers": None,
        "last_hidden": None,
        "concurrency": 32,
        "max_length": None,
        "only_last_turn": False,
        "generate": None,
    },
    "rows": 120000,
    "done": 4200,
    "captured": 4100,
    "reused": 98,
    "failed": 2,
    "in_flight": 32,
    "tokens": 8601600,
    "rows_per_second": 41.5,
    "seconds_left": 2790.4,
    "errors": [{"line": 17, "capture_id": None, "reason": "this line is no JSON: Expecting value at character 1"}],
    "created": 1767225600.0,
    "updated": 1767225701.0,
}

REQUESTS: dict[str, Any] = {
    "text": {"summary": "plain text", "value": {"text": "The capital of France is", "capture_id": "conv-0001"}},
    "messages": {
        "summary": "a conversation, laid out with the model's chat template",
        "value": {
            "messages": [
                {"role": "user", "content": "What is the capital of France?"},
                {"role": "assistant", "content": "Paris."},
            ],
            "metadata": {"source": "sharegpt"},
        },
    },
    "generate": {
        "summary": "a question that the target answers first",
        "value": {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "generate": {"max_new_tokens": 512, "temperature": 0.7},
        },
    },
    "input_ids": {
        "summary": "token ids, with layers of one's own",
        "value": {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "layers": [2, 30, 58], "last_hidden": "both"},
    },
}


def answer(example: Any, description: str = "OK") -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entry of a good JSON answer."""
    return {200: {"description": description, "content": {"application/json": {"example": example}}}}


def page(item: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entry of a page of one item."""
    return answer({"items": [item], "next": None}, "a page, from the newest on")
