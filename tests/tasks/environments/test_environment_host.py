"""A user's environment that fails is named, bounded and started again, and no other episode is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.data.conversation import Call
from fctune.tasks.environments.host import EnvironmentDefect, EnvironmentHost, Limits, list_environments
from tests.conftest import ROOT

FILE = Path(__file__).with_name("faulty_environments.py")
LIMITS = Limits(call_s=1.0, memory_bytes=512 * 1024**2, result_bytes=10_000)


def add(by: int) -> Call:
    return Call("add", {"by": by})


def open_host(name: str) -> EnvironmentHost:
    return EnvironmentHost(f"{FILE}:{name}", LIMITS)


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[EnvironmentHost]:
    opened = open_host(request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("Raises", "raised KeyError: 'no such shelf'"),
        ("Hangs", "no result within 1 s"),
        ("Exits", "its process exited with code 7"),
        ("SysExits", "tried to exit with 3"),
        ("ReturnsSet", "returned what JSON cannot express"),
        ("ReturnsNan", "returned what JSON cannot express"),
        ("Floods", "returned 10,000,013 bytes; at most 10,000 are allowed"),
        ("Eats", "ran out of the memory that it may use"),
        ("Crashes", "its process was killed by signal 11"),
    ],
    indirect=["host"],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_a_fault_ends_its_episode_alone(host: EnvironmentHost, reason: str) -> None:
    task = host.make_task(4, "train")
    other, failing = host.start(task), host.start(task)
    assert other.call(add(2)).text == '{"value": 2}'
    assert not other.call(add(-1)).is_accepted
    begun = time.monotonic()
    with pytest.raises(EnvironmentDefect) as raised:
        failing.call(add(13))
    assert time.monotonic() - begun < 5
    said = str(raised.value)
    assert f"faulty_environments.py:{host.name.rpartition(':')[2]}, call of add: " in said
    assert reason in said
    assert "\n" not in said
    # The other episode continues where it was, in a new process if need be, and so do new ones.
    assert other.call(add(3)).text == '{"value": 5}'
    assert other.state() == {"value": 5} == task.goal
    assert host.start(task).state() == {"value": 0}


@pytest.mark.parametrize("host", ["Writes"], indirect=True)
def test_prints_do_not_get_into_results(host: EnvironmentHost) -> None:
    assert host.start(host.make_task(1, "train")).call(add(13)).text == '"printed"'


@pytest.mark.parametrize("host", ["Drifts"], indirect=True)
def test_an_environment_that_is_not_deterministic_is_named_when_calls_are_made_again(host: EnvironmentHost) -> None:
    from fctune.tasks.environments.base import CheckedTask, TaskSpec

    task = CheckedTask("t", TaskSpec("?", {"value": 0}, ()))
    first, second = host.start(task), host.start(task)
    first.call(add(1))
    with pytest.raises(EnvironmentDefect, match="exited with code 7"):
        second.call(add(13))
    with pytest.raises(EnvironmentDefect, match="is not deterministic: add gave a different result"):
        first.call(add(1))


@pytest.mark.parametrize("host", ["Counter"], indirect=True)
def test_calls_that_match_no_tool_are_refused_without_asking_the_class(host: EnvironmentHost) -> None:
    episode = host.start(host.make_task(1, "train"))
    for call in (Call("subtract", {}), Call("add", {}), Call("add", {"by": "2"}), Call("add", {"by": 2, "to": 3})):
        result = episode.call(call)
        assert not result.is_accepted
        assert '"error"' in result.text
    assert episode.state() == {"value": 0}
    assert len(episode.calls) == 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fils", "environment fils: no such environment; did you mean files? (known: calendar, files, shop)"),
        ("no.such.module:Thing", "No module named 'no'"),
        ("mine.py:Thing", "mine.py does not exist; relative paths start at /"),
        (
            "faulty_environments:Counter",
            "modules are not imported from the working directory; pass faulty_environments.py:Counter",
        ),
        (f"{FILE}:Missing", "has no attribute 'Missing'"),
        (
            f"{FILE}:NotAnEnvironment",
            "lacks the methods list_tools, make_task, reset, call, state",
        ),
        (f"{FILE}:NoTools", "list_tools returned no list of tools"),
        (f"{FILE}:BadSchema", "its schema is unusable"),
    ],
    ids=range(8),
)
def test_an_unusable_environment_is_refused_at_the_start_in_one_sentence(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FILE.parent)
    with pytest.raises(ConfigError) as raised:
        EnvironmentHost(name, LIMITS)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("Unsolvable", "has a call that is refused"),
        ("Pointless", "changes nothing and asks for nothing"),
        ("NoTask", "make_task: returned str; expected fctune.tasks.environments.base.TaskSpec"),
    ],
    indirect=["host"],
    ids=["Unsolvable", "Pointless", "NoTask"],
)
def test_a_task_that_its_own_calls_do_not_solve_is_named(host: EnvironmentHost, reason: str) -> None:
    with pytest.raises(EnvironmentDefect, match=reason):
        host.make_task(3, "train")


def test_an_entry_point_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fctune.tasks.environments]\ncounter = tests.tasks.environments.faulty_environments:Counter\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # installed
    assert "counter" in list_environments()
    host = EnvironmentHost("counter", LIMITS)
    try:
        assert host.make_task(1, "train").id == "counter/train/1"
    finally:
        host.close()


def test_the_process_gets_no_keys_and_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is a file next to modules of its own, in a folder with files that would hide those of Python."""
    for name in ("struct", "resource", "jsonschema"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write(__name__)\n")
    (tmp_path / "starts.py").write_text("import resource\nSTART = 5\n")
    (tmp_path / "calendar.py").write_text(
        f"import os, starts\n"
        f"import importlib.util as u\n"
        f"spec = u.spec_from_file_location('faulty', {str(FILE)!r})\n"
        f"faulty = u.module_from_spec(spec)\n"
        f"spec.loader.exec_module(faulty)\n"
        f"class Mine(faulty.Counter):\n"
        f"    def state(self):\n"
        f"        return {{'value': self._value, 'variables': sorted(os.environ), 'start': starts.START}}\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "FCTUNE_API_KEY", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_URL"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("FCTUNE_ENVIRONMENT_VARIABLES", "DB_USER, DB_URL")
    host = EnvironmentHost("calendar.py:Mine", LIMITS)
    try:
        state = host.make_task(1, "train").goal
    finally:
        host.close()
    assert state["start"] == 5
    assert "PATH" in state["variables"]
    assert "DB_URL" in state["variables"]
    assert not [name for name in state["variables"] if any(word in name for word in ("TOKEN", "KEY"))]
    assert not (tmp_path / "executed").exists()


def test_ending_the_host_ends_its_process() -> None:
    host = open_host("Counter")
    assert host._process is not None
    child = host._process._child
    host.close()
    assert child.code is not None
