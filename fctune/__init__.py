"""fctune: fine-tune chat models to call functions, with torchtune, and measure whether they do."""

import os
import sys


def _leave_working_directory() -> None:
    """Take the working directory off the import path, where `python -m` and `tune run` put it.

    A file of a cloned data set, or one that a user has named datasets.py, would be imported instead of a package.
    """
    # Python has not found the module that it runs yet, so this package is its parent, or imported by its parent.
    if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    # `tune run recipes/x` without torchrun's options.
    elif sys.argv and sys.argv[0].startswith("recipes.") and sys.path[-1:] == [os.getcwd()]:
        del sys.path[-1]


_leave_working_directory()

import logging  # noqa: E402

__version__ = "0.1.0"

# On import, torchao warns in every process that it skips C++ kernels, which fctune does not use.
logging.getLogger("torchao").setLevel(logging.ERROR)
