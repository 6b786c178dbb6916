"""A stand-in for the process of a verifiers environment: it speaks the same lines, and fails in the way it is told."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add", "parameters": {"type": "object"}}}]
PROMPT = [{"role": "user", "content": "Count."}]


def write_python(folder: Path, fault: str) -> str:
    """Write a program that takes the place of the Python of an environment, and return its path."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, '-S', __file__, fault])}\n")
    path.chmod(0o755)
    return str(path)


def send(**reply: Any) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def follow(fault: str, episode: int, message: dict[str, Any], said: list[dict[str, Any]]) -> None:
    """Reply to an answer: a result to a call, else the reward."""
    said.append({"role": "assistant", **message})
    if not message.get("tool_calls"):
        send(episode=episode, reward={"nan": float("nan"), "text": "good", "constant": 0.5}.get(fault, 1.0))
        return
    for call in message["tool_calls"]:
        content = "x" * 5000 if fault == "long" else "1"
        said.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    if fault == "rewrites":
        said[0] = {"role": "user", "content": "Count backwards."}
    send(episode=episode, messages=said, tools=[] if fault == "tools" else TOOLS)


def main() -> None:
    fault, said = sys.argv[1], dict[int, list[dict[str, Any]]]()
    if fault == "silent":
        sys.exit("no module named counting")
    send(tasks=[{"messages": [{"role": "user", "content": f"Count to {number}."}]} for number in range(30)])
    for line in sys.stdin:
        request = json.loads(line)
        episode = request["episode"]
        if request["do"] == "start":
            said[episode] = list(PROMPT)
            if fault == "dies":
                sys.exit("killed by the environment")
            if fault == "error":
                send(episode=episode, error="TaskError: setup failed")
            elif fault == "early":
                send(episode=episode, reward=1.0)
            else:
                send(episode=episode, messages=PROMPT, tools=TOOLS)
        elif request["do"] == "answer":
            if fault == "hangs":
                time.sleep(600)
            if fault == "garbage":
                sys.stdout.write("Traceback\n")
                sys.stdout.flush()
                continue
            follow(fault, episode, request["message"], said[episode])
        elif request["do"] == "finish":
            send(episode=episode, reward=0.25)


if __name__ == "__main__":
    main()
