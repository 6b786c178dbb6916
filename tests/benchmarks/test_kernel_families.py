"""The page of kernels shows what was counted, and says why a family is above Llama."""

from __future__ import annotations

import json

from benchmarks.kernel_families import FAMILIES, LIMIT, PAGE, RESULT, compare_with_llama, format_page


def test_the_page_is_that_of_the_result_and_has_every_family() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == format_page(result), "run python -m benchmarks.kernel_families page"
    assert [row["models"] for row in result["rows"]] == [family.models for family in FAMILIES]
    reasons = {family.models: family.reason for family in FAMILIES}
    for row in result["rows"]:
        is_far = max(row["kernels_percent"], row["kernel bytes_percent"]) > LIMIT
        assert is_far <= bool(reasons[row["models"]]), row["models"]


def test_rows_are_compared_with_the_first() -> None:
    def count(kernels: int, num_bytes: int) -> dict[str, int]:
        return {"kernels": kernels, "kernel bytes": num_bytes, "product bytes": 1_000}

    rows = [
        {"forward": count(10, 100), "backward": count(10, 300)},
        {"forward": count(11, 100), "backward": count(12, 100)},
        {"error": "not traced"},
    ]
    first, second, third = compare_with_llama(rows)
    assert (first["kernels_percent"], first["kernel bytes_percent"], first["all bytes_percent"]) == (0, 0, 0)
    assert (second["kernels"], round(second["kernels_percent"])) == (23, 15)
    assert (second["kernel bytes_percent"], round(second["all bytes_percent"])) == (-50, -8)
    assert third == {"error": "not traced"}
