"""YAML as configs are written: read with limits on what a file may cost, and written so that it reads back the same."""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_CHARS = 2**20
_MAX_NODES = 20_000
_MAX_DEPTH = 50
_MAX_EXPANDED_CHARS = 2 * MAX_CHARS  # with every alias written in full, as messages and records write it
_MAX_SCALAR_CHARS = 100  # of a number or a boolean; longer ones are text
_MAX_INTEGER = 2**63


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the numbers of YAML 1.2, without dates, and with bounds on its size.

    ``2e-4`` is a float, ``016`` is 16, and ``1:30`` is text. ``0x1F``, ``0b11`` and ``1_024`` are integers as in 1.1.
    A scalar that looks like a number, but has no value that 64 bits hold, stays text, so that the check of its key
    reports it with the other problems. So does a date: no key takes one, and a directory may be named by it.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._num_nodes = 0
        self._extents: dict[int, tuple[int, int]] = {}  # characters and height of each complete node

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            self._refuse(f"more than {_MAX_NODES:,} values", event)
        if self._depth >= _MAX_DEPTH:
            self._refuse(f"nested deeper than {_MAX_DEPTH} levels", event)
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._extents:
                self._refuse(f"the alias *{event.anchor} is part of what it stands for", event)
            if self._depth + self._extents[id(node)][1] > _MAX_DEPTH:
                self._refuse(f"nested deeper than {_MAX_DEPTH} levels through the alias *{event.anchor}", event)
            return node
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in children for part in pair]
        extents = [self._extents[id(child)] for child in children]
        num_chars = 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else sum(chars for chars, _ in extents))
        if num_chars > _MAX_EXPANDED_CHARS:
            self._refuse(f"its aliases expand to more than {_MAX_EXPANDED_CHARS:,} characters", event)
        self._extents[id(node)] = num_chars, 1 + max((height for _, height in extents), default=0)
        return node

    def _refuse(self, why: str, event: Any) -> None:
        raise yaml.composer.ComposerError(None, None, why, event.start_mark)

    def construct_number(self, node: Any) -> Any:
        """Return the value of a scalar that is tagged as a number or a boolean; its text if it has none."""
        if len(node.value) > _MAX_SCALAR_CHARS:
            return node.value
        try:
            value = _CONSTRUCTORS[node.tag](self, node)
        except (ValueError, KeyError, OverflowError):
            return node.value
        return node.value if type(value) is int and abs(value) >= _MAX_INTEGER else value


def _construct_int(loader: _Loader, node: Any) -> int:
    text = node.value.replace("_", "")
    base = {"0b": 2, "0x": 16}.get(text.lstrip("-+")[:2], 10)
    return int(text, base)


_PREFIX = "tag:yaml.org,2002:"
_CONSTRUCTORS: dict[str, Any] = {
    f"{_PREFIX}bool": yaml.SafeLoader.construct_yaml_bool,
    f"{_PREFIX}int": _construct_int,
    f"{_PREFIX}float": yaml.SafeLoader.construct_yaml_float,
}
for _tag in _CONSTRUCTORS:
    _Loader.add_constructor(_tag, _Loader.construct_number)
_safe: Any = yaml.SafeLoader
for _tag in ("binary", "omap", "pairs", "set"):  # no key takes them, and no record can hold them
    _Loader.add_constructor(f"{_PREFIX}{_tag}", _safe.construct_undefined)
_Loader.add_constructor(f"{_PREFIX}timestamp", _safe.construct_yaml_str)
_REPLACED = ("timestamp", "int", "float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_PREFIX) not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads: text such as ``2e-4`` or ``089`` is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that occurs twice in full each time."""
        return True


_INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$")
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{_PREFIX}int", _INT, list("-+0123456789"))
    _kind.add_implicit_resolver(f"{_PREFIX}float", _FLOAT, list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """Parse a YAML document to plain values, in bounded time and memory.

    Raises:
        yaml.YAMLError: The text is not YAML, or longer, deeper or larger than any config.
    """
    if len(text) > MAX_CHARS:
        raise yaml.YAMLError(f"longer than {MAX_CHARS:,} characters")
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def dump_yaml(value: Any) -> str:
    """Write plain values as one line of YAML, without a line break, that ``parse_yaml`` reads back."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=True)
    return text.removesuffix("\n...\n").removesuffix("\n")
