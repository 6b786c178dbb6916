"""What TRL trains of the rows that fctune trains, token by token.

    python -m benchmarks.peer_rows --model DIR --data FILE [--limit N] [--result FILE]

Rows in OpenAI's format are prepared by TRL's ``SFTTrainer``, which renders them with its training template for the
model if it has one, and by fctune with the model's own template. Arguments of calls are JSON strings, as OpenAI's API
returns them, or objects, as most templates expect them. ``load_dataset`` reads the rows from a JSON Lines file, and
``from_list`` takes them from memory; both are functions of the datasets package, as it is without options. Without
``assistant_only_loss``, which is TRL's default, the loss covers every token.

Each row counts once, by the first difference in this order: TRL refuses it; its text differs; its text is equal, but it
does not train a token that fctune trains, or trains one that fctune does not.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training import describe_machine
from fctune.base.files import write_atomically
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.data.sources import read_source

VARIANTS = (  # form of the arguments, function that loads the rows, assistant_only_loss
    ("objects", "load_dataset", True),
    ("strings", "load_dataset", True),
    ("objects", "from_list", True),
    ("objects", "load_dataset", False),
)
_SHOWN = 120  # characters of a difference


def make_rows(path: str, model_dir: Path, limit: int) -> list[tuple[dict[str, Any], list[int], list[bool]]]:
    """Return rows in OpenAI's format with fctune's token ids, and which of them it trains; rows of one sample only."""
    encoder = ChatTemplate(model_dir).encoder
    rows = []
    for conversation in read_source(path):
        if isinstance(conversation, Conversation) and len(samples := encoder.encode(conversation)) == 1:
            rows.append((conversation.to_openai(), samples[0].tokens, [w > 0 for w in samples[0].weights]))
        if len(rows) == limit:
            break
    return rows


def to_form(row: dict[str, Any], form: str) -> dict[str, Any]:
    """Return the row with the arguments of its calls as JSON strings or as objects."""
    row = json.loads(json.dumps(row))
    for message in row["messages"]:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            call["function"]["arguments"] = json.dumps(arguments) if form == "strings" else arguments
    return row


def prepare_with_trl(
    rows: Sequence[dict[str, Any]], model_dir: Path, loader: str, masked: bool
) -> list[tuple[list[int], list[bool]]]:
    """Return TRL's token ids of the rows, and which of them it trains.

    Raises:
        Exception: TRL refuses the rows.
    """
    from datasets import Dataset, load_dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = AutoConfig.from_pretrained(model_dir)
    for name, value in (("num_hidden_layers", 1), ("hidden_size", 16), ("intermediate_size", 16)):
        setattr(config, name, value)
    config.num_attention_heads = config.num_key_value_heads = 1
    config.layer_types = ["full_attention"]
    with tempfile.TemporaryDirectory() as folder:
        if loader == "from_list":
            dataset = Dataset.from_list(list(rows))
        else:
            file = Path(folder, "rows.jsonl")
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            dataset = load_dataset("json", data_files=str(file), split="train", cache_dir=folder)
        settings = SFTConfig(
            *(folder,),
            max_length=None,
            assistant_only_loss=masked,
            use_cpu=True,
            report_to=[],
            packing=False,
            bf16=False,
        )
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_config(config),
            args=settings,
            train_dataset=dataset,
            processing_class=tokenizer,
        )
        prepared = trainer.train_dataset
        labels = [row.get("labels") or row["input_ids"] for row in prepared]
        return [
            (row["input_ids"], [label != -100 for label in found]) for row, found in zip(prepared, labels, strict=True)
        ]


def compare(ours: tuple[list[int], list[bool]], theirs: tuple[list[int], list[bool]], decode: Any) -> tuple[str, str]:
    """Return the kind of the first difference and an example of it; "equal" for none."""
    (tokens, trained), (other, other_trained) = ours, theirs
    text, other_text = decode(tokens).rstrip("\n"), decode(other).rstrip("\n")
    if text != other_text:
        parts = difflib.SequenceMatcher(None, text, other_text, autojunk=False).get_opcodes()
        kind, i, j, k, m = next(part for part in parts if part[0] != "equal")
        return "text differs", f"{kind}: {text[i:j][:_SHOWN]!r} became {other_text[k:m][:_SHOWN]!r}"
    chars, other_chars = spread(tokens, trained, decode), spread(other, other_trained, decode)
    pairs = list(zip(text, chars, other_chars, strict=False))
    missing = [i for i, (_, mine, other) in enumerate(pairs) if mine and not other]
    added = [i for i, (char, mine, other) in enumerate(pairs) if other and not mine and not char.isspace()]
    if missing:
        return "trains less", repr(text[missing[0] : missing[0] + _SHOWN])
    if added:
        return "trains more", repr(text[added[0] : added[0] + _SHOWN])
    return "equal", ""


def spread(tokens: Sequence[int], trained: Sequence[bool], decode: Any) -> list[bool]:
    """Return for each character of the text whether its token is trained."""
    flags: list[bool] = []
    start = 0
    for end, is_trained in enumerate(trained, start=1):
        piece = decode(tokens[start:end])
        if not piece.endswith("\ufffd"):  # which ends within a character
            flags += [is_trained] * len(piece)
            start = end
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the table, and write the result if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", required=True, metavar="FILE", help="rows in any format that fctune reads")
    parser.add_argument("--limit", type=int, default=400, metavar="N", help="rows; default: %(default)s")
    parser.add_argument("--result", type=Path, metavar="FILE", help="JSON file to write")
    arguments = parser.parse_args(argv)
    rows = make_rows(arguments.data, arguments.model, arguments.limit)
    decode = ChatTemplate(arguments.model).tokenizer.decode
    found: dict[str, Any] = {}
    for form, loader, masked in VARIANTS:
        name = f"{form}, {loader}, {'assistant_only_loss' if masked else 'untouched'}"
        try:
            prepared = prepare_with_trl([to_form(row, form) for row, _, _ in rows], arguments.model, loader, masked)
        except Exception as error:  # of any kind: it is what the user sees
            found[name] = {"refused": f"{type(error).__name__}: {error}"}
            continue
        kinds, examples = Counter[str](), dict[str, str]()
        for (_, tokens, trained), theirs in zip(rows, prepared, strict=True):
            kind, example = compare((tokens, trained), theirs, decode)
            kinds[kind] += 1
            examples.setdefault(kind, example)
        tokens_trained = {"fctune": sum(map(sum, (r[2] for r in rows))), "trl": sum(sum(p[1]) for p in prepared)}
        found[name] = {"kinds": dict(kinds), "examples": examples, "tokens_trained": tokens_trained}
    print(json.dumps(found, indent=1))
    if arguments.result is not None:
        date = f"{datetime.date.today()}"
        described = {"date": date, "rows": len(rows), "machine": describe_machine(), "variants": found}
        write_atomically(arguments.result, json.dumps(described, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
