"""Components that a config names by import path (``_component_: torch.optim.AdamW``).

To import a module is to execute it, and configs are passed around. So a config may only name components of the packages
below; others must be allowed by whoever starts the run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.config.fields import Range
from fctune.config.parsing import shorten, suggest

_OPTIMIZERS = "torch.optim"
_ALLOWED = (_OPTIMIZERS, "torchao.optim", "torchtune", "bitsandbytes")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", re.ASCII)

ALLOW_COMPONENTS = "FCTUNE_ALLOW_COMPONENTS"
"""Environment variable with further packages, modules or components, separated by commas; ranks inherit it."""

# Arguments that select an implementation of the same update. A component without the choice is called without them, so
# that a config stays valid when an override changes its optimizer.
_IMPLEMENTATION_ARGUMENTS = ("fused", "foreach")
_OF_TWO_BETAS = ("torch.optim", "torchao.optim")  # elsewhere, some optimizers have three
_MAX_UNKNOWN = 50  # unknown arguments that are reported


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Constraint of a mapping with the ``_component_`` of an optimizer and its arguments."""

    def find_problems(self, key: str, value: dict[str, Any], null: str) -> list[str]:
        """Check the component, the names of its arguments, its rates and betas."""
        problems = find_argument_problems(value, key)
        for name in ("lr", "weight_decay", "eps"):
            rate = value.get(name)
            if rate is None:
                continue
            if isinstance(rate, (bool, str)) or not isinstance(rate, (int, float)) or not Range(ge=0).contains(rate):
                problems.append(f"{key}.{name}={rate!r}: expected a number, 0 or more")
        betas = value.get("betas")
        if betas is not None and _is_within(str(value["_component_"]), _OF_TWO_BETAS) and not _are_two_betas(betas):
            problems.append(
                f"{key}.betas={shorten(betas)}: expected two numbers from 0 to less than 1, e.g. [0.9, 0.999]"
            )
        return problems


def _are_two_betas(betas: Any) -> bool:
    """Return True for a list of two numbers from 0 to less than 1."""
    if not isinstance(betas, list) or len(betas) != 2:
        return False
    return all(type(beta) in (int, float) and Range(ge=0, lt=1).contains(beta) for beta in betas)


@dataclass(frozen=True, slots=True)
class CallbackSpecs:
    """Constraint of a list of mappings, each with the ``_component_`` of a callback and its arguments."""

    def find_problems(self, key: str, value: list[dict[str, Any]], null: str) -> list[str]:
        """Check the components and the names of their arguments."""
        problems = []
        for index, spec in enumerate(value):
            if "_component_" in spec:
                problems += find_argument_problems(spec, f"{key}.{index}", "my_package.MyCallback")
            else:
                problems.append(f"{key}.{index}._component_: missing; write e.g. my_package.MyCallback")
        return problems


def resolve_component(spec: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Import the callable that ``_component_`` names; returns it and its keyword arguments.

    ``fused`` and ``foreach`` are left out for a component that does not take them.

    Raises:
        ConfigError: The component is not allowed.
    """
    component = _import_component(spec["_component_"])
    accepted = _list_parameters(component)
    return component, {
        key: value
        for key, value in spec.items()
        if key != "_component_" and (accepted is None or key in accepted or key not in _IMPLEMENTATION_ARGUMENTS)
    }


def find_argument_problems(spec: Mapping[str, Any], where: str, example: str = "torch.optim.AdamW") -> list[str]:
    """Check a component and the names of its arguments; one line per problem, with the example of another component.

    The signature of an optimizer in ``torch.optim`` is read from torch's source, which is much faster than importing
    torch; any other component is imported.
    """
    path = spec["_component_"]
    key = f"{where}._component_={shorten(path)}"
    if problem := _find_path_problem(path, example):
        return [f"{key}: {problem}"]
    module, _, name = path.rpartition(".")
    parameters: list[str] | None = None
    if module == _OPTIMIZERS and (sources := _read_optimizer_sources()):
        if name not in sources:
            close = suggest(name, sources, f"{_OPTIMIZERS}.")
            return [f"{key}: cannot be imported: torch.optim has no {name}{close or '; e.g. torch.optim.AdamW'}"]
        parameters = _read_parameters(sources[name], name)
    if parameters is None:
        try:
            parameters = _list_parameters(_import_component(path))
        except (ImportError, AttributeError, ValueError, ConfigError) as error:
            return [f"{key}: cannot be imported ({error}); expected e.g. {example}"]
        if parameters is None:
            return []
    unknown = [name for name in spec if name not in ("_component_", *_IMPLEMENTATION_ARGUMENTS, *parameters)]
    more = [f"{where}: {len(unknown) - _MAX_UNKNOWN:,} more such arguments"] if len(unknown) > _MAX_UNKNOWN else []
    problems = [
        f"{where}.{argument}: {name} takes no such argument"
        + (suggest(argument, parameters, f"{where}.") or f"; drop it with ~{where}.{argument}")
        for argument in map(shorten, unknown[:_MAX_UNKNOWN])
    ]
    return problems + more


def allow_components(names: Sequence[str]) -> None:
    """Allow components beyond the known packages, for this process and those that it starts.

    Args:
        names: Packages, modules or components, such as ``my_optimizers`` or ``my_optimizers.Lion``.

    Raises:
        ConfigError: A name is not an import path.
    """
    for name in names:
        if not _IMPORT_PATH.fullmatch(f"{name}.x"):
            raise ConfigError(
                f"--allow-component {name}: expected a package or component, such as my_package.MyOptimizer."
            )
    if names:
        os.environ[ALLOW_COMPONENTS] = ",".join([*_list_allowed()[len(_ALLOWED) :], *names])


def _list_allowed() -> list[str]:
    further = (name.strip() for name in os.environ.get(ALLOW_COMPONENTS, "").split(","))
    return [*_ALLOWED, *(name for name in further if name)]


def _is_within(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _find_path_problem(path: Any, example: str = "torch.optim.AdamW") -> str | None:
    """Return why a component may not be imported; None if it may."""
    if not isinstance(path, str) or not _IMPORT_PATH.fullmatch(path):
        return f"not an import path; expected e.g. {example}"
    if _is_within(path, _list_allowed()):
        return None
    return (
        f"not imported, because a config may only name components of {', '.join(_ALLOWED)}. If you trust its code, "
        f"pass --allow-component {path}, or set {ALLOW_COMPONENTS}={path}"
    )


def _import_component(path: str) -> Callable[..., Any]:
    """Import an allowed component.

    Raises:
        ConfigError: It is not allowed, or another package's, which an allowed module only imports.
    """
    if problem := _find_path_problem(path):
        raise ConfigError(f"_component_={shorten(path)}: {problem}.")
    module, _, name = path.rpartition(".")
    component: Callable[..., Any] = getattr(importlib.import_module(module), name)
    home, allowed = getattr(component, "__module__", None) or "", _list_allowed()
    if not callable(component):
        raise ConfigError(f"{path} cannot be called")
    if not _is_within(home, allowed) and not _is_within(path, allowed[len(_ALLOWED) :]):
        raise ConfigError(f"it is {home}.{getattr(component, '__qualname__', name)}, which is not allowed")
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
