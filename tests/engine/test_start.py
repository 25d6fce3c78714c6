"""Servers that cannot capture: they do not start, or say so, and nothing is hooked."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_capture_patches.contract import HOOKED

from engine.captures import CapturingServer, assert_rows_agree, spool_directory
from sglang_capture.probe import NoProbeError, Prober
from sglang_capture.selftest import run_self_test
from sglang_capture.spool import dumps, read_failure, read_status

pytestmark = pytest.mark.engine

REGISTER = """
import json, os, sys
import sglang_capture_patches.hooks
from sglang.srt.plugins.hook_registry import HookRegistry
for before, env in json.loads(sys.argv[1]):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    os.environ.update(env)
    exec(before)
    try:
        sglang_capture_patches.register()
        said = ""
    except SystemExit as error:
        said = str(error.code)
    print(json.dumps([said, sorted(HookRegistry._hooks)]), flush=True)
    os._exit(0)
"""
"""Imports SGLang once, for that takes a quarter of a minute, and registers in a fresh copy of the process each time."""

AN_OLD_VERSION = """
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "0.5.10" if name == "sglang" else real(name)
"""

A_MISSING_SYMBOL = """
from sglang.srt.managers.schedule_batch import Req
del Req._compute_max_prefix_len
"""

ANOTHER_SIGNATURE = """
from sglang.srt.model_executor.model_runner import ModelRunner
ModelRunner.forward = lambda self, batch: None
"""


CASES = {
    "as installed": ("", {}),
    "an old version": (AN_OLD_VERSION, {}),
    "a missing symbol": (A_MISSING_SYMBOL, {}),
    "another signature": (ANOTHER_SIGNATURE, {}),
    "an old version, not strict": (AN_OLD_VERSION, {"SGLANG_CAPTURE_STRICT": "0"}),
    "switched off": ("", {"SGLANG_CAPTURE_MODE": "off"}),
    "an unusable setting": ("", {"SGLANG_CAPTURE_QUOTA": "lots"}),
}


@pytest.fixture(scope="module")
def registered() -> dict[str, tuple[str, list[str]]]:
    """For each case what ``register`` says, and the targets it hooked."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, "-c", REGISTER, json.dumps(list(CASES.values()))],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(zip(CASES, outcomes, strict=True))


def test_the_sglang_that_is_installed_is_hooked(registered):
    said, hooked = registered["as installed"]
    assert said == ""
    assert hooked == sorted(need.target for need in HOOKED)


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("an old version", "SGLang 0.5.10 cannot be captured from.*older than 0.5.15"),
        ("a missing symbol", "_compute_max_prefix_len is missing"),
        ("another signature", r"ModelRunner.forward begins with \(self, batch\)"),
    ],
)
def test_an_sglang_that_does_not_fit_is_named_and_not_hooked(registered, case, found):
    said, hooked = registered[case]
    assert hooked == []
    assert re.search(found, said, re.DOTALL), said
    assert "Install an SGLang from" in said


@pytest.mark.parametrize("case", ["an old version, not strict", "switched off"])
def test_without_strict_or_switched_off_the_server_is_left_alone(registered, case):
    assert registered[case] == ["", []]


def test_an_unusable_setting_names_its_variable(registered):
    said, hooked = registered["an unusable setting"]
    assert hooked == []
    assert "SGLANG_CAPTURE_QUOTA" in said
    assert "64GiB" in said


def test_a_server_that_could_not_capture_does_not_start(tiny6_model_dir):
    reason = "index 6 of a model with 6 layers is the last hidden state"
    with spool_directory() as spool, pytest.raises(RuntimeError, match=reason):
        CapturingServer(tiny6_model_dir, spool, layers="3,6").start()


def test_without_strict_it_starts_and_says_so(tmp_path: Path, tiny6_model_dir, new_id):
    olmo = _tiny_olmo(tmp_path / "olmo", tiny6_model_dir)
    with spool_directory() as spool, CapturingServer(olmo, spool, "--dtype", "float32", strict="0") as server:
        server.assert_serving()
        status = read_status(spool)
        assert status is not None
        assert status.state == "refused"
        assert "Olmo2ForCausalLM is not supported: no decoder layers in it take" in status.problem
        assert status.alive


def test_every_prompt_is_captured_where_that_is_asked_for_and_the_secret_guards_marks(
    tiny6_model_dir, oracle6, draw, new_id, monkeypatch
):
    with (
        spool_directory() as spool,
        CapturingServer(
            tiny6_model_dir, spool, "--dtype", "float32", mode="all", token="s3cret", layers="0,3,5"
        ) as server,
    ):
        prompt, rid = draw(30), new_id()
        server.generate(prompt, request={"rid": rid})
        assert_rows_agree(server.dump(rid), oracle6, prompt)
        good, bad = new_id(), new_id()
        server.capture(prompt, {"capture": good, "capture_token": "s3cret"})
        server.capture(prompt, {"capture": bad, "capture_token": "guess"})
        assert_rows_agree(server.dump(good), oracle6, prompt)
        assert "capture_token" in server.failure(bad).reason
        _assert_embeddings_in_place_of_tokens_are_refused(server, prompt)
        there = {path.name for path in spool.glob("*.pt")}
        monkeypatch.setenv("SGLANG_CAPTURE_TOKEN", "s3cret")
        findings = list(run_self_test(Prober.connect(server.url, spool), random.Random(1)))
        assert {finding.state for finding in findings} == {"ok"}, findings
        assert {path.name for path in spool.glob("*.pt")} == there
        monkeypatch.delenv("SGLANG_CAPTURE_TOKEN")
        with pytest.raises(NoProbeError, match="set SGLANG_CAPTURE_TOKEN"):
            Prober.connect(server.url, spool)
        written = b"".join(path.read_bytes() for path in spool.glob("*.json"))
        assert b"s3cret" not in written
        assert "s3cret" not in server.log_text()


def _assert_embeddings_in_place_of_tokens_are_refused(server, prompt):
    """As scoring takes them; such a request carries no mark, and no id that a client chose."""
    before = set(server.spool.glob("*.failed.json"))
    scoring = {
        "model": "m",
        "query": prompt,
        "items": [[20, 21]],
        "label_token_ids": [30, 31],
        "embed_override_token_id": prompt[10],
        "query_embed_overrides": [[0.5] * server.dump(next(dumps(server.spool)).stem).spec.hidden_size]
        * prompt.count(prompt[10]),
    }
    published = server.counts().published
    server.post("/v1/score", scoring)
    assert server.counts().published == published
    (failure,) = set(server.spool.glob("*.failed.json")) - before
    assert "embedding overrides" in read_failure(failure).reason


def _tiny_olmo(directory: Path, tokenizer: Path) -> Path:
    """A random OLMo of two layers, with the tiny model's tokenizer: its layers have no capture keyword."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    Olmo2ForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, directory / name)
    return directory
