"""What a template itself marks as the assistant's, with ``{% generation %}``.

transformers counts where such a block begins by what was put out before it, which is wrong for a block in a macro, a
``{% set %}`` block or a recursive loop: what these make is put out as a whole, later. So a character that no text has
is put out at both ends of each block, and looked for afterwards.
"""

from __future__ import annotations

import re
from typing import Final

from sglang_capture.prompts.turns import Span

_BEGIN: Final = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END: Final = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_NONCHARACTERS: Final = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that Unicode keeps free of meaning, for use inside a program."""


def marks_generation(template: str) -> bool:
    """Whether ``template`` says what an assistant wrote."""
    return _BEGIN.search(template) is not None


def free_characters(text: str) -> tuple[str, str] | None:
    """Two characters that ``text`` does not have; ``None`` if it has them all."""
    free = [character for character in _NONCHARACTERS if character not in text]
    return (free[0], free[1]) if len(free) > 1 else None


def with_marks(template: str, marks: tuple[str, str]) -> str:
    """``template``, which also puts out ``marks`` where a block begins and where it ends.

    The second pair of tags takes over what the first did to the white space inside.
    """
    begin, end = marks
    template = _BEGIN.sub(rf'{{%\1 generation %}}{{{{ "{begin}" }}}}{{% if true \2%}}', template)
    return _END.sub(rf'{{%\1 endif %}}{{{{ "{end}" }}}}{{% endgeneration \2%}}', template)


def marked_spans(marked: str, text: str, marks: tuple[str, str]) -> list[Span] | None:
    """Where the blocks stand in ``text``, with those that hold others counted once.

    ``None`` if ``marked`` is not ``text`` with marks: the template does something to what it has marked.
    """
    begin, end = marks
    spans, depth, start, place = [], 0, 0, 0
    pieces = re.split(f"([{begin}{end}])", marked)
    for piece in pieces:
        if piece == begin:
            start = place if depth == 0 else start
            depth += 1
        elif piece == end:
            depth -= 1
            if depth == 0:
                spans.append((start, place))
        else:
            place += len(piece)
        if depth < 0:
            return None
    return spans if depth == 0 and "".join(pieces[::2]) == text else None
