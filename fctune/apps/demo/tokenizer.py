"""Training of byte-level BPE tokenizers, for the tiny base and for benchmarks."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers


def train_tokenizer(texts: Iterable[str], pieces: str, vocab_size: int, ignore_merges: bool = False) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which encodes any text without losing a byte.

    Args:
        texts: Training texts.
        pieces: Regular expression of the pieces that merges never cross.
        vocab_size: Number of tokens, with those of the 256 bytes.
        ignore_merges: Encode a piece that is a token as that token, whatever the merges say.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
