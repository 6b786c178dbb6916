"""Sources of weights: any region of one equals that region of the full tensor, and splitting undoes reading."""

from __future__ import annotations

import itertools
import json
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fctune.base.errors import CheckpointError
from fctune.models.tensor_files import TensorReader, read_headers
from fctune.models.transformers.lazy_tensors import LazyTensor
from fctune.models.weight_plan import WeightPlan
from fctune.models.weight_sources import Dequantized, Source, Stored

# Made of tensors [4, 6] by functions that transformers' conversions call.
CASES: dict[str, Any] = {
    "stack": lambda t: torch.stack(t),
    "stack inside": lambda t: torch.stack(t, dim=1),
    "join rows": lambda t: torch.cat(t),
    "join columns": lambda t: torch.cat(t, dim=1),
    "transposed": lambda t: torch.transpose(t[0], 0, 1).contiguous(),
    "rows": lambda t: torch.chunk(torch.cat(t), 3, dim=0)[1],
    "columns": lambda t: torch.split(t[0], [1, 3, 2], dim=1)[1],
    "experts": lambda t: torch.cat((torch.stack(t[:2]), torch.stack(t[2:])), dim=1),
    "experts transposed": lambda t: torch.cat((torch.stack(t[:2]), torch.stack(t[2:])), dim=1).transpose(1, 2),
    "unbound": lambda t: torch.stack([torch.unbind(part, dim=0)[2] for part in t]),
    "interleaved": lambda t: t[0].reshape(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with four stored tensors ``[4, 6]`` of different numbers."""
    path = tmp_path_factory.mktemp("stored")
    save_file({f"t{i}": torch.arange(24.0).view(4, 6) + 100 * i for i in range(4)}, path / "model.safetensors")
    return path


def build(folder: Path, case: str) -> tuple[Source, Tensor]:
    """Return a source and the tensor that it must equal."""
    headers = read_headers(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(f"t{i}") for i in range(4)]
    lazy = [LazyTensor(Stored(headers[f"t{i}"])) for i in range(4)]
    return CASES[case](lazy).source, CASES[case](tensors)


def regions(shape: Sequence[int]) -> Any:
    """Iterate over all regions of a tensor: the slices of each dim."""
    ranges = [[slice(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in shape]
    return itertools.islice(itertools.product(*ranges), 0, None, 7)


@pytest.mark.parametrize("case", CASES)
def test_any_region_is_that_of_the_full_tensor(case: str, folder: Path) -> None:
    source, full = build(folder, case)
    assert source.shape == tuple(full.shape)
    with TensorReader() as reader:
        for region in regions(full.shape):
            out = torch.full_like(full[region], -1.0).contiguous()
            source.read_(out, [part.start for part in region], reader)
            assert torch.equal(out, full[region]), region


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("rows", "columns", "unbound")])
def test_splitting_a_tensor_gives_the_stored_ones(case: str, folder: Path) -> None:
    source, full = build(folder, case)
    parts = dict(WeightPlan(folder, {"weight": [source]}).split([("weight", full)]))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert parts
        for name, tensor in parts.items():
            assert torch.equal(tensor, file.get_tensor(name)), name


def test_a_stored_tensor_that_parameters_share_is_whole_once_all_have_come(folder: Path) -> None:
    lazy: Any = LazyTensor(Stored(read_headers(folder)["t0"]))
    sources = {f"p{i}": [part.source] for i, part in enumerate(torch.chunk(lazy, 4, dim=0))}
    plan = WeightPlan(folder, sources)
    assert [unit.parameters for unit in plan.units()] == [("p0", "p1", "p2", "p3")]
    given: list[str] = []

    def give() -> Any:
        for i in range(4):
            given.append(f"p{i}")
            yield f"p{i}", torch.full((1, 6), float(i))

    for name, tensor in plan.split(give()):
        assert (name, given) == ("t0", ["p0", "p1", "p2", "p3"])
        assert torch.equal(tensor, torch.arange(4.0)[:, None].expand(4, 6))


def test_groups_are_dequantised_as_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fctune.models import weight_sources

    monkeypatch.setattr(weight_sources, "_CHUNK_ELEMENTS", 12)
    stored = torch.arange(48, dtype=torch.uint8).view(8, 6)
    save_file({"w": stored, "s": torch.arange(1.0, 5.0)}, tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    sizes: list[int] = []

    def scale(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        sizes.append(len(parts[0]))
        return (parts[0].to(dtype).unflatten(0, (len(parts[1]), -1)) * parts[1][:, None, None]).flatten(0, 1)

    source = Dequantized("w", (8, 6), (headers["w"], headers["s"]), scale, num_groups=4)
    expected = stored.float() * torch.arange(1.0, 5.0).repeat_interleave(2)[:, None]
    with TensorReader() as reader:
        for start, end in itertools.combinations(range(9), 2):
            out = torch.empty(end - start, 6)
            source.read_(out, (start, 0), reader)
            assert torch.equal(out, expected[start:end])
    assert max(sizes) == 2


def test_headers_are_read_without_mapping_the_files(tmp_path: Path) -> None:
    size, file = 4 * 1024**3, tmp_path / "model.safetensors"
    header = {"w": {"dtype": "BF16", "shape": [size // 8, 4], "data_offsets": [0, size]}}
    content = json.dumps(header).encode()
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    os.truncate(file, 8 + len(content) + size)  # sparse
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + size // 2, before[1]))
    try:
        found = read_headers(tmp_path)["w"]
        with (
            TensorReader() as reader,
            pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read .*[mM]emory"),
        ):
            reader.read_all(found)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (found.shape, found.dtype) == ((size // 8, 4), torch.bfloat16)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda content: content[:5], "no header"),
        (lambda content: b"\xff" * 8 + content[8:], "no header"),
        (lambda content: content[:-1], "47 bytes of tensors in place of 48"),
        (lambda content: content + b"x", "49 bytes of tensors in place of 48"),
        (lambda content: content.replace(b"[2,6]", b"[2,7]"), "t does not have the number of bytes of its shape"),
        (lambda content: content.replace(b'"shape"', b'"shope"'), "KeyError: 'shape'"),
        (lambda content: content[:8] + b"[" + content[9:], "damaged"),
    ],
    ids=["too short", "length", "truncated", "longer", "shape", "key", "not JSON"],
)
def test_damaged_headers_are_refused_as_safetensors_does(
    damage: Callable[[bytes], bytes], problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"t": torch.zeros(2, 6)}, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SafetensorError), safe_open(file, framework="pt"):
        pass
    with pytest.raises(CheckpointError, match=f"damaged safetensors .*{problem}|{problem} safetensors"):
        read_headers(tmp_path)


def test_tensors_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    lazy: list[Any] = [LazyTensor(Stored(header)) for header in read_headers(tmp_path).values()]
    with pytest.raises(ValueError, match=r"b has the shape \[2, 4\], a \[2, 3\]"):
        torch.stack(lazy)
    with pytest.raises(ValueError, match=r"b has the shape \[2, 4\], a \[2, 3\]"):
        torch.cat(lazy)
    with pytest.raises(NotImplementedError):
        lazy[0] * 2
