"""Bundle recipes, configs and eval in the wheel, under ``fctune/bundled``.

A top-level ``recipes`` package would overwrite torchtune's. A clone and an editable install read the repository root.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithBundle(build_py):
    """Copy the bundled directories after the packages."""

    def run(self) -> None:
        """Build the packages, then the bundle."""
        super().run()
        if self.editable_mode:
            return
        for name in ("recipes", "configs", "eval"):
            target = Path(self.build_lib) / "fctune" / "bundled" / name
            shutil.copytree(name, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithBundle})
