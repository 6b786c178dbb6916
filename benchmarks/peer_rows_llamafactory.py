"""Prepare rows with LLaMA-Factory; ``benchmarks.peer_rows`` runs this file with a Python that has it.

    PYTHON benchmarks/peer_rows_llamafactory.py MODEL ROWS RESULT sharegpt|openai

LLaMA-Factory reads the rows and encodes them as its training does, with its template ``qwen``, which its list of models
names for Qwen2.5, and the defaults of its arguments, except that no row is cut (``cutoff_len``).

``sharegpt`` is the format that its documentation has for calls, which ``peer_rows.to_sharegpt`` makes; ``openai`` is
its reader of OpenAI's format, which gets the rows as they are.

RESULT is a JSON file: ``version``, and ``rows``, which has for each row ``[ids, is_trained]`` or null if it is dropped.
If the rows were refused it has ``refused``, the error, in place of ``rows``.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.data.loader import _get_merged_dataset
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer

OPENAI = {
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
SHAREGPT = {
    "formatting": "sharegpt",
    "columns": {"messages": "conversations", "system": "system", "tools": "tools"},
}


def prepare(model: str, rows: list[dict[str, Any]], layout: str, folder: str) -> list[list[Any] | None]:
    """Return ``[ids, is_trained]`` of each row, or None if LLaMA-Factory drops it."""
    Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    described = {"rows": {"file_name": "rows.jsonl"} | (SHAREGPT if layout == "sharegpt" else OPENAI)}
    Path(folder, "dataset_info.json").write_text(json.dumps(described), encoding="utf-8")
    model_args, data_args, training_args, _, _ = get_train_args(
        {
            "model_name_or_path": model,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "dataset": "rows",
            "dataset_dir": folder,
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
    return [row and [row["input_ids"], [label != -100 for label in row["labels"]]] for row in prepared]


def main(model: str, rows: str, result: str, layout: str) -> None:
    """Write the result."""
    lines = Path(rows).read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = {"version": version("llamafactory")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            found["rows"] = prepare(model, [json.loads(line) for line in lines], layout, folder)
        except Exception as error:  # of any kind: it is what the user sees
            cause = error.__cause__ or error
            found["refused"] = f"{type(cause).__name__}: {cause}"
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
