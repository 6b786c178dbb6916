"""vLLM's own reader of response templates accepts ours, and reads what transformers' reader does."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.calls.response_samples import END, EXPRESSED, KINDS, make_spec, read_calls
from tests.calls.server_outputs import make_outputs

pytestmark = pytest.mark.serving

READ = """
import json, sys
from vllm.parser.chat_parsing import parse_response
from vllm.parser.response_template import validate_response_template_for_serving

def read(row):
    validate_response_template_for_serving(row["spec"])
    try:
        found = parse_response(row["text"], row["spec"], prefix="", tools=row["tools"])
    except Exception as error:
        return str(error)
    return [[call["function"]["name"], call["function"]["arguments"]] for call in found.get("tool_calls", ())]

with open(sys.argv[1], encoding="utf-8") as rows, open(sys.argv[2], "w", encoding="utf-8") as out:
    json.dump([read(json.loads(row)) for row in rows], out)
"""


def test_vllm_reads_every_seeded_output_as_transformers_does(vllm_python: str, tmp_path: Path) -> None:
    thinking = {"open": "<think>", "close": "</think>", "content": "text"}
    rows, expected = [], []
    for call_format in EXPRESSED:
        spec = make_spec(call_format)
        spec["fields"]["thinking"] = thinking
        for output in make_outputs(call_format, 130, seed=9):
            if output.kind in KINDS:
                tools = [tool.to_openai() for tool in output.tools]
                rows.append(json.dumps({"spec": spec, "text": output.text + END, "tools": tools}))
                expected.append(read_calls(output.text + END, spec, output.tools))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    files = [str(tmp_path / "rows.jsonl"), str(tmp_path / "read.json")]
    subprocess.run([vllm_python, "-c", READ, *files], check=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})
    found = json.loads((tmp_path / "read.json").read_text())
    same = Counter(
        isinstance(ours, str) if isinstance(theirs, str) else ours == theirs
        for ours, theirs in zip(expected, found, strict=True)
    )
    assert same == {True: len(rows)}
    assert len(rows) > 2000
