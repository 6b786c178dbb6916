"""The recipes that `tune run` starts. This file makes the folder win over torchtune's own `recipes` package."""

import fctune  # noqa: F401  (before torchtune, whose imports it quietens)
