"""The recipe in ``recipes/`` that a config is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONFIGS = {
    "lora_grpo_distributed": "with grpo",
    "lora_dpo_distributed": "with preference",
    "lora_distill_distributed": "with distill and adapter",
    "full_distill_distributed": "with distill and without adapter",
    "lora_fc_distributed": "with adapter, and without grpo, preference and distill",
    "full_fc_distributed": "without adapter, grpo, preference and distill",
}


def find_recipe(sections: Mapping[str, Any]) -> str:
    """Return the name of the recipe for a config with these sections; missing ones and null are the same."""
    if sections.get("grpo") is not None:
        return "lora_grpo_distributed"
    if sections.get("preference") is not None:
        return "lora_dpo_distributed"
    if sections.get("distill") is not None:
        return "full_distill_distributed" if sections.get("adapter") is None else "lora_distill_distributed"
    return "full_fc_distributed" if sections.get("adapter") is None else "lora_fc_distributed"


def find_recipe_problem(recipe: str, expected: str) -> str | None:
    """Return why a recipe cannot run a config that ``expected`` is for; None if it can."""
    if recipe == expected:
        return None
    return (
        f"recipes/{recipe} is for configs {_CONFIGS[recipe]}, and this one is {_CONFIGS[expected]}. Run "
        f"recipes/{expected} (fctune train chooses it), or change these sections of the config."
    )
