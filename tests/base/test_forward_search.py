"""The search that remembers its last result finds what ``str.find`` finds."""

from __future__ import annotations

import random
import time

from fctune.base.forward_search import ForwardSearch


def test_every_search_equals_str_find() -> None:
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choice("ab<>") for _ in range(rng.randint(0, 40)))
        end = rng.randint(0, len(text))
        search = ForwardSearch(text, end)
        for _ in range(30):
            needle, start = rng.choice(["a", "<", "ab", "<>"]), rng.randint(0, len(text))
            assert search.find(needle, start) == text.find(needle, start, end)


def test_repeated_searches_for_a_missing_mark_take_linear_time() -> None:
    search = ForwardSearch("<" * 1_000_000)
    begun = time.process_time()
    assert {search.find("</", start) for start in range(0, 1_000_000, 10)} == {-1}
    assert time.process_time() - begun < 2
