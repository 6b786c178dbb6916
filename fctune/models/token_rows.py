"""Rows of the embedding and the output head that train while the rest of both stays frozen.

A token whose rows were never trained cannot be learned by adapters on the linears: they change hidden states, and two
tokens with equal rows get equal logits from any of them. PEFT has the same rows as ``trainable_token_indices``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from fctune.base.errors import ConfigError
from fctune.models.base_weights import plan_base, read_rows
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import copy_full_
from fctune.models.precision import wide_dtype
from fctune.models.untrained_tokens import find_untrained_rows


class TokenRows(nn.Module):
    """A frozen weight ``[vocab, d]`` with trained rows ``token_rows [n, d]`` in place of those of n tokens.

    The rows are stored in float32 (float64 for a float64 base), and replicated or sharded like an adapter.

    Args:
        weight: Frozen weight.
        ids: The tokens, ascending.
    """

    def __init__(self, weight: nn.Parameter, ids: Sequence[int]):
        super().__init__()
        self.ids = tuple(ids)
        self.weight = weight
        self.is_active = True  # see ``fctune.models.lora.adapters_off``
        options: dict[str, Any] = {"device": weight.device}
        rows = torch.empty(len(ids), weight.shape[1], dtype=wide_dtype(weight.dtype), **options)
        self.token_rows = nn.Parameter(rows)
        self.token_ids: Tensor
        self.register_buffer("token_ids", torch.empty(len(ids), dtype=torch.int64, **options), persistent=False)

    def init_buffers_(self) -> None:
        """Copy the ids to the device."""
        self.token_ids.copy_(torch.tensor(self.ids))

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the row of each token, ``[..., d]`` in the weight's dtype."""
        frozen = embedding(tokens, self.weight)
        if not self.is_active:
            return frozen
        slots = torch.searchsorted(self.token_ids, tokens).clamp(max=len(self.ids) - 1)
        # Every token goes through the trained rows, so that a batch without any of them has a gradient of zero.
        trained = embedding(slots, self.token_rows.to(frozen.dtype))
        return torch.where((self.token_ids[slots] == tokens)[..., None], trained, frozen)

    def project(self, x: Tensor) -> Tensor:
        """Return the logits ``[..., vocab]`` of hidden states ``[..., d]``."""
        logits = linear(x, self.weight)
        if not self.is_active:
            return logits
        # Adding the difference in place saves the copies of the logits that replacing columns would make in forward
        # and backward.
        change = (self.token_rows - self.weight[self.token_ids].to(self.token_rows.dtype)).to(x.dtype)
        return logits.index_add_(-1, self.token_ids, linear(x, change))


class TokenEmbedding(TokenRows):
    """A frozen embedding of which some rows train."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the row of each token; see ``look_up``."""
        return self.look_up(tokens)


class TokenHead(TokenRows):
    """A frozen output head of which some rows train."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits; see ``project``."""
        return self.project(x)


class TiedTokenHead:
    """The head of a model that shares the weight and the trained rows of its embedding. Holds no parameters."""

    def __init__(self, tied_module: TokenEmbedding):
        self.tied_module = tied_module

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits; see ``TokenRows.project``."""
        return self.tied_module.project(x)


def train_tokens_(model: CausalLM, ids: Sequence[int]) -> None:
    """Make the embedding and head rows of some tokens trainable, in place; without ids, change nothing.

    Raises:
        ConfigError: The head has an adapter, which PEFT cannot combine with trained rows.
    """
    if not ids:
        return
    if hasattr(model.head, "lora_a"):
        head = model.architecture.head
        raise ConfigError(
            f"adapter.modules: {head} cannot have both a LoRA adapter and trained rows (adapter.train_tokens). Leave "
            f"{head} out of adapter.modules, or set adapter.train_tokens=off."
        )
    ordered = sorted(set(ids))
    frozen: Any = model.embedding
    trained = TokenEmbedding(frozen.weight, ordered)
    if model.architecture.is_tied:
        model.replace_ends_(trained, TiedTokenHead(trained))
    else:
        head_module: Any = model.head
        model.replace_ends_(trained, TokenHead(head_module.weight, ordered))


def init_token_rows_(model: CausalLM, model_dir: Path, separates: bool = True) -> None:
    """Set the trained rows to the base's, in place, so that the model starts as its base; separate equal ones.

    Two tokens with equal rows, such as the opening and the closing marker of calls in a base that never saw them, get
    nearly equal gradients until something tells them apart: their rows start as the mean of the rows of their text's
    pieces. Each rank reads the rows from the base's files, which needs no communication, and keeps its shard.

    Args:
        model: Model with its trained rows, sharded or not.
        model_dir: Folder of the base.
        separates: Separate equal rows; without it, the model's outputs are exactly the base's.
    """
    ends = [(name, module) for name, module in model.named_modules() if isinstance(module, TokenRows)]
    if not ends:
        return
    plan = plan_base(model.architecture, model_dir)
    for name, module in ends:
        weight = model.architecture.to_hf_name(f"{name}.weight")
        rows = read_rows(plan, weight, module.ids)
        found = find_untrained_rows(rows, range(len(rows)), range(len(rows))) if separates else {}
        equal = [index for index, (duplicate, _) in found.items() if duplicate is not None]
        for index, pieces in _split_tokens(model_dir, [module.ids[i] for i in equal], equal).items():
            rows[index] = read_rows(plan, weight, pieces).double().mean(0).to(rows.dtype)
        copy_full_(module.token_rows, rows)


def _split_tokens(model_dir: Path, tokens: Sequence[int], indices: Sequence[int]) -> dict[int, list[int]]:
    """Return, by index, the pieces of the text of each token that are left if the tokenizer does not have it."""
    file = model_dir / "tokenizer.json"
    if not tokens or not file.is_file():
        return {}
    described = json.loads(file.read_text(encoding="utf-8"))
    texts = {added["id"]: added["content"] for added in described["added_tokens"]}
    described["added_tokens"] = [added for added in described["added_tokens"] if added["id"] not in tokens]
    described["post_processor"] = None
    without = tokenizers.Tokenizer.from_str(json.dumps(described))
    split = {
        index: without.encode(texts[token], add_special_tokens=False).ids
        for index, token in zip(indices, tokens, strict=True)
        if token in texts
    }
    return {index: pieces for index, pieces in split.items() if pieces and set(pieces).isdisjoint(tokens)}


def count_parameters(model: CausalLM) -> dict[str, int]:
    """Count the parameters of an unsharded model: all, those that train, and those of them in rows of tokens."""
    trained = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    return {
        "total": sum(p.numel() for p in model.parameters()),
        "trained": sum(numel for _, numel in trained),
        "token_rows": sum(numel for name, numel in trained if name.endswith("token_rows")),
    }


def trained_token_ids(model: CausalLM) -> tuple[int, ...]:
    """Return the tokens whose rows train, ascending."""
    rows: Any = model.embedding
    return rows.ids if isinstance(rows, TokenRows) else ()
