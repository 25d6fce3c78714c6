"""``make test-versions``: the tests of rows, on older releases of SGLang that start on a machine without a GPU.

Each release goes into ``.versions/<release>`` without its dependencies, in front of what ``.venv`` has; the two oldest
bring the transformers that they were made for. A release's whole test output is in ``.versions/<release>.log``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

OLDER_TRANSFORMERS = ("transformers==5.12.1", "tokenizers==0.22.2")

NO_ENGINES_SIDE_BY_SIDE = (
    "test_pipeline_stages_fill_one_dump",
    "test_pipeline_stages_of_two_ranks_each_fill_one_dump",
    "test_ranks_of_attention_data_parallelism_write_their_own_rows",
    "test_two_engines_of_one_server_share_a_spool",
)
"""These servers do not start on a CPU with the two oldest: SGLang counts cores by the tensor-parallel size alone there,
and its CPU attention lacks what padded batches need."""


class Release(NamedTuple):
    """What a release needs beside the newest one's dependencies, and the tests whose servers do not start with it."""

    packages: tuple[str, ...] = ()
    not_starting: tuple[str, ...] = ()


RELEASES = {
    "0.5.15": Release(OLDER_TRANSFORMERS, NO_ENGINES_SIDE_BY_SIDE),
    "0.5.18": Release(OLDER_TRANSFORMERS, NO_ENGINES_SIDE_BY_SIDE),
    "0.5.20": Release(),
    "0.5.22": Release(),
}

TESTS = ("test_rows.py", "test_caching.py", "test_parallel.py", "test_values.py", "test_scheduling.py")

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".versions"


def main() -> int:
    wanted = sys.argv[1:] or list(RELEASES)
    if unknown := [release for release in wanted if release not in RELEASES]:
        print(f"known to start on the test bed: {', '.join(RELEASES)}; not {', '.join(unknown)}", file=sys.stderr)
        return 2
    outcomes = {release: run(release) for release in wanted}
    for release, (status, last_line) in outcomes.items():
        print(f"{release:8} {'ok' if status == 0 else 'FAILED':7} {last_line}")
    return max(status for status, _ in outcomes.values())


def run(release: str) -> tuple[int, str]:
    """Exit status and closing line of the tests on one release."""
    install(release)
    log = PLACE / f"{release}.log"
    print(f"SGLang {release}: {log.relative_to(ROOT)}", flush=True)
    files = [f"tests/engine/{name}" for name in TESTS]
    left_out = [f"--deselect=tests/engine/test_parallel.py::{name}" for name in RELEASES[release].not_starting]
    command = [sys.executable, "-m", "pytest", *files, *left_out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_UNDER_TEST": str(PLACE / release)}
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    lines = [line for line in log.read_text().splitlines() if " in " in line and ("passed" in line or "failed" in line)]
    return done.returncode, lines[-1] if lines else "no closing line"


def install(release: str) -> None:
    target = PLACE / release
    if (target / "complete").exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(target)]
    subprocess.run([*pip, f"sglang=={release}", *RELEASES[release].packages], check=True)
    (target / "complete").touch()


if __name__ == "__main__":
    sys.exit(main())
