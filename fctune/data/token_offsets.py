"""Tokenisation with exact offsets at the least cost."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import AnyStr, Generic

import tokenizers

from fctune.base.errors import DataError
from fctune.data.control_tokens import has_hidden, restore_hidden
from fctune.data.line_breaks import BETWEEN_OBJECTS, split_between_objects, splits_between_objects

# Byte-level vocabularies spell a printable byte as itself and the others with the characters after 255.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


@dataclass(frozen=True, slots=True)
class TokenOffsets(Generic[AnyStr]):
    """Token ids with offsets: token i is at ``starts[i]:ends[i]`` of ``text``, a str or its UTF-8 bytes.

    Starts and ends never decrease. In a str, several tokens of one character all have the offsets of that character.
    """

    ids: array[int]
    starts: list[int]
    ends: list[int]
    text: AnyStr


class OffsetTokenizer:
    """A fast tokenizer that returns token offsets.

    The offsets of the tokenizers library cost about as much as the tokenisation itself. With a byte-level vocabulary,
    offsets follow from the lengths of the tokens if their concatenation is the text, so the library's are only used
    otherwise.

    A text is split at its special tokens first, and the parts are tokenised independently. Conversations share many
    parts, so the tokens of parts are cached. A list of tools is split further if ``fctune.data.line_breaks`` finds that
    the tokenizer splits there too: rows share tools more often than lists of tools.

    Args:
        tokenizer: Fast tokenizer.
        max_cached_characters: Characters of all cached parts; 2**23 take about 30 MB with their tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_cached_characters: int = 2**23):
        self.tokenizer = tokenizer
        self._max_cached = max_cached_characters
        self._pieces = _Pieces(tokenizer)
        splitter = _make_splitter(tokenizer)
        self._is_splitting = splitter is not None
        self._split = splitter or (lambda text: [text])
        self._is_splitting_lines: bool | None = None if self._is_splitting else False  # None: not known yet
        # The ids of a part's tokens and their lengths in bytes, as bytes of C integers: joined at once for a text.
        self._cache: dict[str, tuple[bytes, bytes]] = {}
        self._num_cached = 0  # characters

    def __reduce__(self) -> tuple[type[OffsetTokenizer], tuple[tokenizers.Tokenizer]]:
        return OffsetTokenizer, (self.tokenizer,)

    def ids(self, text: str) -> list[int]:
        """Return token ids without added special tokens."""
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode(self, text: str) -> TokenOffsets[bytes] | TokenOffsets[str]:
        """Return token ids with offsets, without added special tokens."""
        parts = list(filter(None, self._split(text)))
        if self._is_splitting_lines is not False and BETWEEN_OBJECTS in text:
            if self._is_splitting_lines is None:
                self._is_splitting_lines = splits_between_objects(self.tokenizer)
            if self._is_splitting_lines:
                parts = [line for part in parts for line in split_between_objects(part)]
        found = list(map(self._cache.get, parts))
        if None in found:
            self._add([part for part in parts if part not in self._cache], parts)
            found = list(map(self._cache.get, parts))
        known = [tokens for tokens in found if tokens is not None and tokens[0]]
        if len(known) == len(parts):
            ids, sizes = (array("i", b"".join([tokens[column] for tokens in known])) for column in (0, 1))
            ends = list(accumulate(sizes))
            return TokenOffsets(ids, [0, *ends][:-1], ends, text.encode())
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoding.offsets
        return TokenOffsets(
            array("i", encoding.ids), [start for start, _ in offsets], [end for _, end in offsets], text
        )

    def encode_hidden(self, text: str) -> TokenOffsets[bytes]:
        """Encode a text with special tokens that ``fctune.data.control_tokens`` has hidden; they become plain text.

        Raises:
            DataError: The tokenizer cannot encode a special token as plain text.
        """
        ids = array("i")
        sizes: list[int] = []
        parts = list(filter(None, self._split(text)))
        for part in parts:
            plain = restore_hidden(part)
            self.tokenizer.encode_special_tokens = has_hidden(part)  # True: special tokens are plain text
            try:
                part_ids = self.ids(plain)
            finally:
                self.tokenizer.encode_special_tokens = False
            pieces = list(map(self._pieces.__getitem__, part_ids))
            if b"".join(pieces) != plain.encode() or not self._is_splitting:
                raise DataError(
                    "contains the text of a special token, which this tokenizer cannot encode as plain text (it is not "
                    "byte-level, or strips whitespace next to special tokens); remove it from the row"
                )
            ids.extend(part_ids)
            sizes += map(len, pieces)
        ends = list(accumulate(sizes))
        return TokenOffsets(ids, [0, *ends][:-1], ends, restore_hidden(text).encode())

    def _add(self, new: list[str], parts: list[str]) -> None:
        """Cache the tokens of new parts, or none for a part that is not the concatenation of its tokens."""
        self._num_cached += sum(map(len, new))
        if self._num_cached > self._max_cached:
            self._cache.clear()
            new, self._num_cached = parts, sum(map(len, parts))
        for part in new:  # not as a batch, which is spread over threads at a higher cost than it saves here
            ids = self.ids(part)
            pieces = list(map(self._pieces.__getitem__, ids))
            is_exact = b"".join(pieces) == part.encode()
            columns = (ids, map(len, pieces)) if is_exact else ((), ())
            self._cache[part] = array("i", columns[0]).tobytes(), array("i", columns[1]).tobytes()


def _make_splitter(tokenizer: tokenizers.Tokenizer) -> Callable[[str], list[str]] | None:
    """Return a function that splits a text at its special tokens, these included, as the tokenizer does.

    None if a special token strips whitespace, matches single words only, or is matched in normalised
    text, since the tokenizer then splits differently.
    """
    special = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    is_plain = all(not (t.lstrip or t.rstrip or t.single_word or t.normalized) for t in special)
    if not special or not is_plain:
        return None
    # Of several that start at the same position, the longest wins.
    contents = sorted((re.escape(token.content) for token in special), key=len, reverse=True)
    return re.compile(f"({'|'.join(contents)})").split


class _Pieces(dict[int, bytes]):
    """The bytes of each token, looked up on first use; empty for a token that is not spelled in bytes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        super().__init__({i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()})
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        spelling = self._tokenizer.id_to_token(token) or ""
        self[token] = bytes(_BYTES[c] for c in spelling) if all(c in _BYTES for c in spelling) else b""
        return self[token]
