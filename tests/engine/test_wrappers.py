"""Wrappers of DeepSeek-V2 that SGLang serves without a GPU. (Kimi-K2.5 has tests of its own: test_kimi.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.captures import relative_error
from engine.models import make_model
from engine.oracle import Oracle
from engine.served import check_defaults, check_each_row_is_taken_once, check_layers_and_lengths, serving
from engine.wrappers import make_kimi_vl, make_mistral_large_3

pytestmark = pytest.mark.engine


def test_kimi_vl_with_text(tmp_path: Path) -> None:
    text = make_model(tmp_path / "text", "deepseek_v2")
    model = make_kimi_vl(tmp_path / "model", text)
    with serving(model, "--trust-remote-code", oracle=Oracle(text)) as served:
        check_defaults(served)
        check_layers_and_lengths(served)
        check_each_row_is_taken_once(served)


def test_mistral_large_3(tmp_path: Path, tiny6_model_dir: Path, oracle6: Oracle) -> None:
    """SGLang runs it in bfloat16 whatever it is told, so its rows are near the oracle's, as in test_rows.py."""
    model = make_mistral_large_3(tmp_path, tiny6_model_dir)
    with serving(model, oracle=oracle6) as served:
        prompt = served.draw(150)
        mark = {"capture": "all", "capture_layers": [0, 1, 2, 3, 4, 5], "capture_last_hidden": "both"}
        served.server.capture(prompt, mark)
        dump, run = served.server.dump("all"), oracle6.run(prompt)
        assert dump.spec.dtype == "bfloat16"
        assert relative_error(dump.hidden_states[:, 0], run.hidden_states[0]) < 2**-8
        for layer in range(1, 6):
            assert relative_error(dump.hidden_states[:, layer], run.hidden_states[layer]) < 0.05
        assert relative_error(dump.last_hidden["last_hidden_state"], run.hidden_states[-1]) < 0.05
        assert relative_error(dump.last_hidden["last_hidden_state_prenorm"], run.prenorm) < 0.05
