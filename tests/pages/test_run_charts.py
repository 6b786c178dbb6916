"""Thinned charts keep extremes and both ends."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.pages.run_charts import Curve, make_line_chart, smooth, thin

values = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=3000)


@settings(max_examples=60, deadline=None)
@given(values, st.integers(10, 200))
def test_thinning_keeps_extremes_and_ends(column: list[float | None], num_points: int) -> None:
    indices = thin(column, num_points)
    known = [(index, value) for index, value in enumerate(column) if value is not None]
    assert len(indices) <= num_points
    assert indices == sorted(set(indices))
    assert all(column[index] is not None for index in indices)
    if known:
        kept = [column[index] for index in indices]
        assert (indices[0], indices[-1]) == (known[0][0], known[-1][0])
        assert max(kept) == max(v for _, v in known)  # type: ignore[type-var]
        assert min(kept) == min(v for _, v in known)  # type: ignore[type-var]


def test_single_outliers_among_a_hundred_thousand_steps_are_drawn() -> None:
    column: list[float | None] = [1.0] * 100_000
    column[77_777], column[33_333] = 50.0, -3.0
    steps = list(range(1, 100_001))
    chart = make_line_chart([Curve("loss", steps, column)], "")
    assert len(chart.labels) <= 400
    drawn = dict(zip(chart.labels, chart.series[0].values, strict=True))
    assert (drawn[77_778], drawn[33_334]) == (50.0, -3.0)


def test_curves_with_different_steps_share_an_axis_and_keep_their_values() -> None:
    first = Curve("a", list(range(1, 2001)), [float(i) for i in range(1, 2001)])
    second = Curve("b", list(range(500, 3001, 100)), [float(-i) for i in range(500, 3001, 100)])
    chart = make_line_chart([first, second], "")
    a, b = (dict(zip(chart.labels, series.values, strict=True)) for series in chart.series)
    assert all(value is None or value == label for label, value in a.items())
    assert {label: value for label, value in b.items() if value is not None} == dict(
        zip(second.steps, second.values, strict=True)
    )
    assert [series.is_sparse for series in chart.series] == [False, True]  # the first ends sooner, without a gap


def test_a_single_value_is_drawn_as_a_point() -> None:
    chart = make_line_chart(
        [Curve("loss", [1, 2, 3], [3.0, 2.0, 1.0]), Curve("validation", [1, 2, 3], [None, 2.5, None])], ""
    )
    assert [series.is_sparse for series in chart.series] == [False, True]
    assert make_line_chart([Curve("loss", [1], [3.0])], "").series[0].is_sparse


def test_a_logarithmic_axis_needs_positive_values_that_span_a_decade() -> None:
    assert make_line_chart([Curve("loss", [1, 2, 3], [0.5, None, 0.05])], "", is_log=True).is_log
    assert not make_line_chart([Curve("loss", [1, 2], [0.5, 0.0])], "", is_log=True).is_log
    assert not make_line_chart([Curve("loss", [1, 2], [0.5, -0.1])], "", is_log=True).is_log
    assert not make_line_chart([Curve("loss", [1, 2], [0.9, 0.6])], "", is_log=True).is_log
    assert not make_line_chart([Curve("loss", [1, 2], [9.0, 0.6])], "").is_log


def test_smoothing_follows_the_mean_without_delay_and_keeps_gaps() -> None:
    noisy: list[float | None] = [0.01 * step + (1.0 if step % 2 else -1.0) for step in range(400)]
    noisy[200] = None
    smoothed = smooth(noisy)
    assert smoothed[200] is None
    assert all(value is None or abs(value - 0.01 * step) < 0.25 for step, value in list(enumerate(smoothed))[10:-10])
    assert smooth([3.0, 2.0, 1.0]) == [3.0, 2.0, 1.0]
    with_spike = smooth([1.0] * 100 + [math.inf] + [1.0] * 100)
    assert with_spike == [1.0] * 100 + [math.inf] + [1.0] * 100
