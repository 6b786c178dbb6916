"""Files and directories in memory."""

from __future__ import annotations

import copy
import fnmatch
from typing import Any

from fctune.tasks.environments.base import Split, TaskSpec, ToolEnvironment, ToolError
from fctune.tasks.environments.files_tasks import TASKS, Tree
from fctune.tasks.environments.writing import Writer


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
