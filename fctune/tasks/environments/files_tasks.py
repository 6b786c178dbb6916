"""Task generators for files: question, initial state, and the calls that solve it."""

from __future__ import annotations

from typing import Any

from fctune.tasks.environments.base import TaskSpec
from fctune.tasks.environments.writing import Writer

Tree = dict[str, Any]

_FOLDERS = (
    "reports", "invoices", "photos", "drafts", "projects", "archive", "downloads", "contracts",
    "music", "recipes", "notes", "backups", "scripts", "letters", "taxes", "travel",
    "school", "garden", "receipts", "templates", "videos", "designs", "orders", "house",
)  # fmt: skip
_STEMS = (
    "budget", "summary", "minutes", "offer", "plan", "holiday", "report", "agenda", "survey", "proposal", "roadmap",
    "timesheet", "inventory", "checklist", "passport", "warranty", "schedule", "menu", "receipt", "draft", "letter",
    "index", "results", "contacts", "packing_list", "floor_plan", "bill", "lease", "transcript", "poster", "log_2025",
)  # fmt: skip
_ENDINGS = ("txt", "csv", "md", "log", "json", "pdf", "html", "yaml")
_LINES = (
    "Call the supplier on Monday.", "Total: 1,840 EUR", "Second version, not yet reviewed.", "See the appendix.",
    "Sent to the customer.", "Ask Priya about the figures.", "Valid until the end of the year.", "Chapter 3 is lost.",
    "Meeting moved to room 12.", "Copy kept at the office.", "Prices include tax.", "Waiting for a signature.",
)  # fmt: skip
_NOTES = (
    "Buy milk and bread", "The door code has changed", "Return the books", "Renew the insurance",
    "Water the plants twice a week", "The printer needs toner", "Book the train", "Order new chairs",
)  # fmt: skip
_CODES = ("K-4471", "PO-2093", "B-118", "X-7750", "R-3306", "T-9021", "M-645", "Z-8812")


def _make_tree(w: Writer, num_folders: int = 4, num_files: int = 3) -> Tree:
    tree: Tree = {}
    for folder in w.sample(_FOLDERS, num_folders):
        names = [f"{stem}.{w.random.choice(_ENDINGS)}" for stem in w.sample(_STEMS, num_files)]
        tree[folder] = {name: "\n".join(w.sample(_LINES, w.random.randint(1, 2))) for name in names}
    return tree


def _choose_file(w: Writer, tree: Tree) -> tuple[str, str]:
    """Return the folder and name of a file."""
    folder = w.random.choice(list(tree))
    return folder, w.random.choice(list(tree[folder]))


def _move(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder, name = _choose_file(w, tree)
    other = w.random.choice([f for f in tree if f != folder])
    tree[other].pop(name, None)
    source, target = f"/{folder}/{name}", f"/{other}"
    question = w.request(
        (
            "move {source} into {target}",
            "put the file {source} into the folder {target}",
            "take {source} and move it to the {target} directory",
            "relocate {source} so that it lives in {target}",
        ),
        source=source,
        target=target,
    )
    calls = (("move", {"source": source, "destination": f"{target}/{name}"}),)
    return TaskSpec(question, tree, calls, category="move")


def _rename(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder, name = _choose_file(w, tree)
    new = f"{w.pick(_STEMS)}_{w.random.randint(2, 99)}.{name.rpartition('.')[2]}"
    question = w.request(
        (
            "rename {path} to {new}",
            "give the file {path} the new name {new}",
            "change the name of {path}; it should be called {new}",
            "let {path} be called {new} from now on",
        ),
        path=f"/{folder}/{name}",
        new=new,
    )
    calls = (("move", {"source": f"/{folder}/{name}", "destination": f"/{folder}/{new}"}),)
    return TaskSpec(question, tree, calls, category="rename")


def _copy(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder, name = _choose_file(w, tree)
    stem, _, ending = name.rpartition(".")
    new = f"{stem}.{w.random.choice(('backup', 'copy', 'old'))}.{ending}"
    question = w.request(
        (
            "make a copy of {path} in the same folder, named {new}",
            "copy {path} to {new} next to it",
            "before I edit {path}, keep a copy of it as {new} in the same directory",
            "duplicate {path} under the name {new}, in the folder that it is in",
        ),
        path=f"/{folder}/{name}",
        new=new,
    )
    calls = (("copy", {"source": f"/{folder}/{name}", "destination": f"/{folder}/{new}"}),)
    return TaskSpec(question, tree, calls, category="copy")


def _delete_kind(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    places = [w.random.choice(list(tree)) for _ in range(w.random.randint(1, 3))]
    paths = []
    for number, folder in enumerate(places):
        name = f"{w.pick(_STEMS)}{number}.tmp"
        tree[folder][name] = ""
        paths.append(f"/{folder}/{name}")
    question = w.request(
        (
            "delete every file that ends in .tmp",
            "remove all .tmp files, wherever they are",
            "get rid of the temporary files (*.tmp) in all folders",
            "clear out anything whose name ends with .tmp",
        )
    )
    calls = (("find_files", {"pattern": "*.tmp"}), *(("delete", {"path": path}) for path in sorted(paths)))
    return TaskSpec(question, tree, calls, category="delete by pattern")


def _write(w: Writer) -> TaskSpec:
    tree = _make_tree(w, num_folders=3)
    folder = next(name for name in w.sample(_FOLDERS, 4) if name not in tree)
    name, note = f"{w.pick(_STEMS)}.txt", w.pick(_NOTES)
    question = w.request(
        (
            "create the folder /{folder} and in it a file {name} with the text “{note}”",
            "make a new directory /{folder} and write “{note}” into {name} there",
            "save “{note}” as {name} in a new folder /{folder}",
            "I want a file /{folder}/{name} that says “{note}”; the folder is not there yet",
        ),
        folder=folder,
        name=name,
        note=note,
    )
    calls = (("make_directory", {"path": f"/{folder}"}), ("write_file", {"path": f"/{folder}/{name}", "text": note}))
    return TaskSpec(question, tree, calls, category="write")


def _append(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder, name = _choose_file(w, tree)
    note = w.pick(_NOTES)
    question = w.request(
        (
            "add the line “{note}” at the end of /{folder}/{name}",
            "append “{note}” to /{folder}/{name}",
            "write “{note}” below what is in /{folder}/{name}",
            "put one more line into /{folder}/{name}: “{note}”",
        ),
        folder=folder,
        name=name,
        note=note,
    )
    calls = (("append_line", {"path": f"/{folder}/{name}", "line": note}),)
    return TaskSpec(question, tree, calls, category="append")


def _search(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder, name = _choose_file(w, tree)
    code = w.pick(_CODES)
    tree[folder][name] += f"\nReference: {code}"
    question = w.ask(
        (
            "Which file mentions {code}?",
            "In which file can I find the reference {code}?",
            "I know I noted {code} somewhere. What is the path of that file?",
            "Somewhere there is a file about {code}; where is it?",
        ),
        code=code,
    )
    return TaskSpec(question, tree, (("search_text", {"text": code}),), (name,), "search")


def _count(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder = w.random.choice(list(tree))
    tree[folder] |= {f"{stem}.old": "" for stem in w.sample(_STEMS, w.random.randint(1, 5))}
    question = w.ask(
        (
            "How many files are in /{folder}?",
            "Count the files in the folder /{folder}, please.",
            "What is the number of files in /{folder}?",
            "Tell me how many files /{folder} has.",
        ),
        folder=folder,
    )
    return TaskSpec(question, tree, (("list_directory", {"path": f"/{folder}"}),), (str(len(tree[folder])),), "count")


def _read(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder, name = _choose_file(w, tree)
    amount = f"{w.random.randint(100, 9999)}.{w.random.randint(0, 99):02d}"
    tree[folder][name] += f"\nAmount due: {amount}"
    question = w.ask(
        (
            "What amount is due according to /{folder}/{name}?",
            "Look into /{folder}/{name} and tell me the amount due.",
            "/{folder}/{name} says how much I have to pay. How much is it?",
            "Which amount due does /{folder}/{name} give?",
        ),
        folder=folder,
        name=name,
    )
    return TaskSpec(question, tree, (("read_file", {"path": f"/{folder}/{name}"}),), (amount,), "read")


def _clean(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder = w.random.choice(list(tree))
    question = w.request(
        (
            "delete the folder /{folder} with everything in it",
            "remove /{folder} and all of its files",
            "throw away the complete directory /{folder}",
            "erase /{folder}, contents included",
        ),
        folder=folder,
    )
    return TaskSpec(question, tree, (("delete", {"path": f"/{folder}"}),), category="delete")


def _gather(w: Writer) -> TaskSpec:
    tree = _make_tree(w, num_folders=3)
    target = next(name for name in w.sample(_FOLDERS, 4) if name not in tree)
    ending = w.random.choice(("xlsx", "png", "mp3"))
    paths = []
    for number, folder in enumerate(w.random.sample(list(tree), w.random.randint(1, 2))):
        name = f"{w.pick(_STEMS)}{number}.{ending}"
        tree[folder][name] = w.pick(_LINES)
        paths.append(f"/{folder}/{name}")
    question = w.request(
        (
            "collect all .{ending} files in a new folder /{target}",
            "create /{target} and move every .{ending} file there",
            "move the .{ending} files of all folders into a new directory /{target}",
            "bring everything that ends in .{ending} together in /{target}, which you have to create",
        ),
        ending=ending,
        target=target,
    )
    moves = (("move", {"source": p, "destination": f"/{target}/{p.rpartition('/')[2]}"}) for p in sorted(paths))
    calls = (("find_files", {"pattern": f"*.{ending}"}), ("make_directory", {"path": f"/{target}"}), *moves)
    return TaskSpec(question, tree, calls, category="gather")


def _swap(w: Writer) -> TaskSpec:
    tree = _make_tree(w)
    folder, name = _choose_file(w, tree)
    other = w.random.choice([f for f in tree if f != folder])
    note = w.pick(_NOTES)
    target = f"{w.pick(_STEMS)}_{w.random.randint(2, 99)}.txt"
    question = w.request(
        (
            "delete /{folder}/{name} and create /{other}/{target} with the text “{note}”",
            "replace /{folder}/{name} by a new file /{other}/{target} that says “{note}”",
            "I no longer need /{folder}/{name}; remove it, and write “{note}” to /{other}/{target}",
            "write “{note}” to /{other}/{target}, then delete /{folder}/{name}",
        ),
        folder=folder,
        name=name,
        other=other,
        target=target,
        note=note,
    )
    calls = (
        ("delete", {"path": f"/{folder}/{name}"}),
        ("write_file", {"path": f"/{other}/{target}", "text": note}),
    )
    return TaskSpec(question, tree, calls, category="replace")


TASKS = (_move, _rename, _copy, _delete_kind, _write, _append, _search, _count, _read, _clean, _gather, _swap)
"""Functions that make a task, one for each category."""
