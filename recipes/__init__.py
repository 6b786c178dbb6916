"""Recipes for `tune run`. This file gives the directory precedence over torchtune's own `recipes` package."""

import fctune  # noqa: F401  (before torchtune, to silence warnings of its imports)
