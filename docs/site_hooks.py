"""What mkdocs does besides: pages that lie outside docs/, and links and roles that only a repository understands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Any, config: Any) -> Any:
    """The repository's own pages, with links as they are from docs/."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](").replace('="docs/', '="')
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository lead to the repository, those to its pages to the site."""

    def rewritten(link: re.Match[str]) -> str:
        path, _, anchor = link[1].partition("#")
        end = f"#{anchor}" if anchor else ""
        name = path.removeprefix("../")
        if name in OUTSIDE:
            return f"]({OUTSIDE[name]}{end})"
        if path.startswith("../") or (page.file.src_uri in OUTSIDE.values() and not (ROOT / "docs" / path).exists()):
            return f"]({config.repo_url}/blob/main/{name}{end})"
        return link[0]

    return re.sub(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)", rewritten, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name classes and functions by roles, and end a line before code with two colons."""
    html = re.sub(r":(?:class|func|meth|mod|attr):<code>~?([\w.]+)</code>", _named, html)
    return html.replace("::</p>", ":</p>")


def _named(role: re.Match[str]) -> str:
    return f"<code>{role[1].rpartition('.')[2]}</code>"
