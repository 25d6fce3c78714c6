"""Errors whose message is for the user: what was expected, what was found, what to do.

The command prints them without a traceback; anything else that is raised is a fault of ours.
"""

from __future__ import annotations


class CaptureError(Exception):
    """An error whose message is for the user; the CLI prints it and exits 1."""


class UsageError(CaptureError):
    """Something was asked for in a way that cannot work (a name, an option); the CLI exits 2."""
