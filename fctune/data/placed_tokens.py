"""Token ids of a text and where in it each of them stands, at the least cost that is exact."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import AnyStr, Generic

import tokenizers

# The characters by which byte-level vocabularies name bytes: a printable one names itself, the others follow 255.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


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
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer
        self._pieces = _Pieces(tokenizer)

    def __reduce__(self) -> tuple[type[PlacingTokenizer], tuple[tokenizers.Tokenizer]]:
        return PlacingTokenizer, (self.tokenizer,)

    def ids(self, text: str) -> list[int]:
        """Token ids; no special tokens are added."""
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def place(self, text: str) -> PlacedTokens[bytes] | PlacedTokens[str]:
        """Token ids with their places; no special tokens are added."""
        ids = self.ids(text)
        data = text.encode()
        pieces = list(map(self._pieces.__getitem__, ids))
        if b"".join(pieces) == data:
            ends = list(accumulate(map(len, pieces)))
            return PlacedTokens(ids, [0, *ends][:-1], ends, data)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoding.offsets
        return PlacedTokens(encoding.ids, [start for start, _ in offsets], [end for _, end in offsets], text)


class _Pieces(dict[int, bytes]):
    """The bytes of each token, spelt as it is met; those of a token that is not spelt in bytes are none."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        super().__init__({i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()})
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        spelling = self._tokenizer.id_to_token(token) or ""
        self[token] = bytes(_BYTES[c] for c in spelling) if all(c in _BYTES for c in spelling) else b""
        return self[token]
