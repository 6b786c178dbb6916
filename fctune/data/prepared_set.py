"""The prepared set: conversations as tokens on disk, written once, mapped by every rank.

A directory named by a fingerprint of all its inputs holds ``meta.json`` and flat arrays. It is written under another
name and renamed when whole, so a directory of that name is always complete; any change of an input makes a new one.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fctune.config.schema import DataConfig, RunConfig
from fctune.data.encoding import Counts, encode_sources
from fctune.data.packing import pack_best_fit
from fctune.data.sources.fingerprint import FileDigests, fingerprint_source
from fctune.errors import DataError
from fctune.files import staged_directory

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

# Part of every fingerprint: raise it when the meaning of the files or the making of tokens changes.
_VERSION = 2

_MAX_WEIGHTS = 256  # as codes are bytes
_ARRAYS: dict[str, Any] = {"tokens": np.int32, "codes": np.uint8, "offsets": np.int64, "digests": np.uint64}


@dataclass(frozen=True, slots=True)
class PreparedSet:
    """A prepared set, its arrays memory-mapped.

    ``tokens`` and ``codes`` are flat over conversations; conversation i is ``offsets[i]:offsets[i + 1]``. ``codes``
    index ``weights``, the distinct loss weights (code 0 is 0.0: not learnt). ``packs[split]`` are pairs of flat members
    and their offsets.
    """

    path: Path
    fingerprint: str
    inputs: dict[str, Any]
    seq_len: int
    is_packed: bool
    counts: Counts
    weights: NDArray[np.float32]
    tokens: NDArray[np.int32]
    codes: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint64]
    packs: dict[Split, tuple[NDArray[np.int64], NDArray[np.int64]]] = field(repr=False)

    def describe(self) -> dict[str, Any]:
        """Where the set lies and what it was made from, for a run's record."""
        return {"path": str(self.path), "fingerprint": self.fingerprint, "inputs": self.inputs}

    def num_packs(self, split: Split) -> int:
        """Packs of a split; unpacked, a pack is one conversation."""
        return len(self.packs[split][1]) - 1

    def let_go(self) -> None:
        """Take the tokens that were read out of this process's memory; the system's cache keeps them.

        Without it a rank's resident memory grows with the dataset, as pages are mapped and never unmapped.
        """
        for flat in (self.tokens, self.codes):
            mapped = getattr(flat.base, "obj", None)  # numpy holds a view of the map
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def members(self, split: Split, pack: int) -> list[int]:
        """The conversations of a pack, in order."""
        flat, offsets = self.packs[split]
        return [int(i) for i in flat[offsets[pack] : offsets[pack + 1]]]


def fingerprint_inputs(
    config: DataConfig, model_dir: Path, digests: FileDigests | None = None
) -> tuple[str, dict[str, Any]]:
    """Name of the set that these inputs make, and the inputs by name (what a mismatch is explained with).

    Rows, tokenizer and template enter by content, so a file edited in place is another input.
    """
    digests = digests or FileDigests()
    inputs: dict[str, Any] = {
        "version": _VERSION,
        "sources": [
            {"path": s.path, "format": s.format, "weight": s.weight, "content": fingerprint_source(s.path, digests)}
            for s in config.sources
        ],
        "tokenizer": {
            name: digests.digest(model_dir / name)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
            if (model_dir / name).is_file()
        },
    }
    names = (
        "validation_share",
        "max_samples",
        "seq_len",
        "packed",
        "train_on",
        "call_weight",
        "on_invalid",
        "overlong",
    )
    inputs |= {name: getattr(config, name) for name in (*names, "parallel_calls")}
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), inputs


def prepare(
    config: DataConfig, model_dir: Path, root: Path, on_progress: Callable[[Counts], None] | None = None
) -> PreparedSet:
    """The set for these inputs: opened where it exists under ``root``, else made.

    Raises:
        DataError: rows that cannot be used (with ``on_invalid: fail``), nothing left to train on, no room to write.
    """
    digests = FileDigests(root / "file_digests.json")
    name, inputs = fingerprint_inputs(config, model_dir, digests)
    path = root / name
    if not (path / "meta.json").is_file():
        try:
            with staged_directory(path, suffix=str(os.getpid())) as staging:
                _write(config, model_dir, staging, name, inputs, on_progress)
        except OSError as error:
            raise DataError(
                f"{root}: cannot write the prepared set ({error.strerror or error}). "
                "Make room there, or name another place with data.prepared_dir."
            ) from None
    digests.keep()
    return open_prepared(path)


def open_prepared(path: Path) -> PreparedSet:
    """A complete prepared set, mapped read-only.

    Raises:
        DataError: when a file is missing or shorter than ``meta.json`` says.
    """
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: _map(path / f"{name}.bin", dtype, meta["sizes"][name]) for name, dtype in _ARRAYS.items()}
        packs = {
            split: tuple(
                _map(path / f"{split}_{n}.bin", np.int64, meta["sizes"][f"{split}_{n}"]) for n in ("packs", "ends")
            )
            for split in SPLITS
        }
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: damaged prepared set ({error}). Delete the directory; it is made again.") from None
    return PreparedSet(
        path=path,
        fingerprint=meta["fingerprint"],
        inputs=meta["inputs"],
        seq_len=meta["inputs"]["seq_len"],
        is_packed=meta["inputs"]["packed"],
        counts=Counts(**meta["counts"]),
        weights=np.asarray(meta["weights"], dtype=np.float32),
        packs=packs,  # type: ignore[arg-type]
        **arrays,
    )


def prepared_root(config: RunConfig) -> Path:
    """Where the prepared sets of a run are kept."""
    data = config.data
    return Path(data.prepared_dir) if data.prepared_dir else Path(config.output_dir).parent / "prepared"


def describe_counts(prepared: PreparedSet) -> list[str]:
    """What became of the rows, a line for each thing worth saying."""
    counts = prepared.counts
    lines = [
        f"{counts.conversations:,} conversations of {counts.rows:,} rows, {counts.tokens:,} tokens, "
        f"{counts.supervised / counts.tokens:.0%} of them learnt ({prepared.path})"
    ]
    if prepared.is_packed:
        flat, _ = prepared.packs["train"]
        real = int((prepared.offsets[flat + 1] - prepared.offsets[flat]).sum())
        num_packs = prepared.num_packs("train")
        share = real / (num_packs * prepared.seq_len)
        lines.append(f"{num_packs:,} packs of {prepared.seq_len:,} tokens, {share:.1%} of them real")
    for count, what in (
        (counts.invalid, "rows skipped as invalid"),
        (counts.overlong, f"conversations dropped, longer than {prepared.seq_len:,} tokens"),
        (counts.cut, f"conversations cut to {prepared.seq_len:,} tokens"),
        (counts.unsupervised, "conversations dropped, nothing to learn under data.train_on and their weights"),
    ):
        if count:
            lines.append(f"{count:,} {what}")
    return lines


def is_validation(digests: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Which conversations are in the validation split: by their hash, so that equal rows never fall on both sides."""
    is_held_out: NDArray[np.bool_] = digests >> np.uint64(32) < share * 2**32
    return is_held_out


# --- writing --------------------------------------------------------------------------------------------------------


def _write(
    config: DataConfig,
    model_dir: Path,
    path: Path,
    name: str,
    inputs: dict[str, Any],
    on_progress: Callable[[Counts], None] | None,
) -> None:
    counts = Counts()
    weights = np.zeros(1, dtype=np.float32)  # the distinct loss weights; the first is 0.0
    lengths, digests = array("q"), array("Q")
    members: dict[Split, array[int]] = {"train": array("q"), "validation": array("q")}
    with open(path / "tokens.bin", "wb") as tokens_file, open(path / "codes.bin", "wb") as codes_file:
        for part in encode_sources(config, model_dir, counts):
            tokens_file.write(part.tokens.data)  # numpy's tofile does not say why it fails
            weights, codes = _code(part.weights, weights)
            codes_file.write(codes.data)
            numbers = np.arange(len(lengths), len(lengths) + len(part.lengths))
            is_held_out = is_validation(part.digests, config.validation_share)
            members["train"].frombytes(np.repeat(numbers, part.repeats * ~is_held_out).tobytes())
            members["validation"].frombytes(numbers[is_held_out].tobytes())
            lengths.frombytes(part.lengths.tobytes())
            digests.frombytes(part.digests.tobytes())
            if on_progress is not None:
                on_progress(counts)
        for file in (tokens_file, codes_file):
            file.flush()
            os.fsync(file.fileno())
    if not members["train"]:
        raise DataError(_explain_nothing_left(counts, config))
    arrays: dict[str, NDArray[Any]] = {
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "digests": np.asarray(digests, dtype=np.uint64),
    }
    sizes = dict.fromkeys(("tokens", "codes"), int(arrays["offsets"][-1]))
    for split, indices in members.items():
        flat, ends = _lay_out_packs(np.asarray(indices, dtype=np.int64), np.asarray(lengths), config)
        arrays[f"{split}_packs"], arrays[f"{split}_ends"] = flat, ends
    for array_name, values in arrays.items():
        (path / f"{array_name}.bin").write_bytes(values.data)
        sizes[array_name] = len(values)
    meta = {
        "fingerprint": name,
        "inputs": inputs,
        "counts": asdict(counts),
        "weights": [float(weight) for weight in weights],
        "sizes": sizes,
    }
    (path / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _code(values: NDArray[np.float32], known: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The known weights with those of ``values`` that are new after them, and each value's place among them."""
    known = np.concatenate([known, np.setdiff1d(values, known)])
    if len(known) > _MAX_WEIGHTS:
        raise DataError(
            f"over {_MAX_WEIGHTS} different loss weights (message weights times data.call_weight). "
            "Round the weights in the rows, to 0.01 or so."
        )
    order = np.argsort(known)
    return known, order[np.searchsorted(known, values, sorter=order)].astype(np.uint8)


def _lay_out_packs(
    indices: NDArray[np.int64], lengths: NDArray[np.int64], config: DataConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Flat members of the packs of a split, and their offsets."""
    if not config.packed:
        return indices, np.arange(len(indices) + 1)
    packs = pack_best_fit(lengths[indices], config.seq_len)
    flat = np.fromiter((i for pack in packs for i in pack), dtype=np.int64, count=len(indices))
    ends = np.cumsum([0, *(len(pack) for pack in packs)], dtype=np.int64)
    return indices[flat], ends


def _explain_nothing_left(counts: Counts, config: DataConfig) -> str:
    losses = [
        f"{count:,} {what}"
        for count, what in (
            (counts.invalid, "invalid"),
            (counts.overlong, f"longer than data.seq_len={config.seq_len}"),
            (counts.unsupervised, f"with nothing to learn under data.train_on={config.train_on}"),
            (counts.conversations, f"in the validation split (data.validation_share={config.validation_share})"),
        )
        if count
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
