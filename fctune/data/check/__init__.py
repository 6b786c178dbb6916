"""The dataset report: statistics of the rows, and defects and warnings by line."""

from fctune.data.check.checker import Encode, check_sources
from fctune.data.check.report import Report
from fctune.data.check.warnings import CLASSES, WARNING_KINDS

__all__ = ["CLASSES", "WARNING_KINDS", "Encode", "Report", "check_sources"]
