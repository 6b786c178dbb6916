"""Serve a model with vLLM while a benchmark measures it."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch

from fctune.base.errors import ConfigError
from fctune.base.launcher_watch import stop_with_parent
from fctune.calls.server_parsers import FILE_NAME as PARSERS_FILE
from fctune.calls.server_parsers import write_server_parsers
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.template_args import TEMPLATE_ARGS_FILE, write_template_args
from fctune.models.precision import is_emulated

# Without instructions for bfloat16, an hour of training and measuring would be most of a day.
IS_SLOW_IN_BF16 = not torch.cuda.is_available() and is_emulated(torch.bfloat16)
_DTYPE = "float32" if IS_SLOW_IN_BF16 else "bfloat16"
DEFAULT_OPTIONS = f"--enforce-eager --dtype {_DTYPE} --max-model-len 6144 --max-num-seqs 32 --host 127.0.0.1"
# BFCL's dialogues describe up to forty functions, and grow with each result.
LONG_OPTIONS = DEFAULT_OPTIONS.replace("--max-model-len 6144", "--max-model-len 16384")
# vLLM 0.32 on a CPU dies of a part of a prompt whose request has a seed ("does not use offset"), as samples have.
WHOLE_PROMPTS = "--no-enable-chunked-prefill --max-num-batched-tokens 6144"
# On a CPU, vLLM takes 92 % of the memory for its cache, and does not start where less is free. GPUs ignore this.
CPU_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "2"}
_TEMPLATE_FILE = "chat_template.jinja"
_FEW_CORES = 4
_START_LIMIT_S = 1800.0
_STOP_LIMIT_S = 60.0


@contextmanager
def serve(model_dir: Path, python: str, options: str, port: int, log: Path) -> Iterator[str]:
    """Run ``fctune serve`` and yield its address; the server ends with the block, or with this process.

    Args:
        model_dir: The model, with its chat template.
        python: Python of an environment with vLLM.
        options: Further options of vLLM.
        port: The port to listen on.
        log: File that gets the server's output.

    Raises:
        ConfigError: The server ends, or is not healthy after half an hour; with the last line of its output.
    """
    wait_until_free(port)
    command = [sys.executable, "-m", "fctune.cli", "serve", str(model_dir), "--name", log.stem, "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--python", python, f"--vllm={options}"],
            env=CPU_SETTINGS | _bind_to_all_cores() | os.environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            # After a kill of this process, the next start must not find another server in memory.
            preexec_fn=stop_with_parent(),
        )
    try:
        _wait(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def link_with_template(
    model_dir: Path, template: ChosenTemplate | None, template_args: Mapping[str, Any], folder: Path
) -> Path:
    """Return a directory with links to a model's files and a chat template; servers know no other way to choose one."""
    if template is None:
        return model_dir
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in model_dir.iterdir():
        if file.name not in (_TEMPLATE_FILE, TEMPLATE_ARGS_FILE, PARSERS_FILE):  # a write would follow the link
            (folder / file.name).symlink_to(file.resolve())
    (folder / _TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
    write_template_args(folder, template_args)
    write_server_parsers(folder, ChatTemplate(folder), template_args, has_reasoning=False)
    return folder


def _bind_to_all_cores() -> dict[str, str]:
    """Return vLLM's setting for a CPU of few cores, of which it would keep one from the model for its scheduler.

    On two cores, 64 prompts of 500 tokens with answers of 60 took 25 s instead of 40 s.
    """
    if sys.platform != "linux":
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if len(cores) <= _FEW_CORES else {}


def wait_until_free(port: int, limit_s: float = _STOP_LIMIT_S) -> None:
    """Wait for the server of a run that was killed to end.

    Raises:
        ConfigError: The port stays taken; its server would be measured in place of the model's.
    """
    started = time.monotonic()
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return
        if time.monotonic() - started > limit_s:
            raise ConfigError(f"--port {port}: another server listens there. End it, or pass another --port.")
        time.sleep(0.5)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    started = time.monotonic()
    while True:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise ConfigError(f"{shlex.quote(str(log))}: the server ended: {lines[-1] if lines else 'no output'}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0, trust_env=False).status_code == 200:
                print(f"{log.stem}: served after {time.monotonic() - started:.0f} s", flush=True)
                return
        if time.monotonic() - started > _START_LIMIT_S:
            raise ConfigError(f"{log}: the server is not healthy after {_START_LIMIT_S:.0f} s.")
        time.sleep(0.5)
