"""The command `verify`: what it prints where, and its exit codes. The oracle itself is in test_verify.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from factories import make_dataset, make_spec, save_dump
from service.running import until
from service.standin import Generate, StandInServer, put_failure
from typer.testing import CliRunner, Result

from sglang_capture.commands.verify import print_report, verify
from sglang_capture.comparison import KindReport
from sglang_capture.dump import Dump
from sglang_capture.errors import UsageError
from sglang_capture.export import ExportError, export_dataset
from sglang_capture.oracle import Oracle, States
from sglang_capture.probe import ProbeError
from sglang_capture.references import AnotherModelError
from sglang_capture.shards import CaptureDataset, DatasetError
from sglang_capture.verify import VerifyReport

SPEC = make_spec(last_hidden="both", num_layers=5, layers=(1, 2, 3), weights_digest="a" * 32)


class KnownStates:
    """An oracle that knows the rows of one dataset."""

    num_layers, hidden_size, dtype = SPEC.num_layers, SPEC.hidden_size, "bfloat16"
    placeholders: frozenset[int] = frozenset()

    def __init__(self, dataset: Path) -> None:
        self._samples = {tuple(sample["input_ids"].tolist()): sample for sample in CaptureDataset(dataset)}

    def states(self, input_ids: torch.Tensor) -> States:
        sample = self._samples[tuple(input_ids.tolist())]
        noise = torch.randn(len(input_ids), SPEC.hidden_size)
        layers = sample["hidden_states"].unbind(1)
        return States((noise, *layers, noise), sample["last_hidden_state"], sample["last_hidden_state_prenorm"])


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_dataset(tmp_path, SPEC, [3, 4], [5])
    known = KnownStates(tmp_path)
    monkeypatch.setattr(Oracle, "load", lambda *_, **__: known)
    return tmp_path


def run(*arguments: Any) -> Result:
    app = typer.Typer()
    app.command()(verify)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def damage(dataset: Path) -> None:
    """Exchange the last hidden states before and after the norm in the file itself."""
    path = dataset / "shard-000000.safetensors"
    content = path.read_bytes()
    names = b'"last_hidden_state":', b'"last_hidden_state_prenorm":', b'"xxxxx":'
    for old, new in ((names[0], names[2]), (names[1], names[0]), (names[2], names[1])):
        content = content.replace(old, new)
    path.write_bytes(content)


def test_right_captures_exit_with_0(dataset: Path) -> None:
    result = run(dataset)
    assert result.exit_code == 0
    assert "3 captures (12 tokens, bfloat16)" in result.stdout
    content = json.loads(run(dataset, "--json", "--sample", 2).stdout)
    assert (content["ok"], content["samples"], content["worst_error"]) == (True, 2, 0.0)


def test_wrong_captures_exit_with_1_and_say_what_they_look_like(dataset: Path) -> None:
    damage(dataset)
    result = run(dataset, "--json")
    assert result.exit_code == 1
    kinds = {kind["name"]: kind["looks_like"] for kind in json.loads(result.stdout)["kinds"] if not kind["ok"]}
    assert kinds["last_hidden_state_prenorm"] == "last_hidden_state"
    assert run(dataset).exit_code == 1


def test_no_word_of_the_table_is_cut_on_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row without an id of its own has one of 34 characters."""
    monkeypatch.setenv("COLUMNS", "80")
    name, like = f"r-{'0123456789abcdef' * 2}", "last_hidden_state_prenorm"
    errors = {"worst_error": 1.0, "allowed_worst": 1e-5, "middle_error": 1.0, "allowed_middle": 1e-5}
    kind = KindReport(name=like, ok=False, sample_id=name, row=12345, looks_like=like, **errors)
    about = {"source": "data", "model": "tiny", "samples": 1, "tokens": 9, "dtype": "float32"}
    print_report(
        VerifyReport(ok=False, oracle_dtype="float32", worst_error=1.0, first_difference=None, kinds=[kind], **about)
    )
    shown = capsys.readouterr().out
    header, *lines = shown[: shown.index("✗")].splitlines()
    assert "…" not in shown and max(len(line.rstrip()) for line in (header, *lines)) <= 80
    assert header.split() == ["rows", "worst", "middle", "worst", "row", "verdict"]
    place, verdict = header.index("worst row"), header.index("verdict")
    assert "".join(line[place:verdict].strip() for line in lines) == f"{name}:12345"
    assert "".join(line[verdict:].replace(" ", "") for line in lines) == f"wrong:lookslike{like}"


def test_where_it_first_differs_is_printed(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = KnownStates.states

    def later_layers_differ(known: KnownStates, input_ids: torch.Tensor) -> States:
        right = states(known, input_ids)
        rows = right.hidden[2].clone()
        rows[len(input_ids) - 2 :] *= -1
        return replace(right, hidden=(*right.hidden[:2], rows, *right.hidden[3:]), post=-right.post)

    monkeypatch.setattr(KnownStates, "states", later_layers_differ)
    result = run(dataset)
    assert result.exit_code == 1
    first = json.loads(run(dataset, "--json").stdout)["first_difference"]
    assert (first["name"], first["sample_id"], first["position"]) == ("index 2", "shard0-0", 1)
    assert "\nindex 2: 6 of 12 rows differ, first at position 1 of shard0-0 (error 2.0" in result.stdout
    assert f"it first differs at index 2, position 1 of shard0-0 (token {first['token_id']})" in result.stdout


@pytest.fixture
def second_server(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInServer]:
    """Hands out the rows of the dataset, by the ids it is sent."""
    directory = tmp_path_factory.mktemp("second") / "spool"
    directory.mkdir(mode=0o700)
    server = StandInServer(directory)
    server.status_changes = {"spec": SPEC.model_dump(mode="json")}
    server.write_status()
    known = KnownStates(dataset)

    def answer(_: StandInServer, request: Generate) -> int:
        input_ids = torch.tensor(request.input_ids)
        states = known.states(input_ids)
        rows = torch.stack([states.hidden[index] for index in request.spec.layers], dim=1)
        spec = SPEC.model_copy(update={"layers": request.spec.layers, "last_hidden": request.spec.last_hidden})
        last = {"last_hidden_state": states.post, "last_hidden_state_prenorm": states.pre}
        save_dump(directory, Dump(request.capture_id, "", spec, input_ids, rows, last))
        return 200

    server.behaviour = answer
    yield server
    server.close()


def with_server(dataset: Path, server: StandInServer, *arguments: Any) -> Result:
    return run(dataset, "--with-server", server.url, "--spool", server.spool, *arguments)


def test_a_second_server_is_asked_for_the_same_layers_and_nothing_is_left_there(
    dataset: Path, second_server: StandInServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Oracle, "load")  # no transformers, no weights
    result = with_server(dataset, second_server)
    assert result.exit_code == 0, result.output
    assert f"against the server at {second_server.url} in bfloat16" in result.stdout.replace("\n", " ")
    assert {(request.spec.layers, request.spec.last_hidden) for request in second_server.requests} == {
        ((1, 2, 3), "both")
    }
    assert len(second_server.requests) == 3
    assert list(second_server.spool.glob("*.pt")) == []
    damage(dataset)
    report = json.loads(with_server(dataset, second_server, "--json").stdout)
    assert report["first_difference"]["name"] == "last_hidden_state_prenorm"
    assert {kind["looks_like"] for kind in report["kinds"] if not kind["ok"]} >= {"last_hidden_state"}


def test_an_export_without_layers_is_compared_with_a_second_server_too(
    dataset: Path, second_server: StandInServer, tmp_path: Path
) -> None:
    export_dataset(dataset, "eagle", tmp_path / "out")
    report = json.loads(with_server(tmp_path / "out", second_server, "--json").stdout)
    assert report["ok"] and [kind["name"] for kind in report["kinds"]] == ["last_hidden_state"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_layers": 6}, "layers 5 and 6"),
        ({"vocab_size": 600}, "vocabulary 512 and 600"),
        ({"weights_digest": "b" * 32}, "digest of the weights"),
    ],
    ids=["depth", "vocabulary", "weights"],
)
def test_a_second_server_of_another_model_is_refused(
    dataset: Path, second_server: StandInServer, changes: dict[str, Any], found: str
) -> None:
    second_server.status_changes = {"spec": SPEC.model_copy(update=changes).model_dump(mode="json")}
    second_server.write_status()
    result = with_server(dataset, second_server)
    assert isinstance(result.exception, AnotherModelError)
    assert "runs another model" in str(result.exception) and found in str(result.exception)
    assert second_server.requests == []


def test_a_second_server_that_refuses_says_why(dataset: Path, second_server: StandInServer) -> None:
    def refuse(server: StandInServer, request: Generate) -> int:
        put_failure(server.spool, request.capture_id, "spool full: no room", kind="refused", retriable=True)
        return 200

    second_server.behaviour = refuse
    result = with_server(dataset, second_server)
    assert isinstance(result.exception, ProbeError) and "spool full" in str(result.exception)


def test_a_model_and_a_server_are_not_named_together(dataset: Path) -> None:
    result = run(dataset, "--with-server", "http://127.0.0.1:1", "--model", "m")
    assert isinstance(result.exception, UsageError) and "name one of them" in str(result.exception)


def test_a_directory_that_is_not_there_is_named_before_anything_is_read(tmp_path: Path) -> None:
    result = run(tmp_path / "absent", "--model", "/nonexist")
    assert isinstance(result.exception, UsageError)
    assert "there is no directory /nonexist" in str(result.exception)


def test_what_is_passed_by_is_said(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = KnownStates.states

    def nan_for_the_shortest(known: KnownStates, input_ids: torch.Tensor) -> States:
        right = states(known, input_ids)
        return replace(right, post=right.post * float("nan")) if len(input_ids) == 3 else right

    monkeypatch.setattr(KnownStates, "states", nan_for_the_shortest)
    result = run(dataset)
    assert result.exit_code == 0
    assert "passed by 1 capture for which" in result.stdout and "itself gives NaN or Inf" in result.stdout
    assert json.loads(run(dataset, "--json").stdout)["reference_nonfinite"] == 1


def test_ended_by_a_signal_it_leaves_nothing_on_the_second_server(dataset: Path, second_server: StandInServer) -> None:
    go_on, answer = threading.Event(), second_server.behaviour

    def hang(server: StandInServer, request: Generate) -> int:
        answer(server, request)
        go_on.wait(60)
        return 200

    second_server.behaviour = hang
    command = [sys.executable, "-m", "sglang_capture", "verify", str(dataset), "--with-server", second_server.url]
    with subprocess.Popen([*command, "--spool", str(second_server.spool)]) as process:
        until(lambda: list(second_server.spool.glob("*.pt")), "the capture")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(second_server.spool.glob("*.pt")) == []
    go_on.set()


def test_a_damaged_byte_is_found_if_asked_for(dataset: Path) -> None:
    path = dataset / "shard-000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert run(dataset).exit_code == 0
    assert isinstance(run(dataset, "--checksums").exception, DatasetError)


def test_a_truncated_shard_is_an_error(dataset: Path) -> None:
    path = dataset / "shard-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result = run(dataset)
    assert isinstance(result.exception, DatasetError) and "shard-000001.safetensors is truncated" in str(
        result.exception
    )


def test_help_has_an_example() -> None:
    assert "sglang-capture verify captures --sample 16" in " ".join(run("--help").stdout.split())


def test_a_damaged_byte_of_an_export_is_found_too(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "export"
    export_dataset(dataset, "specforge", out)
    whole = run(out, "--checksums", "--json")
    files = list(out.rglob("*.ckpt"))
    assert json.loads(whole.stdout)["checksums"] == {"files": len(files), "bytes": sum(f.stat().st_size for f in files)}
    damaged = bytearray(files[0].read_bytes())
    damaged[-9] ^= 1
    files[0].write_bytes(damaged)
    files[1].unlink()
    fault = run(out, "--checksums").exception
    assert isinstance(fault, ExportError)
    assert f"{files[0]} was changed" in str(fault)
    assert f"{files[1]} cannot be read" in str(fault)


def test_what_has_no_checksums_is_not_said_to_be_checked(dataset: Path, tmp_path: Path) -> None:
    assert "every byte is as it was written" in run(dataset, "--checksums").stdout
    assert "every byte" not in run(dataset).stdout
    (tmp_path / "other").mkdir()
    assert isinstance(run(tmp_path / "other", "--checksums").exception, UsageError)
