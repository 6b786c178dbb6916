"""Small runs of one architecture: config, data and model, for ``benchmarks.model_checks``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.model_zoo import TOKENIZER_DIR
from fctune.base.distributed import World
from fctune.config.loading import parse_config
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import prepare
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.training.setup import build_base, shard_and_load_

NUM_STEPS = 5
_NUM_ROWS = 24
_SEQ_LEN = 256


class Recorder:
    """Sink that keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def write(self, metrics: dict[str, Any]) -> None:
        """Append the loss of a step to ``losses``."""
        self.losses.append(float(metrics["loss"]))

    def close(self) -> None:
        """Do nothing, as losses are only kept in memory."""


def make_run(
    model: Path,
    output: Path,
    modules: Sequence[str] | str | None,
    is_packed: bool,
    rows: str = "synthetic:train:1",
    **changes: Any,
) -> RunConfig:
    """Return the config of a small run; ``modules`` get an adapter, None trains all weights."""
    raw: dict[str, Any] = {
        "output_dir": str(output),
        "model": {"path": str(model)},
        "precision": "fp32",
        "data": {
            "sources": [{"path": rows}],
            "validation_share": 0.0,
            "seq_len": _SEQ_LEN,
            "packed": is_packed,
        },
        "global_batch_size": 2 if is_packed else 4,
        "micro_batch_size": 1 if is_packed else 2,
        "max_steps": NUM_STEPS,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "lr_scheduler": {"name": "constant"},
        "clip_grad_norm": 1.0,
    }
    if modules is not None:
        raw["adapter"] = {"rank": 4, "alpha": 8, "dropout": 0.0, "modules": modules, "train_tokens": "off"}
    problems: list[str] = []
    config = parse_config(raw | changes, problems)
    assert config is not None, problems
    return config


def prepare_sets(root: Path) -> None:
    """Write the packed and the unpacked prepared set, which all architectures share, into a folder."""
    rows = root / "rows.jsonl"
    rows.write_text("".join(json.dumps(_make_row(number)) + "\n" for number in range(_NUM_ROWS)), encoding="utf-8")
    for is_packed in (True, False):
        config = make_run(TOKENIZER_DIR, root / "run", None, is_packed, str(rows))
        path = prepare(config.data, TOKENIZER_DIR, root / "sets").path
        (root / link_name(is_packed)).symlink_to(path)


def _make_row(number: int) -> dict[str, Any]:
    """Return a short row, a different one for each number; a pack holds a few of them."""
    name, town = f"get_{number}", "Bergen Oslo " * (1 + number % 4)
    tool = {"name": name, "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}
    call = {"name": name, "arguments": json.dumps({"town": town})}
    messages = [
        {"role": "user", "content": f"Find {town}"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
    ]
    return {"tools": [{"type": "function", "function": tool}], "messages": messages}


def link_name(is_packed: bool) -> str:
    """Return the name under which ``prepare_sets`` has written a set."""
    return "packed" if is_packed else "unpacked"


def load(config: RunConfig, world: World) -> tuple[CausalLM, Any]:
    """Build, shard and load the model of a run, as its recipe does."""
    model_dir = Path(config.model.path)
    model = build_base(config, model_dir, world)
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
    gradient_sync = shard_and_load_(model, config, model_dir, world)
    if config.adapter is not None:
        init_adapters_(model, config.seed)
    return model, gradient_sync
