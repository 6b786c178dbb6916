"""Imports that commands on data need not pay for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def imported_by(code: str) -> set[str]:
    """Return the modules loaded in a new process after running the code."""
    report = "import sys; print('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


@pytest.mark.parametrize("module", ["show", "check", "prepared_set", "synthetic", "sources", "tool_schema"])
def test_modules_of_data_import_no_framework(module: str) -> None:
    assert not imported_by(f"import fctune.data.{module}") & {"torch", "transformers", "datasets", "pyarrow"}


def test_a_tokenizer_is_loaded_without_its_models_code(tiny_base: Path) -> None:
    code = f"from fctune.data.chat_template import ChatTemplate; ChatTemplate({str(tiny_base)!r})"
    found = imported_by(code)
    assert "transformers.models.llama" not in found
    assert "torch.distributed.tensor" not in found
