"""Size of an epoch: counted in the prepared set if there is one, else estimated from command-line options."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fctune.base.errors import ConfigError
from fctune.config.cache import prepared_root
from fctune.config.intervals import format_count
from fctune.config.run_length import RunLength
from fctune.config.schema import RunConfig
from fctune.data.chosen_template import read_chosen_template
from fctune.data.chunk_encoder import list_sources
from fctune.data.fingerprint import FileDigests, describe_rows, drop_contents, fingerprint_inputs
from fctune.data.loader import ROW_MULTIPLE, deal_rows, shuffled
from fctune.data.prepared_set import PreparedSet, open_prepared, resolve_batch_size
from fctune.data.sources.reader import list_files

# Assumed share of packed positions that hold a token, and of tokens that are supervised, without a prepared set. The
# first is what best-fit packing reaches on conversations much shorter than a pack; the second is common in
# function-calling data.
_PACKED_SHARE = 0.98
_SUPERVISED_SHARE = 0.25

_MAX_READ_BYTES = 2**30  # read in seconds, to find the set of files that were moved


@dataclass(frozen=True, slots=True)
class DataSize:
    """Size of one epoch of the training split."""

    packs: int
    rows: int
    tokens: int
    slots: int  # computed positions, including padding
    supervised: int  # tokens
    pairs: int  # pairs of a token and a token it attends to, including itself
    source: str  # where the numbers come from
    is_prepared: bool = False  # counted in a prepared set

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that are padding."""
        return 1 - self.tokens / self.slots


def measure_data(
    config: RunConfig, model_dir: Path | None, rows: int | None, mean_tokens: float | None, world_size: int = 1
) -> DataSize | None:
    """Measure the epoch of a run; None if there is no prepared set and no size was given.

    Args:
        config: Config of the run.
        model_dir: Directory of the model, whose tokenizer identifies the prepared set; None if it is not available.
        rows: Number of rows given by the user.
        mean_tokens: Mean tokens per row given by the user.
        world_size: Number of ranks, which determines the padding of unpacked rows.

    Raises:
        ConfigError: Only one of ``rows`` and ``mean_tokens`` is given, or one is out of range.
        DataError: The prepared set is damaged.
    """
    if (rows is None) != (mean_tokens is None):
        missing = "--mean-tokens" if mean_tokens is None else "--rows"
        raise ConfigError(f"{missing}: missing; --rows and --mean-tokens must be given together.")
    if rows is not None and mean_tokens is not None:
        return _estimate(config, rows, mean_tokens)
    found = find_prepared(config, model_dir)
    return None if found is None else _count_prepared(config, *found, world_size)


def count_steps(config: RunConfig, packs: int, rows: int | None = None) -> int:
    """Return the optimizer steps of a run without its own answers whose training split has so many packs.

    A distillation counts rows instead, and needs them.
    """
    if config.distill is None:
        steps = config.epochs * math.ceil(packs / config.global_batch_size)
    else:
        assert rows is not None
        steps = config.epochs * math.ceil(rows / config.distill.rows_per_step)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def find_run_length(config: RunConfig) -> RunLength | None:
    """Return the length of a run, counted in its prepared set or bounded by its rows; None if neither is known.

    Cases that a run answers are not counted.

    Raises:
        DataError: The prepared set is damaged.
    """
    if config.rollouts is not None:
        return None
    found = find_prepared(config, None)
    if found is not None:
        prepared, _ = found
        config = resolve_batch_size(config, prepared.num_tokens("train"), prepared.num_packs("train"))
        packs, has_validation = prepared.num_packs("train"), prepared.num_packs("validation") > 0
        rows = len(prepared.packs["train"][0])
    elif config.data.max_samples is not None and config.global_batch_tokens is None:
        # A pack holds one row or more.
        packs, has_validation = max(1, config.data.max_samples * len(config.data.sources)), True
        rows = packs
    else:
        return None
    steps = count_steps(config, packs, rows)
    return RunLength(steps, packs, is_upper_bound=found is None, has_validation=has_validation)


def find_prepared(config: RunConfig, model_dir: Path | None) -> tuple[PreparedSet, str] | None:
    """Find the prepared set of a config, with a phrase that says how certain the match is; None if there is none.

    Raises:
        DataError: The set is damaged.
    """
    found = find_set(config, model_dir) if isinstance(config.data.seq_len, int) else None
    return None if found is None else (open_prepared(found[0]), found[1])


def find_set(config: RunConfig, model_dir: Path | None) -> tuple[Path, str] | None:
    """Find the directory of a prepared set; see ``find_prepared``.

    A set's name is the fingerprint of all its inputs, including the model's tokenizer. Without the tokenizer, the
    newest set with the same settings is taken.
    """
    root = prepared_root(config)
    sets = sorted(root.glob("*/meta.json"))
    candidates = [meta for meta in sets if _has_same_settings(config, meta)]
    if model_dir is not None and (model_dir / "tokenizer.json").is_file():
        # Uses the digests stored by the preparation, so that data files are not read again.
        digests = FileDigests(root / "file_digests.json")
        if not candidates:  # the files may have been moved
            candidates = [meta for meta in sets if _has_same_settings(config, meta, is_anywhere=True)]
            if not candidates or _count_unread(config, digests) > _MAX_READ_BYTES:
                return None
        chosen = read_chosen_template(config.model)
        name, _ = fingerprint_inputs(config.data, model_dir, digests, config.model.template_args, chosen)
        return (root / name, "counted in") if (root / name / "meta.json").is_file() else None
    if not candidates:
        return None
    newest = max(candidates, key=lambda meta: meta.stat().st_mtime).parent
    return newest, "counted, without the model's tokenizer to confirm the match, in"


def _count_unread(config: RunConfig, digests: FileDigests) -> int:
    """Return the bytes of a run's rows in files whose digests are not stored."""
    paths = [source.path for source in list_sources(config.data)]
    local = [path for path in paths if not path.startswith(("hf:", "synthetic:"))]
    files = [file for path in local for file in list_files(path)]
    return sum(Path(file).stat().st_size for file in files if not digests.has(file))


def _has_same_settings(config: RunConfig, meta: Path, is_anywhere: bool = False) -> bool:
    """Return True if a set was made with a config's settings; ``is_anywhere`` leaves out the paths of its sources."""
    left_out = ("content", "path") if is_anywhere else ("content",)
    try:
        inputs = json.loads(meta.read_text(encoding="utf-8"))["inputs"]
        rows = {key: inputs[key] for key in ("sources", "augment", "replay") if key in inputs}
        prepared = drop_contents(rows, left_out)
        if "redact" in inputs.get("secrets", {}):
            prepared["secrets"] = {"redact": inputs["secrets"]["redact"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    configured = json.loads(json.dumps(drop_contents(describe_rows(config.data, None), left_out)))
    data = asdict(config.data)
    return bool(prepared == configured) and all(
        data[name] == value
        for name, value in inputs.items()
        if name in data and name not in configured and name != "secrets"
    )


def _count_prepared(config: RunConfig, prepared: PreparedSet, how: str, world_size: int) -> DataSize:
    flat, _ = prepared.packs["train"]
    lengths = (prepared.offsets[flat + 1] - prepared.offsets[flat]).astype("int64")
    tokens, packs = int(lengths.sum()), prepared.num_packs("train")
    is_constant = prepared.is_packed or config.data.pad_to == "seq_len"
    slots = packs * prepared.seq_len if is_constant else _count_unpacked(lengths, config, world_size)
    share = prepared.counts.supervised / max(1, prepared.counts.tokens)
    return DataSize(
        packs,
        len(flat),
        tokens,
        max(slots, tokens),
        int(share * tokens),
        int((lengths * (lengths + 1) // 2).sum()),
        f"{how} {prepared.path}",
        is_prepared=True,
    )


def _count_unpacked(lengths: NDArray[np.int64], config: RunConfig, world_size: int) -> int:
    """Count the positions of the first epoch, with each row padded to about the longest of its micro-batch.

    Rows are dealt to ranks as by the loader, longest first, for which their length is cost enough here. A micro-batch
    whose size is not chosen yet counts as one row.
    """
    batch = config.global_batch_size
    size = config.micro_batch_size if isinstance(config.micro_batch_size, int) else 1
    shuffled_lengths = lengths[shuffled(len(lengths), config.seed, 0)]
    slots = 0
    for start in range(0, len(lengths), batch):
        step: list[int] = shuffled_lengths[start : start + batch].tolist()
        for rows in deal_rows(step, world_size):
            for first in range(0, len(rows), size):
                longest = math.ceil(step[rows[first]] / ROW_MULTIPLE) * ROW_MULTIPLE
                slots += min(longest, config.data.row_tokens) * len(rows[first : first + size])
    return slots


def _estimate(config: RunConfig, rows: int, mean_tokens: float) -> DataSize:
    data = config.data
    if rows < 1:
        raise ConfigError(f"--rows {rows}: expected 1 or more.")
    if not 1 <= mean_tokens <= data.row_tokens:
        raise ConfigError(
            f"--mean-tokens {mean_tokens:g}: expected 1 to data.seq_len={data.row_tokens}; longer rows are dropped."
        )
    read = rows if data.max_samples is None else min(rows, data.max_samples * len(data.sources))
    kept = max(1, round(read * (1 - data.validation_share)))
    tokens = int(kept * mean_tokens)
    packs = math.ceil(tokens / (data.row_tokens * _PACKED_SHARE)) if data.packed else kept
    slots = packs * data.row_tokens if data.packed or data.pad_to == "seq_len" else tokens
    described = (
        f"given: {format_count(rows, 'row')} of {mean_tokens:g} tokens, {_SUPERVISED_SHARE:.0%} supervised (assumed)"
    )
    described += f", packs {_PACKED_SHARE:.0%} full (assumed)" if data.packed else ""
    described += "" if slots > tokens else ", padding unknown"
    pairs = int(tokens * (mean_tokens + 1) / 2)
    return DataSize(packs, kept, tokens, max(slots, tokens), int(_SUPERVISED_SHARE * tokens), pairs, described)
