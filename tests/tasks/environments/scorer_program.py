"""A scorer as users write them: it reads an episode and prints a score, or one of several wrong things.

python scorer_program.py [HABIT]     the episode as JSON on the input
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    habit = sys.argv[1] if len(sys.argv) > 1 else "scores"
    episode = json.load(sys.stdin)
    assert (Path(os.environ["FCTUNE_EPISODE_DIR"]) / "task.json").is_file()
    said = "".join(message["content"] or "" for message in episode["answers"])
    print("a line before the score")
    match habit:
        case "scores":
            print(hashlib.blake2b(said.encode(), digest_size=1).digest()[0] / 255)
        case "object":
            print(json.dumps({"score": 1.0, "why": "fine"}))
        case "constant":
            print(0.5)
        case "crashes":
            sys.exit("no such table: orders")
        case "hangs":
            time.sleep(600)
        case "nothing":
            print(" " * 3, file=sys.stderr)
        case _:
            print(habit)


if __name__ == "__main__":
    main()
