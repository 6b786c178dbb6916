"""``fctune export``: convert a model to GGUF."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Add ``fctune export`` to the command-line parser."""
    export = commands.add_parser("export", help="convert a run's export for llama.cpp and Ollama (GGUF)")
    export.add_argument("model", metavar="PATH", help="directory of a run or a tune, a model directory, or hf:NAME")
    export.add_argument("--to", choices=("gguf",), required=True, help="the file format")
    export.add_argument(
        "--quantize", metavar="TYPE", help="f32, f16, bf16, q8_0, q6_k, q5_k_m or q4_k_m; default: the model's dtype"
    )
    export.add_argument(
        "--out", type=Path, metavar="DIR", help="default: gguf, next to the model directory; for hf:NAME, NAME-gguf"
    )
    export.add_argument("--force", action="store_true", help="convert a model that fctune gate has stopped")
    export.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from fctune.apps.serve.gguf_export import export_gguf
    from fctune.runs.release import require_released

    require_released(arguments.model, "not converted", arguments.force)
    done = export_gguf(arguments.model, arguments.out, arguments.quantize)
    print(f"{done.path}: {done.path.stat().st_size / 1e6:,.1f} MB")
    print(f"{done.num_checked} of {done.num_checked} prompts are tokenised as in training")
    tools = "declares tools" if done.unserved is None else f"declares no tools: {done.unserved}"
    print(f"{done.modelfile}: {tools}   (ollama create NAME -f {done.modelfile})")
    print(f"llama-server -m {done.path} --jinja")
    return 0
