"""Hooks of `mkdocs build` (mkdocs.yml names this file)."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)[^)\s]*\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Writes links to files outside docs/ as the text and the path in the repository: the site has no such file.

    On a git host, `../src/octavo/errors.py` in a page works as it is.
    """
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir)
    folder = posixpath.dirname(page.file.src_uri)

    def in_words(match: re.Match[str]) -> str:
        text, link = match.groups()
        path = Path(os.path.normpath(docs / folder / link))
        if docs in path.parents or not path.exists():  # a page of the site; or wrong, which mkdocs reports
            return match[0]
        name = path.relative_to(root).as_posix()
        return text if name in text else f"{text} (`{name}`)"

    return LINK.sub(in_words, markdown)
