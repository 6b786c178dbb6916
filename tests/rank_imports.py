"""Imports that the ranks of tests share: the server that they are forked from makes them once; see ``tests.ranks``."""

import gc
from importlib import import_module

for name in (
    *("torch", "torchtune.modules", "transformers", "peft"),
    *("fctune.training.entry", "fctune.acceptance.run"),
    *("recipes.lora_fc_distributed", "recipes.full_fc_distributed", "recipes.lora_dpo_distributed"),
    "recipes.lora_grpo_distributed",
):
    import_module(name)

# Ranks neither scan nor copy what is imported: a collection writes to each object.
gc.collect()
gc.freeze()
