"""The documentation and the service agree, and OpenAPI tells all there is to tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.standin import put_failure
from sglang_capture.service.problems import KINDS
from sglang_capture.service.settings import ServiceSettings
from sglang_capture.settings import variable

DOCS = Path(__file__).parents[2] / "docs"
HTTP_API = (DOCS / "http-api.md").read_text()
SERVICE = (DOCS / "service.md").read_text()


@pytest.fixture
def operations(service: httpx.Client) -> dict[tuple[str, str], dict[str, Any]]:
    paths = service.get("/openapi.json").json()["paths"]
    return {
        (method.upper(), path): operation for path, methods in paths.items() for method, operation in methods.items()
    }


def test_every_setting_is_in_the_table_with_its_default_and_meaning() -> None:
    rows = dict(re.findall(r"^\| `(SGLANG_CAPTURE_\w+)` \| (.*) \|$", SERVICE, re.MULTILINE))
    fields = ServiceSettings.model_fields
    assert list(rows) == [variable(name) for name in fields]
    for name, field in fields.items():
        default = "unset" if field.default is None else f"`{field.default}`"
        assert rows[variable(name)] == f"{default} | {field.description}", name


def test_every_route_is_documented(operations: dict[tuple[str, str], Any]) -> None:
    documented = set(re.findall(r"^### `(\w+) (\S+)`$", HTTP_API, re.MULTILINE))
    assert {(method, re.sub(r"\{\w+\}", "{id}", path)) for method, path in operations} == documented


def test_every_kind_of_problem_is_documented() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \|", HTTP_API, re.MULTILINE)
    assert {kind: int(status) for kind, status in rows} == {kind: known.status for kind, known in KINDS.items()}


def test_every_metric_is_documented(service: httpx.Client, spool_dir: Path) -> None:
    put_failure(spool_dir, "bad", "why")
    service.post("/capture", json={"input_ids": [1]}).raise_for_status()
    families = text_string_to_metric_families(service.get("/metrics").text)
    found = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert found == set(re.findall(r"^\| `(sglang_capture_\w+)` \|", HTTP_API, re.MULTILINE))


def test_every_operation_has_a_summary_a_description_and_an_example(
    operations: dict[tuple[str, str], dict[str, Any]],
) -> None:
    for route, operation in operations.items():
        assert operation.get("summary"), route
        assert operation.get("description"), route
        good = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        contents = [content for answer in good for content in answer["content"].values()]
        assert any("example" in content or "examples" in content for content in contents), route
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert "example" in content or "examples" in content, route


def test_every_bad_answer_is_a_problem_document(operations: dict[tuple[str, str], dict[str, Any]]) -> None:
    for route, operation in operations.items():
        for status, answer in operation["responses"].items():
            if not status.startswith("2"):
                assert list(answer["content"]) == ["application/problem+json"], (route, status)


def test_examples_of_requests_are_accepted(
    service: httpx.Client, operations: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """Not refused as malformed: what they name need not be there."""
    for (method, path), operation in operations.items():
        if path == "/capture":
            continue  # the stand-in has no tokenizer, and another model's layers
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in body.get("examples", {}).values():
            answer = service.request(method, path, json=example["value"])
            if answer.status_code == 422:
                assert "be the absolute path of" in answer.json()["detail"], (path, answer.text)
