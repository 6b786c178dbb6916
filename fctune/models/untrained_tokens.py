"""Tokens whose embedding or head row was never trained, found from the weights alone.

Two signs, as in "Fishing for Magikarp" (https://arxiv.org/abs/2405.05417), with thresholds that are safe for a single
token:

- The row of an added token (a special token or marker) equals another token's. Tokens that never occur in pretraining
  all receive the same updates, so their rows converge on one direction: a distance under 0.14 of the norm, which is a
  cosine over 0.99. Rows of trained tokens are less alike: in Gemma 3 270M, the closest pair among 6,742 tokens of code,
  prose and tool calls has 0.971 (runs of 23 and 25 spaces), while its placeholders reach 1.000. Tokens of the
  tokenizer's own vocabulary occur in text, so only added ones are compared.
- The row's norm is far from the rest: beyond both Tukey's outer fence (three interquartile ranges of the log norms) and
  a factor of two from the median. The fence alone would flag rows of models whose norms are all nearly equal; the
  factor alone, rows of models whose norms vary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fctune.models.architecture import Architecture
from fctune.models.base_weights import plan_base, read_matrix

MAX_DISTANCE = 0.14  # between two rows that count as equal, as a share of the larger norm
_NUM_FENCES = 3.0  # interquartile ranges from a quartile to its outer fence
_MIN_FACTOR = 2.0  # between a norm that is far from the rest and the median

_CHUNK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class UntrainedToken:
    """A token with an untrained row.

    Attributes:
        id: The token.
        matrix: The first matrix that shows it.
        duplicate: Token whose row equals this one's; None if the norm shows it.
        factor: Norm of the row as a multiple of the median norm.
    """

    id: int
    matrix: Literal["embedding", "head"]
    duplicate: int | None
    factor: float


class Candidates(NamedTuple):
    """Tokens to look at. A head never trains the rows of tokens that are only read, such as the first of a text."""

    supervised: Set[int] = frozenset()  # must be written, so both matrices count
    context: Set[int] = frozenset()  # are read, so the embedding counts


def has_weights(model_dir: Path) -> bool:
    """Return True if a directory holds the weights of a model."""
    return any((model_dir / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def find_untrained(
    model_dir: Path, architecture: Architecture, candidates: Candidates, added: Collection[int]
) -> list[UntrainedToken]:
    """Find the untrained tokens among some, by their rows in the embedding and the head of a model directory.

    Reads both matrices once, a chunk at a time.

    Args:
        model_dir: Hugging Face directory with the weights.
        architecture: Shape of the model.
        candidates: Ids beyond the vocabulary are ignored.
        added: The tokenizer's added tokens; of these, rows are compared with all others.

    Raises:
        CheckpointError: A matrix is missing, or its file is damaged.
    """
    plan = plan_base(architecture, model_dir)
    found: dict[int, UntrainedToken] = {}
    for matrix, name in architecture.token_matrices.items():
        rows = read_matrix(plan, name)
        tokens = candidates.supervised | (candidates.context if matrix == "embedding" else frozenset())
        for token, (duplicate, factor) in find_untrained_rows(rows, tokens, added).items():
            found.setdefault(token, UntrainedToken(token, matrix, duplicate, factor))
    return [found[token] for token in sorted(found)]


@torch.no_grad()
def find_untrained_rows(
    rows: Tensor, candidates: Iterable[int], added: Collection[int]
) -> dict[int, tuple[int | None, float]]:
    """Find the untrained rows of one matrix.

    Args:
        rows: One row per token, ``[vocab, d]``.
        candidates: Rows to look at.
        added: Candidates to compare with every other row too.

    Returns:
        By candidate: the row that equals it, or None if its norm is far from the rest; and its norm over the median.
    """
    checked = sorted({i for i in candidates if 0 <= i < len(rows)})
    compared = torch.tensor([i for i in checked if i in added], dtype=torch.int64)
    norms, duplicates = _compare_rows(rows, compared)
    median = float(norms.median())
    low, high = _outer_fences(norms)
    found: dict[int, tuple[int | None, float]] = {}
    for token in checked:
        norm = float(norms[token])
        factor = norm / median if median else math.inf
        is_far = (norm < low and factor < 1 / _MIN_FACTOR) or (norm > high and factor > _MIN_FACTOR)
        if token in duplicates or is_far:
            found[token] = (duplicates.get(token), factor)
    return found


def _compare_rows(rows: Tensor, compared: Tensor) -> tuple[Tensor, dict[int, int]]:
    """Return the norm of every row ``[vocab]``, and of those to compare that equal another row, the nearest one."""
    own = rows[compared].float()
    own_norms = torch.linalg.vector_norm(own, dim=1)
    norms = torch.empty(len(rows))
    nearest, duplicates = torch.full((len(compared),), math.inf), torch.zeros(len(compared), dtype=torch.int64)
    for start in range(0, len(rows), _CHUNK_ROWS):
        part = rows[start : start + _CHUNK_ROWS].float()
        norms[start : start + len(part)] = torch.linalg.vector_norm(part, dim=1)
        if not len(compared):
            continue
        larger = torch.maximum(own_norms[:, None], norms[start : start + len(part)])
        squares = own_norms[:, None] ** 2 + norms[start : start + len(part)] ** 2 - 2 * own @ part.T
        distances = squares.clamp(min=0).sqrt() / larger.clamp(min=torch.finfo(larger.dtype).tiny)
        is_own = compared[:, None] == torch.arange(start, start + len(part))
        least, index = distances.masked_fill(is_own | (larger == 0), math.inf).min(dim=1)
        duplicates = torch.where(least < nearest, index + start, duplicates)
        nearest = torch.minimum(least, nearest)
    pairs = zip(compared.tolist(), duplicates.tolist(), (nearest <= MAX_DISTANCE).tolist(), strict=True)
    return norms, {token: duplicate for token, duplicate, is_equal in pairs if is_equal}


def _outer_fences(norms: Tensor) -> tuple[float, float]:
    """Return Tukey's outer fences of the norms, computed from their logarithms; rows of zeros are left out."""
    logs = norms[norms > 0].log()
    if not len(logs):
        return 0.0, math.inf
    # Not torch.quantile, which takes at most 16 million numbers.
    first, third = (float(logs.kthvalue(max(1, math.ceil(share * len(logs)))).values) for share in (0.25, 0.75))
    reach = _NUM_FENCES * (third - first)
    return math.exp(first - reach), math.exp(third + reach)
