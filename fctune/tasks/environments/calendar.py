"""The ``calendar`` environment: meetings with attendees."""

from __future__ import annotations

import copy
import datetime
from typing import Any

from fctune.tasks.environments.base import Split, TaskSpec, ToolEnvironment, ToolError
from fctune.tasks.environments.writing import Writer

Event = dict[str, Any]

_TITLES = (
    "Budget review", "Team lunch", "Dentist", "Design workshop", "Quarterly planning", "Interview with Dana",
    "Yoga class", "Board meeting", "Sprint demo", "Parents' evening", "Car inspection", "Guitar lesson",
    "Hiring sync", "Book club", "Safety training", "Client call", "Roadmap session", "Haircut", "Press briefing",
    "Choir rehearsal", "Code review", "Warehouse tour", "Tax advice", "Flat viewing", "Physio appointment",
    "Contract talks", "Supplier visit", "Retrospective",
)  # fmt: skip
_PEOPLE = (
    "amira", "bruno", "chen", "divya", "elena", "farid", "greta", "hugo", "ines", "jonas", "keiko", "liam",
    "mara", "nils", "olga", "pavel", "qadir", "rosa", "samir", "tove", "uma", "viktor", "wen", "yara",
)  # fmt: skip
_HOURS = ("08:00", "08:30", "09:00", "09:30", "10:00", "11:00", "11:30", "13:00", "14:00", "14:30", "15:00", "16:30")
_DURATIONS = (15, 20, 30, 45, 50, 60, 75, 90, 105, 120, 150, 180)
_FIRST_DAY = datetime.date(2026, 3, 2)


class _Scene:
    """The events of a task, and its current day."""

    def __init__(self, w: Writer, num_events: int = 6):
        self.today = _FIRST_DAY + datetime.timedelta(days=w.random.randrange(200))
        self.events: dict[str, Event] = {}
        for number, title in enumerate(w.sample(_TITLES, num_events), start=1):
            self.events[f"e{number}"] = {
                "title": title,
                "date": self.day(w.random.randint(1, 12)),
                "start": w.random.choice(_HOURS),
                "minutes": w.random.choice(_DURATIONS),
                "attendees": w.sample(_PEOPLE, w.random.randint(0, 3)),
            }
        self.event_id = w.random.choice(list(self.events))
        self.event = self.events[self.event_id]

    def day(self, days: int) -> str:
        return (self.today + datetime.timedelta(days=days)).isoformat()

    def lookup(self) -> tuple[str, dict[str, Any]]:
        """Return the call that finds the chosen event."""
        return "find_events", {"text": self.event["title"]}

    def to_task(
        self, question: str, calls: list[tuple[str, dict[str, Any]]], category: str, facts: tuple[str, ...] = ()
    ) -> TaskSpec:
        state = {"events": self.events, "next_id": len(self.events) + 1}
        system = f"Today is {self.today:%A}, {self.today.isoformat()}. Write times as HH:MM."
        return TaskSpec(question, state, tuple(calls), facts, category, system)


def _say_day(iso: str) -> str:
    day = datetime.date.fromisoformat(iso)
    return f"{day:%A}, {day.day} {day:%B} {day.year}"


def _create(w: Writer) -> TaskSpec:
    scene = _Scene(w, 5)
    title = next(title for title in w.sample(_TITLES, 6) if all(title != e["title"] for e in scene.events.values()))
    date, start, minutes = scene.day(w.random.randint(1, 20)), w.pick(_HOURS), w.pick(_DURATIONS)
    people = w.sample(_PEOPLE, w.random.randint(0, 2))
    guests = f", and invite {' and '.join(name.capitalize() for name in people)}" if people else ""
    question = w.request(
        (
            "put “{title}” into my calendar on {day} at {start} for {minutes} minutes{guests}",
            "schedule “{title}” for {day}, {start}, {minutes} minutes long{guests}",
            "create an event called “{title}” on {day}; it starts at {start} and takes {minutes} minutes{guests}",
            "book {minutes} minutes for “{title}” on {day} from {start} on{guests}",
        ),
        title=title,
        day=_say_day(date),
        start=start,
        minutes=minutes,
        guests=guests,
    )
    event = {"title": title, "date": date, "start": start, "minutes": minutes, "attendees": people}
    return scene.to_task(question, [("create_event", event)], "create")


def _move(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    date, start = scene.day(w.random.randint(13, 25)), w.pick(_HOURS)
    question = w.request(
        (
            "move “{title}” to {day} at {start}",
            "reschedule “{title}”: it should be on {day}, {start}",
            "postpone “{title}” to {day} and let it start at {start}",
            "shift “{title}” so that it begins on {day} at {start}",
        ),
        title=scene.event["title"],
        day=_say_day(date),
        start=start,
    )
    calls = [scene.lookup(), ("move_event", {"event_id": scene.event_id, "date": date, "start": start})]
    return scene.to_task(question, calls, "move")


def _cancel(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    question = w.request(
        (
            "cancel “{title}”",
            "remove “{title}” from my calendar",
            "call off “{title}”, I cannot make it",
            "take “{title}” out of the calendar",
        ),
        title=scene.event["title"],
    )
    return scene.to_task(question, [scene.lookup(), ("cancel_event", {"event_id": scene.event_id})], "cancel")


def _invite(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    name = next(name for name in w.sample(_PEOPLE, 4) if name not in scene.event["attendees"])
    question = w.request(
        (
            "invite {name} to “{title}”",
            "add {name} to the people who come to “{title}”",
            "have {name} join “{title}”",
            "put {name} on the list for “{title}”",
        ),
        name=name.capitalize(),
        title=scene.event["title"],
    )
    calls = [scene.lookup(), ("add_attendee", {"event_id": scene.event_id, "name": name})]
    return scene.to_task(question, calls, "invite")


def _uninvite(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    name = w.pick(_PEOPLE)
    if name not in scene.event["attendees"]:
        scene.event["attendees"].append(name)
    question = w.request(
        (
            "take {name} off “{title}”",
            "remove {name} from the attendees of “{title}”",
            "uninvite {name} from “{title}”",
            "drop {name} from “{title}”, but keep the event",
        ),
        name=name.capitalize(),
        title=scene.event["title"],
    )
    calls = [scene.lookup(), ("remove_attendee", {"event_id": scene.event_id, "name": name})]
    return scene.to_task(question, calls, "uninvite")


def _lengthen(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    minutes = w.random.choice([m for m in w.own(_DURATIONS) if m != scene.event["minutes"]])
    question = w.request(
        (
            "make “{title}” {minutes} minutes long",
            "set the length of “{title}” to {minutes} minutes",
            "change “{title}” so that it takes {minutes} minutes",
            "let “{title}” last {minutes} minutes",
        ),
        title=scene.event["title"],
        minutes=minutes,
    )
    calls = [scene.lookup(), ("set_duration", {"event_id": scene.event_id, "minutes": minutes})]
    return scene.to_task(question, calls, "duration")


def _when(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    question = w.ask(
        (
            "At what time does “{title}” start?",
            "When does “{title}” begin? Tell me the time of day.",
            "I forgot the start time of “{title}”. What is it?",
            "Which time is “{title}” at?",
        ),
        title=scene.event["title"],
    )
    return scene.to_task(question, [scene.lookup()], "when", (scene.event["start"],))


def _who(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    people = w.sample(_PEOPLE, w.random.randint(1, 3))
    scene.event["attendees"] = people
    question = w.ask(
        (
            "Who comes to “{title}”?",
            "Which people are invited to “{title}”?",
            "Tell me who else is at “{title}”.",
            "What are the names of those who attend “{title}”?",
        ),
        title=scene.event["title"],
    )
    return scene.to_task(question, [scene.lookup()], "who", tuple(people))


def _clear(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    date = scene.event["date"]
    for event in w.random.sample(list(scene.events.values()), w.random.randint(0, 2)):
        event["date"] = date
    busy = [key for key, event in scene.events.items() if event["date"] == date]
    question = w.request(
        (
            "cancel everything that I have on {day}",
            "clear my calendar for {day}",
            "I am ill on {day}; cancel all events of that day",
            "make {day} a free day by cancelling all its events",
        ),
        day=_say_day(date),
    )
    calls = [("list_events", {"date": date}), *(("cancel_event", {"event_id": key}) for key in busy)]
    return scene.to_task(question, calls, "clear a day")


def _replace(w: Writer) -> TaskSpec:
    scene = _Scene(w, 5)
    title = next(title for title in w.sample(_TITLES, 6) if all(title != e["title"] for e in scene.events.values()))
    old = scene.event
    question = w.request(
        (
            "cancel “{old}” and put “{title}” in its place, with the same day, time and length, and nobody invited",
            "replace “{old}” by a new event “{title}” at the same day and time, equally long, without attendees",
            "swap “{old}” for “{title}”: cancel the one, create the other in the same slot without guests",
            "in the slot of “{old}” I now have “{title}”, alone. Cancel the first and create the second",
        ),
        old=old["title"],
        title=title,
    )
    new = {"title": title, "date": old["date"], "start": old["start"], "minutes": old["minutes"]}
    calls = [scene.lookup(), ("cancel_event", {"event_id": scene.event_id}), ("create_event", new)]
    return scene.to_task(question, calls, "replace")


def _how_many(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    date = scene.event["date"]
    for event in w.random.sample(list(scene.events.values()), w.random.randint(1, 4)):
        event["date"] = date
    count = sum(event["date"] == date for event in scene.events.values())
    day = datetime.date.fromisoformat(date) - scene.today
    question = w.ask(
        (
            "How many events do I have on {day}?",
            "Count my events on {day}, please.",
            "What is the number of events on {day}?",
            "On {day}, how many events are in my calendar?",
        ),
        day="tomorrow" if day.days == 1 else f"the {datetime.date.fromisoformat(date):%A} that is {date}",
    )
    return scene.to_task(question, [("list_events", {"date": date})], "count", (str(count),))


TASKS = (_create, _move, _cancel, _invite, _uninvite, _lengthen, _when, _who, _clear, _replace, _how_many)
"""Functions that make a task, one for each category."""


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
