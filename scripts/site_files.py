"""A hook of mkdocs: files outside docs/ that pages link to become part of the site, and links follow them there.

docs/X is X in the site, README.md is its index.md, and everything else keeps its path in the repository. So one link serves a
reader of the repository and one of the site, and ``mkdocs build --strict`` finds broken ones of both.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_SIGNATURE = re.compile(r"^(#{3,4}) `((?:class )?([\w.]+)\(.+\))`$", re.M)


def on_files(files: Files, config: Any) -> Files:
    """Adds the home page, and what pages link to outside docs/, and what that links to."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, _in_site(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            _with_links((ROOT / path).read_text(encoding="utf-8"), path, waiting.append)
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Has links lead to where the files are in the site; drops what only the tests read behind a fence's language.

    In the reference, names alone are headings, so that the table of contents and the search show names and not signatures.
    """
    uri = page.file.src_uri
    here = "README.md" if uri == "index.md" else f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri
    markdown = _SIGNATURE.sub(r"\1 `\3`\n\n`\2`\n", markdown) if uri == "api.md" else markdown
    return re.sub(r'^(```\w+) skip="[^"]*"$', r"\1", _with_links(markdown, here, lambda path: None), flags=re.M)


def _in_site(path: str) -> str:
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _with_links(text: str, here: str, found: Callable[[str], None]) -> str:
    """Returns a page with its links as the site needs them.

    Args:
        text: the page.
        here: its path in the repository.
        found: is told of each linked path in the repository.
    """

    def replaced(match: re.Match[str]) -> str:
        link = match[1]
        if re.match(r"\w+:", link):
            return link
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
        if (ROOT / target).is_dir():
            target = f"{target}/README.md"
        found(target)
        return posixpath.relpath(_in_site(target), posixpath.dirname(_in_site(here)) or ".")

    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replaced, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(replaced, text[at:])])
