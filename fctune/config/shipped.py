"""Files that come with fctune: configs, recipes, evaluation suites and the tiny base.

In a clone they are read from the repository root; an installed wheel carries them in ``fctune/bundled``.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_BUNDLED = _PACKAGE / "bundled"


def shipped_dir(name: str) -> Path:
    """Return the directory of ``configs``, ``recipes`` or ``eval``."""
    return (_BUNDLED if _BUNDLED.is_dir() else _PACKAGE.parent) / name


def list_shipped_configs() -> list[Path]:
    """Return the configs that come with fctune, sorted by name."""
    return sorted(shipped_dir("configs").glob("*.yaml"))


def list_shipped_recipes() -> list[Path]:
    """Return the recipes that come with fctune, sorted by name."""
    return sorted(path for path in shipped_dir("recipes").glob("*.py") if path.stem != "__init__")


def find_shipped_config(name: str) -> Path | None:
    """Find a shipped config by name; None if there is no such config.

    The words of a name may come in any order (``lora_tiny`` is ``tiny_lora``). ``.yaml`` and a leading ``configs/`` may
    be left out or given.
    """
    path = Path(name)
    if path.suffix not in ("", ".yaml") or path.parent not in (Path("."), Path("configs")):
        return None
    words = sorted(path.stem.split("_"))
    return next((file for file in list_shipped_configs() if sorted(file.stem.split("_")) == words), None)


def resolve_shipped_path(path: str) -> str:
    """Resolve a path inside the package, such as ``fctune/assets/tiny_base``, where the working directory has none.

    Any other path is returned as it is.
    """
    if path.startswith("fctune/assets/") and not os.path.exists(path) and (_PACKAGE.parent / path).exists():
        return str(_PACKAGE.parent / path)
    return path
