"""Quantise a GGUF file, or tokenise with it, by llama.cpp's code; run by ``fctune.apps.serve.gguf_export``.

    PYTHON -P gguf_library.py quantize IN.gguf OUT.gguf TYPE
    PYTHON -P gguf_library.py tokenize FILE.gguf < texts.jsonl > ids.jsonl

A process of its own, because llama.cpp aborts the process on files that it cannot handle. Quantising is cyllama's;
texts go through the server in xllamacpp, which is the newer llama.cpp of the two. Imports nothing of fctune.
"""

from __future__ import annotations

import json
import sys
import urllib.request

# Of llama.h, enum llama_ftype.
_TYPES = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}


def main(action: str, *arguments: str) -> int:
    """Run one of the actions; returns the exit code."""
    (quantize if action == "quantize" else tokenize)(*arguments)
    return 0


def quantize(source: str, out: str, gguf_type: str) -> None:
    """Write the file with quantised weights."""
    from cyllama.llama import llama_cpp

    options = llama_cpp.LlamaModelQuantizeParams()
    options.ftype = _TYPES[gguf_type]
    llama_cpp.model_quantize(source, out, options)


def tokenize(source: str) -> None:
    """Print the ids of each text on stdin, a JSON string a line; control tokens in a text are read as such."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = source
    options.n_ctx = 256
    options.warmup = False
    server = xllamacpp.Server(options)
    for line in sys.stdin:
        body = json.dumps({"content": json.loads(line), "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=600) as answer:
            print(json.dumps(json.load(answer)["tokens"]), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
