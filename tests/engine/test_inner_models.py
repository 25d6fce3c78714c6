"""What is tapped in models that no test serves: SGLang's own classes, built small and without weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_capture_patches.cpu import standins
from sglang_capture_patches.families import GATHERED, PRODUCED

from engine.models import make_model

pytestmark = pytest.mark.engine

FOUND = {
    "kimi_vl": ("language_model.model", "norm", GATHERED, 6),
    "deepseek_vl2": ("language_model.model", "norm", GATHERED, 6),
    "mistral_large_3": ("model", "norm", GATHERED, 6),
    "deepseek_v3.2": ("model", "norm", GATHERED, 6),
    "qwen3_next": ("model", "norm", GATHERED, 4),
    "qwen3_5": ("model", "norm", GATHERED, 4),
    "qwen3_vl": ("model", "norm", PRODUCED, 4),
    "qwen3_vl_moe": ("model", "norm", GATHERED, 4),
    "gpt_oss": ("model", "norm", PRODUCED, 4),
    "lfm2": ("model", "embedding_norm", GATHERED, 4),
    "llama4": ("language_model.model", "norm", PRODUCED, 4),
}
SERVED = {"kimi_vl", "mistral_large_3"}
"""By test_wrappers.py."""

REFUSED = {
    "mllama": "only some layers of MllamaTextModel take a capture keyword",
    "nanbeige": "its layers run several times for one token",
    "gemma3": r"no decoder layers in it take .* \(Gemma3TextModel\)",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = make_model(tmp_path_factory.mktemp("any"), "deepseek_v2")
    program = Path(__file__).with_name("build_models.py")
    paths = [str(standins()), str(program.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")},
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(program), str(directory)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


@pytest.mark.parametrize("name", FOUND)
def test_the_language_model_is_found_where_it_is(found: dict[str, dict[str, Any]], name: str) -> None:
    holder, norm, keyword, depth = FOUND[name]
    assert found[name] == {
        "layers": f"{holder}.layers",
        "norm": f"{holder}.{norm}",
        "keyword": keyword,
        "held": [0, depth],
        "state": "proved" if name in SERVED else "expected",
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(found: dict[str, dict[str, Any]], name: str) -> None:
    assert re.search(REFUSED[name], found[name]["refused"])


def test_each_model_built_is_asked_for(found: dict[str, dict[str, Any]]) -> None:
    assert found.keys() == {*FOUND, *REFUSED}
