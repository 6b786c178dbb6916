"""Recipes for `tune run`. This file gives the directory precedence over torchtune's own `recipes` package."""

import fctune  # noqa: F401  (before torchtune, to silence warnings of its imports)
from fctune.launcher_watch import end_with_launcher

end_with_launcher()  # before the imports of a recipe, which take seconds
