"""`python -m sglang_capture` is the command `sglang-capture`."""

from sglang_capture.cli import main

main()
