"""Exit codes of a run, and which of them make a launcher start the run again: scripts and manifests follow this table.

A restart resumes from the newest checkpoint. ``sky/run_node.sh`` ends with FAILED instead of a code that restarts once
several restarts in a row have saved no new checkpoint, so launchers need no limit for these codes. They limit only the
restarts after other ends, such as a container that was killed.
"""

from typing import NamedTuple

DONE = 0
FAILED = 1
INVALID = 2
SAVE_FAILED = 74  # EX_IOERR of sysexits.h
STOPPED = 75  # EX_TEMPFAIL
NODE_FAULT = 76


class Ending(NamedTuple):
    """Meaning of an exit code; launchers repeat the command by themselves if ``restarts``."""

    meaning: str
    restarts: bool


EXIT_CODES = {
    DONE: Ending("done", restarts=False),
    FAILED: Ending("the run or a check failed", restarts=False),
    INVALID: Ending("wrong usage, config or data", restarts=False),
    SAVE_FAILED: Ending("a full or hanging disk", restarts=False),
    STOPPED: Ending("stopped on request, and saved", restarts=True),
    NODE_FAULT: Ending("a GPU, a node or the network failed", restarts=True),
}
RESTARTED = tuple(code for code, ending in EXIT_CODES.items() if ending.restarts)
