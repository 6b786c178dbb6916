"""Prepare rows with LLaMA-Factory or axolotl; ``benchmarks.peer_rows`` runs this file with a Python that has the tool.

    PYTHON benchmarks/peer_rows_elsewhere.py llamafactory|axolotl MODEL FOLDER LAYOUT

FOLDER has the rows, ``rows.jsonl``, and gets ``result.json``: ``rows``, with ``[ids, is_trained]`` for each row or null
if it is dropped, or, if the rows were refused, ``refused``, the error.

LLaMA-Factory reads the rows and encodes them as its training does, with its template ``qwen``, which its list of models
names for Qwen2.5, and the defaults of its arguments, except that no row is cut (``cutoff_len``). The layout
``sharegpt`` is the format that its documentation has for calls, which ``peer_rows.to_sharegpt`` makes; ``openai`` is
its reader of OpenAI's format, which gets the rows as they are.

axolotl does so with the dataset type ``chat_template``, the model's own template, which is the default, and the default
of what is trained: the turns of the assistant and the tokens that end them. The rows are neither shuffled nor dropped
for their length. Its layouts differ in the rows only.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

SHAREGPT = {
    "file_name": "rows.jsonl",
    "formatting": "sharegpt",
    "columns": {"messages": "conversations", "system": "system", "tools": "tools"},
}
OPENAI = {
    "file_name": "rows.jsonl",
    "formatting": "openai",
    "columns": {"messages": "messages", "tools": "tools"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool",
        "function_tag": "function_call",
        "system_tag": "system",
    },
}


def prepare_with_llamafactory(model: str, folder: Path, layout: str) -> list[list[Any] | None]:
    """Return ``[ids, is_trained]`` of each row, or None if LLaMA-Factory drops it."""
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.data.loader import _get_merged_dataset
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    described = {"rows": SHAREGPT if layout == "sharegpt" else OPENAI}
    Path(folder, "dataset_info.json").write_text(json.dumps(described), encoding="utf-8")
    model_args, data_args, training_args, _, _ = get_train_args(
        {
            "model_name_or_path": model,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "dataset": "rows",
            "dataset_dir": str(folder),
            "template": "qwen",
            "cutoff_len": 1_000_000,
            "output_dir": str(Path(folder, "out")),
            "cache_dir": str(Path(folder, "cache")),
            "report_to": "none",
            "use_cpu": True,
        }
    )
    tokenizer_module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizer_module["tokenizer"], data_args)
    arguments = (model_args, data_args, training_args)
    found = iter(get_dataset(template, *arguments, stage="sft", **tokenizer_module)["train_dataset"])
    # A row that is not of alternating turns is left without an answer, and dropped when it is encoded.
    is_kept = [bool(row["_response"]) for row in _get_merged_dataset(["rows"], *arguments, stage="sft")]
    prepared = [next(found) if kept else None for kept in is_kept]
    assert next(found, None) is None
    return [row and _mask(row) for row in prepared]


def prepare_with_axolotl(model: str, folder: Path, _: str) -> list[list[Any] | None]:
    """Return ``[ids, is_trained]`` of each row."""
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.utils.dict import DictDefault

    file = Path(folder, "rows.jsonl")
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
    if len(prepared) != (num_rows := len(file.read_bytes().splitlines())):
        raise ValueError(f"{len(prepared)} of {num_rows} rows are left")
    return [_mask(row) for row in prepared]


def _mask(row: dict[str, Any]) -> list[Any]:
    return [row["input_ids"], [label != -100 for label in row["labels"]]]


def main(tool: str, model: str, folder: str, layout: str) -> None:
    """Prepare the rows of a folder with a tool, and write ``result.json`` there."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    os.environ["AXOLOTL_IS_PREPROCESS"] = (
        "1"  # as in its command preprocess, which does not count the steps of training
    )
    prepare = {"llamafactory": prepare_with_llamafactory, "axolotl": prepare_with_axolotl}[tool]
    try:
        found: dict[str, Any] = {"rows": prepare(model, Path(folder), layout)}
    except ImportError:  # the environment lacks a part of the tool, which says nothing of the rows
        raise
    except Exception as error:  # of any kind: it is what the user sees
        cause = error.__cause__ or error
        found = {"refused": f"{type(cause).__name__}: {cause}"}
    Path(folder, "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
