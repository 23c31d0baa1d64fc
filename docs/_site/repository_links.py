"""Makes links out of docs/ work on the site: what they name in the repository becomes a page of it.

A page of docs/ may link to `../SECURITY.md` or `../examples/full_run.py`, as is right where the repository is shown.
The site has no such files, and names no host that has. Each of them becomes a page below `repository/`: Markdown as it
is, anything else as a block of code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
_FOLDER = "repository"
_LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".sh": "bash"}


def repository_path(source: str) -> str:
    """Return where the source of a page stands in the repository."""
    folder, _, rest = source.partition("/")
    if folder != _FOLDER:
        return f"docs/{source}"
    return rest if (ROOT / rest).is_file() else rest.removesuffix(".md")


def page_source(path: str) -> str:
    """Return the source of the page that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{_FOLDER}/{path}" if path.endswith(".md") else f"{_FOLDER}/{path}.md"


def linked(markdown: str, path: str) -> set[str]:
    """Return the files outside of docs/ that the text of a file of the repository links to."""
    targets = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link, _ in _LINK.findall(markdown)}
    return {target for target in targets if not target.startswith("docs/") and (ROOT / target).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file of the repository that is linked to, also from such a page."""
    waiting = [(repository_path(file.src_uri), file.content_string) for file in files.documentation_pages()]
    added: set[str] = set()
    while waiting:
        path, text = waiting.pop()
        for target in sorted(linked(text, path) - added):
            added.add(target)
            found = (ROOT / target).read_text(encoding="utf-8")
            if target.endswith(".md"):
                waiting.append((target, found))
            else:
                found = f"# {target}\n\n````{_LANGUAGES.get(Path(target).suffix, 'text')}\n{found}````\n"
            files.append(File.generated(config, page_source(target), content=found))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point each link that leaves or enters docs/ to the page that shows what it names."""
    source = page.file.src_uri
    path = repository_path(source)

    def replaced(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if not (ROOT / target).is_file() or (path.startswith("docs/") and target.startswith("docs/")):
            return match[0]  # a page of its own folder, or nothing: mkdocs says so
        return f"]({posixpath.relpath(page_source(target), posixpath.dirname(source))}{anchor})"

    return _LINK.sub(replaced, markdown)
