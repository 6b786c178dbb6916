"""Our attention within the conversations of packed rows, as transformers' models call it.

It is registered once, without a function for masks, so that transformers builds none. The bounds of the conversations
do not pass through the models' code, of which some drop arguments that they do not know: a block's wrapper sets them
while the block runs, in forward and in recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface

from fctune.base.errors import ConfigError
from fctune.models.architecture import AttentionLayer
from fctune.models.attention import DocumentBounds, attend, needs_flex

# Name of our attention among transformers' implementations.
ATTENTION = "fctune"


# Arguments that layers pass on although they describe no attention of ours: bounds of conversations in transformers'
# form, and what concerns their caches and outputs.
_UNUSED = frozenset(
    {
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch"),
        *("position_ids", "cache_position", "use_cache", "return_dict", "labels", "logits_to_keep", "deterministic"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "layer_idx"),
    }
)


class AttentionUse(NamedTuple):
    """How a layer attends.

    Attributes:
        module: Identity of the layer's module.
        layer: Sizes of the layer.
        needs_flex: The layer is beyond flash attention over variable-length rows.
    """

    module: int
    layer: AttentionLayer
    needs_flex: bool


class _Running:
    """State of the block that is running: the bounds of its batch, and a record of how layers attend, if kept."""

    bounds: DocumentBounds | None = None
    record: list[AttentionUse] | None = None


_RUNNING = _Running()


def run_block(
    block: nn.Module, forward: Callable[..., Any], *arguments: Any, bounds: DocumentBounds | None, **options: Any
) -> Any:
    """Call a block's own forward with the bounds of its batch."""
    before = _RUNNING.bounds
    _RUNNING.bounds = bounds
    try:
        return forward(*arguments, **options)
    finally:
        _RUNNING.bounds = before


def running_bounds() -> DocumentBounds | None:
    """Return the bounds of the batch whose block is running; None: each row is one conversation."""
    return _RUNNING.bounds


@contextmanager
def recorded_attention() -> Iterator[list[AttentionUse]]:
    """Record how each layer attends, in their order, while the context is open; nothing is computed."""
    _RUNNING.record = []
    try:
        yield _RUNNING.record
    finally:
        _RUNNING.record = None


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for a layer of transformers, ``[b, h, s, d]`` to ``[b, s, h, v_d]``.

    Raises:
        ConfigError: Attention that is not causal or not to the row itself, or an argument that is not known.
    """
    if _RUNNING.record is not None:
        _check_layer(module, query, key, attention_mask, is_causal, options)
        is_flex = needs_flex(query, value, softcap, s_aux)
        size = (query.shape[-1] + value.shape[-1]) / 2
        layer = AttentionLayer(query.shape[1], key.shape[1], size, sliding_window or None)
        _RUNNING.record.append(AttentionUse(id(module), layer, is_flex))
        # Kernels of CUDA refuse meta tensors.
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    window, cap = sliding_window or None, softcap or None
    out = attend(q, k, v, _RUNNING.bounds, scale=scaling, window=window, softcap=cap, sinks=s_aux)
    return out.contiguous(), None  # some layers take a view of it


def _check_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    options: dict[str, Any],
) -> None:
    """Check that a layer asks for nothing that would be ignored.

    Raises:
        ConfigError: Names the layer and what it asks for.
    """
    layer = type(module).__name__
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal or key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"model.path: {layer} attends to later tokens or to another sequence, which fctune does not train; choose "
            "another model."
        )
    unknown = sorted(name for name, value in options.items() if value is not None and name not in _UNUSED)
    if attention_mask is not None or unknown:
        what = "a mask of its own" if attention_mask is not None else ", ".join(unknown)
        raise ConfigError(
            f"model.path: {layer} attends with {what}, which fctune's attention does not have; choose another model."
        )


AttentionInterface.register(ATTENTION, attend_packed)
