"""Token ids of a text and where in it each of them stands, at the least cost that is exact."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import AnyStr, Generic

import tokenizers

# The characters by which byte-level vocabularies name bytes: a printable one names itself, the others follow 255.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}

_MAX_KEPT_CHARACTERS = 2**23  # of parts whose tokens are remembered: some 30 MB with them


@dataclass(frozen=True, slots=True)
class PlacedTokens(Generic[AnyStr]):
    """Token i stands at ``starts[i]:ends[i]`` of ``text``, which is str, or the UTF-8 bytes of what was tokenised.

    Neither starts nor ends ever fall. Of a str, the tokens of one character may all stand at that character.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]
    text: AnyStr


class PlacingTokenizer:
    """A fast tokenizer that tells where its tokens stand.

    Its own offsets cost about as much as its merges. Where the vocabulary is of bytes, tokens that join to the very
    text stand where their lengths say, so they are only asked for where that does not hold.

    Special tokens cut a text before anything else does, and what lies between them is tokenised by itself. Much of that
    conversations share, such as the tools of a system prompt, so the tokens of such parts are remembered.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer
        self._pieces = _Pieces(tokenizer)
        self._cut = _make_cut(tokenizer)
        self._known: dict[str, tuple[array[int], array[int]]] = {}  # ids and bytes of each token, of a part
        self._num_kept = 0

    def __reduce__(self) -> tuple[type[PlacingTokenizer], tuple[tokenizers.Tokenizer]]:
        return PlacingTokenizer, (self.tokenizer,)

    def ids(self, text: str) -> list[int]:
        """Token ids; no special tokens are added."""
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def place(self, text: str) -> PlacedTokens[bytes] | PlacedTokens[str]:
        """Token ids with their places; no special tokens are added."""
        parts = list(filter(None, self._cut(text)))
        known = self._known
        if new := [part for part in parts if part not in known]:
            known = self._learn(new, parts)
        if all(known[part][0] for part in parts):
            ids, sizes = array("i"), array("i")
            for part in parts:
                of_part = known[part]
                ids += of_part[0]
                sizes += of_part[1]
            ends = list(accumulate(sizes))
            return PlacedTokens(ids.tolist(), [0, *ends][:-1], ends, text.encode())
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoding.offsets
        return PlacedTokens(encoding.ids, [start for start, _ in offsets], [end for _, end in offsets], text)

    def _learn(self, new: list[str], parts: list[str]) -> dict[str, tuple[array[int], array[int]]]:
        """Tokenise new parts and remember them; of one whose tokens do not join to it, none are."""
        self._num_kept += sum(map(len, new))
        if self._num_kept > _MAX_KEPT_CHARACTERS:
            self._known.clear()
            new, self._num_kept = parts, sum(map(len, parts))
        for part in new:  # one by one: a batch is spread over threads, which costs more than it saves here
            ids = self.ids(part)
            pieces = list(map(self._pieces.__getitem__, ids))
            is_exact = b"".join(pieces) == part.encode()
            self._known[part] = (array("i", ids if is_exact else ()), array("i", map(len, pieces) if is_exact else ()))
        return self._known


def _make_cut(tokenizer: tokenizers.Tokenizer) -> Callable[[str], list[str]]:
    """What cuts a text at its special tokens, these included, as the tokenizer does; into one part if that is not sure.

    A special token that takes white space along, stands for whole words alone or is looked for in normalised text cuts
    in another way.
    """
    special = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    is_plain = all(not (t.lstrip or t.rstrip or t.single_word or t.normalized) for t in special)
    if not special or not is_plain:
        return lambda text: [text]
    # The longest of those that begin at a place wins.
    contents = sorted((re.escape(token.content) for token in special), key=len, reverse=True)
    return re.compile(f"({'|'.join(contents)})").split


class _Pieces(dict[int, bytes]):
    """The bytes of each token, spelt as it is met; those of a token that is not spelt in bytes are none."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        super().__init__({i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()})
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        spelling = self._tokenizer.id_to_token(token) or ""
        self[token] = bytes(_BYTES[c] for c in spelling) if all(c in _BYTES for c in spelling) else b""
        return self[token]
