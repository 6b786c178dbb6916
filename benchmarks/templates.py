"""Print, as Markdown tables, how the public chat templates of the trl and transformers wheels are trained on.

    python -m benchmarks.templates [--out docs/reference/chat-templates.md]

Each template gets a byte-level tokenizer that has the special tokens of all, and the generation_config.json of its
model family. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fctune.apps.demo.tokenizer import train_tokenizer
from fctune.base.errors import DataError
from fctune.calls.formats.registry import FORMATS, detect_format
from fctune.calls.formats.response_fields import Surroundings
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool

SPECIAL = re.compile(
    r"<[|｜][^<>\s]*?[|｜]>|</?s>|\[/?[A-Z_]{3,}\]|<eos>|<bos>|<end_of_turn>|<start_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>"
)
# Added tokens that are not special tokens, as in Qwen's tokenizer.
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# How Qwen's tokenizer divides text: two line breaks after a tag are one token.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

# The tokens with which each family's models stop, from their generation_config.json.
STOPS = {
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "diffusion_gemma": ("<eos>", "<turn|>", "<|tool_response>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "llama3": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "transformers_llama4": ("<|end_of_text|>", "<|eom|>", "<|eot|>"),
    "muse": ("<|eot|>",),
    "": ("<|im_end|>", "<|endoftext|>"),
}


@dataclass(frozen=True, slots=True)
class PublicTemplate:
    """A chat template of an installed package.

    Attributes:
        name: Its unique name; templates of transformers begin with ``transformers_``.
        source: Its text.
    """

    name: str
    source: str


@cache
def find_templates() -> tuple[PublicTemplate, ...]:
    """Return the chat templates of the trl wheel, then those of transformers; none without the wheels."""
    files = sorted((folder / "chat_templates").glob("*.jinja")) if (folder := _find_package("trl")) else []
    own = [PublicTemplate(file.stem, file.read_text(encoding="utf-8")) for file in files]
    return (*own, *_iter_transformers_templates())


def _iter_transformers_templates() -> Iterator[PublicTemplate]:
    """Yield the chat templates that are texts in the code of transformers' models, named by the model's module."""
    folder = _find_package("transformers")
    for file in sorted(folder.glob("models/*/*.py")) if folder else []:
        code = file.read_bytes()
        if b"{%" not in code:
            continue
        for node in ast.walk(ast.parse(code)):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and "{%" in node.value and "messages" in node.value:  # type: ignore[attr-defined]
                yield PublicTemplate(f"transformers_{file.parent.name}", node.value)  # type: ignore[attr-defined]


def _find_package(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def stops_of(name: str) -> tuple[str, ...]:
    """Return the tokens with which models of a template's family stop."""
    return next(stops for family, stops in STOPS.items() if name.startswith(family))


def write_tokenizer(path: Path, texts: Iterable[str]) -> None:
    """Write a tokenizer with the special tokens of all templates, trained on texts."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_tokenizer([*texts, *["a:\n\nb>\n\nc.\n\n"] * 3], PIECES, vocab_size=700)
    spelled = {token for template in find_templates() for token in SPECIAL.findall(template.source)}
    spelled |= {token for stops in STOPS.values() for token in stops}
    tokenizer.add_special_tokens(sorted({"<bos_>", "<eos_>", *spelled}))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos_>", eos_token="<eos_>").save_pretrained(path)


def write_model(path: Path, tokenizer_dir: Path, template: PublicTemplate) -> None:
    """Write a model directory without weights: the tokenizer, a chat template, and its family's stop tokens."""
    shutil.copytree(tokenizer_dir, path)
    (path / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    content = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    eos = [ids[token] for token in stops_of(template.name)]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


_TOOL = Tool(
    {
        "name": "find_place",
        "description": "Find a place.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    }
)


def _make_conversation(has_reasoning: bool) -> Conversation:
    """Return a conversation of two questions and three assistant turns."""
    first, second, third = ("I look it up.", "Found.", "A greeting.") if has_reasoning else (None, None, None)
    call = Call("find_place", {"town": "Bergen"}, id="callAAAA1")
    return Conversation(
        (
            Message("user", "Find Bergen."),
            Message("assistant", None, (call,), reasoning=first),
            Message("tool", '{"found": true}', call_id="callAAAA1", name="find_place"),
            Message("assistant", "It is there.", reasoning=second),
            Message("user", "Thanks!"),
            Message("assistant", "You are welcome.", reasoning=third),
        ),
        (_TOOL,),
    )


def describe_template(name: str, model: Path) -> str:
    """Return a template's row of the table."""
    try:
        template = ChatTemplate(model)
    except DataError as error:
        reason = str(error).removeprefix(f"{model}: ").partition(", so")[0].partition(". ")[0]
        return f"| {name} | refused: {reason} | | | | | |"
    ends = [template.encoder.planner.find_end(message) for message in (Message("assistant", "x"), _CALLS)]
    stops = [", ".join(f"`{token}`" for token in (*end.printed, *end.following)).replace("|", r"\|") for end in ends]
    try:
        call_format = detect_format(template.source).name
    except DataError:
        call_format = "-"
    counts = []
    for has_reasoning in (False, True):
        try:
            counts.append(str(len(template.encode(_make_conversation(has_reasoning)))))
        except DataError:
            counts.append("-")
    key = f"`{template.reasoning.key}`" if template.reasoning.key else "-"
    return f"| {name} | {call_format} | {stops[0]} | {stops[1]} | {key} | {counts[0]} | {counts[1]} |"


_CALLS = Message("assistant", None, (Call("find_place", {}),))


_HEAD = """| template | calls | end of an answer | end of a call | reasoning | samples | with reasoning |
|---|---|---|---|---|---|---|"""


def iter_lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield f"""# Public chat templates

<!-- numbers of this page: tests/data/test_public_templates.py -->

How fctune trains on the chat templates in the wheels of TRL {version("trl")} and
transformers {version("transformers")}; written by `python -m benchmarks.templates`.

The stop tokens are those with which the model is trained to end a turn. "Samples" is the number of samples that one
conversation becomes: a question, a call, its result, an answer, thanks, and a reply; first without reasoning, then with
reasoning in every turn. A template that prints earlier turns as the model wrote them needs one sample (see [Chat
templates](../templates.md)). "-" in the last column means that the template does not print all of that reasoning, and
`data.reasoning` says what happens to it.

{_HEAD}"""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_dir = Path(folder) / "tokenizer"
        write_tokenizer(tokenizer_dir, [_make_conversation(True).to_json()])
        for template in find_templates():
            model = Path(folder) / template.name
            write_model(model, tokenizer_dir, template)
            yield describe_template(template.name, model)
    yield _RESPONSES
    around = Surroundings(r"\A", "end")
    for name, found in FORMATS.items():
        is_expressed = found.describe_response(around) is not None
        yield f"| `{name}` | {'yes' if is_expressed else 'no'} | {found.response_note or '-'} |"
    yield _NOT_INSTALLED


_RESPONSES = """
## Response templates

Call formats that a tokenizer's `response_template` can express. An export has the one of its chat template, unless it
misreads any of the seeded answers that are rendered with that template. What its reader refuses, it answers with an
error. Untyped values are typed by the schemas of the tools, which the reader needs to be given.

| call format | expressed | refused or misread |
|---|---|---|"""
_NOT_INSTALLED = """
## In the repository of transformers, but not in its wheel

Found in the source distribution of transformers 5.23.0 and on GitHub, and tried once by hand, not by a test.

- `convert_gpt_oss_weights_to_hf.py`: accepted. The template equals `gptoss` except for the position of one empty line,
  and its entries in the table would be the same.
- `convert_gemma4_weights.py` and `convert_muse_glimmer_weights_to_hf.py` contain no template: they download it.
- `convert_llama_weights_to_hf.py`: the template prints no tools.
- `tests/test_tokenization_common.py` and `tests/test_processing_common.py`: 13 templates, none of which prints tools.
- `tests/utils/test_chat_parsing.py` and `test_chat_parsing_utils.py` contain response schemas, not chat templates.
- Tests of single models download the model's template from the hub; these were not tried."""


def main() -> None:
    """Print the table, or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Markdown file to write; default: print")
    arguments = parser.parse_args()
    text = "\n".join(iter_lines()) + "\n"
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
