"""LoRA adapters (https://arxiv.org/abs/2106.09685) on a model's linears, reproducible at any world size."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import linear

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig, BaseDtype
from fctune.models.architecture import EXPERT_ADAPTERS, ROUTER_ADAPTER
from fctune.models.causal_lm import CausalLM
from fctune.models.dropout import TokenKeys, channel_keys, keyed_dropout
from fctune.models.expert_lora import ExpertLoRA, RouterLoRA, adapt_router_
from fctune.models.frozen_experts import Float8Experts, FrozenExperts, Mxfp4Experts, Nf4Experts, iter_frozen_experts
from fctune.models.frozen_linear import FrozenLinear
from fctune.models.precision import wide_dtype
from fctune.models.torchtune.names import to_own_path

_ADAPTER_LEAVES = (".lora_a", ".lora_b", ".magnitude", ".token_rows")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter, not to the base."""
    return name.endswith(_ADAPTER_LEAVES)


class AdapterInput:
    """A tensor that some linears of a block read, such as queries, keys and values, and the product of their A with it.

    Thin products take the time of reading their input, and dropout that of a hash of each element. So the first linear
    to run multiplies the input by the A matrices of all, in one product after one dropout, and the others take their
    parts. Each keeps its own parameters. A linear that is called with another tensor computes its product by itself.

    Args:
        key: Name of the input within the model, equal for every source; seeds its dropout.
        dropout: Share of the elements that are dropped in training.
        token_keys: Keys of the tokens in the current forward, shared by all inputs of the model.
    """

    def __init__(self, key: str, dropout: float, token_keys: TokenKeys):
        self.key, self.dropout = key, dropout
        self._token_keys = token_keys
        self._readers: list[LoRALinear] = []
        # The tensor that parts are left of, and the parts of the readers that have not run yet.
        self._x: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def add_reader(self, adapter: LoRALinear) -> int:
        """Add a linear that reads this input; returns its index, the argument of ``multiply``."""
        self._readers.append(adapter)
        return len(self._readers) - 1

    def split_(self, inside: Set[nn.Module]) -> None:
        """Give the readers among these modules an input of their own, with the same dropout, in place."""
        own = AdapterInput(self.key, self.dropout, self._token_keys)
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.read_(own if reader in inside else self)

    def multiply(self, index: int, x: Tensor, token_keys: Tensor | None = None) -> Tensor:
        """Return ``dropout(x) A'`` of one reader, ``[..., rank]``; see ``LoRALinear.forward``."""
        if len(self._readers) == 1:
            return linear(self._drop(self._readers[0], x, token_keys), self._readers[0].lora_a.to(x.dtype))
        if self._x is not x or index not in self._parts:
            self._x, self._parts = x, dict(enumerate(self._multiply_all(x, token_keys)))
        part = self._parts.pop(index)
        if not self._parts:
            self._x = None
        return part

    def _multiply_all(self, x: Tensor, token_keys: Tensor | None) -> tuple[Tensor, ...]:
        matrices = [reader.lora_a.to(x.dtype) for reader in self._readers]
        product = linear(self._drop(self._readers[0], x, token_keys), torch.cat(matrices))
        return torch.split(product, [len(matrix) for matrix in matrices], dim=-1)

    def _drop(self, reader: LoRALinear, x: Tensor, token_keys: Tensor | None) -> Tensor:
        if not (self.dropout and reader.training):
            return x
        token_keys = self._token_keys.value if token_keys is None else token_keys
        assert token_keys is not None, "an adapter with dropout was called without token keys"
        # Some models pass a tensor with one more dimension, such as DeepSeek's latents with one for their only head.
        return keyed_dropout(x, self.dropout, token_keys.reshape(x.shape[:-1]), reader.channel_keys)


class LoRALinear(FrozenLinear):
    """``x W' + b + scaling * dropout(x) A' B'``: a frozen linear with a trained low-rank part.

    Linears that read the same tensor share its dropout and the product with their A matrices: see ``AdapterInput``.

    Shapes: ``weight [out, in]``, ``lora_a [rank, in]``, ``lora_b [out, rank]``. The adapter is stored in float32
    (float64 for a float64 base) and cast to the input's dtype for the products.

    With DoRA (https://arxiv.org/abs/2402.09353), ``magnitude [out]`` replaces the norm of each row of W + scaling B A:
    the sum of both products is multiplied by magnitude / norm, with the norm detached from the graph.

    Args:
        base: Linear to adapt.
        config: The ``adapter`` section of the run's config.
        base_dtype: Storage of the frozen weight.
        key: Name of the linear within the model.
        shared: The input that it reads, with other linears or alone.
    """

    def __init__(self, base: nn.Linear, config: AdapterConfig, base_dtype: BaseDtype, key: str, shared: AdapterInput):
        super().__init__(base, base_dtype)
        out_dim, in_dim = base.weight.shape
        options: dict[str, Any] = {"dtype": wide_dtype(base.weight.dtype), "device": base.weight.device}
        self.lora_a = nn.Parameter(torch.empty(config.rank, in_dim, **options))
        self.lora_b = nn.Parameter(torch.empty(out_dim, config.rank, **options))
        self.magnitude = nn.Parameter(torch.empty(out_dim, **options)) if config.dora else None
        self.scaling = adapter_scaling(config)
        self.is_active = True  # see ``adapters_off``
        self.channel_keys: Tensor
        empty = torch.empty(in_dim, dtype=torch.int32, device=base.weight.device)
        self.register_buffer("channel_keys", empty, persistent=False)
        self.key = key
        self.read_(shared)

    def read_(self, shared: AdapterInput) -> None:
        """Make an input the one that this linear reads, in place."""
        self._input, self._index = shared, shared.add_reader(self)

    def init_buffers_(self) -> None:
        """Compute the dropout keys of the input's channels."""
        self.channel_keys.copy_(channel_keys(self._input.key, len(self.channel_keys)))

    def forward(self, x: Tensor, token_keys: Tensor | None = None) -> Tensor:
        """Project ``[..., in]`` to ``[..., out]``; ``token_keys [...]`` are needed if x is not the complete batch."""
        if not self.is_active:
            return self.project(x)
        base = self.project(x) if self.magnitude is None else self.multiply(x)
        inner = self._input.multiply(self._index, x, token_keys)
        if torch.compiler.is_compiling():
            # One kernel adds and computes what follows; ``addmm`` on CUDA would copy the base's output first. Scaling
            # the matrix costs nothing; backward of a scaled product would write the scaled gradient of the output.
            total = base + linear(inner, (self.scaling * self.lora_b).to(x.dtype))
        else:
            lora_b = self.lora_b.to(x.dtype).t()
            rows = torch.addmm(base.flatten(0, -2), inner.flatten(0, -2), lora_b, alpha=self.scaling)
            total = rows.view_as(base)
        if self.magnitude is None:
            return total
        with torch.no_grad():
            norms = row_norms(self.dequantized_weight(), self.lora_a, self.lora_b, self.scaling)
        scale = (self.magnitude / norms).to(x.dtype)
        out = total * scale
        return out if self.bias is None else out + self.bias


def separate_inputs_(module: nn.Module) -> None:
    """Separate what the adapters inside a module read from what others read of the same tensor, in place.

    For a module that is called with parts of the tensor, while others get all of it.
    """
    inside = {inner for inner in module.modules() if isinstance(inner, LoRALinear)}
    for shared in {adapter._input for adapter in inside}:
        shared.split_(inside)


@contextlib.contextmanager
def adapters_off(model: CausalLM) -> Iterator[None]:
    """Switch adapters and trained token rows off in this context, so that the model computes as its frozen base."""
    adapters: list[Any] = [module for module in model.modules() if hasattr(module, "is_active")]
    for adapter in adapters:
        adapter.is_active = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_active = True


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return the norm of each row of W + scaling B A, ``[out]``, in the adapter's dtype, without forming the sum."""
    squares: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=a.dtype).square()
    cross = ((weight @ a.T.to(weight.dtype)).to(a.dtype) * b).sum(1)
    low_rank = ((b @ (a @ a.T)) * b).sum(1)
    return torch.sqrt(squares + 2 * scaling * cross + scaling**2 * low_rank)


def merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None) -> Tensor:
    """Return the merged weight ``[out, in]`` of a linear and its adapter, in the adapter's dtype."""
    merged = weight.to(a.dtype) + scaling * (b @ a)
    if magnitude is None:
        return merged
    norms: Tensor = torch.linalg.vector_norm(merged, dim=1)
    return merged * (magnitude / norms)[:, None]


def adapter_scaling(config: AdapterConfig) -> float:
    """Return the factor on the low-rank product: alpha / rank, or alpha / sqrt(rank) for rsLoRA (arXiv:2312.03732)."""
    return config.alpha / (math.sqrt(config.rank) if config.scaling == "rslora" else config.rank)


def apply_lora_(model: CausalLM, config: AdapterConfig) -> None:
    """Freeze the model and add an adapter to each linear that the config selects, in place.

    Raises:
        ConfigError: Modules that the model does not have, or a head that shares the weight of the embedding.
    """
    if problems := model.architecture.find_adapter_problems(config.modules):
        raise ConfigError("\n".join(problems))
    modules = model.architecture.resolve_adapter_modules(config.modules)
    _check_experts(model, config, modules)
    model.requires_grad_(False)
    inputs: dict[str, AdapterInput] = {}
    for module, key, path, input_key in list(model.linears()):
        # The loss is most sensitive to the head, so it is never quantised.
        base_dtype: BaseDtype = "bf16" if module == model.architecture.head or config.base == "mxfp4" else config.base
        if module in modules:
            base: Any = model.get_submodule(path)
            shared = inputs.setdefault(input_key, AdapterInput(input_key, config.dropout, model.token_keys))
            model.set_submodule(path, LoRALinear(base, config, base_dtype, key, shared))
        elif base_dtype != "bf16" and module not in model.architecture.unquantized:
            base = model.get_submodule(path)
            model.set_submodule(path, FrozenLinear(base, base_dtype))
    _adapt_experts_(model, config, modules)
    kinds: dict[BaseDtype, type[FrozenExperts]] = {"nf4": Nf4Experts, "mxfp4": Mxfp4Experts, "float8": Float8Experts}
    if (kind := kinds.get(config.base)) is not None:
        for weight in list(model.expert_weights()):
            owner: Any = model.get_submodule(weight.path)
            parameter = owner._parameters.pop(weight.name)
            owner.add_module(weight.name, kind(parameter, weight.is_transposed))


def _check_experts(model: CausalLM, config: AdapterConfig, modules: Sequence[str]) -> None:
    """Check that a mixture of experts has the options of its adapters.

    Raises:
        ConfigError: An option that experts do not have.
    """
    architecture = model.architecture
    if config.base == "mxfp4" and not (architecture.stores_mxfp4 and architecture.expert_names):
        raise ConfigError(
            "adapter.base=mxfp4: keeps experts as a checkpoint stores them in MXFP4, and this model's config.json "
            "says of none that they are; set adapter.base=nf4."
        )
    chosen = [name for name in (*architecture.expert_names, *architecture.router_names) if name in modules]
    if config.dora and chosen:
        raise ConfigError(
            f"adapter.dora: experts and routers have no DoRA, and adapter.modules selects {', '.join(chosen)}; select "
            "other modules, or set adapter.dora=false."
        )


def _adapt_experts_(model: CausalLM, config: AdapterConfig, modules: Sequence[str]) -> None:
    """Add an adapter to each selected weight of experts and to each selected router, in place."""
    scaling = adapter_scaling(config)
    chosen = [weight for weight in model.expert_weights() if weight.module in modules]
    routers = [router for router in model.routers() if router.module in modules]
    for weight in chosen:
        owner: Any = model.get_submodule(weight.path)
        parameter = owner.get_parameter(weight.name)
        dtype = wide_dtype(parameter.dtype)
        if not hasattr(owner, EXPERT_ADAPTERS):
            owner.add_module(EXPERT_ADAPTERS, nn.ModuleDict())
        owner.get_submodule(EXPERT_ADAPTERS)[weight.name] = ExpertLoRA(
            parameter, weight.is_transposed, config, dtype, scaling, weight.key, model.token_keys
        )
    for router in routers:
        owner = model.get_submodule(router.path)
        adapt_router_(owner, config, wide_dtype(owner.get_parameter("weight").dtype), scaling)


def iter_adapted(model: CausalLM) -> Iterator[tuple[str, ExpertLoRA | RouterLoRA]]:
    """Iterate over the names of the experts' and routers' weights that have an adapter, with the adapter."""
    for path, module in model.named_modules():
        if isinstance(module, ExpertLoRA):
            owner, _, name = path.rpartition(f".{EXPERT_ADAPTERS}.")
            yield f"{owner}.{name}", module
        elif isinstance(module, RouterLoRA):
            yield f"{path.removesuffix(f'.{ROUTER_ADAPTER}')}.weight", module


def count_parameters(model: CausalLM) -> dict[str, int]:
    """Return the number of elements of each parameter; quantised experts count as what they stand for."""
    experts = dict(iter_frozen_experts(model))
    plain = {name: p.numel() for name, p in model.named_parameters() if name.rpartition(".")[0] not in experts}
    return plain | {path: weight.num_weights for path, weight in experts.items()}


def describe_adapters(model: CausalLM) -> str:
    """Return how many parameters of a mixture of experts adapters train, by kind of module; empty for a dense model."""
    if not model.architecture.expert_names:
        return ""
    counts: Counter[str] = Counter()
    for module in model.modules():
        kind = {LoRALinear: "linears", ExpertLoRA: "experts", RouterLoRA: "routers"}.get(type(module))
        if kind is not None:
            counts[kind] += sum(p.numel() for name, p in module.named_parameters() if is_adapter(f".{name}"))
    parts = ", ".join(f"{count:,} on {kind}" for kind, count in counts.items())
    return f"{counts.total():,} parameters: {parts}"


def find_frozen_experts(model: CausalLM) -> str | None:
    """Return a warning if the model has experts and none of them has an adapter, else None."""
    weights = list(model.expert_weights())  # no experts, or those that transformers computes by code of its own
    if not weights or any(isinstance(module, ExpertLoRA) for module in model.modules()):
        return None
    sizes = count_parameters(model)
    frozen = sum(sizes[f"{weight.path}.{weight.name}"] for weight in weights)
    total = sum(size for name, size in sizes.items() if not is_adapter(name))
    return (
        f"the experts, {frozen / total:.0%} of the model's parameters, stay frozen; to adapt them, add "
        f"{' and '.join(dict.fromkeys(weight.module for weight in weights))} to adapter.modules"
    )


def init_adapters_(model: CausalLM, seed: int) -> None:
    """Initialise every adapter, in place: A uniform like ``nn.Linear``, B zero, so that the model starts as its base.

    DoRA's magnitudes start as the row norms of the base's weights, which must be loaded. Each A is drawn in full from a
    generator seeded by (seed, name) and then sharded, so that adapters are the same at any world size.
    """
    for path, module in model.named_modules():
        if isinstance(module, (LoRALinear, ExpertLoRA, RouterLoRA)):
            # The name is that of torchtune's module, so that a model of either source starts with the same adapters.
            name = (to_own_path(module.key) if isinstance(module, LoRALinear) else None) or path
            key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little") % 2**63)
            bound = 1 / math.sqrt(module.lora_a.shape[-1])  # kaiming_uniform_ with a = sqrt(5)
            full = torch.empty(module.lora_a.shape, dtype=module.lora_a.dtype).uniform_(
                -bound, bound, generator=generator
            )
            copy_full_(module.lora_a, full)
            nn.init.zeros_(module.lora_b)
            if isinstance(module, LoRALinear) and module.magnitude is not None:
                _init_magnitude_(module.magnitude, module.dequantized_weight())


@torch.no_grad()
def _init_magnitude_(magnitude: Tensor, weight: Tensor) -> None:
    """Fill ``magnitude [out]`` with the row norms of ``weight [out, in]``; both are sharded by rows alike."""
    rows, norms = (t.to_local() if isinstance(t, DTensor) else t for t in (weight, magnitude))
    norms.copy_(torch.linalg.vector_norm(rows, dim=1, dtype=norms.dtype))


@torch.no_grad()
def copy_full_(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter that may be sharded; each rank keeps its shard, without communication."""
    full = full.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)
