"""What a checkpoint holds: the tensors that training changes, by name, and the few numbers beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fctune.checkpoint.quantised import StateTensor
from fctune.training.schedule import set_lr_

# What wrappers put into the names of the parameters within them.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def named_trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by their name without wrappers."""
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def clean_name(name: str) -> str:
    """A parameter's name as it is without checkpointing and compilation."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def collect_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The live tensors that training changes: ``model.NAME`` and ``optimizer.NAME.KEY``; sharded ones are DTensors.

    A quantised state ends in ``.codes`` and ``.scale`` where it is stored in blocks: see ``StateTensor``.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in named_trained(model).items()}
    for state in state_tensors(model, optimizer):
        tensors |= state.to_store()
    return tensors


def state_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[StateTensor]:
    """The tensors of an optimizer's state."""
    for name, parameter in named_trained(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield StateTensor(f"optimizer.{name}.{key}", key, value.detach(), optimizer)


def init_optimizer_state_(optimizer: Optimizer) -> None:
    """Make the optimizer create its state, by a step of rate 0 with gradients of 0; no weight changes."""
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


def collect_rng(rank: int) -> dict[str, Tensor]:
    """The state of every random generator of this rank, as tensors ``rng.RANK.KIND``."""
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
    """Set this rank's generators to what ``collect_rng`` gave."""
    torch.set_rng_state(states[f"rng.{rank}.torch"])
    version, *words = states[f"rng.{rank}.python"].tolist()
    gauss = states[f"rng.{rank}.python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, cached = states[f"rng.{rank}.numpy_rest"].tolist()
    keys = states[f"rng.{rank}.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if (cuda := states.get(f"rng.{rank}.cuda")) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
