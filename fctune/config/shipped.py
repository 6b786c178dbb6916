"""Files that come with fctune: configs, recipes, evaluation suites and the tiny base.

In a clone they are read from the repository root; an installed wheel carries them in ``fctune/bundled``.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_BUNDLED = _PACKAGE / "bundled"

# Size of a model -> name of the shipped config that it stands for, wherever a config is named, and as MODEL_SIZE.
CONFIG_OF_SIZE = {
    "270M": "gemma3_270m_lora",
    "350M": "lfm2_5_350m_lora",
    "0.5B": "qwen2_5_coder_0_5b_lora",
    "0.6B": "qwen3_0_6b_lora",
    "0.8B": "qwen3_5_0_8b_lora",
    "1B": "llama3_2_1b_qlora",
    "2B": "qwen3_5_2b_lora",
    "3B": "smollm3_3b_lora",
    "4B": "qwen3_4b_lora",
    "7B": "qwen2_7b_lora",
    "8B": "llama3_1_8b_lora",
    "9B": "qwen3_5_9b_lora",
    "20B": "gpt_oss_20b_lora",
    "30B": "qwen3_30b_a3b_lora",
    "32B": "qwen3_32b_lora",
    "70B": "llama3_3_70b_lora",
    "72B": "qwen2_5_72b_full",
    "120B": "gpt_oss_120b_lora",
}


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
    """Find a shipped config by name or by the size of its model, such as 8B; None if there is no such config.

    The words of a name may come in any order (``lora_tiny`` is ``tiny_lora``). ``.yaml`` and a leading ``configs/`` may
    be left out or given.
    """
    path = Path(CONFIG_OF_SIZE.get(name.upper(), name))
    if path.suffix not in ("", ".yaml") or path.parent not in (Path("."), Path("configs")):
        return None
    words = sorted(path.stem.split("_"))
    return next((file for file in list_shipped_configs() if sorted(file.stem.split("_")) == words), None)


def list_sizes() -> str:
    """Return the sizes that stand for a config, with its name, for messages."""
    return ", ".join(f"{size} ({name})" for size, name in CONFIG_OF_SIZE.items())


def has_size(config: str | Path, size: str) -> bool:
    """Return True if the file name of a config has the size of a model in it, as ``llama3_1_8b_full`` has 8B."""
    words, name = size.lower().replace(".", "_"), f"_{Path(config).stem.lower()}_"
    return f"_{words}_" in name and f"_0_{words}_" not in name  # qwen3_5_0_8b has 0.8B


def resolve_shipped_path(path: str) -> str:
    """Resolve a path inside the package, such as ``fctune/assets/tiny_base``, where the working directory has none.

    Any other path is returned as it is.
    """
    if path.startswith("fctune/assets/") and not os.path.exists(path) and (_PACKAGE.parent / path).exists():
        return str(_PACKAGE.parent / path)
    return path
