"""YAML that remembers where everything stood.

PyYAML's loader forgets lines and columns; error messages need them. So the text is composed to nodes
and turned into plain Python here, with a position for every value and every key. Only plain data
comes out (no tags, no dates, no sexagesimal `10:30`), keys are text and appear once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
MAXIMUM_VALUES = 50_000  # after anchors are followed: a small file must not unfold to a huge one
MAXIMUM_DEPTH = 50

_CORE = "tag:yaml.org,2002:"
_SCALARS = {_CORE + kind for kind in ("null", "bool", "int", "float", "str", "timestamp", "value", "merge")}
_INTEGER = re.compile(r"[-+]?[0-9]{1,19}\Z|0x[0-9a-fA-F]{1,16}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?\Z")
_TRUE, _FALSE = {"yes", "true", "on"}, {"no", "false", "off"}


@dataclass(frozen=True)
class Mark:
    """A position in the file; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class YamlProblem:
    """Something wrong with the YAML itself."""

    mark: Mark
    path: Path
    message: str


@dataclass
class Document:
    """Plain data, where each value and key stood, and what was wrong.

    values: position of the value at a path; keys: position of the key that leads to it.
    """

    data: Any = None
    values: dict[Path, Mark] = field(default_factory=dict)
    keys: dict[Path, Mark] = field(default_factory=dict)
    problems: list[YamlProblem] = field(default_factory=list)

    def mark(self, path: Path) -> Mark:
        """Where the value at `path` stands; of what is not there, the nearest thing around it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.values:
                return self.values[path[:end]]
        return Mark(1, 1)

    def key_mark(self, path: Path) -> Mark:
        """Where the key at the end of `path` stands."""
        return self.keys.get(path) or self.mark(path)


def read_yaml(text: str) -> Document:
    """Reads one YAML document. Never raises: whatever is wrong is in `problems`, and `data` is what could be read."""
    document = Document()
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            document.problems.append(YamlProblem(Mark(1, 1), (), "the file is empty"))
        else:
            document.data = _Builder(document).build(node, ())
    except _TooMuch as error:
        document.problems.append(YamlProblem(error.mark, (), str(error)))
    except yaml.MarkedYAMLError as error:
        document.problems.append(YamlProblem(*_syntax(error)))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        character = chr(error.character) if isinstance(error.character, int) else error.character
        message = f"the character {character!r} is not allowed in YAML"
        document.problems.append(YamlProblem(Mark(line, column), (), message))
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # e.g. a %YAML directive or an escape out of range
        document.problems.append(YamlProblem(Mark(1, 1), (), f"is not YAML: {error}"))
    return document


class _TooMuch(Exception):
    def __init__(self, mark: Mark, message: str) -> None:
        super().__init__(message)
        self.mark = mark


class _Loader(yaml.SafeLoader):
    """Refuses deep nesting while it reads: PyYAML's time for it is quadratic, and Python's stack is finite."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._check(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._check(len(self.indents))
        return super().add_indent(column)

    def _check(self, depth: int) -> None:
        if depth > MAXIMUM_DEPTH:
            mark = self.get_mark()
            raise _TooMuch(Mark(mark.line + 1, mark.column + 1), "is nested too deeply")


class _Builder:
    """Nodes → plain data; anchors are followed, and counted each time."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.count = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.count += 1
        if self.count > MAXIMUM_VALUES:
            raise _TooMuch(_mark(node), "unfolds to too many values; use fewer anchors")
        if len(path) > MAXIMUM_DEPTH:  # an anchor within itself ends here
            raise _TooMuch(_mark(node), "is nested too deeply")
        self.document.values[path] = _mark(node)
        if isinstance(node, yaml.MappingNode) and node.tag == _CORE + "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _CORE + "seq":
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return _scalar(node)
        self.problem(node, path, f"the tag {_short(node.tag)} is not allowed; write plain values")
        return None

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _CORE + "merge":
                merged.append(value_node)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, path, "a key must be text")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in result:
                first = self.document.keys[here].line
                self.problem(key_node, here, f"is given twice; the first is in line {first}")
                continue
            self.document.keys[here] = _mark(key_node)
            result[key] = self.build(value_node, here)
        for source in merged:
            self.merge(source, path, result)
        return result

    def merge(self, source: yaml.Node, path: Path, result: dict[str, Any]) -> None:
        """`<<`: what the mapping does not say itself comes from the merged one."""
        parts = source.value if isinstance(source, yaml.SequenceNode) else [source]
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                self.problem(part, path, "`<<` needs a mapping")
                continue
            inner = Document()
            builder = _Builder(inner)
            builder.count = self.count
            for key, value in builder.mapping(part, path).items():
                if key in result:
                    continue
                result[key] = value
                head = (*path, key)
                for ours, theirs in (
                    (self.document.values, inner.values),
                    (self.document.keys, inner.keys),
                ):
                    ours.update({p: m for p, m in theirs.items() if p[: len(head)] == head})
            self.count = builder.count
            self.document.problems.extend(inner.problems)

    def problem(self, node: yaml.Node, path: Path, message: str) -> None:
        self.document.problems.append(YamlProblem(_mark(node), path, message))


def _scalar(node: yaml.ScalarNode) -> Any:
    """null, true, 4, 0.5 or text. What else YAML 1.1 sees in a plain word (dates, 10:30, 1_000) stays text."""
    text, kind = str(node.value), node.tag.removeprefix(_CORE)
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if kind == "int" and _INTEGER.match(text):
        return int(text, 16) if text.startswith("0x") else int(text)
    if kind in ("float", "int") and _FLOAT.match(text):
        return float(text)
    if kind == "str" and node.style is None and _FLOAT.match(text):  # 1e3: text in YAML 1.1, a number in 1.2
        return float(text)
    return text


def _syntax(error: yaml.MarkedYAMLError) -> tuple[Mark, Path, str]:
    """Position and one sentence of a YAML syntax error."""
    mark = error.problem_mark or error.context_mark
    place = Mark(mark.line + 1, mark.column + 1) if mark else Mark(1, 1)
    words = [part.strip() for part in (error.problem, error.context) if part]
    return place, (), "is not YAML: " + (", ".join(words) or "syntax error").replace("\n", " ")


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _short(tag: str) -> str:
    return "!!" + tag.removeprefix(_CORE) if tag.startswith(_CORE) else tag
