"""Recipes for `tune run`. This file gives the directory precedence over torchtune's own `recipes` package."""

import fctune  # noqa: F401  (before all others: it takes the working directory off the import path)
from fctune.base.launcher_watch import end_with_launcher, protect_imports

end_with_launcher()  # before the imports of a recipe, which take seconds
protect_imports()
