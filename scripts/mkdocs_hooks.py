"""Hooks of `mkdocs build` (mkdocs.yml names this file)."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Points links to files outside docs/ at the repository.

    On a git host, `../src/octavo/errors.py` in a page works as it is. The site has no such file.
    """
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir)
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(docs / folder / match[0]))
        if docs in path.parents or not path.exists():  # a page of the site; or wrong, which mkdocs reports
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"{config.repo_url.rstrip('/')}/{kind}/main/{path.relative_to(root).as_posix()}"

    return LINK.sub(target, markdown)
