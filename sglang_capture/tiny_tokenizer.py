"""The tokenizer and the chat template of the tiny model: any text can be encoded, and nothing is downloaded.

Byte-level BPE as most models have it, in the file format of the ``tokenizers`` library. The vocabulary is written down
by a rule instead of being trained: control tokens, the 256 bytes, and pairs of letters that are frequent in English.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
BOS, EOS, PAD = 0, 1, 2
_CONTROL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")

_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
<|assistant|>{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
{%- elif message['role'] in ['system', 'user'] -%}
{{ '<|' + message['role'] + '|>' + message['content'] }}
{%- else -%}
{{ raise_exception("a message's role must be system, user or assistant, not " + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def write_tokenizer(directory: Path, *, max_length: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _CONTROL[BOS],
        "eos_token": _CONTROL[EOS],
        "pad_token": _CONTROL[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    _write_json(directory / "tokenizer.json", _tokenizer())
    _write_json(directory / "tokenizer_config.json", config)
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _tokenizer() -> dict[str, Any]:
    letters = _byte_letters()
    merges = _merges(VOCAB_SIZE - len(_CONTROL) - len(letters))
    tokens = [*_CONTROL, *letters, *(first + second for first, second in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    bos = _CONTROL[BOS]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, content in enumerate(_CONTROL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        # Plain text starts with <|bos|>, as it does in the DeepSeek tokenizers; a rendered chat brings its own.
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [BOS], "tokens": [bos]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def _byte_letters() -> list[str]:
    """The visible character that stands for each of the 256 bytes: the mapping every byte-level BPE shares."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _merges(count: int) -> list[tuple[str, str]]:
    """``count`` pairs: a space and a letter, then consonant and vowel, vowel and consonant."""
    vowels = "eaoiu"
    consonants = "tnshrdlcmwfgypbvkjxqz"
    pairs = [("Ġ", letter) for letter in vowels + consonants]
    pairs += [(consonant, vowel) for vowel in vowels for consonant in consonants]
    pairs += [(vowel, consonant) for vowel in vowels for consonant in consonants]
    pairs += [("t", "h"), ("s", "t"), ("n", "g"), ("l", "l"), ("c", "h"), ("s", "h"), ("o", "u"), ("e", "a")]
    pairs += [("s", "s"), ("n", "t"), ("n", "d"), ("e", "e"), ("o", "o"), ("p", "r")]
    return pairs[:count]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
