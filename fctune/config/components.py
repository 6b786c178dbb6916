"""Components that a config names by import path (``_component_: torch.optim.AdamW``)."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.config.fields import Range
from fctune.config.parsing import suggest

_OPTIMIZERS = "torch.optim"

# Arguments that select an implementation of the same update. A component without the choice is called without them, so
# that a config stays valid when an override changes its optimizer.
_IMPLEMENTATION_ARGUMENTS = ("fused", "foreach")


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Constraint of a mapping with the ``_component_`` of an optimizer and its arguments."""

    def find_problems(self, key: str, value: dict[str, Any], null: str) -> list[str]:
        """Check the component, the names of its arguments, and its rates."""
        problems = find_argument_problems(value, key)
        for name in ("lr", "weight_decay", "eps"):
            rate = value.get(name)
            if rate is None:
                continue
            if isinstance(rate, (bool, str)) or not isinstance(rate, (int, float)) or not Range(ge=0).contains(rate):
                problems.append(f"{key}.{name}={rate!r}: expected a number, 0 or more")
        return problems


def resolve_component(spec: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Import the callable that ``_component_`` names; returns it and its keyword arguments.

    ``fused`` and ``foreach`` are left out for a component that does not take them.
    """
    component = _import_component(str(spec["_component_"]))
    accepted = _list_parameters(component)
    return component, {
        key: value
        for key, value in spec.items()
        if key != "_component_" and (accepted is None or key in accepted or key not in _IMPLEMENTATION_ARGUMENTS)
    }


def find_argument_problems(spec: Mapping[str, Any], where: str) -> list[str]:
    """Check a component and the names of its arguments; one line per problem.

    The signature of an optimizer in ``torch.optim`` is read from torch's source, which is much faster than importing
    torch; any other component is imported.
    """
    path = str(spec["_component_"])
    module, _, name = path.rpartition(".")
    key = f"{where}._component_={path}"
    parameters: list[str] | None = None
    if module == _OPTIMIZERS and (sources := _read_optimizer_sources()):
        if name not in sources:
            close = suggest(name, sources, f"{_OPTIMIZERS}.")
            return [f"{key}: cannot be imported: torch.optim has no {name}{close or '; e.g. torch.optim.AdamW'}"]
        parameters = _read_parameters(sources[name], name)
    if parameters is None:
        try:
            parameters = _list_parameters(_import_component(path))
        except (ImportError, AttributeError, ValueError) as error:
            return [f"{key}: cannot be imported ({error}); expected e.g. torch.optim.AdamW"]
        if parameters is None:
            return []
    return [
        f"{where}.{argument}: {name} takes no such argument"
        + (suggest(argument, parameters, f"{where}.") or f"; drop it with ~{where}.{argument}")
        for argument in spec
        if argument not in ("_component_", *_IMPLEMENTATION_ARGUMENTS) and argument not in parameters
    ]


def _import_component(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    component: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return component


def _list_parameters(component: Callable[..., Any]) -> list[str] | None:
    """Return the names of a callable's parameters; None if it takes ``**kwargs``."""
    parameters = inspect.signature(component).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else list(parameters)


def _read_optimizer_sources() -> dict[str, Path]:
    """Map each name that torch.optim re-exports to the file that defines it; empty if torch has another layout."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    root = Path(spec.origin).parent / "optim"
    if not (root / "__init__.py").is_file():
        return {}
    sources: dict[str, Path] = {}
    for node in ast.parse((root / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_OPTIMIZERS}."):
            file = root / f"{str(node.module).removeprefix(f'{_OPTIMIZERS}.')}.py"
            sources |= {alias.asname or alias.name: file for alias in node.names}
    return sources


def _read_parameters(file: Path, name: str) -> list[str] | None:
    """Return the parameters of a class's own ``__init__``; None if it has none, or takes ``**kwargs``."""
    if not file.is_file():
        return None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__" and method.args.kwarg is None:
                arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
                return [argument.arg for argument in arguments if argument.arg != "self"]
    return None
