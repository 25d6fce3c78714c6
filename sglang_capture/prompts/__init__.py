"""From a line of training data to what an engine is asked to capture.

``jsonl`` reads a file and names the lines it cannot use, ``rows`` turns one row into a :class:`Prompt`, and ``chat``
turns a conversation into ids with the model's own chat template.
"""

from sglang_capture.prompts.chat import ChatTokenizer
from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.jsonl import read_jsonl
from sglang_capture.prompts.rows import Prompt, check_vocabulary, parse_row

__all__ = ["ChatTokenizer", "Prompt", "RowError", "check_vocabulary", "parse_row", "read_jsonl"]
