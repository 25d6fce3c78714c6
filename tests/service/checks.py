"""What many tests of the service look at."""

from __future__ import annotations

from typing import Any

import httpx
import torch
from safetensors.torch import load


def problem(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The problem document of an answer that must be this one."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    document = response.json()
    assert isinstance(document, dict)
    assert (response.status_code, document["type"]) == (status, f"urn:sglang-capture:problem:{kind}"), document
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    return document


def nested(levels: int) -> list[Any]:
    """Lists inside each other."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def record(client: httpx.Client, capture_id: str) -> dict[str, Any]:
    response = client.get(f"/capture/{capture_id}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def state(client: httpx.Client, capture_id: str) -> str | None:
    response = client.get(f"/capture/{capture_id}")
    return response.json()["state"] if response.is_success else None


def states(client: httpx.Client) -> dict[str, str]:
    """Of all captures."""
    found: dict[str, str] = {}
    cursor = None
    while True:
        page = client.get("/capture", params={"limit": 1000, **({"cursor": cursor} if cursor else {})}).json()
        found.update((item["id"], item["state"]) for item in page["items"])
        if (cursor := page["next"]) is None:
            return found


def tensors(client: httpx.Client, capture_id: str) -> dict[str, torch.Tensor]:
    response = client.get(f"/capture/{capture_id}/data")
    assert response.status_code == 200, response.text
    assert int(response.headers["content-length"]) == len(response.content)
    return load(response.content)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
