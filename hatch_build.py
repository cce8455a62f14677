"""Make the links of README.md absolute in the archives of a release.

The environment variable `REPOSITORY_URL`, which also the documentation site reads, is
the address of the repository. Without it, the links stay relative.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, url: str, version: str) -> str:
    """The text, with links that start at the files of this version."""
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({url}/blob/v{version}/", text)


class LinksOfReadme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if url := os.environ.get("REPOSITORY_URL"):
            text = absolute(text, url, metadata["version"])
            metadata["urls"] = {"Repository": url}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
