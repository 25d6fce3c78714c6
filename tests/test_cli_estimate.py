"""`sglang-capture estimate`: tokens times bytes, and whether they fit."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_capture import cli
from sglang_capture.client import ServiceUnreachable
from sglang_capture.commands import _estimate
from sglang_capture.commands._count import count_tokens, sample_tokens
from sglang_capture.commands._model import read_spec
from sglang_capture.errors import UsageError
from sglang_capture.layers import LayerError
from sglang_capture.prompts import ChatTokenizer, read_jsonl
from sglang_capture.tiny_model import make_tiny_model

Disk = namedtuple("Disk", "f_bavail f_frsize")
"""As os.statvfs gives it, as far as it is read."""

IDS = [{"input_ids": [1] * length} for length in (10, 20, 30)]
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "torch_dtype": "bfloat16"},
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("estimate") / "model"
    make_tiny_model(directory, layers=4, hidden=32)
    return directory


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    return tmp_path


def write(tmp_path: Path, rows: Sequence[dict[str, Any] | str]) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def estimate(*arguments: str, text: bool = False) -> tuple[int, Any]:
    result = CliRunner().invoke(cli.app, ["estimate", *arguments, *([] if text else ["--json"])])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout if text else json.loads(result.stdout)


def test_bytes_are_those_of_the_layers_and_the_mask(tmp_path: Path, kimi: Path) -> None:
    """Three layers and the last hidden state of Kimi-K2.5: 57,344 bytes of states, 8 of id, 1 of mask."""
    code, facts = estimate(write(tmp_path, IDS), "--model", str(kimi), "--data", str(tmp_path))
    assert code == 0
    assert (facts["layers"], facts["last_hidden"], facts["dtype"]) == ([3, 31, 59], "post", "bfloat16")
    assert facts["bytes_per_token"] == 57_344 + 8 + 1
    assert (facts["rows"], facts["tokens"], facts["longest_tokens"]) == (3, 60, 30)
    assert facts["bytes"] == 60 * facts["bytes_per_token"]


def test_what_is_asked_for_counts(tmp_path: Path, kimi: Path) -> None:
    options = ["--layers", "59,3", "--last-hidden", "both"]
    _, facts = estimate(write(tmp_path, IDS), "--model", str(kimi), *options)
    assert facts["layers"] == [3, 59]
    assert facts["bytes_per_token"] == 4 * 7168 * 2 + 9


def test_messages_are_counted_as_a_run_would_send_them(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("transformers")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    _, facts = estimate(write(tmp_path, [{"messages": messages}, {"text": "hi"}]), "--model", str(model))
    ids, _mask = ChatTokenizer(model).encode_messages(messages)
    assert facts["tokens"] == len(ids) + 2  # <|bos|> and "hi"
    assert facts["dtype"] == "float32"


def test_bad_rows_are_left_out_and_shown(tmp_path: Path, kimi: Path) -> None:
    _, facts = estimate(write(tmp_path, [*IDS, "{", {"a": 1}]), "--model", str(kimi))
    assert (facts["rows"], facts["bad_rows"], facts["tokens"]) == (3, 2, 60)
    assert [fault["line"] for fault in facts["faults"]] == [4, 5]


def test_a_disk_that_is_too_small_is_an_error(tmp_path: Path, kimi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 60 * (57_344 + 9)
    monkeypatch.setenv("SGLANG_CAPTURE_QUOTA", "1GiB")
    monkeypatch.setattr(_estimate.os, "statvfs", lambda _path: Disk(needed, 1))
    assert estimate(write(tmp_path, IDS), "--model", str(kimi))[0] == 0
    monkeypatch.setattr(_estimate.os, "statvfs", lambda _path: Disk(needed - 1, 1))
    code, facts = estimate(write(tmp_path, IDS), "--model", str(kimi))
    assert code == 1 and facts["data"]["fits"] is False
    assert "1 B too little" in estimate(write(tmp_path, IDS), "--model", str(kimi), text=True)[1]


def test_a_small_spool_is_normal_unless_a_conversation_does_not_fit(
    tmp_path: Path, kimi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 30 * (57_344 + 8)
    monkeypatch.setenv("SGLANG_CAPTURE_QUOTA", str(longest))
    code, shown = estimate(write(tmp_path, IDS), "--model", str(kimi), text=True)
    assert code == 0 and "less than the dataset, which is normal" in shown
    monkeypatch.setenv("SGLANG_CAPTURE_QUOTA", str(longest - 1))
    code, shown = estimate(write(tmp_path, IDS), "--model", str(kimi), text=True)
    assert code == 1 and "the longest conversation does not fit" in shown


def test_a_sample_says_that_it_is_one_and_comes_close(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("transformers")
    rows = [json.dumps({"text": f"{number} " + "some words and more " * (1 + number % 17)}) for number in range(300)]
    tokenizer = ChatTokenizer(model)
    exact = count_tokens(read_jsonl(rows), tokenizer)
    sampled = sample_tokens(read_jsonl(rows), tokenizer, 20)
    assert (exact.sampled, sampled.sampled, sampled.rows) == (None, 20, 300)
    assert sampled.tokens == pytest.approx(exact.tokens, rel=0.05)
    assert sampled.longest == pytest.approx(exact.longest, rel=0.05)
    assert sample_tokens(read_jsonl(rows), tokenizer, 20) == sampled
    _, shown = estimate(write(tmp_path, rows), "--model", str(model), "--sample", "20", text=True)
    assert "about" in shown and "20 rows drawn at random" in shown


@pytest.mark.parametrize("options", [[], ["--sample", "9"]], ids=["all", "sample"])
def test_what_a_run_captures_once_is_counted_once(tmp_path: Path, kimi: Path, options: list[str]) -> None:
    rows = [*IDS, IDS[0], {"id": "a", **IDS[0]}, {"id": "a", **IDS[0]}, {"input_ids": [1] * 10, "other": 1}]
    _, facts = estimate(write(tmp_path, rows), "--model", str(kimi), *options)
    assert (facts["rows"], facts["duplicates"], facts["tokens"]) == (4, 3, 70)
    _, shown = estimate(write(tmp_path, rows), "--model", str(kimi), *options, text=True)
    assert "conversations  4, and 3 duplicates" in shown


def test_ids_that_a_run_would_refuse_are_bad_rows(tmp_path: Path, kimi: Path) -> None:
    _, facts = estimate(write(tmp_path, [*IDS, {"input_ids": [163840]}]), "--model", str(kimi))
    assert (facts["rows"], facts["bad_rows"]) == (3, 1)


def test_a_sample_larger_than_the_file_is_all_of_it(model: Path) -> None:
    rows = [json.dumps(row) for row in IDS]
    assert sample_tokens(read_jsonl(rows), ChatTokenizer(model), 100).tokens == 60


def test_an_empty_file_takes_nothing(tmp_path: Path, kimi: Path) -> None:
    for options in ([], ["--sample", "5"]):
        code, facts = estimate(write(tmp_path, []), "--model", str(kimi), *options)
        assert (code, facts["rows"], facts["tokens"]) == (0, 0, 0)


def test_without_model_and_service_the_error_names_both(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model.*--service"):
        estimate(write(tmp_path, IDS))


def test_a_service_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnreachable, match=r"http://127\.0\.0\.1:1"):
        estimate(write(tmp_path, IDS), "--service", "http://127.0.0.1:1")


def test_the_service_says_what_its_server_captures_and_how_much_room_it_has(
    tmp_path: Path, kimi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(str(kimi), "2,30,58", "pre").model_dump(mode="json")
    plugin = {"spec": spec, "quota_bytes": 1 << 30, "tokenizer_path": "t", "model_path": "m"}

    async def health(_url: str) -> dict[str, Any]:
        return {"plugin": plugin, "problems": [], "data": str(tmp_path), "spool": "/dev/shm/x"}

    monkeypatch.setattr(_estimate, "_health", health)
    _, facts = estimate(write(tmp_path, IDS), "--service", "http://service")
    assert (facts["layers"], facts["last_hidden"]) == ([2, 30, 58], "pre")
    assert facts["spool"] == {"path": "/dev/shm/x", "quota_bytes": 1 << 30, "longest_fits": True}
    assert facts["data"]["free_bytes"] > 0
    _, facts = estimate(write(tmp_path, IDS), "--service", "http://service", "--layers", "1")
    assert facts["layers"] == [1]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"num_hidden_layers": 4}, UsageError, "says nothing of 'hidden_size'"),
        ([], UsageError, "a JSON object is expected"),
        ({"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9}, LayerError, "no default layers"),
    ],
)
def test_a_config_that_says_too_little_is_refused(
    tmp_path: Path, config: Any, error: type[Exception], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        read_spec(str(tmp_path), None, None)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        read_spec(str(tmp_path), None, None)


@pytest.mark.parametrize("nesting", [("language_config",), ("thinker_config", "text_config"), ("llm_config",)])
def test_the_language_model_is_found_however_deep_it_is_written(tmp_path: Path, nesting: tuple[str, ...]) -> None:
    config: dict[str, Any] = {**KIMI["text_config"]}  # type: ignore[dict-item]
    for name in reversed(nesting):
        config = {"architectures": ["Seeing"], name: config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(str(tmp_path), None, None)
    assert (spec.architecture, spec.num_layers, spec.hidden_size) == ("Seeing", 61, 7168)


@pytest.mark.parametrize("written", [{"dtype": "float16"}, {"torch_dtype": "float16"}])
def test_the_dtype_is_read_however_it_is_written(kimi: Path, written: dict[str, str]) -> None:
    config = {**KIMI, "text_config": {**KIMI["text_config"], "torch_dtype": None}, **written}  # type: ignore[dict-item]
    (kimi / "config.json").write_text(json.dumps(config))
    assert read_spec(str(kimi), None, None).dtype == "float16"


@pytest.mark.parametrize("option", ["--model", "--tokenizer"])
def test_a_directory_that_is_not_there_is_named_before_the_file_is_read(tmp_path: Path, option: str) -> None:
    with pytest.raises(UsageError, match=f"there is no directory ./absent; {option} takes"):
        estimate(str(tmp_path / "absent.jsonl"), option, "./absent")


def test_bad_rows_beyond_the_first_are_counted(tmp_path: Path, kimi: Path) -> None:
    result = CliRunner().invoke(cli.app, ["estimate", write(tmp_path, ["?"] * 8), "--model", str(kimi)])
    assert "rows.jsonl:5: " in result.stderr and "rows.jsonl:6: " not in result.stderr
    assert "and 3 more bad rows; --json lists them" in result.stderr
