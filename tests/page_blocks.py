"""The code blocks of the pages."""

from __future__ import annotations

import re
from pathlib import Path


def list_blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a language, with or without a title."""
    return re.findall(rf"^```{language}(?: title=.*?)?\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
