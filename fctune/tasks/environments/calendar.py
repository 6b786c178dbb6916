"""The ``calendar`` environment: meetings with attendees."""

from __future__ import annotations

import copy
import datetime
from typing import Any

from fctune.tasks.environments.base import Split, TaskSpec, ToolEnvironment, ToolError
from fctune.tasks.environments.calendar_tasks import TASKS, Event
from fctune.tasks.environments.writing import Writer

_TIME = {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$", "description": "Start, as HH:MM"}
_DATE = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "description": "Day, as YYYY-MM-DD"}
_MINUTES = {"type": "integer", "minimum": 1, "maximum": 1440, "description": "Duration in minutes"}
_ATTENDEES = {"type": "array", "items": {"type": "string"}, "description": "First names, in lower case"}


class Calendar(ToolEnvironment):
    """One person's events; a state has ``events`` by id, and the number of the next id."""

    def __init__(self) -> None:
        super().__init__()
        self._events: dict[str, Event] = {}
        self._next_id = 1
        event = "Id of the event, such as e3"
        self.add_tool(self.list_events, "List the events of a day, in the order of their start.", date=_DATE)
        self.add_tool(self.find_events, "List events by a word of their title, or by an attendee.", text="Word or name")
        self.add_tool(
            self.create_event,
            "Create an event; returns its id.",
            "attendees",
            title="Title",
            date=_DATE,
            start=_TIME,
            minutes=_MINUTES,
            attendees=_ATTENDEES,
        )
        self.add_tool(
            self.move_event, "Move an event to another day and time.", event_id=event, date=_DATE, start=_TIME
        )
        self.add_tool(self.set_duration, "Change how long an event takes.", event_id=event, minutes=_MINUTES)
        self.add_tool(self.add_attendee, "Invite a person to an event.", event_id=event, name="First name")
        self.add_tool(self.remove_attendee, "Take a person off an event.", event_id=event, name="First name")
        self.add_tool(self.cancel_event, "Cancel an event.", event_id=event)

    def make_task(self, seed: int, split: Split) -> TaskSpec:
        """Return the task of a seed."""
        writer = Writer(seed, split, "calendar")
        return writer.random.choice(TASKS)(writer)

    def reset(self, state: dict[str, Any]) -> None:
        """Set the events and the number of the next id."""
        self._events = copy.deepcopy(state["events"])
        self._next_id = state["next_id"]

    def state(self) -> dict[str, Any]:
        """Return the events without their ids, which depend on the order of calls."""
        events = [{**event, "attendees": sorted(event["attendees"])} for event in self._events.values()]
        return {"events": sorted(events, key=lambda e: (e["date"], e["start"], e["title"], e["minutes"]))}

    def list_events(self, date: str) -> list[Event]:
        """Return the events of a day."""
        _check_date(date)
        return self._list(lambda event: event["date"] == date)

    def find_events(self, text: str) -> list[Event]:
        """Return events by title or attendee."""
        wanted = text.strip().lower()
        return self._list(lambda event: wanted in event["title"].lower() or wanted in event["attendees"])

    def create_event(
        self, title: str, date: str, start: str, minutes: int, attendees: list[str] | None = None
    ) -> dict[str, str]:
        """Create an event, to which a name that is listed twice is invited once, and return its id."""
        _check_date(date)
        event_id = f"e{self._next_id}"
        self._next_id += 1
        names = list(dict.fromkeys(name.strip().lower() for name in attendees or []))
        self._events[event_id] = {
            "title": title,
            "date": date,
            "start": start,
            "minutes": int(minutes),
            "attendees": names,
        }
        return {"event_id": event_id}

    def move_event(self, event_id: str, date: str, start: str) -> str:
        """Give an event another day and start; its duration stays as it is."""
        _check_date(date)
        self._find(event_id).update(date=date, start=start)
        return f"moved {event_id} to {date}, {start}"

    def set_duration(self, event_id: str, minutes: int) -> str:
        """Set the minutes that an event takes; its start stays as it is."""
        self._find(event_id)["minutes"] = int(minutes)
        return f"{event_id} takes {int(minutes)} minutes"

    def add_attendee(self, event_id: str, name: str) -> str:
        """Add a name to the attendees, or refuse one that is among them."""
        attendees = self._find(event_id)["attendees"]
        name = name.strip().lower()
        if name in attendees:
            raise ToolError(f"{name} is invited to {event_id} already")
        attendees.append(name)
        return f"invited {name} to {event_id}"

    def remove_attendee(self, event_id: str, name: str) -> str:
        """Remove a name from the attendees, or refuse one that is not among them."""
        attendees = self._find(event_id)["attendees"]
        name = name.strip().lower()
        if name not in attendees:
            raise ToolError(f"{name} is not invited to {event_id}")
        attendees.remove(name)
        return f"took {name} off {event_id}"

    def cancel_event(self, event_id: str) -> str:
        """Remove an event; its id is not used again."""
        self._find(event_id)
        del self._events[event_id]
        return f"cancelled {event_id}"

    def _find(self, event_id: str) -> Event:
        if event_id not in self._events:
            raise ToolError(f"there is no event {event_id}")
        return self._events[event_id]

    def _list(self, matches: Any) -> list[Event]:
        found = [{"event_id": key, **copy.deepcopy(event)} for key, event in self._events.items() if matches(event)]
        return sorted(found, key=lambda event: (event["date"], event["start"], event["event_id"]))


def _check_date(date: str) -> None:
    try:
        datetime.date.fromisoformat(date)
    except ValueError as error:
        raise ToolError(f"{date} is not a day ({error})") from None
