from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kdacompile import __version__
from kdacompile.commands import support

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # tomli comes with pytest
ROOT = Path(__file__).parents[2]
MAPPED = {"kdacompile": "kdacompile", "patterns": "kdacompile.patterns", "lowering": "kdacompile.lowering"}
MAX_LINES = 500


def sources() -> list[Path]:
    folders = [*MAPPED, "tests", "examples"]
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_folder_of_the_package_is_listed_for_installation() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found: set[str] = set()
    for folder, package in MAPPED.items():
        for marker in (ROOT / folder).rglob("__init__.py"):
            inside = marker.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inside)))
    assert found == listed


def test_the_version_has_one_home() -> None:
    assert metadata.version("kdacompile") == __version__


def test_the_readme_holds_the_generated_support_table() -> None:
    readme = (ROOT / "README.md").read_text()
    held = readme.split("<!-- support:", 1)[1].split("-->\n", 1)[1].split("\n<!-- /support -->", 1)[0]
    assert held == support.table(), "run `python -m kdacompile support` and paste its output into README.md"


def test_no_file_grows_past_reading() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def torch_names(tree: ast.Module) -> Iterator[str]:
    """What a file imports, and the attributes it names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and "(" not in (name := ast.unparse(node)):
            yield name


def test_private_names_of_torch_stay_in_compat() -> None:
    found: dict[str, set[str]] = {}
    for path in sources():
        folder, *inside = path.relative_to(ROOT).parts
        if folder in MAPPED and inside[0] != "compat":
            names = {name for name in torch_names(ast.parse(path.read_text())) if name.split(".")[0] == "torch"}
            private = {n for n in names if any(part[0] == "_" and part[:2] != "__" for part in n.split("."))}
            found |= {str(path.relative_to(ROOT)): private} if private else {}
    assert found == {}


def test_text_files_are_utf8_everywhere() -> None:
    """Without a word, Windows reads and writes them in an encoding that has no arrows."""
    found: list[str] = []
    for path in (path for path in sources() if path.relative_to(ROOT).parts[0] in MAPPED):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr in ("read_text", "write_text") and "encoding" not in {k.arg for k in call.keywords}:
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found == []


OTHERS = {
    "_NamedFuncPointer": "ctypes: what a function of a library is, for an annotation",
    "_fields": "collections.namedtuple, documented",
    "_getframe": "sys, documented",
    "_reinterpret": "Gluon: a shared tile read as another dtype, which has no other name",
    "_replace": "collections.namedtuple, documented",
    "_to_copy": "an ATen operator",
}
"""Private names of others on objects, with the reason. Torch's are in compat."""


def test_private_names_on_objects_are_our_own() -> None:
    """``op._schema`` is torch's as much as ``torch._C`` is: a private attribute is one that a file of ours defines."""
    own: set[str] = set()
    used: dict[str, set[str]] = {}
    for path in sources():
        folder, *inside = path.relative_to(ROOT).parts
        if folder not in MAPPED or inside[0] == "compat":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                if isinstance(node.ctx, ast.Store):
                    own.add(name)
                elif isinstance(node, ast.Attribute) and name[0] == "_" and name[:2] != "__":
                    used.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    foreign = {name: files for name, files in used.items() if name not in own or name in TENSORS_OWN}
    assert {name: files for name, files in foreign.items() if name not in OTHERS} == {}


TENSORS_OWN = {"_version", "_base", "_grad", "_schema", "_opname", "_overloadname"}
"""Torch's even if a file of ours should define a name like it."""


def test_importing_the_package_does_not_import_torch() -> None:
    """Doctor must be able to start where torch does not."""
    code = "import sys, kdacompile, kdacompile.doctor, kdacompile.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
