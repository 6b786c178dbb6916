"""The generated pages of the documentation are current, and complete."""

from __future__ import annotations

import dataclasses

import pytest

from fctune.cli.reference import render_command_reference, render_metric_reference, render_sweep_reference
from fctune.config.fields import read_field_docs
from fctune.config.reference import render_config_reference
from fctune.config.schema import RunConfig
from tests.conftest import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_the_config_page_is_current() -> None:
    assert (REFERENCE / "config.md").read_text() == render_config_reference(), "run `make reference`"


def test_the_command_page_is_current() -> None:
    assert (REFERENCE / "commands.md").read_text() == render_command_reference(), "run `make reference`"


def test_the_metric_page_is_current() -> None:
    assert (REFERENCE / "metrics.md").read_text() == render_metric_reference(), "run `make reference`"


def test_the_sweep_page_is_current() -> None:
    assert (REFERENCE / "sweep.md").read_text() == render_sweep_reference(), "run `make reference`"


def test_every_key_is_on_the_config_page() -> None:
    page = render_config_reference()
    for spec in dataclasses.fields(RunConfig):
        assert f"| `{spec.name}` |" in page


def test_a_field_without_documentation_is_an_error() -> None:
    @dataclasses.dataclass
    class Section:
        first: int = 1
        """Documented."""
        second: int = 2

    with pytest.raises(LookupError, match="Section: no documentation below second"):
        read_field_docs(Section)
