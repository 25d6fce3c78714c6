"""`sglang-capture run` against the real service, with a stand-in for the engine. (The real engine: tests/engine.)"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from service.running import ServiceProcess, serving, until
from service.standin import Generate, StandInServer, publish
from typer.testing import CliRunner

from sglang_capture import cli, spool
from sglang_capture.client import ServiceUnreachable
from sglang_capture.commands import _bulk, _run
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.layers import LayerError
from sglang_capture.prompts import tables

ROWS = [{"id": f"c{number}", "input_ids": [1, 2, number % 10]} for number in range(12)]

PROCESS_PATIENCE = 150.0
"""Seconds until a command that ought to do something is given up; never what a test measures."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bulk, "pause_seconds", lambda _error, _attempt: 0.02)
    monkeypatch.setattr(_run, "_READY_SECONDS", 0.5)


@pytest.fixture
def sglang(tmp_path: Path) -> Iterator[StandInServer]:
    (tmp_path / "spool").mkdir(mode=0o700)
    server = StandInServer(tmp_path / "spool")
    yield server
    server.close()


@pytest.fixture
def service(tmp_path: Path, sglang: StandInServer) -> Iterator[str]:
    with serving(tmp_path, hold_seconds=0.2) as client:
        until(lambda: client.get("/health").json()["plugin"], "the plugin's status")
        yield str(client.base_url)


def write(tmp_path: Path, rows: Sequence[dict[str, Any] | str]) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, summary and remarks."""
    result = CliRunner().invoke(cli.app, ["run", *arguments, "--json"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout), result.stderr


def ids(url: str) -> set[str]:
    with httpx.Client(base_url=url, trust_env=False) as client:
        return {record["id"] for record in client.get("/capture", params={"limit": 1000}).json()["items"]}


def test_a_file_is_captured_and_summed_up(tmp_path: Path, sglang: StandInServer, service: str) -> None:
    code, summary, _ = run(write(tmp_path, ROWS), "--service", service)
    assert code == 0
    assert (summary["rows"], summary["captured"], summary["missing"]) == (12, 12, 0)
    assert summary["tokens"] == 36 and summary["bytes"] > 0
    assert sorted(sglang.sent_ids) == sorted(row["id"] for row in ROWS)


def test_a_json_list_is_captured_as_its_rows_are(tmp_path: Path, sglang: StandInServer, service: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([*ROWS[:3], {"input_ids": [10**6]}, {"input_ids": [1] * 9}]))
    code, summary, remarks = run(str(file), "--service", service, "--max-length", "8")
    assert code == 1 and f"{file}, row 4: token id 1000000" in remarks
    counts = [summary[name] for name in ("rows", "captured", "too_long", "bad_rows", "missing")]
    assert counts == [5, 3, 1, 1, 1]


def test_a_parquet_file_is_captured_with_its_total(tmp_path: Path, sglang: StandInServer, service: str) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{**row, "text": "x"} for row in ROWS]).to_parquet(tmp_path / "rows.parquet")
    options = ("--service", service, "--limit", "4", "--column", "input_ids")
    code, summary, _ = run(str(tmp_path / "rows.parquet"), *options)
    assert (code, summary["rows"], summary["captured"]) == (0, 4, 4)


def test_where_the_number_of_rows_is_not_known_the_end_tells(
    tmp_path: Path, sglang: StandInServer, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    streamed = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    monkeypatch.setattr(tables, "find", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_names, **_options: streamed)
    code, summary, _ = run("hf:org/name", "--service", service)
    assert (code, summary["rows"], summary["captured"], summary["not_tried"]) == (0, 12, 12, 0)


def test_a_file_without_rows_is_used_wrongly(tmp_path: Path, service: str) -> None:
    with pytest.raises(UsageError, match=r"rows\.jsonl holds no row"):
        run(write(tmp_path, ["", ""]), "--service", service)


def test_masks_that_teach_nothing_are_warned_of(tmp_path: Path, sglang: StandInServer, service: str) -> None:
    file = write(tmp_path, [{**ROWS[0], "loss_mask": [0, 0, 0]}, {**ROWS[1], "loss_mask": [1, 1, 1]}])
    shown = CliRunner().invoke(cli.app, ["run", file, "--service", service]).stdout
    assert "1 loss mask all zero" in shown and "1 loss mask all one" in shown


def test_with_generate_the_answers_are_written_and_captured_once(
    tmp_path: Path, sglang: StandInServer, service: str
) -> None:
    file = write(tmp_path, ROWS)
    options = ("--service", service, "--generate", "--max-new-tokens", "9", "--temperature", "0")
    assert run(file, *options, "--limit", "5")[1]["captured"] == 5
    code, summary, _ = run(file, *options)
    assert (code, summary["captured"], summary["already_there"]) == (0, 7, 5)
    assert len(sglang.prompts) == len(sglang.requests) == 12
    assert all(sampling == {"max_new_tokens": 9, "temperature": 0} for _, sampling in sglang.prompts)
    assert all((request.input_ids or [])[-1] == 1 and request.tokens == 5 for request in sglang.requests)
    with pytest.raises(UsageError, match="SGLANG_CAPTURE_TOKENIZER where it runs"):
        run(file, *options, "--tokenizer", "x")


def test_a_second_run_does_nothing_twice(tmp_path: Path, sglang: StandInServer, service: str) -> None:
    file = write(tmp_path, ROWS)
    assert run(file, "--service", service, "--limit", "5")[1]["captured"] == 5
    code, summary, _ = run(file, "--service", service)
    assert (code, summary["captured"], summary["already_there"]) == (0, 7, 5)
    assert len(sglang.sent_ids) == 12


def test_bad_rows_are_named_and_the_exit_code_tells(tmp_path: Path, service: str) -> None:
    file = write(tmp_path, [*ROWS[:2], "{", ROWS[2], {"input_ids": [10**6]}, ROWS[0], ""])
    code, summary, remarks = run(file, "--service", service)
    assert code == 1
    counts = [summary[name] for name in ("rows", "captured", "duplicates", "bad_rows", "missing")]
    assert counts == [6, 3, 1, 2, 2]
    assert f"{file}:3: this line is no JSON" in remarks
    assert f"{file}:5: token id 1000000" in remarks
    assert [fault["line"] for fault in summary["faults"]] == [3, 5]


def test_rows_without_a_loss_mask_are_counted(tmp_path: Path, service: str) -> None:
    rows = [{"text": "one"}, {"text": "two"}, {"input_ids": [1, 2]}, {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]
    _, summary, _ = run(write(tmp_path, rows), "--service", service)
    assert (summary["captured"], summary["without_mask"], summary["masks_all_zero"]) == (4, 3, 0)
    shown = CliRunner().invoke(cli.app, ["run", write(tmp_path, rows), "--service", service]).stdout
    assert "without mask   3\n" in shown


def test_the_layers_asked_for_are_captured(tmp_path: Path, sglang: StandInServer, service: str) -> None:
    run(write(tmp_path, ROWS[:1]), "--service", service, "--layers", "1", "--last-hidden", "both")
    assert (sglang.requests[0].spec.layers, sglang.requests[0].spec.last_hidden) == ((1,), "both")


def test_the_same_rows_can_be_captured_with_other_layers(tmp_path: Path, sglang: StandInServer, service: str) -> None:
    file = write(tmp_path, [{"text": "a b"}, {"text": "c d e"}])
    assert run(file, "--service", service)[1]["captured"] == 2
    assert run(file, "--service", service, "--layers", "1")[1]["captured"] == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--layers", "3,x"], LayerError, "comma-separated"),
        (["--layers", "400"], LayerError, "does not exist"),
        (["--last-hidden", "last"], UsageError, "none, post, pre, both"),
        (["--tokenizer", "/nonexistent"], UsageError, "there is no directory /nonexistent"),
        (["--tokenizer", "non/existent"], UsageError, "--tokenizer non/existent: there is no such directory"),
    ],
    ids=["no layers", "no such layer", "no such kind", "no such directory", "no such tokenizer"],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    tmp_path: Path, sglang: StandInServer, service: str, options: list[str], error: type[Exception], message: str
) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(error, match=message):
        run(write(tmp_path, rows), "--service", service, *options)
    assert not sglang.sent_ids


def test_without_a_service_the_command_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnreachable, match="sglang-capture serve"):
        run(write(tmp_path, ROWS), "--service", "http://127.0.0.1:1")


def test_without_the_plugin_nothing_is_sent(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(mode=0o700)
    with serving(tmp_path) as client, pytest.raises(CaptureError, match="SGLANG_PLUGINS=sglang_capture"):
        run(write(tmp_path, ROWS), "--service", str(client.base_url))


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"state": "refused", "problem": "no layer takes the keyword"}, "no layer takes the keyword"),
        ({"time": 0.0}, "has stopped writing its status"),
        ({"url": "http://127.0.0.1:1"}, "no SGLang server answers at http://127.0.0.1:1"),
    ],
    ids=["refused", "stale", "unreachable"],
)
def test_a_server_that_cannot_capture_is_found_out_first(
    tmp_path: Path, sglang: StandInServer, service: str, status: dict[str, Any], message: str
) -> None:
    sglang.status_changes = status
    with httpx.Client(base_url=service, trust_env=False) as client:
        until(lambda: message in str(client.get("/health").json()["problems"]), "the problem in the health")
    with pytest.raises(CaptureError) as caught:
        run(write(tmp_path, ROWS), "--service", service)
    assert message in str(caught.value)
    assert not sglang.sent_ids


def test_a_file_that_is_not_there_is_named(service: str) -> None:
    with pytest.raises(UsageError, match=r"nothing\.jsonl cannot be read"):
        run("nothing.jsonl", "--service", service)


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "sglang_capture", "run", *arguments, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def eventually(process: subprocess.Popen[str], condition: Callable[[], bool], what: str) -> None:
    """Wait for what a command brings about, however long a busy machine takes to start it."""
    deadline = time.monotonic() + PROCESS_PATIENCE
    while not condition():
        assert process.poll() is None, f"the command ended before {what}: {process.communicate()}"
        assert time.monotonic() < deadline, f"this never came: {what}"
        time.sleep(0.02)


class HeldEngine:
    """Answers two requests, and holds the others back until it is let go: a run that is surely in its middle."""

    def __init__(self, server: StandInServer) -> None:
        self.go = threading.Event()
        self._server = server
        server.behaviour = self._answer

    def is_reached(self) -> bool:
        return len(self._server.requests) > 2

    def _answer(self, server: StandInServer, request: Generate) -> int:
        if len(server.requests) > 2:
            self.go.wait(PROCESS_PATIENCE)
        return publish(server, request)


@pytest.fixture
def held(sglang: StandInServer) -> Iterator[HeldEngine]:
    engine = HeldEngine(sglang)
    yield engine
    engine.go.set()


def refusals(url: str) -> float:
    """How often the service has refused a capture because the spool is full."""
    with httpx.Client(base_url=url, trust_env=False) as client:
        found = re.search(r'sent_total\{outcome="spool-full"\} ([0-9.]+)', client.get("/metrics").text)
        return float(found[1]) if found else 0.0


def test_a_full_spool_is_waited_for(tmp_path: Path, sglang: StandInServer, service: str) -> None:
    def full_after_three(server: StandInServer, request: Generate) -> int:
        if len(server.requests) == 3:
            server.free = 0
            until(lambda: spool.read_status(server.spool).free_bytes == 0, "the status of a full spool")  # type: ignore[union-attr]
        return publish(server, request)

    sglang.behaviour = full_after_three
    process = start(write(tmp_path, ROWS), "--service", service, "--concurrency", "1")
    eventually(process, lambda: refusals(service) >= 1, "a refusal by the service")
    assert len(sglang.requests) == 3
    sglang.free = None
    output, _ = process.communicate(timeout=PROCESS_PATIENCE)
    assert process.returncode == 0
    assert json.loads(output)["captured"] == 12


def test_ctrl_c_ends_the_run_with_a_summary(
    tmp_path: Path, sglang: StandInServer, held: HeldEngine, service: str
) -> None:
    file = write(tmp_path, ROWS)
    process = start(file, "--service", service, "--concurrency", "1")
    eventually(process, held.is_reached, "the third request")
    process.send_signal(signal.SIGINT)
    output, remarks = process.communicate(timeout=PROCESS_PATIENCE)
    summary = json.loads(output)
    assert process.returncode == 1 and "Traceback" not in remarks
    assert (summary["stopped"], summary["captured"], summary["not_tried"]) == ("interrupted", 2, 10)
    held.go.set()
    assert run(file, "--service", service)[0] == 0
    assert sorted(sglang.sent_ids) == sorted(row["id"] for row in ROWS)


def test_after_kill_9_the_same_command_goes_on(
    tmp_path: Path, sglang: StandInServer, held: HeldEngine, service: str
) -> None:
    file = write(tmp_path, ROWS)
    process = start(file, "--service", service, "--concurrency", "2")
    eventually(process, held.is_reached, "the third request")
    process.kill()
    process.communicate()
    held.go.set()
    code, summary, _ = run(file, "--service", service)
    assert (code, summary["captured"] + summary["already_there"]) == (0, 12)
    assert summary["already_there"] >= 2
    assert sorted(sglang.sent_ids) == sorted(row["id"] for row in ROWS)
    assert ids(service) == {row["id"] for row in ROWS}


def test_a_restart_of_the_service_is_survived(tmp_path: Path, held: HeldEngine) -> None:
    first = ServiceProcess(tmp_path)
    url = str(first.client.base_url)
    processes = [first.process]
    try:
        until(lambda: first.client.get("/health").json()["plugin"], "the plugin's status")
        process = start(write(tmp_path, ROWS), "--service", url, "--concurrency", "2")
        processes.append(process)
        eventually(process, held.is_reached, "the third request")
        first.kill()
        held.go.set()
        processes.append(ServiceProcess(tmp_path, PORT=str(first.client.base_url.port)).process)
        summary = json.loads(process.communicate(timeout=PROCESS_PATIENCE)[0])
        assert process.returncode == 0, summary
        assert summary["captured"] + summary["already_there"] == 12
        assert ids(url) == {row["id"] for row in ROWS}
    finally:
        for each in processes:
            each.kill()
            each.communicate()
