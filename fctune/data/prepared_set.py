"""Prepared sets: tokenised conversations on disk, written once and memory-mapped by every rank.

A directory named by a fingerprint of all its inputs holds ``meta.json`` and flat arrays. It is renamed to that name at
the end, so a directory of that name is always complete; any change of an input makes a new one.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import socket
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fctune.base.errors import DataError
from fctune.base.files import hold_lock, is_in_use, mark_in_use, staged_directory
from fctune.config.intervals import format_count, format_share, parse_share
from fctune.config.schema import RunConfig
from fctune.config.sections.data import DataConfig
from fctune.data.augment.augmenter import AugmentCounts, KindCounts
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.chunk_encoder import Counts, SourceRows, list_sources
from fctune.data.encoding import encode_sources
from fctune.data.fingerprint import FileDigests, fingerprint_inputs
from fctune.data.packing import pack_best_fit
from fctune.data.secrets import SecretCounts
from fctune.data.sources import LEFT_OUT_KINDS, Selection
from fctune.data.sources.row_formats.registry import describe_unread
from fctune.data.sources.unmatched import require_selected

logger = logging.getLogger("fctune")

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

_MIN_TO_HOLD_OUT = 20  # fewer conversations are all trained on if validation_share holds none out
_MAX_WEIGHTS = 256  # codes are bytes
_CHUNK_TOKENS = 4 * 1024**2  # bounds the memory of a pass over all tokens
_ARRAYS: dict[str, Any] = {"tokens": np.int32, "codes": np.uint8, "offsets": np.int64, "digests": np.uint64}


@dataclass(frozen=True, slots=True)
class PreparedSet:
    """A prepared set with memory-mapped arrays.

    ``tokens`` and ``codes`` are flat over samples; sample i is ``offsets[i]:offsets[i + 1]``. ``codes`` index
    ``weights``, the distinct loss weights (code 0 is 0.0: not supervised). ``digests`` are those of the samples'
    conversations. ``packs[split]`` are the samples of all packs, flat, and the offsets of the packs. In a set of
    preference pairs, samples 2i and 2i + 1 are the chosen and the rejected answer of pair i, which share a pack. In a
    set with augmented or replayed rows, ``kinds`` are the bits of each sample (``chunk_encoder.KIND_BITS``), and the
    digest of a changed or added row is that of the row that it was made of; ``augmented`` has the counts of each kind.
    ``secrets`` are the places with secrets, by kind.
    """

    path: Path
    fingerprint: str
    inputs: dict[str, Any]
    seq_len: int
    is_packed: bool
    is_paired: bool
    counts: Counts
    weights: NDArray[np.float32]
    tokens: NDArray[np.int32]
    codes: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint64]
    packs: dict[Split, tuple[NDArray[np.int64], NDArray[np.int64]]] = field(repr=False)
    sources: tuple[SourceRows, ...] = ()
    kinds: NDArray[np.uint16] | None = None
    augmented: AugmentCounts = field(default_factory=dict)
    secrets: SecretCounts = field(default_factory=SecretCounts)

    def describe(self) -> dict[str, Any]:
        """Return the set's path, fingerprint and inputs for a run's record, and its rows of benchmarks, if any.

        ``skipped`` lists the sources with rows that were skipped as invalid; ``augmented`` has the counts of each kind
        of augmentation, ``replayed`` the number of replayed conversations, and ``secrets`` the places with secrets by
        kind, and if placeholders replace them.
        """
        described: dict[str, Any] = {"path": str(self.path), "fingerprint": self.fingerprint, "inputs": self.inputs}
        described |= {"benchmark_rows": self.counts.benchmark} if self.counts.benchmark else {}
        skipped = [asdict(source) | {"invalid": source.invalid} for source in self.sources if source.kinds]
        described |= {"skipped": skipped} if skipped else {}
        described |= {"replayed": self.counts.replayed} if self.counts.replayed else {}
        if self.secrets.kinds:
            described["secrets"] = self.secrets.to_json() | {"redacted": self.is_redacted}
        return described | ({"augmented": _dump_augmented(self.augmented)} if self.augmented else {})

    @property
    def is_redacted(self) -> bool:
        """True if placeholders replace the secrets that were found."""
        return "redact" in self.inputs.get("secrets", {})

    def num_packs(self, split: Split) -> int:
        """Return the number of packs of a split; unpacked, a pack is one conversation."""
        return len(self.packs[split][1]) - 1

    def num_tokens(self, split: Split) -> int:
        """Return the number of tokens of a split, without padding."""
        flat, _ = self.packs[split]
        return int((self.offsets[flat + 1] - self.offsets[flat]).sum())

    @property
    def max_pack_size(self) -> int:
        """Number of conversations in the fullest pack of all splits."""
        return max(int(np.diff(ends).max(initial=0)) for _, ends in self.packs.values())

    def release_pages(self) -> None:
        """Drop the pages that were read from this process's resident memory; they stay in the page cache.

        Without it a rank's resident memory grows to the size of the dataset.
        """
        for flat in (self.tokens, self.codes):
            mapped = getattr(flat.base, "obj", None)  # numpy holds a view of the mapping
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def members(self, split: Split, pack: int) -> list[int]:
        """Return the indices of a pack's conversations, in order."""
        flat, offsets = self.packs[split]
        return [int(i) for i in flat[offsets[pack] : offsets[pack + 1]]]


def prepare(
    config: DataConfig,
    model_dir: Path,
    root: Path,
    on_progress: Callable[[Counts], None] | None = None,
    template_args: dict[str, Any] | None = None,
    chat_template: ChosenTemplate | None = None,
) -> PreparedSet:
    """Open the set for these inputs under ``root``; write it first if it does not exist.

    Raises:
        DataError: Invalid rows (with ``on_invalid: fail``, or more than ``max_invalid_share`` of a source), nothing
            left to train on, or the set cannot be written.
    """
    digests = FileDigests(root / "file_digests.json")
    name, inputs = fingerprint_inputs(config, model_dir, digests, template_args, chat_template)
    path = root / name
    write_once(path, config, lambda folder: _write(config, model_dir, folder, name, inputs, on_progress, chat_template))
    digests.save()
    prepared = open_prepared(path)
    _check_invalid_share(prepared.sources, config.max_invalid_share)
    if config.secrets == "fail" and prepared.secrets.kinds:
        raise DataError(
            f"{', '.join(source.path for source in config.sources)}: {prepared.secrets.describe(False)}. `fctune data "
            "check` lists the places. Remove them, or set data.secrets=redact, which replaces them by placeholders."
        )
    return prepared


def write_once(path: Path, config: DataConfig, write: Callable[[Path], None]) -> None:
    """Have a directory of a config's rows written, unless it has a meta.json; of several processes, by one.

    Args:
        path: The directory, next to others of its kind.
        config: Names the sources.
        write: Writes a directory with a meta.json.

    Raises:
        DataError: It cannot be written.
    """
    try:
        if not (path / "meta.json").is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(f".{path.name}.lock")
            with hold_lock(lock, json.dumps(_describe_writer(config)), _warn_of_wait):
                if not (path / "meta.json").is_file():
                    # Containers that share a disk may have equal process IDs, and not see each other's locks.
                    with staged_directory(path, suffix=uuid.uuid4().hex[:8]) as staging:
                        write(staging)
    except OSError as error:
        raise DataError(
            f"{path.parent}: cannot write the prepared set ({error.strerror or error}). "
            "Free some space, or choose another directory with data.prepared_dir."
        ) from None
    os.utime(path)  # last use, for `fctune clean`


def find_writer(config: DataConfig, root: Path) -> str | None:
    """Return the host that is writing a set of the same sources under ``root``; None if none is seen."""
    for lock in sorted(root.glob(".*.lock")):
        if is_in_use(lock):
            try:
                writer = json.loads(lock.read_text(encoding="utf-8"))
            except (OSError, ValueError):  # it is just starting or ending
                continue
            if writer["sources"] == [source.path for source in config.sources]:
                return str(writer["host"])
    return None


def _describe_writer(config: DataConfig) -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "sources": [source.path for source in config.sources]}


def _warn_of_wait(writer: str) -> None:
    logger.warning("data: another process is preparing the same rows, and this one waits for it: %s", writer)


def _check_invalid_share(sources: Sequence[SourceRows], limit: float | str) -> None:
    """Check that no source lost more than a share of its rows, so that none vanishes unnoticed from a mixture."""
    lossy = [source for source in sources if source.invalid_share > parse_share(limit)]
    if not lossy:
        return
    lines = []
    for source in lossy:
        lines.append(f"{describe_skipped(source)}, over data.max_invalid_share={format_share(parse_share(limit))}:")
        lines += [f"  {line}" for line in source.describe_kinds()]
    enough = format_share(math.ceil(max(source.invalid_share for source in lossy) * 100 - 1e-9) / 100)
    lines.append(
        "`fctune data check` lists all of them. Fix the rows or remove the source; to train on the rest anyway, set "
        f"data.max_invalid_share={enough}."
    )
    raise DataError("\n".join(lines))


def describe_skipped(source: SourceRows) -> str:
    """Return the number and share of a source's rows that were skipped as invalid."""
    tried = source.sampled + source.unreadable
    rows = format_count(tried, "row") + (" that its weight selects" if tried < source.rows else "")
    return f"{source.path}: {source.invalid:,} of {rows} ({format_share(source.invalid_share)}) skipped as invalid"


def open_prepared(path: Path) -> PreparedSet:
    """Map a complete prepared set read-only, and keep it from ``fctune clean`` while this process lives.

    Raises:
        DataError: A file is missing or its size disagrees with ``meta.json``.
    """
    mark_in_use(path / "meta.json")
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: _map(path / f"{name}.bin", dtype, meta["sizes"][name]) for name, dtype in _ARRAYS.items()}
        kinds = _map(path / "kinds.bin", np.uint16, meta["sizes"]["kinds"]) if "kinds" in meta["sizes"] else None
        packs = {
            split: tuple(
                _map(path / f"{split}_{n}.bin", np.int64, meta["sizes"][f"{split}_{n}"]) for n in ("packs", "ends")
            )
            for split in SPLITS
        }
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: damaged prepared set ({error}). Delete the directory; it will be written again."
        ) from None
    return PreparedSet(
        path=path,
        fingerprint=meta["fingerprint"],
        inputs=meta["inputs"],
        seq_len=meta["inputs"]["seq_len"],
        is_packed=meta["inputs"]["packed"],
        is_paired=meta["inputs"].get("pairs", False),
        counts=Counts(**meta["counts"]),
        weights=np.asarray(meta["weights"], dtype=np.float32),
        packs=packs,  # type: ignore[arg-type]
        sources=tuple(SourceRows(**source) for source in meta.get("sources", ())),
        secrets=SecretCounts.from_json(meta.get("secrets", {})),
        augmented={kind: KindCounts.from_json(counts) for kind, counts in meta.get("augmented", {}).items()},
        kinds=kinds,
        **arrays,
    )


def resolve_batch_size(config: RunConfig, tokens: int, packs: int) -> RunConfig:
    """Return the config with the packs of a step that hold ``global_batch_tokens``; unchanged without that key."""
    if config.global_batch_tokens is None:
        return config
    return replace(config, global_batch_size=max(1, round(config.global_batch_tokens * packs / max(1, tokens))))


def list_tokens(prepared: PreparedSet) -> tuple[set[int], set[int]]:
    """Return the supervised tokens of a set, and all of its tokens."""
    is_supervised = prepared.weights > 0
    supervised: set[int] = set()
    present: set[int] = set()
    for start in range(0, len(prepared.tokens), _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        tokens = prepared.tokens[part]
        present.update(np.unique(tokens).tolist())
        supervised.update(np.unique(tokens[is_supervised[prepared.codes[part]]]).tolist())
    prepared.release_pages()
    return supervised, present


def describe_counts(prepared: PreparedSet) -> list[str]:
    """Summarise the rows that were kept, skipped and dropped, one line per nonzero count."""
    counts = prepared.counts
    kept = format_count(counts.conversations, "preference pair" if prepared.is_paired else "conversation")
    lines = [
        f"{kept} from {format_count(counts.rows, 'row')}, {format_count(counts.tokens, 'token')}, "
        f"{counts.supervised / counts.tokens:.0%} of them supervised ({prepared.path})"
    ]
    if not prepared.is_paired and counts.samples > counts.conversations - counts.split + counts.parts:
        lines.append(
            f"{counts.samples:,} samples: the chat template rewrites earlier turns, so turns are trained each with the "
            "history that the model will see"
        )
    if prepared.is_packed:
        num_packs = prepared.num_packs("train")
        filled = prepared.num_tokens("train") / (num_packs * prepared.seq_len)
        lines.append(f"{format_count(num_packs, 'pack')} of {prepared.seq_len:,} tokens, {filled:.1%} filled")
    num_held_out = len(prepared.packs["validation"][0])
    if prepared.inputs["validation_share"]:
        share = f"data.validation_share={prepared.inputs['validation_share']}"
        none = f"no conversation held out for validation ({share} of so few); validation loss is not measured"
        lines.append(f"{num_held_out:,} held out for validation ({share})" if num_held_out else none)
    if counts.folded or counts.left_out:
        lines += _describe_records(counts)
    for count, what in (
        (counts.overlong, f"dropped, longer than {prepared.seq_len:,} tokens"),
        (counts.cut, f"cut to {prepared.seq_len:,} tokens"),
        (counts.unsupervised, "dropped, without supervised tokens under data.train_on and weights"),
        (counts.benchmark, "marked as a benchmark's: the model must not be measured with it"),
    ):
        if count:
            lines.append(f"{format_count(count, 'conversation')} {what}")
    if counts.split:
        lost = f"; {format_count(counts.lost_turns, 'turn')} too long for any" if counts.lost_turns else ""
        lines.append(
            f"{format_count(counts.split, 'conversation')} divided into {counts.parts:,} parts of at most "
            f"{prepared.seq_len:,} tokens{lost}"
        )
    if prepared.augmented:
        made = f"{format_count(counts.changed, 'conversation')} changed and {counts.added:,} added by data.augment"
        shares = prepared.inputs["augment"]
        lines += [f"{made}:", *(f"  {c.describe(kind, shares[kind])}" for kind, c in prepared.augmented.items())]
    if counts.replayed:
        share = f"{format_share(prepared.inputs['replay']['share'])} of the training conversations"
        lines.append(f"{format_count(counts.replayed, 'conversation')} of data.replay, {share}")
    if prepared.secrets.kinds or prepared.secrets.searched:
        is_safe = prepared.is_redacted or not prepared.secrets.kinds
        hint = "" if is_safe else "; `fctune data check` lists the places, data.secrets=redact replaces them"
        lines.append(("" if is_safe else "warning: ") + prepared.secrets.describe(prepared.is_redacted) + hint)
        if unread := describe_unread(counts.unread_columns):
            lines[-1] += f"; {unread}"
    for source in prepared.sources:
        if source.kinds:
            lines += [f"{describe_skipped(source)}:", *(f"  {line}" for line in source.describe_kinds())]
    return lines


def _describe_records(counts: Counts) -> list[str]:
    """Describe how many records and parts of logs the rows are from, and why the others are none, each in a line."""
    num_left_out = counts.folded + counts.left_out
    num_records = format_count(counts.rows + num_left_out, "record")
    # Sets of earlier versions have no kinds.
    head = f"{num_records} read: {format_count(counts.rows, 'row')}, {num_left_out:,} left out"
    return [f"{head}:" if counts.left_out_kinds else head, *(f"  {line}" for line in _list_left_out(counts))]


def _list_left_out(counts: Counts) -> list[str]:
    kinds = sorted(counts.left_out_kinds.items(), key=lambda item: -item[1])
    return [f"{count:,} {LEFT_OUT_KINDS[kind]}" for kind, count in kinds]


def _dump_augmented(augmented: AugmentCounts) -> dict[str, Any]:
    return {kind: counts.to_json() for kind, counts in augmented.items()}


def is_validation(splits: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Return a mask of the conversations in the validation split, chosen by hash so that equal rows share a split."""
    is_held_out: NDArray[np.bool_] = splits >> np.uint64(32) < share * 2**32
    return is_held_out


def _write(
    config: DataConfig,
    model_dir: Path,
    path: Path,
    name: str,
    inputs: dict[str, Any],
    on_progress: Callable[[Counts], None] | None,
    chat_template: ChosenTemplate | None,
) -> None:
    counts = Counts()
    sources = [SourceRows(source.path) for source in list_sources(config)]
    augmented: AugmentCounts = {}
    secrets = SecretCounts()
    weights = np.zeros(1, dtype=np.float32)  # the distinct loss weights; the first is 0.0
    lengths, digests, splits, kinds, num_replayed = array("q"), array("Q"), array("Q"), array("H"), 0
    members: dict[Split, array[int]] = {"train": array("q"), "validation": array("q")}
    with open(path / "tokens.bin", "wb") as tokens_file, open(path / "codes.bin", "wb") as codes_file:
        switches = inputs["template_args"]
        for part in encode_sources(config, model_dir, counts, template_args=switches, chat_template=chat_template):
            sources[part.source].add(part)
            tokens_file.write(part.tokens.data)  # numpy's tofile does not report the cause of a failure
            weights, codes = _code(part.weights, weights)
            codes_file.write(codes.data)
            numbers = np.arange(len(lengths), len(lengths) + len(part.lengths))
            is_held_out = is_validation(part.splits, config.validation_share)
            size = 2 if config.pairs else 1  # samples that stay together
            repeats = (part.repeats * ~is_held_out)[::size]
            members["train"].frombytes(np.repeat(numbers.reshape(-1, size), repeats, axis=0).tobytes())
            members["validation"].frombytes(numbers[is_held_out].tobytes())
            lengths.frombytes(part.lengths.tobytes())
            digests.frombytes(part.digests.tobytes())
            splits.frombytes(part.splits.tobytes())
            kinds.frombytes(part.kinds.tobytes())
            num_replayed += len(part.lengths) if part.source >= len(config.sources) else 0
            for kind, count in part.augmented.items():
                augmented.setdefault(kind, KindCounts()).add(count)
            secrets.add(part.secrets)
            if on_progress is not None:
                on_progress(counts)
        for file in (tokens_file, codes_file):
            file.flush()
            os.fsync(file.fileno())
    if config.validation_share and not members["validation"]:
        _hold_out_one(members, np.asarray(splits, dtype=np.uint64), len(splits) - num_replayed)
    if not counts.rows:
        for source in config.sources:
            left_out, selection = Counter(counts.left_out_kinds), Selection.from_config(source)
            require_selected([source.path], left_out, source.format, source.columns, source.fold, selection)
    if not members["train"]:
        raise DataError(explain_no_rows(counts, config))
    arrays: dict[str, NDArray[Any]] = {
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "digests": np.asarray(digests, dtype=np.uint64),
    }
    if any(kinds):
        arrays["kinds"] = np.asarray(kinds, dtype=np.uint16)
    sizes = dict.fromkeys(("tokens", "codes"), int(arrays["offsets"][-1]))
    for split, indices in members.items():
        flat, ends = _pack(np.asarray(indices, dtype=np.int64), np.asarray(lengths), config)
        arrays[f"{split}_packs"], arrays[f"{split}_ends"] = flat, ends
    for array_name, values in arrays.items():
        (path / f"{array_name}.bin").write_bytes(values.data)
        sizes[array_name] = len(values)
    meta = {
        "fingerprint": name,
        "inputs": inputs,
        "counts": asdict(counts),
        "sources": [asdict(source) for source in sources],
        "augmented": _dump_augmented(augmented),
        "secrets": secrets.to_json(),
        "weights": [float(weight) for weight in weights],
        "sizes": sizes,
    }
    (path / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _hold_out_one(members: dict[Split, array[int]], splits: NDArray[np.uint64], num_own: int) -> None:
    """Move the conversation of the smallest digest to the validation split, in place, if there are 20 or more.

    The rows that were made of it move, too. Only the first ``num_own`` samples, which are not replayed, are considered.
    """
    if len(np.unique(splits[:num_own])) < _MIN_TO_HOLD_OUT:
        return
    is_held_out = splits == splits[:num_own].min()
    members["validation"].extend(int(index) for index in np.flatnonzero(is_held_out))
    members["train"][:] = array("q", (index for index in members["train"] if not is_held_out[index]))


def _code(values: NDArray[np.float32], known: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the known weights with the new ones of ``values`` appended, and the index of each value."""
    known = np.concatenate([known, np.setdiff1d(values, known)])
    if len(known) > _MAX_WEIGHTS:
        raise DataError(
            f"more than {_MAX_WEIGHTS} different loss weights (message weights times data.call_weight). "
            "Round the weights in the rows, for example to 0.01."
        )
    order = np.argsort(known)
    return known, order[np.searchsorted(known, values, sorter=order)].astype(np.uint8)


def _pack(
    indices: NDArray[np.int64], lengths: NDArray[np.int64], config: DataConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the conversations of a split's packs, flat, and the offsets of the packs."""
    if not config.packed:
        return indices, np.arange(len(indices) + 1)
    units = indices.reshape(-1, 2 if config.pairs else 1)  # samples that stay together
    packs = pack_best_fit(lengths[units].sum(axis=1), config.row_tokens)
    flat = np.fromiter((i for pack in packs for i in pack), dtype=np.int64, count=len(units))
    ends = np.cumsum([0, *(len(pack) * units.shape[1] for pack in packs)], dtype=np.int64)
    return units[flat].ravel(), ends


def explain_no_rows(counts: Counts, config: DataConfig) -> str:
    """Return an error message: how many rows were read, and why none is left to train on."""
    losses = [
        *_list_left_out(counts),
        *(
            f"{count:,} {what}"
            for count, what in (
                (counts.invalid, "invalid"),
                (counts.overlong, f"longer than data.seq_len={config.row_tokens}"),
                (counts.unsupervised, f"without supervised tokens under data.train_on={config.train_on}"),
                (counts.conversations, f"in the validation split (data.validation_share={config.validation_share})"),
            )
            if count
        ),
    ]
    paths = ", ".join(source.path for source in config.sources)
    return f"{paths}: no row to train on: {counts.rows:,} read, {'; '.join(losses) or 'none usable'}."


def _map(path: Path, dtype: Any, size: int) -> NDArray[Any]:
    if path.stat().st_size != size * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
    if not size:
        return np.zeros(0, dtype=dtype)
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)
