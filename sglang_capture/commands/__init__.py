"""The commands of `sglang-capture`, one module each; `cli.py` puts them together."""
