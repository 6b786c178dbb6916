"""A plan's own process leaves out slow imports, plans the same, and gets the real modules when it needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fctune.cli import main
from tests.conftest import ROOT

LEFT_OUT = ("torch._inductor", "torchao")
REPORT = (
    f"import atexit, sys; atexit.register(lambda: print([m for m in {LEFT_OUT} if m in sys.modules], file=sys.stderr))"
)

REAL = """
from fctune.cli.quick_imports import stand_in_for_slow_imports
import sys, torch
stand_in_for_slow_imports()
from transformers import AutoModelForCausalLM, Qwen3Config
assert "torch._inductor" not in sys.modules, "imported by transformers after all"
model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4))
assert model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 8)
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(1)) == 2 and hasattr(torch._dynamo, "explain")
import transformers.models
assert transformers.models.qwen3.Qwen3Model is type(model.model)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
try:
    AUTO_QUANTIZER_MAPPING["torchao"](None)
except Exception as error:
    assert "torchao" in str(type(error)) + str(error) or "torchao" in sys.modules
print("done")
"""


def test_a_plan_of_its_own_process_is_the_same_without_the_slow_imports(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "configs/gemma3_270m_lora.yaml", "compile=false", "--json"]
    code = f"{REPORT}; from fctune.cli import main; sys.argv = {['fctune', *words]!r}; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines()[-1] == "[]"
    assert main([words[0], str(ROOT / words[1]), *words[2:]]) == 0
    assert done.stdout == capsys.readouterr().out


def test_real_modules_replace_the_stand_ins_when_they_are_needed() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr
