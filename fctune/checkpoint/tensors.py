"""Tensors of a checkpoint: trainable weights, optimizer state and random-generator state, by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fctune.checkpoint.quantized import StateTensor

# Inserted into parameter names by activation checkpointing and torch.compile.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, without the names of wrapper modules."""
    return {_unwrap_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def collect_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the live weights and optimizer state: ``model.NAME`` and ``optimizer.NAME.KEY``; shards are DTensors.

    A quantized optimizer state that is stored in blocks ends in ``.codes`` and ``.scale``: see ``StateTensor``.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in named_trainable(model).items()}
    for state in iter_optimizer_state(model, optimizer):
        tensors |= state.to_store()
    return tensors


def iter_optimizer_state(model: nn.Module, optimizer: Optimizer) -> Iterator[StateTensor]:
    """Yield the tensors of an optimizer's state, parameter by parameter."""
    for name, parameter in named_trainable(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield StateTensor(f"optimizer.{name}.{key}", key, value.detach(), optimizer)


def init_optimizer_state_(optimizer: Optimizer) -> None:
    """Make the optimizer create its state, by a step with rate 0 and gradients of 0; no weight changes."""
    rates = []
    for group in optimizer.param_groups:
        rates.append(float(group["lr"]))
        set_lr_(group, 0.0)
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    # Not through ``optimizer.step``, which a learning-rate schedule has wrapped to count.
    type(optimizer).step(optimizer)
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        set_lr_(group, lr)
    optimizer.zero_grad(set_to_none=True)


def set_lr_(group: dict[str, Any], lr: float | Tensor) -> None:
    """Set the learning rate of a parameter group, in place."""
    if isinstance(group["lr"], Tensor):  # torchao's optimizers keep it in a tensor and refuse a number
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def collect_rng(rank: int) -> dict[str, Tensor]:
    """Return the state of this rank's random generators, as tensors ``rng.RANK.KIND``."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rng.{rank}.{kind}": state for kind, state in states.items()}


def restore_rng(states: dict[str, Tensor], rank: int) -> None:
    """Set this rank's random generators to a state from ``collect_rng``."""
    torch.set_rng_state(states[f"rng.{rank}.torch"])
    version, *words = states[f"rng.{rank}.python"].tolist()
    gauss = states[f"rng.{rank}.python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, cached = states[f"rng.{rank}.numpy_rest"].tolist()
    keys = states[f"rng.{rank}.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if (cuda := states.get(f"rng.{rank}.cuda")) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def _unwrap_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
