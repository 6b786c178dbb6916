"""Every attention kernel gives the same as a dense mask over packed rows."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fctune.base.errors import ConfigError
from fctune.models.attention import activate_flash_attention_3, attend, choose_attention_kernel, make_bounds
from fctune.models.document_attention import attend_per_document

LENGTHS = [[5, 40, 19], [33, 31]]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def tensors(dtype: torch.dtype = torch.float64, device: str = "cpu", scale: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 64 * scale)
    made = (
        torch.randn(*shape, heads, HEAD_DIM * scale, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    q, k, v = (tensor.to(device=device, dtype=dtype).requires_grad_() for tensor in made)
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: list[list[int]]) -> Tensor:
    """Reference attention with a dense mask."""
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    same = documents[:, :, None] == documents[:, None, :]
    mask = (same & torch.ones_like(same[0]).tril())[:, None].to(q.device)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


FEATURES: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "all": {"scale": 0.9, "window": 11, "softcap": 1.5, "sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)},
}


def by_definition(q: Tensor, k: Tensor, v: Tensor, lengths: list[list[int]], options: dict[str, Any]) -> Tensor:
    """Attention with every feature, conversation by conversation, written down from the definition."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    rows = []
    for row, of_row in enumerate(lengths):
        parts, start = [], 0
        for length in of_row:
            mine = [t[row, start : start + length].transpose(0, 1) for t in (q, k, v)]
            scores = mine[0] @ mine[1].mT * options.get("scale", q.shape[-1] ** -0.5)
            if cap := options.get("softcap"):
                scores = cap * torch.tanh(scores / cap)
            at = torch.arange(length)
            distance = at[:, None] - at[None]
            seen = (distance >= 0) & (distance < options.get("window", length))
            scores = scores.masked_fill(~seen, float("-inf"))
            if (sinks := options.get("sinks")) is not None:
                scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, length, 1)], dim=-1)
            parts.append((scores.softmax(-1)[..., :length] @ mine[2]).transpose(0, 1))
            start += length
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def with_sinks_that_train(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone().requires_grad_() if name == "sinks" else value for name, value in options.items()}


def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(out, inputs, seed.to(out.device, out.dtype))


def test_attention_per_document_equals_a_dense_mask_in_float64() -> None:
    inputs = tensors()
    ours, theirs = attend(*inputs, make_bounds(LENGTHS, "per_document")), dense(*inputs, LENGTHS)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    for mine, their in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("lengths", [[[64], [64]], LENGTHS, [[300, 212]], None], ids=str)
def test_windows_soft_caps_and_sinks_equal_their_definition_in_float64(
    options: dict[str, Any], lengths: list[list[int]] | None
) -> None:
    q, k, v = tensors(scale=8 if lengths == [[300, 212]] else 1)
    q, k, v = (t[: len(lengths or [0, 0])] for t in (q, k, v))
    v = v[..., :12]  # as in multi-head latent attention
    mine, theirs = with_sinks_that_train(options), with_sinks_that_train(options)
    bounds = None if lengths is None else make_bounds(lengths, "per_document")
    ours = attend(q, k, v, bounds, **mine)
    exact = by_definition(q, k, v, lengths or [[64], [64]], theirs)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)
    inputs = (q, k, v, *((mine["sinks"],) if "sinks" in mine else ()))
    others = (q, k, v, *((theirs["sinks"],) if "sinks" in theirs else ()))
    for one, other in zip(gradients(ours, inputs), gradients(exact, others), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_flex_attention_has_every_feature(options: dict[str, Any]) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (t.detach() for t in tensors(torch.float32))
    bounds = make_bounds(LENGTHS, "flex", (options.get("window"),)).to(torch.device("cpu"))
    ours = attend(q, k, v, bounds, flex_attention, **options)
    torch.testing.assert_close(ours, by_definition(q, k, v, LENGTHS, options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FEATURES)
def test_varlen_attention_has_windows_and_scales_and_leaves_the_rest_to_flex(name: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (t.detach().float() for t in tensors())
    q, k, v = q[..., :13], k[..., :13], v[..., :12]
    bounds = make_bounds(LENGTHS, "varlen", (FEATURES[name].get("window"),)).to(torch.device("cpu"))
    kernel = varlen if name in ("scale", "window", "window of one") else flex_attention
    ours = attend(q, k, v, bounds, kernel, **FEATURES[name])
    torch.testing.assert_close(ours, by_definition(q, k, v, LENGTHS, FEATURES[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_16_bit_attention_with_features_equals_float64(options: dict[str, Any]) -> None:
    inputs = tensors(torch.bfloat16)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    ours = attend(*inputs, make_bounds(LENGTHS, "per_document"), **options)
    exact = by_definition(*wide, LENGTHS, options)
    torch.testing.assert_close(ours.double(), exact, rtol=0.02, atol=0.02)
    for mine, their in zip(gradients(ours, inputs), gradients(exact, wide), strict=True):
        torch.testing.assert_close(mine.double(), their, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("lengths", [LENGTHS, None])
def test_16_bit_attention_on_cpu_equals_float64(lengths: list[list[int]] | None) -> None:
    inputs = tensors(torch.bfloat16)
    bounds = None if lengths is None else make_bounds(lengths, "per_document")
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    ours, exact = attend(*inputs, bounds), dense(*wide, lengths or [[64], [64]])
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours.double(), exact, rtol=0.02, atol=0.02)
    for mine, their in zip(gradients(ours, inputs), gradients(exact, wide), strict=True):
        torch.testing.assert_close(mine.double(), their, rtol=0.05, atol=0.05)


_MANY_LENGTHS = """
import os, random, sys
import torch
from torch import nn
from fctune.models import attention, document_attention, loss

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

if sys.argv[1] == "unpadded":
    document_attention.CPU_TILE = loss.CPU_TILE = 1
head = nn.Linear(64, 4096, dtype=torch.bfloat16)
def step(length):
    q, k, v = (torch.randn(1, 512, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attention.attend(q, k, v, attention.make_bounds([[length, 512 - length]], "per_document")).sum().backward()
    hidden = torch.randn(1, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.where(torch.arange(512) < length, 1, loss.IGNORE)[None]
    loss.supervised_losses(hidden, lambda rows, keys: head(rows), 4096, labels).sum().backward()
for length in range(64, 449, 64):  # the shapes of every tile
    step(length)
before = resident_mib()
for length in random.Random(0).sample(range(30, 480), 40):
    step(length)
print(resident_mib() - before)
"""


@pytest.mark.slow
def test_16_bit_attention_and_loss_on_cpu_keep_no_memory_for_each_length() -> None:
    def measure(how: str) -> float:
        command = [sys.executable, "-c", _MANY_LENGTHS, how]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert measure("padded") < 100
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert measure("unpadded") > 200  # otherwise the test does not provoke what padding prevents


def test_a_row_without_bounds_is_one_conversation() -> None:
    inputs = tensors()
    ours, theirs = attend(*inputs, None), dense(*inputs, [[64], [64]])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_custom_operator_passes_opcheck() -> None:
    inputs = [t.transpose(1, 2) for t in tensors(torch.float32)]
    torch.library.opcheck(attend_per_document, (*inputs, make_bounds(LENGTHS, "per_document").ends, 0.25))


def test_flex_masks_separate_the_conversations() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (t.detach() for t in tensors(torch.float32))
    bounds = make_bounds(LENGTHS, "flex").to(torch.device("cpu"))
    ours = attend(q, k, v, bounds, flex_attention)  # not compiled, which takes long
    torch.testing.assert_close(ours, dense(q, k, v, LENGTHS), rtol=1e-4, atol=1e-5)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Reference for torch's ``varlen_attn``: attention within each document, ``[tokens, heads, dim]``."""
    assert q_ends.dtype == k_ends.dtype == torch.int32
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    ends = q_ends.tolist()
    assert max(b - a for a, b in itertools.pairwise(ends)) <= max_q == max_k
    left, right = window_size
    parts = []
    for start, stop in itertools.pairwise(ends):
        rows = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
        at = torch.arange(stop - start)
        seen = at[:, None] - at[None] >= -right
        seen = seen if left < 0 else seen & (at[:, None] - at[None] <= left)
        found = scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=True, scale=scale)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def test_varlen_inputs_match_the_kernel_signature() -> None:
    inputs = tensors()
    ours = attend(*inputs, make_bounds(LENGTHS, "varlen").to(torch.device("cpu")), varlen)
    torch.testing.assert_close(ours, dense(*inputs, LENGTHS), rtol=1e-9, atol=1e-12)


def test_torch_accepts_the_varlen_inputs() -> None:
    q, k, v = (t.detach().to("meta", torch.bfloat16) for t in tensors())
    bounds = make_bounds(LENGTHS, "varlen").to(torch.device("meta"))
    assert attend(q, k, v, bounds).shape == q.shape


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "kernel"),
    [
        ("cpu", torch.float32, 64, None, "per_document"),
        ("cuda", torch.bfloat16, 128, (9, 0), "varlen"),
        ("cuda", torch.bfloat16, 128, (8, 0), "varlen"),
        ("cuda", torch.float32, 128, (9, 0), "flex"),
        ("cuda", torch.float16, 128, (7, 5), "flex"),
        ("cuda", torch.bfloat16, 512, (9, 0), "flex"),
        ("cuda", torch.float64, 128, (9, 0), "per_document"),
        ("cuda", torch.float16, 128, (7, 0), "per_document"),
    ],
)
def test_the_fastest_available_kernel_is_chosen(
    device: str, dtype: torch.dtype, head_dim: int, capability: Any, kernel: str
) -> None:
    chosen, name = choose_attention_kernel(device, dtype, head_dim, capability)
    assert chosen == kernel
    assert name


@pytest.fixture
def flash_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Install a package of FlashAttention 3, of which torch imports the operators."""
    from torch.nn.attention import restore_flash_attention_impl

    def install(source: str) -> None:
        (tmp_path / "flash_attn_interface.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("flash_attn_interface", None)
    restore_flash_attention_impl(_raise_warn=False)


FLASH_3 = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
library.define("bwd(Tensor q) -> Tensor")
"""


def test_flash_attention_3_is_used_on_hopper_where_its_package_is(flash_3: Callable[[str], None]) -> None:
    from torch.nn.attention import current_flash_attention_impl

    assert not activate_flash_attention_3((9, 0))
    flash_3(FLASH_3)
    for capability in (None, (8, 0), (10, 0)):
        assert not activate_flash_attention_3(capability)
        assert current_flash_attention_impl() is None
    assert activate_flash_attention_3((9, 0))
    assert current_flash_attention_impl() == "FA3"
    assert activate_flash_attention_3((9, 0))  # of the next run in this process


@pytest.mark.parametrize("source", ["import a_library_of_another_torch", "", "raise OSError('undefined symbol')"])
def test_a_package_of_flash_attention_3_that_does_not_load_is_named(
    source: str, flash_3: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.ops, "flash_attn_3", raising=False)
    flash_3(source)
    monkeypatch.setattr(torch.ops, "flash_attn_3", object(), raising=False)
    with pytest.raises(ConfigError, match="flash_attn_interface is installed, but torch"):
        activate_flash_attention_3((9, 0))


def test_bounds_of_rows_of_one_length_have_one_shape_and_limit() -> None:
    bounds = make_bounds(LENGTHS, "varlen")
    assert bounds.ends.tolist() == [0, 5, 45, 64, 97, 128]
    assert (bounds.max_length, bounds.shape) == (64, (2, 64))
    padded = make_bounds([[*row, 0, 0] for row in LENGTHS], "varlen")
    assert padded.ends.tolist() == [0, 5, 45, 64, 64, 64, 97, 128, 128, 128]
    assert (padded.max_length, padded.shape) == (bounds.max_length, bounds.shape)


@pytest.mark.parametrize("kernel", ["per_document", "flex", "varlen"])
def test_conversations_of_no_tokens_change_nothing(kernel: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    inputs = tensors() if kernel == "per_document" else tensors(torch.float32)
    implementation = {"flex": flex_attention, "varlen": varlen, "per_document": None}[kernel]
    if kernel == "flex":
        inputs = tuple(t.detach() for t in inputs)  # type: ignore[assignment]
    plain, padded = (
        attend(*inputs, make_bounds(lengths, kernel).to(torch.device("cpu")), implementation)
        for lengths in (LENGTHS, [[5, 0, 40, 19, 0], [33, 31, 0, 0, 0]])
    )
    torch.testing.assert_close(padded, plain, rtol=0, atol=0)
    if kernel != "flex":  # which has no backward on CPU
        for mine, their in zip(gradients(padded, inputs), gradients(plain, inputs), strict=True):
            torch.testing.assert_close(mine, their, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [("varlen", torch.bfloat16, 2e-2), ("flex", torch.float32, 2e-3), ("per_document", torch.float64, 1e-9)],
)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_every_gpu_kernel_equals_a_dense_mask(
    kernel: Any, dtype: torch.dtype, tolerance: float, is_compiled: bool
) -> None:
    lengths = [[5 * 4, 40 * 4, 19 * 4], [33 * 4, 31 * 4]]
    inputs = tensors(dtype, "cuda", scale=4)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    call: Callable[..., Tensor] = torch.compile(attend) if is_compiled else attend
    ours = call(*inputs, make_bounds(lengths, kernel).pin().to(torch.device("cuda")))
    theirs = dense(*exact, lengths)
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    for mine, their in zip(gradients(ours, inputs), gradients(theirs, exact), strict=True):
        torch.testing.assert_close(mine.double(), their, rtol=2 * tolerance, atol=2 * tolerance)


def list_blocks(counts: Tensor, indices: Tensor) -> list[list[int]]:
    """Return the chosen blocks of each row of a block mask."""
    rows = zip(counts.flatten().tolist(), indices.flatten(0, -2).tolist(), strict=True)
    return [sorted(row[:count]) for count, row in rows]


def test_block_masks_have_the_blocks_that_every_pair_of_tokens_gives() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    draw = random.Random(0)
    for _ in range(60):
        length, window = draw.choice([64, 128, 200, 384, 640, 1000]), draw.choice([None, 1, 4, 100, 128, 129, 257, 500])
        rows = []
        for _ in range(draw.choice([1, 2, 3])):
            row = [draw.choice([0, 1, 5, 127, 128, 129, 256, 300]) for _ in range(9)]
            ends = [min(end, length) for end in itertools.accumulate(row)]
            rows.append([*(b - a for a, b in itertools.pairwise([0, *ends])), length - ends[-1]])
        bounds = make_bounds(rows, "flex", [window]).to(torch.device("cpu"))
        document = torch.searchsorted(bounds.ends, torch.arange(len(rows) * length), right=True).view(-1, length)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor, d: Tensor = document, w: int | None = window) -> Tensor:
            seen = (q >= k) & (d[b, q] == d[b, k])
            return seen if w is None else seen & (q - k < w)

        expected = create_block_mask(sees, len(rows), None, length, length, device="cpu")
        found = bounds.block_masks[window]
        assert found.shape == expected.shape
        for kind in ("kv", "full_kv", "q", "full_q"):
            names = f"{kind}_num_blocks", f"{kind}_indices"
            ours, torchs = ([getattr(mask, name) for name in names] for mask in (found, expected))
            assert list_blocks(*ours) == list_blocks(*torchs), (kind, rows, window)
            assert [t.dtype for t in ours] == [t.dtype for t in torchs]
