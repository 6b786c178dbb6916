"""Train rows with LLaMA-Factory or axolotl, in an environment that has the tool.

    python -m benchmarks.head_to_head_peers train JOB.json

``benchmarks.head_to_head`` writes the job, a ``Job`` as JSON. The tool's own command trains in a process whose output
goes to ``OUT/log.txt``; its adapter, or all weights, go to ``OUT/trained``, and what was counted to
``OUT/result.json``. ``benchmarks.head_to_head_trl`` merges.

Each tool gets the rows in the form of its documentation that it renders most like the model's own template. For
LLaMA-Factory that is its form of sharegpt, with its template ``qwen``, as its reader of OpenAI's format changes the
system message. For axolotl it is the dataset type ``chat_template`` with the arguments of calls and the parameters of
tools as JSON strings, as the datasets package fills up objects with the keys of other rows.

Both train packs of ``data.seq_len`` tokens, in which no conversation attends to another. Differences from fctune and
TRL that no option removes: the warm-up begins at a learning rate of 0, so its first step changes nothing; axolotl
rounds a warm-up that is a share of all steps down and takes 2 steps for 1, and its steps of an epoch are those of
complete batches; LLaMA-Factory fills each pack up and reports no number of tokens.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from benchmarks.head_to_head_trl import Job
from benchmarks.peer_rows import to_form, to_sharegpt, to_text_parameters
from benchmarks.peer_rows_elsewhere import SHAREGPT
from fctune.base.files import write_atomically
from fctune.base.launcher_watch import stop_with_parent
from fctune.config.intervals import parse_interval

COMMANDS = {"llamafactory": ("llamafactory.cli", "train"), "axolotl": ("axolotl.cli.train",)}
LOG = "log.txt"
_ROWS = "rows.jsonl"


def make_settings(job: Job) -> dict[str, Any]:
    """Return the config file of the tool: the settings of the job as near as its options allow."""
    assert job.settings is not None
    settings, adapter, optimizer = job.settings, job.settings["adapter"], job.settings["optimizer"]
    name = settings["lr_scheduler"]["name"]
    warmup = parse_interval(settings["lr_scheduler"]["warmup"])
    schedule = "constant_with_warmup" if name == "constant" else name
    is_checkpointed = settings["activation_checkpointing"]["fraction"] != 0
    common = {
        "output_dir": f"{job.out}/trained",
        "gradient_accumulation_steps": settings["global_batch_size"],
        "learning_rate": optimizer["lr"],
        "weight_decay": optimizer["weight_decay"],
        "max_grad_norm": settings["clip_grad_norm"] or 0.0,
        "bf16": settings["precision"] == "bf16",
        "seed": job.seed,
        "logging_steps": 1,
        "save_strategy": "epoch",
        "save_only_model": True,
        **({"max_steps": settings["max_steps"]} if settings["max_steps"] else {}),
        **({"warmup_steps": warmup.steps} if warmup.steps is not None else {"warmup_ratio": warmup.share}),
    }
    is_all = bool(adapter) and adapter["modules"] == "all-linear"
    if job.tool == "llamafactory":
        lora = adapter and {
            "lora_rank": adapter["rank"],
            "lora_alpha": adapter["alpha"],
            "lora_dropout": adapter["dropout"],
            "lora_target": "all" if is_all else ",".join(adapter["modules"]),
        }
        return common | {
            "model_name_or_path": job.model_dir,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora" if adapter else "full",
            **(lora or {}),
            "dataset": "rows",
            "dataset_dir": job.out,
            "cache_dir": f"{job.out}/cache",
            "template": "qwen",
            "cutoff_len": settings["data"]["seq_len"],
            "packing": True,
            "neat_packing": True,
            "per_device_train_batch_size": 1,
            "num_train_epochs": settings["epochs"],
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": schedule,
            "disable_gradient_checkpointing": not is_checkpointed,
            "use_cpu": not torch.cuda.is_available(),
            "report_to": "none",
        }
    lora = adapter and {
        "adapter": "lora",
        "lora_r": adapter["rank"],
        "lora_alpha": adapter["alpha"],
        "lora_dropout": adapter["dropout"],
        **({"lora_target_linear": True} if is_all else {"lora_target_modules": list(adapter["modules"])}),
        # kernels for GPUs, which are its default
        **{f"lora_{name}_kernel": False for name in ("mlp", "qkv", "o", "embedding")},
    }
    return common | {
        "base_model": job.model_dir,
        **(lora or {}),
        "datasets": [{"path": f"{job.out}/{_ROWS}", "type": "chat_template"}],
        "dataset_prepared_path": f"{job.out}/prepared",
        "dataset_num_proc": 1,
        "val_set_size": 0,
        "sequence_len": settings["data"]["seq_len"],
        "sample_packing": True,
        "pad_to_sequence_len": False,
        "attn_implementation": "sdpa",
        "micro_batch_size": 1,
        "num_epochs": settings["epochs"],
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": schedule,
        "gradient_checkpointing": is_checkpointed,
        "fp16": False,
        "tf32": False,
    }


def train(job: Job) -> dict[str, Any]:
    """Train, and return what was counted.

    Raises:
        CalledProcessError: The tool failed.
    """
    assert job.python is not None
    out = Path(job.out)
    rows = [json.loads(line) for line in Path(job.rows).read_text(encoding="utf-8").splitlines()]
    if job.tool == "llamafactory":
        rows = list(map(to_sharegpt, rows))
    else:
        rows = [to_text_parameters(to_form(row, "strings")) for row in rows]
    write_atomically(out / _ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    write_atomically(out / "dataset_info.json", json.dumps({"rows": SHAREGPT}))
    write_atomically(out / "config.yaml", yaml.safe_dump(make_settings(job)))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "HF_DATASETS_CACHE": str(out / "cache")}
    with (out / LOG).open("w", encoding="utf-8") as log:
        subprocess.run(
            [job.python, "-m", *COMMANDS[job.tool], "config.yaml"],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=out,
            env=environment,
            preexec_fn=stop_with_parent(),
            check=True,
        )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # KiB
    return count(out) | {"peak_gib": peak}


def count(out: Path) -> dict[str, Any]:
    """Return what the files and the output of a tool say about its training."""
    states = [json.loads(file.read_text(encoding="utf-8")) for file in out.glob("trained/**/trainer_state.json")]
    state = max(states, key=lambda one: int(one["global_step"]))
    logs = [one for one in state["log_history"] if "loss" in one]
    seconds = re.findall(r"'train_runtime': '?([\d.e+]+)", (out / LOG).read_text(encoding="utf-8"))
    trained = 0
    for file in out.glob("trained/*.safetensors"):
        is_adapter = file.name.startswith("adapter")  # which may also hold the frozen weights of an output layer
        weights = load_file(file)
        trained += sum(weight.numel() for key, weight in weights.items() if "lora_" in key or not is_adapter)
    return {
        "is_packed": True,
        "trained_parameters": trained,
        "steps": state["global_step"],
        "tokens": logs[-1].get("tokens/total"),
        "supervised_tokens": logs[-1].get("tokens/trainable"),
        "training_s": float(seconds[-1]),
        "losses": [one["loss"] for one in logs],
    }


def main() -> int:
    """Train a job; the exit code of the tool if it failed."""
    _, file = sys.argv[1:]
    job = Job(**json.loads(Path(file).read_text(encoding="utf-8")))
    try:
        result = train(job)
    except subprocess.CalledProcessError as error:
        return max(1, int(error.returncode))  # a signal is negative
    write_atomically(Path(job.out, "result.json"), json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
