"""Files and directories in memory."""

from __future__ import annotations

import copy
import fnmatch
from typing import Any

from fctune.tasks.environments.base import Split, TaskSpec, ToolEnvironment, ToolError
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


def _make_tree(w: Writer, num_folders: int = 4) -> Tree:
    tree: Tree = {}
    for folder in w.sample(_FOLDERS, num_folders):
        names = [f"{stem}.{w.random.choice(_ENDINGS)}" for stem in w.sample(_STEMS, 3)]
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


class Files(ToolEnvironment):
    """A tree of directories and text files; a state is nested objects, in which a file is its text."""

    def __init__(self) -> None:
        super().__init__()
        self._tree: Tree = {}
        path = "Absolute path, such as /notes/todo.txt"
        self.add_tool(self.list_directory, "List the names in a directory; those of directories end in /.", path=path)
        self.add_tool(self.read_file, "Read the text of a file.", path=path)
        self.add_tool(
            self.write_file, "Create or replace a file in an existing directory.", path=path, text="Complete new text"
        )
        self.add_tool(
            self.append_line, "Add a line at the end of an existing file.", path=path, line="Line without line break"
        )
        self.add_tool(self.make_directory, "Create a directory in an existing one.", path=path)
        source, destination = "Path of what is moved or copied", "Its new path, which must not exist yet"
        self.add_tool(self.move, "Move or rename a file or directory.", source=source, destination=destination)
        self.add_tool(self.copy, "Copy a file or directory.", source=source, destination=destination)
        self.add_tool(self.delete, "Delete a file, or a directory with all it contains.", path=path)
        self.add_tool(
            self.find_files,
            "List the paths of all files whose name matches a pattern.",
            pattern="Pattern of the name, such as *.csv",
        )
        self.add_tool(self.search_text, "List the paths of all files whose text contains a text.", text="Text to find")

    def make_task(self, seed: int, split: Split) -> TaskSpec:
        """Return the task of a seed."""
        writer = Writer(seed, split, "files")
        return writer.random.choice(TASKS)(writer)

    def reset(self, state: dict[str, Any]) -> None:
        """Replace the tree by a copy of this one."""
        self._tree = copy.deepcopy(state)

    def state(self) -> dict[str, Any]:
        """Return a copy of the directories as nested objects, in which a file is its text."""
        return copy.deepcopy(self._tree)

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        found = self._find(path)
        if not isinstance(found, dict):
            raise ToolError(f"{path} is a file")
        return sorted(f"{name}/" if isinstance(child, dict) else name for name, child in found.items())

    def read_file(self, path: str) -> str:
        """Return the text of a file."""
        return self._find_file(path)

    def write_file(self, path: str, text: str) -> str:
        """Create or replace a file."""
        parent, name = self._find_parent(path)
        if isinstance(parent.get(name), dict):
            raise ToolError(f"{path} is a directory")
        parent[name] = text
        return f"wrote {path}"

    def append_line(self, path: str, line: str) -> str:
        """Add a line to a file."""
        text = self._find_file(path)
        parent, name = self._find_parent(path)
        parent[name] = f"{text}\n{line}" if text else line
        return f"added a line to {path}"

    def make_directory(self, path: str) -> str:
        """Create an empty directory in an existing one, under an unused name."""
        parent, name = self._find_parent(path)
        if name in parent:
            raise ToolError(f"{path} exists already")
        parent[name] = {}
        return f"created {path}"

    def move(self, source: str, destination: str) -> str:
        """Move or rename a file or directory."""
        moved = self._find(source)
        old_parent, old_name = self._find_parent(source)
        parent, name = self._find_destination(source, destination)
        del old_parent[old_name]
        parent[name] = moved
        return f"moved {source} to {destination}"

    def copy(self, source: str, destination: str) -> str:
        """Copy a file or directory."""
        copied = copy.deepcopy(self._find(source))
        parent, name = self._find_destination(source, destination)
        parent[name] = copied
        return f"copied {source} to {destination}"

    def delete(self, path: str) -> str:
        """Delete a file or directory."""
        self._find(path)
        parent, name = self._find_parent(path)
        del parent[name]
        return f"deleted {path}"

    def find_files(self, pattern: str) -> list[str]:
        """Return the paths of files by name, sorted."""
        files = _walk(self._tree)
        return sorted(path for path in files if fnmatch.fnmatchcase(path.rpartition("/")[2], pattern))

    def search_text(self, text: str) -> list[str]:
        """Return the paths of files by their text, sorted."""
        return sorted(path for path, content in _walk(self._tree).items() if text.lower() in content.lower())

    def _find(self, path: str) -> Any:
        found: Any = self._tree
        for part in _split(path):
            if not isinstance(found, dict) or part not in found:
                raise ToolError(f"{path} does not exist")
            found = found[part]
        return found

    def _find_file(self, path: str) -> str:
        found = self._find(path)
        if not isinstance(found, str):
            raise ToolError(f"{path} is a directory")
        return found

    def _find_parent(self, path: str) -> tuple[Tree, str]:
        parts = _split(path)
        if not parts:
            raise ToolError("the root cannot be changed")
        parent = self._find("/" + "/".join(parts[:-1]))
        if not isinstance(parent, dict):
            raise ToolError(f"/{'/'.join(parts[:-1])} is a file")
        return parent, parts[-1]

    def _find_destination(self, source: str, destination: str) -> tuple[Tree, str]:
        parts = _split(source)
        if _split(destination)[: len(parts)] == parts:
            raise ToolError(f"{destination} is {source} or inside it")
        parent, name = self._find_parent(destination)
        if name in parent:
            raise ToolError(f"{destination} exists already")
        return parent, name


def _split(path: str) -> list[str]:
    if not path.startswith("/"):
        raise ToolError(f"{path} is not absolute: it must start with /")
    return [part for part in path.split("/") if part not in ("", ".")]


def _walk(tree: Tree, above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, child in tree.items():
        path = f"{above}/{name}"
        found |= _walk(child, path) if isinstance(child, dict) else {path: child}
    return found
