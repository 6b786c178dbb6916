"""All target tools, and what of them the curriculum must keep clear of."""

from __future__ import annotations

from fctune.data.synthetic.targets_first import FIRST_TARGETS
from fctune.data.synthetic.targets_second import SECOND_TARGETS

TARGETS = FIRST_TARGETS + SECOND_TARGETS
TARGET_NAMES = frozenset(target.name for target in TARGETS)
TARGET_PROPERTY_SETS = frozenset(frozenset(target.slots) for target in TARGETS)
TARGET_PROPERTIES = frozenset(name for target in TARGETS for name in target.slots)
