"""The launcher of the test bed, up to the point where it becomes SGLang."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from sglang_capture_patches import cpu


class Became(Exception):  # noqa: N818 - it stands for the process that the launcher turns into
    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.command, self.environment = command, environment


@pytest.fixture(autouse=True)
def no_gpu_and_no_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    def exec_instead(_: str, command: list[str], environment: dict[str, str]) -> None:
        raise Became(command, environment)

    monkeypatch.setattr(os, "execve", exec_instead)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "entry_points", lambda **_: ["installed"])
    for name in list(os.environ):
        if name.startswith(("SGLANG_", "OMP_", "HF_", "PYTHONPATH")):
            monkeypatch.delenv(name)


def launched(*arguments: str) -> Became:
    with pytest.raises(Became) as became:
        cpu.main(arguments)
    return became.value


def option(command: list[str], name: str) -> str:
    assert command.count(name) == 1
    return command[command.index(name) + 1]


def test_becomes_the_stock_server_with_defaults_added() -> None:
    command = launched("--model-path", "tiny", "--port", "31000").command
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert option(command, "--model-path") == "tiny"
    assert option(command, "--device") == "cpu"
    assert option(command, "--dtype") == "float32"
    assert int(option(command, "--max-total-tokens")) > 0


@pytest.mark.parametrize("given", [("--dtype", "bfloat16"), ("--dtype=bfloat16",)])
def test_arguments_of_the_user_stand(given: tuple[str, ...]) -> None:
    command = launched("--model-path", "tiny", *given).command
    assert "float32" not in command
    assert [word for word in command if word.startswith("--dtype")] == [given[0]]


def test_speculative_decoding_gets_the_backend_that_verifies() -> None:
    speculating = ("--model-path", "tiny", "--speculative-algorithm", "NGRAM")
    for phase in ("prefill", "decode"):
        name = f"--{phase}-attention-backend"
        assert name not in launched("--model-path", "tiny").command
        assert option(launched(*speculating).command, name) == "intel_amx"
        assert name not in launched(*speculating, "--attention-backend", "torch_native").command
        assert option(launched(*speculating, name, "mine").command, name) == "mine"


def test_environment_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("PATH", "/mine/bin")
    environment = launched("--model-path", "tiny").environment
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(cpu.standins()), "/mine"]
    assert environment["PATH"].split(os.pathsep) == ["/mine/bin", str(Path(sys.executable).parent)]
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        ("sglang_capture", "sglang_capture,sglang_capture_cpu"),
        ("sglang_capture_cpu, other", "sglang_capture_cpu, other"),
    ],
)
def test_a_list_of_plugins_gets_the_test_beds_own(monkeypatch: pytest.MonkeyPatch, plugins: str, expected: str) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    assert launched("--model-path", "tiny").environment["SGLANG_PLUGINS"] == expected


def test_no_list_of_plugins_stays_none() -> None:
    """Unset means all of them; a list of one would switch the others off."""
    assert "SGLANG_PLUGINS" not in launched("--model-path", "tiny").environment


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ([], 1),
        (["--tp", "2"], 2),
        (["--tp-size=2", "--pp-size", "3"], 6),
        (["--tp", "2", "--dp", "2"], 4),
        (["--tensor-parallel-size", "2", "--dp-size", "2", "--enable-dp-attention"], 2),
    ],
)
def test_one_set_of_cores_a_rank(arguments: list[str], ranks: int) -> None:
    bound = launched("--model-path", "tiny", *arguments).environment["SGLANG_CPU_OMP_THREADS_BIND"]
    assert len(bound.split("|")) == ranks


def test_refuses_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as exit_:
        cpu.main(["--model-path", "tiny"])
    assert exit_.value.code == 2
    assert "this machine has a GPU" in capsys.readouterr().err


def test_refuses_where_its_entry_point_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang would not find `register`, start, and compute nonsense."""
    monkeypatch.setattr(cpu, "entry_points", lambda **_: [])
    with pytest.raises(SystemExit) as exit_:
        cpu.main(["--model-path", "tiny"])
    assert exit_.value.code == 2
    assert "pip install" in capsys.readouterr().err


def test_help_comes_with_the_help_of_sglang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/one:/another")
    assert "--help" in launched("--help").command
    shown = capsys.readouterr().out
    assert "python -m sglang_capture_patches.cpu" in shown
    assert "SGLANG_USE_CPU_ENGINE=1" in shown
    assert f"PATH=$PATH:{Path(sys.executable).parent}" in shown and "/another" not in shown


def test_register_leaves_other_servers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)  # importing it would raise
    cpu.register()
    monkeypatch.setenv(cpu.STARTED_HERE, "1")
    with pytest.raises(ImportError):
        cpu.register()
