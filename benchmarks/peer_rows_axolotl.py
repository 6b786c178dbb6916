"""Prepare rows with axolotl; ``benchmarks.peer_rows`` runs this file with a Python that has it.

    PYTHON benchmarks/peer_rows_axolotl.py MODEL ROWS RESULT

axolotl reads the rows and encodes them as its training does, with the dataset type ``chat_template``, the model's own
template, which is the default, and the default of what is trained: the turns of the assistant and the tokens that end
them. The rows are neither shuffled nor dropped for their length.

RESULT is a JSON file: ``version``, and ``rows``, which has ``[ids, is_trained]`` for each row. If the rows were refused
it has ``refused``, the error, in place of ``rows``.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
os.environ["AXOLOTL_IS_PREPROCESS"] = "1"  # as in its command preprocess, which does not count the steps of training

from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.utils.dict import DictDefault


def prepare(model: str, rows: list[dict[str, Any]], folder: str) -> list[list[Any] | None]:
    """Return ``[ids, is_trained]`` of each row."""
    file = Path(folder, "rows.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "base_model": model,
        "datasets": [{"path": str(file), "type": "chat_template"}],
        "shuffle_merged_datasets": False,
        "sequence_len": 1_000_000,
        "dataset_prepared_path": str(Path(folder, "prepared")),
        "output_dir": str(Path(folder, "out")),
        "dataset_num_proc": 1,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "learning_rate": 1e-4,
    }
    prepared = load_datasets(cfg=load_cfg(DictDefault(config))).train_dataset
    if len(prepared) != len(rows):
        raise ValueError(f"{len(prepared)} of {len(rows)} rows are left")
    return [[row["input_ids"], [label != -100 for label in row["labels"]]] for row in prepared]


def main(model: str, rows: str, result: str) -> None:
    """Write the result."""
    lines = Path(rows).read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = {"version": version("axolotl")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            found["rows"] = prepare(model, [json.loads(line) for line in lines], folder)
        except Exception as error:  # of any kind: it is what the user sees
            cause = error.__cause__ or error
            found["refused"] = f"{type(cause).__name__}: {cause}"
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
