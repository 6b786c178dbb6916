"""An agent as users write them, which knows nothing of fctune: a few turns with a model, or one of several bad habits.

python agent_program.py [HABIT]     the task as JSON on the input; OPENAI_BASE_URL and OPENAI_API_KEY in the environment
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any


def ask(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the model's message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "temperature": 0.2, **fields}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
        return message


def main() -> None:
    habit = sys.argv[1] if len(sys.argv) > 1 else "converses"
    task = json.load(sys.stdin)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    if habit == "silent":
        return
    if habit == "other_model":
        ask(messages, model="gpt-4o")
    for turn in range(task.get("turns", 2)):
        answer = ask(messages)
        if habit == "forgets":
            messages = [{"role": "user", "content": f"So far: {answer['content'][:20]!r}. Step {turn}?"}]
        else:
            messages += [answer, {"role": "user", "content": f"Go on, step {turn}."}]
    if habit == "parallel":
        asked = [[{"role": "user", "content": f"{task['question']} Part {part}."}] for part in range(3)]
        threads = [threading.Thread(target=ask, args=(one,)) for one in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if habit == "crashes":
        sys.exit("KeyError: 'tool'")
    if habit == "endless":
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        with Path(task["pids"]).open("a") as pids:
            pids.write(f"{os.getpid()} {child.pid}\n")
        time.sleep(600)
    (Path(os.environ["FCTUNE_EPISODE_DIR"]) / "answer.txt").write_text(
        messages[-2 if len(messages) > 1 else 0]["content"]
    )
    print("done")


if __name__ == "__main__":
    main()
