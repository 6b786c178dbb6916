"""torchtune's models build without importing the datasets library, which works afterwards as ever."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT, TINY_BASE

CODE = """
import sys
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
import torch

model = build_model(read_architecture(sys.argv[1]), 64, PrecisionPolicy.uniform(torch.float32))
assert "torchtune" in sys.modules
assert "datasets" not in sys.modules and "pandas" not in sys.modules, "imported after all"
import torchtune.data._utils as utils
try:
    utils.load_dataset("no/such/dataset.txt-of-a-test")  # forwards to the real function
except Exception as error:
    assert "datasets" in type(error).__module__ or "huggingface" in type(error).__module__ or isinstance(error, OSError)
import datasets
assert datasets.Dataset.from_list([{"a": 1}])[0] == {"a": 1}
rows = datasets.Dataset.from_list([{"a": 1}, {"a": 2}])
assert utils.split_dataset_by_node(rows, rank=1, world_size=2)[0] == {"a": 2}
print("done")
"""


def test_torchtune_is_imported_without_datasets_and_calls_the_real_one() -> None:
    command = [sys.executable, "-c", CODE, str(TINY_BASE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr
