"""What a released SGLang's setters do with a draft's layer ids: their own source, taken out of the wheel and run.

A model's setter is run on a stand-in for ``self`` that only remembers what is set on it; where it calls the setter of
a part (``self.model``), that part's own source runs. Then the part's loop over its layers is read: whether it looks at
the list or at a flag on each layer, and whether it captures before the layer or after it. The answer is hidden-state
indices.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_capture.drafts.rules import SETTERS

_LIST = "the list"
LISTS = ("layers_to_capture", "dspark_layers_to_capture", "_dflash_layers_to_capture")
FLAG = "_is_layer_to_capture"
PARTS = ("model", "language_model", "llm")
Class = tuple[str, str]


class Models:
    """The modules below ``sglang/srt/models`` of one release."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, ast.Module] = {}
        for path in (root / "sglang/srt/models").rglob("*.py"):
            name = ".".join(path.relative_to(root / "sglang/srt/models").with_suffix("").parts)
            self.modules[name] = ast.parse(path.read_bytes())
        self.classes = {
            name: {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
            for name, module in self.modules.items()
        }

    def entries(self) -> Iterator[Class]:
        """The classes by which SGLang finds a model for a config's architecture."""
        for name, module in self.modules.items():
            for node in module.body:
                if isinstance(node, ast.Assign) and _names(node.targets) == {"EntryClass"}:
                    yield from (found for entry in sorted(_names([node.value])) if (found := self.find(name, entry)))

    def find(self, module: str, name: str) -> Class | None:
        """Where a class that ``module`` calls ``name`` (or ``other.name``, of another module) is defined."""
        if "." in name:
            module, _, name = name.rpartition(".")
        if name in self.classes.get(module, {}):
            return module, name
        for node in ast.walk(self.modules[module]) if module in self.modules else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt.models."):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find((node.module or "").removeprefix("sglang.srt.models."), alias.name)
        return None

    def mro(self, cls: Class) -> Iterator[Class]:
        """A class and those it is derived from, as far as they are below ``models``."""
        yield cls
        for base in self.classes[cls[0]][cls[1]].bases:
            if isinstance(base, ast.Name) and (found := self.find(cls[0], base.id)) not in (None, cls):
                yield from self.mro(found)

    def method(self, cls: Class, name: str) -> ast.FunctionDef | None:
        """A method, own or inherited; of two with one name in a class, the last one counts, as in Python."""
        for module, owner in self.mro(cls):
            own = [n for n in self.classes[module][owner].body if isinstance(n, ast.FunctionDef) and n.name == name]
            if own:
                return own[-1]
        return None

    def owner(self, cls: Class, name: str) -> str | None:
        """``module.Class`` that defines a method."""
        for module, owner in self.mro(cls):
            if any(isinstance(n, ast.FunctionDef) and n.name == name for n in self.classes[module][owner].body):
                return f"{module}.{owner}"
        return None

    def part(self, cls: Class, attribute: str) -> Class | None:
        """The class of ``self.<attribute>``: by a parameter's default, a class attribute, or the assigned call."""
        for module, owner in self.mro(cls):
            for name in _part_names(self.classes[module][owner], attribute):
                if found := self.find(module, name):
                    return found
        return None

    def points(self, cls: Class) -> set[tuple[str, int]]:
        """What the loop over the layers looks at (the list, a flag), and what is added to it to get an index."""
        for owner in self.mro(cls):
            method = self.method(owner, "forward")
            loops = [node for node in ast.walk(method) if isinstance(node, ast.For)] if method else []
            if found := set().union(*map(_loop_points, loops)):
                return found
        return set()


def _loop_points(loop: ast.For) -> set[tuple[str, int]]:
    statements = [node for statement in loop.body for node in _flat(statement)]
    calls = [place for place, node in enumerate(statements) if any(map(_calls_layer, _own(node)))]
    found: set[tuple[str, int]] = set()
    if not calls:  # no loop over layers, or one that is not understood: then no index comes out, and the test fails
        return found
    for place, node in enumerate(statements):
        for test in _own(node):
            if isinstance(test, ast.Compare) and _lists(test.comparators) and isinstance(test.ops[0], ast.In):
                found.add((_LIST, int(place > calls[-1]) - _shift(test.left)))
            elif (isinstance(test, ast.Constant) and test.value == FLAG) or _is_attribute(test, FLAG):
                found.add((FLAG, int(place > calls[-1])))
    return found


def _shift(compared: ast.expr) -> int:
    """1 where ``i + 1`` is looked for in the list, -1 where ``i - 1`` is."""
    if not isinstance(compared, ast.BinOp):
        return 0
    return 1 if isinstance(compared.op, ast.Add) else -1


def _flat(statement: ast.stmt) -> Iterator[ast.AST]:
    """A statement and those in it, in the order of the source."""
    yield statement
    for name in ("body", "orelse", "finalbody"):
        for inner in getattr(statement, name, []):
            yield from _flat(inner)


def _own(statement: ast.AST) -> Iterator[ast.AST]:
    """What is in a statement, and in none of the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield from ast.walk(child)


def _calls_layer(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    return called in ("layer", "layer.forward") or (called.startswith("self.layers[") and called.endswith("]"))


def _lists(nodes: Sequence[ast.AST]) -> bool:
    return any(
        _is_attribute(node, name) or (isinstance(node, ast.Name) and node.id == "captures")
        for node in nodes
        for name in LISTS
    )


def _is_attribute(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _part_names(cls: ast.ClassDef, attribute: str) -> Iterator[str]:
    """What may be the class of a part, by the source of one class: chosen by its sub-classes first, then assigned."""
    for node in ast.walk(cls):
        if attribute == "model" and isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args][-len(node.defaults) :] if node.defaults else []
            for argument, default in zip(named, node.defaults, strict=True):
                if argument.arg == "language_model_cls" and isinstance(default, ast.Name):
                    yield default.id
        if attribute == "model" and isinstance(node, ast.Assign) and _names(node.targets) == {"body_cls"}:
            yield ast.unparse(node.value)
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign) and any(_is_self(target, attribute) for target in node.targets):
            yield from (
                n.func.id for n in ast.walk(node.value) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
            )
        if isinstance(node, ast.FunctionDef) and node.name in (f"init_{attribute}", f"_init_{attribute}"):
            yield from sorted(_names(node.body))


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    return {found.id for node in nodes for found in ast.walk(node) if isinstance(found, ast.Name)}


def _is_self(node: ast.AST, attribute: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == attribute and _names([node.value]) == {"self"}


class StandIn:
    """A model or a part of it, as far as a setter looks at it: ``layers`` layers, the last of one pipeline rank."""

    def __init__(self, models: Models, cls: Class, layers: int) -> None:
        self.__dict__.update(_models=models, _cls=cls, _count=layers, _parts={})
        self.__dict__["layers"] = [SimpleNamespace(layer_id=i, mlp_ar_fusable=True) for i in range(layers)]
        shape = SimpleNamespace(num_hidden_layers=layers)
        self.__dict__["config"] = SimpleNamespace(num_hidden_layers=layers, text_config=shape)
        self.__dict__["pp_group"] = _ONE_RANK
        self.__dict__["carries_bank_slices"] = False

    def __getattr__(self, name: str) -> Any:
        if name in PARTS and (cls := self._models.part(self._cls, name)):
            return self._parts.setdefault(name, StandIn(self._models, cls, self._count))
        if name in SETTERS.values() and (method := self._models.method(self._cls, name)):
            return functools.partial(_function(method), self)
        raise AttributeError(f"{self._cls[1]} has no {name}")

    def captured(self) -> list[int] | None:
        """The indices that the loop over the layers will capture, in its order; ``None`` if nothing was set."""
        own = self._captured()
        below = (part.captured() for part in self._parts.values())
        return own if own is not None else next((found for found in below if found is not None), None)

    def _captured(self) -> list[int] | None:
        chosen = next((list(self.__dict__[name]) for name in LISTS if name in self.__dict__), None)
        if chosen is None:
            return None
        flagged = [layer.layer_id for layer in self.layers if getattr(layer, FLAG, False)]
        found: set[int] = set()
        for what, moved in self._models.points(self._cls):
            found |= {i + moved for i in (flagged if what == FLAG else chosen)}
        return sorted(found)


_ONE_RANK = SimpleNamespace(is_last_rank=True, world_size=1)


def _function(definition: ast.FunctionDef) -> Any:
    """A method as a function, from its source alone."""
    bare = copy.deepcopy(definition)
    bare.decorator_list, bare.returns = [], None
    for argument in (*bare.args.args, *bare.args.kwonlyargs):
        argument.annotation = None
    names: dict[str, Any] = {
        "get_pp_group": lambda: _ONE_RANK,
        "get_parallel": lambda: SimpleNamespace(pp_group=_ONE_RANK),
    }
    exec(compile(ast.fix_missing_locations(ast.Module([bare], [])), definition.name, "exec"), names)
    return names[definition.name]


def fed(models: Models, cls: Class, algorithm: str, ids: list[int] | None, layers: int) -> list[int] | str:
    """The indices that a model of ``layers`` layers captures for a draft's ``ids``, or the error that it raises."""
    model = StandIn(models, cls, layers)
    try:
        getattr(model, SETTERS[algorithm])(ids)
    except (ValueError, AttributeError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return model.captured() or []
