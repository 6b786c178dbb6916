"""Causal attention within each conversation of a packed row, without a dense ``[s, s]`` mask.

The fastest kernel of the device is chosen once per run:

- ``varlen``: flash attention over variable-length rows, on CUDA in half precision;
- ``flex``: flex attention with a block mask, on CUDA otherwise;
- ``per_document``: one attention call per conversation, on CPU (10.5 ms instead of 141 ms with a dense mask: 2,048
  tokens in 8 conversations, forward and backward, 2 threads), and on CUDA in float64.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from fctune.base.errors import ConfigError, one_line
from fctune.models.context_exchange import WHOLE_ROWS, ContextGroup, count_repeats, to_heads, to_tokens
from fctune.models.document_attention import attend_per_document, pad_to_tile

AttentionKernel = Literal["varlen", "flex", "per_document"]
MakeBounds = Callable[[Sequence[Sequence[int]]], "DocumentBounds"]

_FLEX_BLOCK = 128  # tokens of a block of flex attention's masks: torch's default

# Package of FlashAttention 3.
_FLASH_3 = "flash_attn_interface"

# Largest head of flash attention.
_MAX_FLASH_HEAD = 256


@dataclass(frozen=True, slots=True)
class DocumentBounds:
    """Boundaries of the conversations in packed rows; the padding of a row counts as a conversation.

    Attributes:
        kernel: Kernel that the bounds are for.
        ends: Cumulative lengths over the flattened batch, starting with 0: int32 ``[conversations + 1]``; on the CPU
            for ``per_document``, else on the device of the queries.
        max_length: Upper bound of the conversations' lengths: the tokens of a row.
        shape: Rows of the batch, and tokens per row.
        host_ends: The same cumulative lengths, for layers that would otherwise wait for the device.
        windows: Sliding windows of the layers that use flex attention; None is a layer without one.
        block_masks: Masks of flex attention by window, on the device.
        derived: What layers make of the bounds once for a batch, by a name that includes its device.
        group: Ranks that each have an equal part of the tokens of these rows.
    """

    kernel: AttentionKernel
    ends: Tensor
    max_length: int
    shape: tuple[int, int]
    host_ends: tuple[int, ...]
    windows: tuple[int | None, ...] = ()
    block_masks: dict[int | None, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    group: ContextGroup = WHOLE_ROWS

    def pin(self) -> DocumentBounds:
        """Return a copy in pinned memory, from which copies to a CUDA device are asynchronous."""
        return self if self.kernel == "per_document" else replace(self, ends=self.ends.pin_memory())

    def to(self, device: torch.device) -> DocumentBounds:
        """Return a copy on the device of the queries, with the masks of flex attention."""
        if self.kernel == "per_document":
            return self
        ends = self.ends.to(device, non_blocking=True)
        return replace(self, ends=ends, block_masks={w: _block_mask(ends, self.shape, w) for w in self.windows})


def make_bounds(
    lengths: Sequence[Sequence[int]], kernel: AttentionKernel, windows: Sequence[int | None] | None = None
) -> DocumentBounds:
    """Return the bounds of rows whose conversations have these lengths.

    Args:
        lengths: Lengths by row; all rows have the same total. They may be zero: with as many lengths in every batch,
            the bounds of all batches have one shape.
        kernel: Kernel that the bounds are for.
        windows: Sliding windows of the layers that use flex attention; None: one layer kind without a window for
            ``flex``, and no layer for the other kernels.
    """
    if windows is None:
        windows = (None,) if kernel == "flex" else ()
    host_ends = tuple(itertools.accumulate((length for row in lengths for length in row), initial=0))
    ends, shape = torch.tensor(host_ends, dtype=torch.int32), (len(lengths), sum(lengths[0]))
    # Not the longest conversation of these rows, for each of which blocks would be compiled again.
    return DocumentBounds(kernel, ends, shape[1], shape, host_ends, tuple(windows))


def choose_attention_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None
) -> tuple[AttentionKernel, str]:
    """Return the fastest kernel for packed rows, and its description for the log.

    Args:
        device_type: ``cpu`` or ``cuda``.
        dtype: Dtype of the queries.
        head_dim: Size of a head.
        capability: CUDA compute capability; None on CPU.
    """
    if device_type != "cuda" or capability is None:
        return "per_document", "flash attention, one call per conversation"
    if dtype in (torch.bfloat16, torch.float16) and capability >= (8, 0) and head_dim <= _MAX_FLASH_HEAD:
        return "varlen", "flash attention over variable-length rows (varlen_attn)"
    if dtype is not torch.float64 and capability >= (7, 5) and head_dim >= 16:
        return "flex", "flex attention with a block mask"
    return "per_document", "one call per conversation"


def activate_flash_attention_3(capability: tuple[int, int] | None) -> bool:
    """Make torch's flash attention, varlen included, that of FlashAttention 3, where it can be.

    That takes a GPU of Hopper, the package ``flash_attn_interface``, whose wheels are not on PyPI, and a torch that
    takes it over.

    Returns:
        True if it is active now.

    Raises:
        ConfigError: The package is installed and cannot be used.
    """
    from torch.nn import attention

    activate = getattr(attention, "activate_flash_attention_impl", None)
    if capability is None or capability[0] != 9 or activate is None or find_spec(_FLASH_3) is None:
        return False
    try:
        activate("FA3")
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"{_FLASH_3} is installed, but torch {torch.__version__} cannot use it ({one_line(error, 200)}). Install "
            "one that was built for this torch, or uninstall it to train with torch's own flash attention."
        ) from None
    return True


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: DocumentBounds | None,
    implementation: Callable[..., Any] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within the conversations of packed rows.

    ``varlen`` has no soft caps, sinks or heads over 256, which go to flex attention. If the rows are split over ranks,
    s is this rank's part of their tokens, and every rank of the group calls this.

    Args:
        q: Queries, ``[b, s, h, d]``.
        k: Keys, ``[b, s, kv_h, d]``.
        v: Values, ``[b, s, kv_h, v_d]``.
        bounds: Ends of the conversations; without them, each row is one conversation, whose padding is at the end,
            where no real token attends to it.
        implementation: Replaces torch's function for ``varlen`` and ``flex``.
        scale: Factor on the scores; None is ``d ** -0.5``.
        window: Tokens that a token sees, itself included; None is all before it.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        sinks: Score of a key of each head that every token sees and whose value is zero, ``[h]``.

    Returns:
        ``[b, s, h, v_d]``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if bounds is None or bounds.group.size == 1:
        return _attend_to_rows(q, k, v, bounds, implementation, scale, window, softcap, sinks)
    group = bounds.group
    repeats = count_repeats(q.shape[2], k.shape[2], group.size)
    assert repeats is not None, "see check_context_parallelism"
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, 2) for t in (k, v))
    if sinks is not None:
        sinks = sinks.view(group.size, -1)[group.rank]
    q, k, v = (to_heads(t, group) for t in (q, k, v))
    out = _attend_to_rows(q, k, v, bounds, implementation, scale, window, softcap, sinks)
    return to_tokens(out, group)


def _attend_to_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: DocumentBounds | None,
    implementation: Callable[..., Any] | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend within whole rows; see ``attend``."""
    if bounds is None:
        return _attend_unpacked(q, k, v, scale, window, softcap, sinks)
    if bounds.kernel == "varlen" and not needs_flex(q, v, softcap, sinks):
        return _attend_by_varlen(q, k, v, bounds, implementation or _varlen(), scale, window)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if bounds.kernel == "per_document":
        out, _ = attend_per_document(q, k, v, bounds.ends, scale, window or 0, softcap or 0.0, sinks)
    else:
        out = _attend_by_flex(q, k, v, bounds, implementation or _flex(), scale, window, softcap, sinks)
    packed: Tensor = out.transpose(1, 2)
    return packed


def needs_flex(q: Tensor, v: Tensor, softcap: float | None, sinks: Tensor | None) -> bool:
    """Return whether a layer with these heads and scores is beyond flash attention over variable-length rows."""
    return bool(softcap) or sinks is not None or max(q.shape[-1], v.shape[-1]) > _MAX_FLASH_HEAD


def _attend_unpacked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend within each row, ``[b, s, h, d]``."""
    length = q.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    is_plain = not softcap and sinks is None and (window is None or length <= window)
    if not is_plain or q.shape[-1] != v.shape[-1]:
        ends = torch.arange(0, (len(q) + 1) * length, length, dtype=torch.int32)
        out, _ = attend_per_document(q, k, v, ends, scale, window or 0, softcap or 0.0, sinks)
        unpacked: Tensor = out.transpose(1, 2)
        return unpacked
    if q.device.type == "cpu":
        q, k, v = (pad_to_tile(t) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    enable_gqa = k.shape[1] < q.shape[1]
    attended: Tensor = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa, scale=scale)
    return attended[:, :, :length].transpose(1, 2)


def _attend_by_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: DocumentBounds,
    implementation: Callable[..., Any],
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend by flash attention over variable-length rows; heads are padded to one size, a multiple of 8."""
    width, length = v.shape[-1], max(q.shape[-1], v.shape[-1])
    length += -length % 8
    flat = [pad(t, (0, length - t.shape[-1])) if t.shape[-1] < length else t for t in (q, k, v)]
    out: Tensor = implementation(
        *(t.flatten(0, 1) for t in flat),
        bounds.ends,
        bounds.ends,
        bounds.max_length,
        bounds.max_length,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return out[..., :width].view(*q.shape[:3], width)


# Torch's own choice for heads of 512 in 16 bits, three stages, needs more shared memory than an H100 has.
_WIDE_HEADS = {"fwd_num_stages": 1, "fwd_num_warps": 8}


def _attend_by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: DocumentBounds,
    implementation: Callable[..., Any],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend by flex attention, ``[b, h, s, d]``; sinks take their share from the log-sum-exp of the other scores."""
    from torch.nn.attention.flex_attention import AuxRequest

    def cap(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap  # type: ignore[operator]

    mask = bounds.block_masks.get(window)
    if mask is None:
        mask = _block_mask(bounds.ends, bounds.shape, window)
        bounds.block_masks[window] = mask
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": k.shape[1] < q.shape[1]}
    options |= {"score_mod": cap} if softcap else {}
    if q.shape[-1] > 256 and q.is_cuda and q.element_size() < 4:
        options["kernel_options"] = _WIDE_HEADS
    if sinks is None:
        out: Tensor = implementation(q, k, v, **options)
        return out
    found, aux = implementation(q, k, v, **options, return_aux=AuxRequest(lse=True))
    shares = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
    taken: Tensor = found * shares[..., None].to(found.dtype)
    return taken


@functools.cache
def _varlen() -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    # Since torch 2.12; 2.11 always allows fewer key heads.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    chosen: Any = functools.partial(varlen_attn, **options)
    return chosen  # type: ignore[no-any-return]


@functools.cache
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def _block_mask(ends: Tensor, shape: tuple[int, int], window: int | None = None) -> Any:
    """Return the flex attention mask for conversations that end at ``ends``, and a sliding window.

    Whether a block of keys is seen by a block of queries follows from the tokens at their corners, because
    conversations are contiguous. torch's ``create_block_mask`` evaluates every pair of tokens: for one row of 65,536,
    differences of positions alone take 34 GB.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_rows, length = shape
    positions = torch.arange(num_rows * length, device=ends.device, dtype=ends.dtype)
    document = torch.searchsorted(ends, positions, right=True).view(shape)
    first = torch.arange(0, length, _FLEX_BLOCK, device=ends.device)
    last = (first + _FLEX_BLOCK - 1).clamp(max=length - 1)
    first_document, last_document = document[:, first], document[:, last]
    # Of an earlier block, the last key is the nearest to the first query, and the first one the farthest from the last.
    is_earlier = first[:, None] > last[None, :]
    is_near = is_earlier if window is None else is_earlier & (first[:, None] - last[None, :] < window)
    is_all_near = is_earlier if window is None else is_earlier & (last[:, None] - first[None, :] < window)
    is_whole = (last - first + 1 == _FLEX_BLOCK)[:, None]  # what is beyond the row is not seen
    full = is_all_near & is_whole & (first_document[:, None, :] == last_document[:, :, None])
    seen = is_near & (last_document[:, None, :] == first_document[:, :, None])
    seen |= torch.eye(len(first), dtype=torch.bool, device=ends.device)  # a token sees itself

    def may_see(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (document[b, query] == document[b, key])
        return seen if window is None else seen & (query - key < window)

    return BlockMask.from_kv_blocks(
        *_order_blocks(seen & ~full), *_order_blocks(full), _FLEX_BLOCK, may_see, (length, length)
    )


def _order_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and which, the chosen ones first.

    Args:
        chosen: Bool ``[b, blocks, blocks]``.

    Returns:
        int32 ``[b, 1, blocks]`` and ``[b, 1, blocks, blocks]``.
    """
    chosen = chosen[:, None].to(torch.int8)
    order = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def attention_operators() -> set[Any]:
    """Return the operators that attention may dispatch to, whose outputs are cheaper to store than to recompute."""
    aten, varlen = torch.ops.aten, getattr(torch.ops.torch_attn, "_varlen_attn", None)  # exists once imported
    operators = {
        torch.ops.fctune.attend_per_document.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    }
    return operators if varlen is None else operators | {varlen.default}
