"""The tokens whose rows a run with adapters trains: ``adapter.train_tokens``."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.config.intervals import format_count
from fctune.config.parsing import suggest
from fctune.config.sections.adapter import AdapterConfig
from fctune.data.prepared_set import PreparedSet, list_tokens
from fctune.models.architecture import Architecture
from fctune.models.sources import read_architecture
from fctune.models.untrained_tokens import Candidates, UntrainedToken, find_untrained, has_weights

_NUM_SHOWN = 6


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Tokens whose rows train, ascending; ``note`` says why, or is empty; ``is_warning`` if it needs attention."""

    ids: tuple[int, ...]
    note: str = ""
    is_warning: bool = False


def choose_tokens(
    config: AdapterConfig,
    model_dir: Path,
    architecture: Architecture,
    candidates: Candidates,
    add_tokens: Sequence[str] = (),
) -> TokenChoice:
    """Choose the tokens to train by ``adapter.train_tokens``.

    Args:
        config: The ``adapter`` section of the run's config.
        model_dir: Hugging Face directory of the base; without weights in it, ``auto`` finds nothing.
        architecture: Shape of the model.
        candidates: Tokens of the run's data.
        add_tokens: Tokens that the run adds to the base, whose rows train in any case.

    Raises:
        ConfigError: A token that the tokenizer does not have, or one of a head with a LoRA adapter.
        CheckpointError: The base's files are damaged.
    """
    has_head_adapter = architecture.head in architecture.resolve_adapter_modules(config.modules)
    if has_head_adapter and add_tokens:
        raise ConfigError(
            f"model.add_tokens: rows of {architecture.head} cannot train along with its LoRA adapter. Leave "
            f"{architecture.head} out of adapter.modules."
        )
    if add_tokens:
        rest = choose_tokens(config, model_dir, architecture, candidates)
        own = find_token_ids(add_tokens, model_dir, architecture)
        note = f"{rest.note}; " if rest.note else ""
        note += f"model.add_tokens: training the rows of {format_count(len(own), 'token')}"
        return TokenChoice(tuple(sorted({*own, *rest.ids})), note, rest.is_warning)
    if isinstance(config.train_tokens, list):
        if has_head_adapter and config.train_tokens:
            raise ConfigError(
                f"adapter.train_tokens: rows of {architecture.head} cannot train along with its LoRA adapter. "
                f"Leave {architecture.head} out of adapter.modules, or set adapter.train_tokens=off."
            )
        ids = find_token_ids(config.train_tokens, model_dir, architecture)
        note = f"adapter.train_tokens: training the rows of {format_count(len(ids), 'token')}"
        return TokenChoice(ids, note if ids else "")
    if not has_weights(model_dir):
        return TokenChoice(())
    untrained = find_untrained(model_dir, architecture, candidates, _added_tokens(model_dir))
    if not untrained:
        return TokenChoice(())
    described = describe_untrained(untrained, model_dir)
    if has_head_adapter:
        return TokenChoice((), f"{described}; the {architecture.head} adapter trains them")
    if config.train_tokens == "off":
        return TokenChoice(
            (),
            f"{described}. Adapters on the linears cannot teach the model to write them. Remedies: "
            "adapter.train_tokens=auto, which trains their rows too; a chat template whose markers are plain text "
            "(model.chat_template); or training all weights",
            is_warning=True,
        )
    ids = tuple(token.id for token in untrained)
    return TokenChoice(ids, f"{described}; training their rows (adapter.train_tokens=auto)")


def find_token_ids(names: Sequence[str], model_dir: Path, architecture: Architecture) -> tuple[int, ...]:
    """Return the ids of tokens given by name, ascending.

    Raises:
        ConfigError: A name that is not one token of the tokenizer; all of them, each with the nearest token.
    """
    tokenizer = _load_tokenizer(model_dir)
    problems: list[str] = []
    ids: set[int] = set()
    for name in names:
        token = tokenizer.token_to_id(name)
        if token is None:
            hint = suggest(name, tokenizer.get_vocab()) or "."
            problems.append(
                f"adapter.train_tokens: {name!r} is not a token of {model_dir}{hint} model.add_tokens adds new ones."
            )
        elif token >= architecture.vocab_size:
            problems.append(
                f"adapter.train_tokens: {name!r} is token {token}, beyond the {architecture.vocab_size} rows of the "
                "model's embedding. Download the model again."
            )
        else:
            ids.add(token)
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(sorted(ids))


def find_candidates(prepared: PreparedSet, model_dir: Path) -> Candidates:
    """Return the tokens of a prepared set to look at: those supervised, and every other added token in it."""
    supervised, present = list_tokens(prepared)
    return Candidates(frozenset(supervised), frozenset(present & _added_tokens(model_dir)))


def find_largest_token(model_dir: Path) -> int:
    """Return the largest id of a model's tokenizer."""
    return int(max(_load_tokenizer(model_dir).get_vocab().values()))


def check_vocabulary(tokens: Collection[int], model_dir: Path, architecture: Architecture) -> None:
    """Check that the model has rows for tokens of the data; an extended tokenizer needs a resized embedding.

    Raises:
        ConfigError: It lacks some; names them, with the remedy.
    """
    beyond = sorted(token for token in tokens if token >= architecture.vocab_size)
    if beyond:
        raise ConfigError(
            f"{model_dir}: the data has tokens beyond the {architecture.vocab_size:,} rows of the model's embedding: "
            f"{_list_names(_load_tokenizer(model_dir), beyond)}. Resize the embedding to the tokenizer, or put the "
            "model's original tokenizer there and add the tokens with model.add_tokens."
        )


def check_tokens(model_dir: Path, supervised: Collection[int], present: Collection[int]) -> str:
    """Return a sentence that names the untrained tokens of data, with the remedy; empty if there are none.

    Also empty if the weights are not at hand, or the model is none that can be trained.

    Args:
        model_dir: Hugging Face directory of the model.
        supervised: Supervised tokens, which are looked at.
        present: All tokens of the data.

    Raises:
        ConfigError: The model has no rows for some of them.
    """
    try:
        architecture = read_architecture(model_dir)
    except ConfigError:
        return ""
    check_vocabulary(present, model_dir, architecture)
    if not has_weights(model_dir):
        return ""
    untrained = find_untrained(model_dir, architecture, Candidates(frozenset(supervised)), _added_tokens(model_dir))
    if not untrained:
        return ""
    return f"{describe_untrained(untrained, model_dir)}; a run with adapters trains their rows (adapter.train_tokens)"


def describe_untrained(untrained: Sequence[UntrainedToken], model_dir: Path) -> str:
    """Name untrained tokens, and say how the first of them shows it, in one sentence without its full stop."""
    tokenizer = _load_tokenizer(model_dir)
    # Markers first: a reader knows them.
    added = _added_tokens(model_dir)
    ordered = sorted(untrained, key=lambda token: token.id not in added)
    first = ordered[0]
    if first.duplicate is not None:
        duplicate = _name(tokenizer, first.duplicate)
        why = f"the {first.matrix} row of {_name(tokenizer, first.id)} equals that of {duplicate}"
    else:
        why = f"the {first.matrix} row of {_name(tokenizer, first.id)} has {first.factor:.2g} times the median norm"
    return f"these tokens look untrained in the base: {_list_names(tokenizer, [t.id for t in ordered])} ({why})"


def _added_tokens(model_dir: Path) -> frozenset[int]:
    return frozenset(_load_tokenizer(model_dir).get_added_tokens_decoder())


def _list_names(tokenizer: Any, tokens: Sequence[int]) -> str:
    names = ", ".join(_name(tokenizer, token) for token in tokens[:_NUM_SHOWN])
    return names + (f" and {len(tokens) - _NUM_SHOWN} more" if len(tokens) > _NUM_SHOWN else "")


def _name(tokenizer: Any, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    # Bytes that are not a complete character have only their name in the vocabulary.
    return str(tokenizer.id_to_token(token) or f"token {token}") if not text or "\ufffd" in text else text


def _load_tokenizer(model_dir: Path) -> Any:
    """Load the plain tokenizer of a model directory, for names and ids.

    Raises:
        ConfigError: There is none, or it is broken.
    """
    file = model_dir / "tokenizer.json"
    return _read_tokenizer(file, file.stat().st_mtime_ns if file.is_file() else 0)


@functools.lru_cache(maxsize=1)  # large ones take a second to load
def _read_tokenizer(file: Path, changed_ns: int) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain exceptions
        raise ConfigError(f"{file}: the tokenizer cannot be loaded ({error}). Download the model again.") from None
