"""Checks that a decoder's layers attend as its masks say, by one forward in which transformers describes its masks.

Our attention takes windows from the arguments of a layer. A family that puts its window, or a pattern of its own, into
the mask alone would be trained with the wrong attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionMaskInterface, masking_utils

from fctune.base.errors import ConfigError, one_line
from fctune.models.attention import make_bounds
from fctune.models.causal_lm import CausalLM
from fctune.models.transformers.architecture import TransformersArchitecture
from fctune.models.transformers.attention import ATTENTION, AttentionUse, recorded_attention

_NUM_TOKENS = 8


class AttentionFindings(NamedTuple):
    """Attention features of a model's layers.

    Attributes:
        uses: How the layers attend, in the order in which they do.
        warning: Why this could not be checked, so that ``uses`` is empty; None if it was.
    """

    uses: tuple[AttentionUse, ...]
    warning: str | None = None


# Function of a batch index, a head index, positions of queries and positions of keys: may the query see the key?
_Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def check_attention(
    model: CausalLM, decoder: Any, architecture: TransformersArchitecture, max_seq_len: int
) -> AttentionFindings:
    """Run a meta model's layers without weights, and return how they attend, or a warning if they need values to run.

    Raises:
        ConfigError: A layer attends in a way that our attention does not have, up to ``max_seq_len`` tokens.
    """
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    buffers = {f"decoder.{name}": buffer.to("meta") for name, buffer in decoder.named_buffers()}
    where, family = architecture.where, architecture.model_type
    call = {"positions": tokens, "bounds": make_bounds([[_NUM_TOKENS]], model.attention_kernel)}
    try:
        with torch.no_grad(), recorded_attention() as uses, _described_masks() as masks, _NoRandomness():
            functional_call(model.train(), buffers, (tokens,), call)
    except ConfigError:
        raise
    except _RandomnessError as error:
        raise ConfigError(
            f"{where}: model_type={family!r} draws random numbers while it trains ({error}), so its runs would depend "
            "on the number of ranks; choose another model."
        ) from None
    except RuntimeError as error:  # layers whose path depends on values cannot run on the meta device
        reason = one_line(error, 120)
        return AttentionFindings(
            (),
            f"layers of model_type={family!r} need values to run ({reason}), so their windows were not compared with "
            "their masks; before a long run, compare its first losses with transformers'",
        )
    except Exception as error:
        reason = one_line(error, 200)
        raise ConfigError(
            f"{where}: layers of model_type={family!r} fail as fctune calls them, without a mask "
            f"({type(error).__name__}: {reason}). Compare config.json with the published one, or choose another model."
        ) from None
    windows = {_shorten(use.layer.window, max_seq_len) for use in uses}
    chunk = getattr(decoder.config, "attention_chunk_size", None)
    if chunk is not None and max_seq_len > chunk:
        raise ConfigError(
            f"data.seq_len={max_seq_len}: layers of model_type={family!r} attend within chunks of {chunk} tokens, and "
            f"fctune trains within one chunk only; lower it to {chunk}, or choose another model."
        )
    meant = {None if chunk else _find_window(mask, max_seq_len, where) for mask in masks}
    if masks and not uses:
        raise ConfigError(
            f"{where}: model_type={family!r} computes attention with code of its own, so its conversations cannot be "
            "kept apart; choose another model."
        )
    kinds = getattr(decoder.config, "layer_types", None)
    is_missing = kinds is not None and "sliding_attention" in kinds and meant != {None} and windows == {None}
    if meant and (not windows <= meant or is_missing):
        shortest = min(window for window in meant | windows if window is not None)
        raise ConfigError(
            f"{where}: layers of model_type={family!r} see {_describe(windows)} tokens, but their masks show them "
            f"{_describe(meant)}; lower data.seq_len to {shortest}, or choose another model."
        )
    return AttentionFindings(tuple(uses))


class _RandomnessError(Exception):
    """A layer draws random numbers; the message is the name of the operation."""


class _NoRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops at operations that draw random numbers, except attention, which is tagged as one for its dropout."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags and "attention" not in function.__name__:
            raise _RandomnessError(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


@contextmanager
def _described_masks() -> Iterator[list[_Mask]]:
    """Collect the masks that transformers would make for our attention, while the context is open."""
    masks: list[_Mask] = []

    def describe(*arguments: Any, mask_function: _Mask, **options: Any) -> None:
        masks.append(mask_function)

    AttentionMaskInterface.register(ATTENTION, describe)
    find_conversations = masking_utils.find_packed_sequence_indices
    # It reads values of the positions, which meta tensors do not have.
    masking_utils.find_packed_sequence_indices = lambda positions: None
    try:
        yield masks
    finally:
        masking_utils.find_packed_sequence_indices = find_conversations
        # Without a function for masks, transformers makes none and does not look for conversations in positions.
        del AttentionMaskInterface._global_mapping[ATTENTION]


def _find_window(mask: _Mask, length: int, where: str) -> int | None:
    """Return the window of a mask, or None if its last queries in ``length`` tokens see all before them.

    Raises:
        ConfigError: The mask is not a window of the same size for each query.
    """
    zero, keys = torch.zeros((), dtype=torch.int64), torch.arange(length)
    found: list[int | None] = []
    for last in (length - 1, length - 2, length // 2):
        seen = mask(zero, zero, torch.tensor(last), keys).expand(length)
        count = max(1, int(seen.sum()))  # a window of 0 belongs to no layer
        if seen.any() and not torch.equal(seen, (keys <= last) & (keys > last - count)):
            raise ConfigError(f"{where}: a mask of this model is not a sliding window; choose another model.")
        if last == length - 1 or count <= last:
            found.append(count if count <= last else None)
    if len(set(found)) > 1:
        raise ConfigError(f"{where}: a mask of this model is not a sliding window; choose another model.")
    return found[0]


def _shorten(window: int | None, length: int) -> int | None:
    return window if window is not None and window < length else None


def _describe(windows: set[int | None]) -> str:
    return " or ".join(str(window or "all") for window in sorted(windows, key=lambda window: window or 0))
