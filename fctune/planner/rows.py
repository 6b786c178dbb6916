"""How much there is to train on: counted in the prepared set where it is there, else said by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fctune.config import RunConfig
from fctune.data.prepared import PreparedSet, fingerprint_inputs, open_prepared, prepared_root
from fctune.errors import ConfigError, DataError

# Share of packed places that hold a token, and of tokens that are learnt, where nothing was counted. The first is what
# best-fit packing reaches on conversations much shorter than a pack; the second is common in function-calling data.
_PACKED_SHARE = 0.98
_SUPERVISED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Rows:
    """An epoch of the training split. ``pairs`` are of a token and one that it may look at, itself among them."""

    packs: int
    tokens: int
    slots: int  # places computed, padding among them
    supervised: int
    pairs: int
    source: str

    @property
    def padding_share(self) -> float:
        """Of the places computed."""
        return 1 - self.tokens / self.slots

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self) | {"padding_share": self.padding_share}


def count_rows(config: RunConfig, model_dir: Path | None, rows: int | None, mean_tokens: float | None) -> Rows | None:
    """What the run trains on an epoch; None where it is neither prepared nor said.

    Raises:
        ConfigError: half of what is needed by hand, or numbers that cannot be.
    """
    if (rows is None) != (mean_tokens is None):
        missing = "--mean-tokens" if mean_tokens is None else "--rows"
        raise ConfigError(f"{missing}: missing; --rows and --mean-tokens are given together.")
    if rows is not None and mean_tokens is not None:
        return _count_by_hand(config, rows, mean_tokens)
    found = find_prepared(config, model_dir)
    return None if found is None else _count_prepared(config, *found)


def find_prepared(config: RunConfig, model_dir: Path | None) -> tuple[PreparedSet, str] | None:
    """The prepared set of a config and how sure that is; rows on a hub are not fetched to compare their contents."""
    root = prepared_root(config)
    candidates = [file.parent for file in sorted(root.glob("*/meta.json")) if _is_alike(config, file)]
    if not candidates:
        return None
    is_remote = any(source.path.startswith("hf:") for source in config.data.sources)
    try:
        if model_dir is not None and not is_remote:
            name, _ = fingerprint_inputs(config.data, model_dir)
            return (open_prepared(root / name), "counted in") if root / name in candidates else None
        newest = max(candidates, key=lambda path: path.stat().st_mtime)
        return open_prepared(newest), "counted in (its rows were not compared with their source)"
    except (DataError, OSError):
        return None


def _is_alike(config: RunConfig, meta: Path) -> bool:
    try:
        inputs = json.loads(meta.read_text(encoding="utf-8"))["inputs"]
        said = [(source["path"], source["format"], source["weight"]) for source in inputs["sources"]]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    asked = [(source.path, source.format, source.weight) for source in config.data.sources]
    data = asdict(config.data)
    return said == asked and all(
        data[name] == value for name, value in inputs.items() if name in data and name != "sources"
    )


def _count_prepared(config: RunConfig, prepared: PreparedSet, how: str) -> Rows:
    flat, _ = prepared.packs["train"]
    lengths = (prepared.offsets[flat + 1] - prepared.offsets[flat]).astype("int64")
    tokens, packs = int(lengths.sum()), prepared.num_packs("train")
    is_constant = prepared.is_packed or config.data.pad_to == "seq_len"
    # Unpacked rows are as long as the longest of their micro-batch: expected of random draws without replacement.
    slots = packs * prepared.seq_len if is_constant else int(_mean_longest(lengths, config.micro_batch_size) * packs)
    share = prepared.counts.supervised / max(1, prepared.counts.tokens)
    return Rows(
        packs,
        tokens,
        max(slots, tokens),
        int(share * tokens),
        int((lengths * (lengths + 1) // 2).sum()),
        f"{how} {prepared.path}",
    )


def _mean_longest(lengths: Any, size: int) -> float:
    """Expected longest of ``size`` draws: sum over sorted lengths of P(all draws up to it) - P(all before it)."""
    ordered = sorted(int(length) for length in lengths)
    count = len(ordered)
    mean, before = 0.0, 0.0
    for place, length in enumerate(ordered, start=1):
        upto = (place / count) ** size
        mean += length * (upto - before)
        before = upto
    return mean


def _count_by_hand(config: RunConfig, rows: int, mean_tokens: float) -> Rows:
    data = config.data
    if rows < 1:
        raise ConfigError(f"--rows {rows}: expected 1 or more.")
    if not 1 <= mean_tokens <= data.seq_len:
        raise ConfigError(
            f"--mean-tokens {mean_tokens:g}: expected 1 to data.seq_len={data.seq_len}, as longer ones are not kept."
        )
    kept = rows * (1 - data.validation_share)
    if data.max_samples is not None:
        kept = min(kept, data.max_samples * len(data.sources) * (1 - data.validation_share))
    tokens = int(kept * mean_tokens)
    packs = math.ceil(tokens / (data.seq_len * _PACKED_SHARE)) if data.packed else math.ceil(kept)
    slots = packs * data.seq_len if data.packed or data.pad_to == "seq_len" else tokens
    described = f"by hand: {rows:,} rows of {mean_tokens:g} tokens, {_SUPERVISED_SHARE:.0%} of them learnt (assumed)"
    described += f", packs {_PACKED_SHARE:.0%} full (assumed)" if data.packed else ""
    described += "" if slots > tokens else ", padding not known"
    pairs = int(tokens * (mean_tokens + 1) / 2)
    return Rows(packs, tokens, max(slots, tokens), int(_SUPERVISED_SHARE * tokens), pairs, described)
