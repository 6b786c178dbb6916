"""A template from outside costs a bounded time and memory, whatever it does and wherever it is rendered."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from fctune.base.errors import DataError
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data import bounded_process
from fctune.data.bounded_process import LimitError
from fctune.data.chat_template import ChatTemplate
from fctune.data.chunk_encoder import Counts, EncodedChunk
from fctune.data.conversation import Conversation, Message
from fctune.data.conversation_encoder import TemplateLimitError
from fctune.data.encoding import encode_sources
from fctune.data.tracing import TracedTemplate

HI = Conversation((Message("user", "Hi"),))
NESTED = "{% set n = namespace(a=[1], b=[1]) %}" + "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}" * 60

MEMORY = {
    "replacements": "{% set s = 'a' %}" + "{% set s = s.replace('a', 'aaaaaaaaaa') %}" * 9,
    "filters": "{{ 'a'" + "|replace('a', 'aaaaaaaaaa')" * 9 + "|length }}",
    "concatenations": "{% set n = namespace(s='ab') %}" + "{% set n.s = n.s ~ n.s %}" * 32,
    "sums": "{% set s = 'ab' %}" + "{% set s = s + s %}" * 32,
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000})|length }}",
    "join": "{{ ('b' * 100000).join('a' * 100000)|length }}",
    "indent": r"{{ ('\n' * 100000)|indent(100000, blank=true)|length }}",
    "a constant format": "{{ '%0999999999d' % 5 }}",
    "format": "{{ '{:>999999999}'.format(messages|length) }}",
    "center": "{{ messages[0].content.center(999999999) }}",
    "a list": "{{ (messages[0].content * 10**8)|list|length }}",
    "JSON": NESTED + "{{ n.a|tojson|length }}",
}
TIME = {
    "a power": "{{ 7 ** (9 ** (messages|length + 8)) }}",
    "a comparison": NESTED + "{{ n.a == n.b }}",
}
SLOW = {
    "a constant power": "{{ 7 ** (9 ** 9) }}",
    "links": "{{ ('www.' ~ 'a.' * 2000000)|urlize|length }}{{ ('(((((' * 1000000 ~ 'a.com')|urlize|length }}",
    "lines": "{{ ('a' * 9000000)|wordwrap(1, wrapstring='b' * 1000)|length }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "mapped": "{{ range(99999)|map('string')|map('center', 99999)|list|length }}",
}


def measure_peak_mib() -> float:
    """Return the most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "source"),
    [*MEMORY.items(), *TIME.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items())],
)
def test_no_template_takes_much_time_or_memory(name: str, source: str) -> None:
    before, started = measure_peak_mib(), time.process_time()
    with pytest.raises(LimitError, match=r"takes more than (512 MiB of memory|2 s of computing|30 s)"):
        TracedTemplate(source, {}).render(HI)
    assert measure_peak_mib() - before < 64
    assert time.process_time() - started < 1  # all of it is the other process's
    assert TracedTemplate("{{ messages[0].content }}", {}).render(HI)[0] == "Hi"  # a new process continues


def test_a_template_prints_in_proportion_to_its_row() -> None:
    much = TracedTemplate("{% for i in range(9) %}{{ messages[0].content * 1000000 }}{% endfor %}", {})
    with pytest.raises(LimitError, match="prints 18,000,000 characters of a row of"):
        much.render(HI)
    long = Conversation((Message("user", "x" * 10**6),))
    assert len(TracedTemplate("{{ messages[0].content * 9 }}", {}).render(long)[0]) == 9 * 10**6


ROW_DEPENDENT = "{% for m in messages %}{% if 'power' in m.content %}{{ 7 ** (9 ** (messages|length + 7)) }}{% endif %}"
ROW_DEPENDENT += "{% if 'fill' in m.content %}{{ 'x' * 10**9 }}{% endif %}{% endfor %}"


def make_config(path: Path) -> DataConfig:
    return DataConfig(
        sources=[SourceConfig(path=str(path))], on_invalid="skip", max_invalid_share=1.0, validation_share=0.0
    )


def join(parts: list[EncodedChunk], name: str) -> list[float]:
    joined: list[float] = np.concatenate([getattr(part, name) for part in parts]).tolist()
    return joined


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_row_that_exceeds_the_limits_is_a_defect_and_the_others_are_kept(
    num_processes: int, tiny_base: Path, write_template: Callable[[str], Path], write_rows: Callable[..., Path]
) -> None:
    rows = [[{"role": "user", "content": f"Hi {i}"}, {"role": "assistant", "content": "Hello."}] for i in range(200)]
    rows[70][0]["content"], rows[150][0]["content"] = "power", "fill"
    path = write_rows([{"messages": messages} for messages in rows])
    model = write_template(ROW_DEPENDENT)
    parts = list(encode_sources(make_config(path), model, Counts(), num_processes))
    defects = [(defect.line, defect.kind, defect.reason) for part in parts for defect in part.defects]
    assert [(line, kind) for line, kind, _ in defects] == [(71, "not_renderable"), (151, "not_renderable")]
    assert "takes more than 2 s of computing" in defects[0][2]
    assert "takes more than 512 MiB of memory" in defects[1][2]
    kept = write_rows([{"messages": messages} for i, messages in enumerate(rows) if i not in (70, 150)])
    plain = list(encode_sources(make_config(kept), tiny_base, Counts(), num_processes))
    for name in ("tokens", "weights", "lengths", "digests", "repeats"):
        assert join(parts, name) == join(plain, name)


def test_a_run_stops_at_the_third_row_that_exceeds_the_limits(
    write_template: Callable[[str], Path], write_rows: Callable[..., Path]
) -> None:
    row = {"messages": [{"role": "user", "content": "fill"}, {"role": "assistant", "content": "Hello."}]}
    path, model = write_rows([row] * 5000), write_template(ROW_DEPENDENT)
    with pytest.raises(
        DataError, match=rf"^{model}: stopped after \d+ rows, such as {path}:1: messages: .*limits"
    ) as e:
        list(encode_sources(make_config(path), model, Counts(), 1))
    assert "\n" not in str(e.value)


def test_a_prompt_that_exceeds_the_limits_is_an_error_and_the_next_one_is_rendered(
    write_template: Callable[[str], Path],
) -> None:
    template = ChatTemplate(write_template(ROW_DEPENDENT))
    with pytest.raises(TemplateLimitError, match="takes more than 512 MiB"):
        template.encode_prompt(Conversation((Message("user", "fill"),)))
    assert "Hi" in template.decode(template.encode_prompt(HI))


@pytest.mark.thorough
def test_the_processes_end_with_the_one_that_uses_them(write_template: Callable[[str], Path]) -> None:
    code = (
        "import os, sys; from fctune.data import tracing; from fctune.data.chat_template import ChatTemplate;"
        "ChatTemplate(sys.argv[1]); print(tracing._renderer._pid, tracing._renderer._server._process.pid, flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(write_template(""))]
    user = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None
    left = [psutil.Process(int(pid)) for pid in user.stdout.readline().split()]
    assert len(left) == 2
    user.send_signal(signal.SIGKILL)
    user.communicate()
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


def test_a_process_that_is_killed_is_reported_and_replaced() -> None:
    process = bounded_process.BoundedProcess()
    with pytest.raises(bounded_process.ProcessDiedError, match="signal 9"):
        process.call(os.kill, process.call(os.getpid), signal.SIGKILL)
    other = bounded_process.BoundedProcess()
    assert other.call(abs, -1) == 1
    other.close()


@pytest.fixture
def write_template(tiny_base: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a model directory with the demo's chat template and text after it."""

    def write(added: str) -> Path:
        path = tmp_path / "model"
        path.mkdir()
        for file in tiny_base.glob("*.json"):
            (path / file.name).write_bytes(file.read_bytes())
        source = ChatTemplate(tiny_base).source
        (path / "chat_template.jinja").write_text(source + added + "{# not the demo's own #}", encoding="utf-8")
        return path

    return write
