"""A language small enough to be learned in minutes: songs of verses, and requests for some of them.

A user names verses (``sing 3 17 5``), the assistant sings them in that order. The words of a verse follow one another
always; which verse comes next stands only in the request, many tokens back. A target that has learned the verses knows
what comes next, and a draft learns it best from the target's hidden states.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

VERSES = 32
LENGTH = 8
"""Words of a verse."""
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"

Conversation = dict[str, object]


def verses() -> list[str]:
    """The verses there are, the same ones always."""
    draw = random.Random("verses 0")
    return [" ".join(_word(draw) for _ in range(LENGTH)) for _ in range(VERSES)]


def conversations(count: int, seed: int) -> Iterator[Conversation]:
    """Conversations as rows of a JSONL: requests for one to three verses, and what is sung."""
    songs = verses()
    draw = random.Random(f"conversations {seed}")
    for number in range(count):
        wanted = [draw.randrange(VERSES) for _ in range(draw.randint(1, 3))]
        yield {
            "id": f"song-{seed}-{number}",
            "messages": [
                {"role": "user", "content": "sing " + " ".join(map(str, wanted))},
                {"role": "assistant", "content": "; ".join(songs[verse] for verse in wanted)},
            ],
        }


def _word(draw: random.Random) -> str:
    return "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(draw.randint(1, 3)))
