"""``make test-versions``: the tests of rows, on older releases of SGLang that start on a machine without a GPU.

Each release goes into ``.versions/<release>`` without its dependencies, in front of what ``.venv`` has; the two oldest
bring the transformers that they were made for. A release's whole test output is in ``.versions/<release>.log``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OLDER_TRANSFORMERS = ("transformers==5.12.1", "tokenizers==0.22.2")

RELEASES: dict[str, tuple[str, ...]] = {
    "0.5.15": OLDER_TRANSFORMERS,
    "0.5.18": OLDER_TRANSFORMERS,
    "0.5.20": (),
    "0.5.22": (),
}
"""With what each needs beside the newest release's dependencies."""

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
    command = [sys.executable, "-m", "pytest", *(f"tests/engine/{name}" for name in TESTS)]
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
    subprocess.run([*pip, f"sglang=={release}", *RELEASES[release]], check=True)
    (target / "complete").touch()


if __name__ == "__main__":
    sys.exit(main())
