"""Imports that the ranks of tests share: the server that they are forked from makes them once; see ``tests.ranks``."""

import gc
from importlib import import_module

for name in (
    *("torch", "torchtune.modules", "transformers", "peft"),
    *("fctune.training.entry", "fctune.models.torchtune.build"),
    *("fctune.data.synthetic.pairs", "recipes.cluster_acceptance"),
    # The four recipes, pytest and hypothesis, which the modules of tests import that ranks find their functions in.
    *("tests.recipes.recipe_runs", "tests.training.training_runs"),
):
    import_module(name)

# Ranks neither scan nor copy what is imported: a collection writes to each object.
gc.collect()
gc.freeze()
