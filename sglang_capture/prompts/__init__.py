"""From a row of training data to what an engine is asked to capture.

``sources`` reads files and datasets and names the rows that cannot be used, ``formats`` brings their shapes to one,
``rows`` turns one row into a :class:`Prompt`, ``chat`` and ``turns`` turn a conversation into ids and a loss mask with
the model's own chat template, and ``lengths`` cuts it at an answer's end.
"""

from sglang_capture.prompts.chat import ChatTokenizer
from sglang_capture.prompts.errors import RowError, TooLong
from sglang_capture.prompts.formats import canonical
from sglang_capture.prompts.lengths import Layout
from sglang_capture.prompts.rows import Prompt, check_vocabulary, parse_row
from sglang_capture.prompts.sources import RowSource, open_source, read_jsonl

__all__ = [
    "ChatTokenizer",
    "Layout",
    "Prompt",
    "RowError",
    "RowSource",
    "TooLong",
    "canonical",
    "check_vocabulary",
    "open_source",
    "parse_row",
    "read_jsonl",
]
