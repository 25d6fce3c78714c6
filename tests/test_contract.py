"""Every released SGLang from the oldest supported one on has all that we hook and read: checked in its wheel.

The wheels (some 25 MB each) are downloaded without their dependencies, once, into ``.wheels``.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sglang_capture_patches.contract import (
    ARGUMENT_SINCE,
    DP_RANK_AT,
    FIELDS,
    HOOKED,
    NEWEST_TESTED,
    REFUSED,
    Need,
    Source,
    needed,
    newest,
)

from sglang_capture.drafts.releases import release

VERSIONS = [f"0.5.{patch}" for patch in range(15, 24)]
CACHE = Path(__file__).parents[1] / ".wheels"


def source_of(version: str) -> Path:
    """The unpacked wheel of a version."""
    unpacked = CACHE / version
    if not (unpacked / "complete").exists():
        CACHE.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(unpacked), f"sglang=={version}"], check=True)
        (wheel,) = unpacked.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith("sglang/srt/")])
        wheel.unlink()
        (unpacked / "complete").touch()
    return unpacked


def test_the_newest_tested_is_the_last_of_the_list():
    assert VERSIONS[-1] == NEWEST_TESTED


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_has_all_that_is_hooked_and_read(version):
    assert list(Source(source_of(version)).faults(version)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_has_every_argument_that_is_refused(version):
    root = source_of(version) / "sglang/srt"
    declared = "".join(path.read_text() for path in [root / "server_args.py", *root.glob("arg_groups/fields/*.py")])
    expected = [name for name, *_ in REFUSED if release(version) >= release(ARGUMENT_SINCE.get(name, version))]
    assert [name for name in expected if f"    {name}: " not in declared] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_says_where_we_look_which_engine_a_process_is_of(version):
    root = source_of(version) / "sglang/srt"
    owner, *way = newest(DP_RANK_AT, version).split(".")
    if owner == "parallel":
        assert f'"{way[0]}"' in (root / "runtime_context.py").read_text()
        return
    runner = {"sglang.srt.model_executor.model_runner.ModelRunner": (way[0],)}
    assert list(Source(source_of(version)).field_faults(runner)) == []
    if len(way) == 2:
        assert f"    {way[1]}: " in (root / "distributed/parallel_state_wrapper.py").read_text()


def test_what_is_missing_is_named(tmp_path):
    module = tmp_path / "sglang/srt/managers/schedule_batch.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "class Req:\n    def __init__(self):\n        self.rid = 1\n    def _compute_max_prefix_len(self, n): ...\n"
    )
    faults = list(Source(tmp_path).faults("0.5.23"))
    assert any("Req has no origin_input_ids" in fault for fault in faults)
    assert any("begins with (self, n), and (self, input_len) is needed" in fault for fault in faults)
    assert any("ModelRunner.forward is missing" in fault for fault in faults)
    assert len(faults) > len(FIELDS)


def test_what_a_release_does_not_have_yet_is_not_asked_of_it():
    later = {need.target.rsplit(".", 1)[1] for need in HOOKED if need not in needed(HOOKED, "0.5.18")}
    assert later == {
        "_local_prefill_cuda_graph_vote",
        "begin_weight_update",
        "end_weight_update",
        "validate_and_init",
    }
    assert needed((Need("a.b", since="0.5.20"),), "0.5.20")


def test_versions_are_compared_by_their_numbers():
    assert release("0.5.10.post1") == (0, 5, 10)
    assert release("0.5.9") < release("0.5.10")
    assert release("0.6.0rc1") == (0, 6)
