"""What captures are compared with: transformers on the same weights, or a second SGLang server with this plugin."""

from __future__ import annotations

from typing import Protocol

from sglang_capture.comparison import Rows, index_name, rows_of
from sglang_capture.dump import Dump
from sglang_capture.errors import UsageError
from sglang_capture.oracle import Oracle
from sglang_capture.probe import Prober
from sglang_capture.spec import LAST_HIDDEN_KEYS, CaptureSpec, LastHidden


class AnotherModelError(UsageError):
    """A reference that is of another model than the captures."""


class Reference(Protocol):
    """Something that computes the rows of a prompt.

    Attributes:
        name: what it is, as in "compared with …".
        dtype: in which it computes.
        placeholders: the ids that stand where an image or sound was, as far as they are known.
    """

    name: str
    dtype: str
    placeholders: set[int]

    def check(self, spec: CaptureSpec) -> None:
        """Raise :class:`AnotherModelError` if captures of ``spec`` are of another model."""

    def rows(self, dump: Dump) -> Rows:
        """The rows of a dump's prompt; all kinds that the dump has, and perhaps more."""


class TransformersReference:
    """Hugging Face transformers, which gives every state there is."""

    def __init__(self, oracle: Oracle, name: str = "") -> None:
        self.name = name
        self.dtype = oracle.dtype
        self.placeholders = oracle.placeholders
        self._oracle = oracle

    def check(self, spec: CaptureSpec) -> None:
        captured = (spec.num_layers, spec.hidden_size)
        found = (self._oracle.num_layers, self._oracle.hidden_size)
        if captured != found:
            raise AnotherModelError(
                f"the captures are of a model with {captured[0]} layers of hidden size {captured[1]}, and the model to "
                f"compare with has {found[0]} of {found[1]}: name the right one with --model"
            )

    def rows(self, dump: Dump) -> Rows:
        states = self._oracle.states(dump.input_ids)
        layers = {index_name(index): rows for index, rows in enumerate(states.hidden)}
        return {**layers, LAST_HIDDEN_KEYS["post"]: states.post, LAST_HIDDEN_KEYS["pre"]: states.pre}


class ServerReference:
    """A second SGLang server, asked for the same layers, and for both kinds of last hidden state where there is one."""

    def __init__(self, prober: Prober) -> None:
        self.name = f"the server at {prober.url}"
        self.dtype = prober.spec.dtype
        self.placeholders: set[int] = set()  # a server does not say
        self._prober = prober

    def check(self, spec: CaptureSpec) -> None:
        theirs = self._prober.spec
        pairs: dict[str, tuple[object, object]] = {
            "layers": (spec.num_layers, theirs.num_layers),
            "hidden size": (spec.hidden_size, theirs.hidden_size),
            "vocabulary": (spec.vocab_size, theirs.vocab_size),
        }
        if spec.weights_digest and theirs.weights_digest:
            pairs["digest of the weights"] = (spec.weights_digest, theirs.weights_digest)
        differences = [f"{name} {mine} and {other}" for name, (mine, other) in pairs.items() if mine != other]
        if differences:
            raise AnotherModelError(
                f"the captures are of {spec.model_path}, and {self.name} runs another model, {theirs.model_path}: "
                f"{'; '.join(differences)}. Start that server with the model that was captured"
            )

    def rows(self, dump: Dump) -> Rows:
        last_hidden: LastHidden = "none" if dump.spec.last_hidden == "none" else "both"
        layers = dump.spec.layers or self._prober.spec.layers  # an export may hold none, and a request must name some
        return rows_of(self._prober.take(dump.input_ids.tolist(), layers=layers, last_hidden=last_hidden))
