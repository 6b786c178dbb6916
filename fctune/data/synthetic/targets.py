"""All target tools, and what of them the curriculum must keep clear of."""

from __future__ import annotations

from fctune.data.synthetic.targets_first import FIRST_TARGETS
from fctune.data.synthetic.targets_second import SECOND_TARGETS

# What the base's curriculum has variants of, and, of these, what fine-tuning and held-out cases call.
DOMAINS = FIRST_TARGETS + SECOND_TARGETS
_CALLED = (
    *("get_weather", "convert_currency", "create_event", "send_email", "set_timer", "track_parcel"),
    *("get_stock_price", "translate_text", "search_flights", "find_restaurant", "find_contact", "play_music"),
)
TARGETS = tuple(target for target in DOMAINS if target.name in _CALLED)
TARGET_NAMES = frozenset(target.name for target in DOMAINS)
TARGET_PROPERTY_SETS = frozenset(frozenset(target.slots) for target in DOMAINS)
TARGET_PROPERTIES = frozenset(name for target in DOMAINS for name in target.slots)
