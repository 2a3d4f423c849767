"""Files of public repositories as modules, read from local clones at fixed commits. Nothing of them is kept here.

A clone lies at ``DIR/owner/name``. A file is written to a temporary folder and run from there; what it imports from its
own repository is loaded in the same way, and libraries that are not installed become :class:`Absent`.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

NEEDED = ("einops", "transformers")
"""Libraries that what is run calls: without them a case is skipped. All others only serve what is not run."""


class MissingSource(Exception):
    """A repository, a file or a library that a case needs is not here; the text says how to get it."""


class Absent(ModuleType):
    """Stands for a library that is not installed: its names exist, decorators leave functions as they are."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getitem__(self, item: object) -> Absent:
        return self

    def __iter__(self) -> Iterator[Absent]:
        return iter(())

    def __or__(self, other: object) -> Absent:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return (object,)


def _definitions(text: str, names: tuple[str, ...]) -> ast.Module:
    """The last definition of each name, wherever it stands, or its assignment at the top, with the imports at the top
    that they read.
    """
    tree = ast.parse(text)
    made = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    last: dict[str, ast.stmt] = {node.name: node for node in made if node.name in names}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            last[node.targets[0].id] = node
    read = {node.id for name in names for node in ast.walk(last[name]) if isinstance(node, ast.Name)}
    imports: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [each for each in node.names if (each.asname or each.name.partition(".")[0]) in read]
            imports += [node] if node.names else []
    tree.body = [*imports, *(last[name] for name in names)]
    return tree


@dataclass(frozen=True)
class Repository:
    """A public repository at one commit. ``roots`` are the folders from which its files import each other."""

    name: str
    commit: str
    roots: tuple[str, ...] = ("",)

    @property
    def clone(self) -> str:
        return f"git clone https://github.com/{self.name} DIR/{self.name}"


@dataclass
class Library:
    """The repositories below one folder, and the modules made of their files. ``patches`` replace text of a file."""

    folder: Path
    written: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="published-")))
    modules: dict[tuple[str, str], ModuleType] = field(default_factory=dict[tuple[str, str], ModuleType])
    trees: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def load(self, repository: Repository, path: str, only: tuple[str, ...] = ()) -> ModuleType:
        """The module of one file, or what ``only`` names of a file that does more than define. Raises MissingSource."""
        key = repository.name, " ".join((path, *only))
        if key in self.modules:
            return self.modules[key]
        text = self._git(repository, "show", f"{repository.commit}:{path}")
        place = self.written / repository.name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        dotted = f"{repository.name}/{path}"[:-3].replace(".", "_").replace("/", ".")
        module = ModuleType(".".join(("published", dotted, *only)))
        module.__file__ = str(place)
        namespace: dict[str, Any] = vars(module)
        namespace["__builtins__"] = {**vars(builtins), "__import__": self._importer(repository, path, own=not only)}
        self.modules[key] = sys.modules[module.__name__] = module
        try:
            exec(compile(_definitions(text, only) if only else text, str(place), "exec"), namespace)
        except BaseException:
            del self.modules[key], sys.modules[module.__name__]
            raise
        namespace["__builtins__"] = builtins
        return module

    def _git(self, repository: Repository, *command: str) -> str:
        where = self.folder / repository.name
        if not where.exists():
            raise MissingSource(repository.clone)
        done = subprocess.run(["git", "-C", str(where), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingSource(f"git -C DIR/{repository.name} fetch origin {repository.commit}")
        return done.stdout

    def _file_of(self, repository: Repository, dotted: str, roots: tuple[str, ...]) -> str | None:
        """The file that makes the module of this name."""
        if repository.name not in self.trees:
            listed = self._git(repository, "ls-tree", "-r", "--name-only", repository.commit)
            self.trees[repository.name] = frozenset(listed.splitlines())
        base = dotted.replace(".", "/")
        for root in roots:
            for ending in (".py", "/__init__.py"):
                path = str(PurePosixPath(root) / base) + ending
                if path in self.trees[repository.name]:
                    return path
        return None

    def _importer(self, repository: Repository, path: str, *, own: bool) -> Callable[..., Any]:
        """What ``import`` means in one file; not ``own``: other files of the repository are absent."""
        package = PurePosixPath(path).parent

        def importer(
            name: str, names: Any = None, values: Any = None, wanted: tuple[str, ...] | None = (), level: int = 0
        ) -> Any:
            known = level or (wanted and self._file_of(repository, name, repository.roots))
            if known and not own:
                return Absent(name)
            if level:
                base = package.parents[level - 2] if level > 1 else package
                return self._own(repository, name, wanted or (), (str(base),))
            if known and wanted:
                return self._own(repository, name, wanted, repository.roots)
            try:
                return builtins.__import__(name, names, values, wanted or (), 0)
            except ImportError:
                if name.partition(".")[0] in NEEDED:
                    raise MissingSource(f"pip install {name.partition('.')[0]}") from None
                return Absent(name)

        return importer

    def _own(self, repository: Repository, name: str, wanted: tuple[str, ...], roots: tuple[str, ...]) -> Any:
        """``from name import wanted`` in the repository: a module that has these names, submodules among them."""
        file = self._file_of(repository, name, roots) if name else None
        module = self.load(repository, file) if file and not file.endswith("__init__.py") else None
        if module is not None:
            return module
        found = ModuleType(name or "package")
        package: Any = None
        for each in wanted:
            below = self._file_of(repository, f"{name}.{each}".strip("."), roots)
            if below:
                vars(found)[each] = self.load(repository, below)
                continue
            package = package or (self.load(repository, file) if file else Absent(name))
            vars(found)[each] = getattr(package, each)
        return found
