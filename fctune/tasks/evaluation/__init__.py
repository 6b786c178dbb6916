"""Measuring a model: suites of cases, runs over them, and what is made of the results."""
