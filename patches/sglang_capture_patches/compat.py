"""Whether the SGLang that is installed has what we hook and read (:mod:`.contract`), checked before anything is hooked.

``python -m sglang_capture_patches.compat [--json]`` prints the result; ``sglang-capture doctor`` shows it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_capture.drafts.releases import release
from sglang_capture_patches.contract import (
    FIELDS,
    HOOKED,
    NEWEST_TESTED,
    OLDEST,
    READ,
    Need,
    Source,
    needed,
    signature_fault,
)


@dataclass
class Report:
    """What :func:`check` found; ``problems`` empty means that capture can work."""

    sglang: str
    problems: list[str] = field(default_factory=list)
    note: str = ""
    hooks: list[str] = field(default_factory=list)

    def message(self) -> str:
        """One message for the log: what was found, what is missing, what to do."""
        missing = "; ".join(self.problems)
        return (
            f"sglang-capture: SGLang {self.sglang} cannot be captured from, and nothing was hooked: {missing}. "
            f"Install an SGLang from {OLDEST} to {NEWEST_TESTED}, a newer sglang-capture, or take sglang_capture out "
            "of SGLANG_PLUGINS (SGLANG_CAPTURE_STRICT=0 starts the server without capture)."
        )


def check() -> Report:
    """Compare this SGLang with the table. Imports only modules that a server's processes import anyway."""
    report = Report(sglang=installed_version())
    if report.sglang == "":
        report.problems.append("the package sglang is not installed")
        return report
    if release(report.sglang) < release(OLDEST):
        report.problems.append(f"version {report.sglang} is older than {OLDEST}")
        return report
    if release(report.sglang) > release(NEWEST_TESTED):
        report.note = (
            f"SGLang {report.sglang} is newer than the newest tested ({NEWEST_TESTED}); its symbols are checked"
        )
    report.hooks = [need.target for need in needed(HOOKED, report.sglang)]
    for need in needed((*HOOKED, *READ), report.sglang):
        report.problems.extend(_faults(need))
    report.problems.extend(Source(_installed_root()).field_faults(FIELDS))
    return report


def installed_version() -> str:
    """SGLang's version, or the empty string."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def _installed_root() -> Path:
    """The directory that holds the package ``sglang``, found without importing it."""
    found = find_spec("sglang")
    if found is None or found.origin is None:
        raise ImportError("sglang is installed, but cannot be found")
    return Path(found.origin).parents[1]


def _faults(need: Need) -> Iterator[str]:
    try:
        found = _resolve(need.target)
    except (ImportError, AttributeError) as error:
        yield f"{need.target} is missing ({error})"
        return
    yield from signature_fault(need, list(inspect.signature(found).parameters))


def _resolve(target: str) -> Any:
    """The object at a dotted path, a classmethod as its plain function."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name and ".".join(parts[:split]).startswith(error.name):
                continue
            raise
        for name in parts[split:]:
            owner = getattr(owner, name)
        return inspect.unwrap(getattr(owner, "__func__", owner))
    raise ImportError(f"no module of {target} can be imported")


def main() -> int:
    """Print the report; 0 if capture can work."""
    report = check()
    if "--json" in sys.argv[1:]:
        print(json.dumps({"ok": not report.problems, **asdict(report)}))
    else:
        print(report.message() if report.problems else f"SGLang {report.sglang}: all of it is there")
        print("\n".join(report.hooks))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
