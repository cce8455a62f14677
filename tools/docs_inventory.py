"""Keep in `docs_inventory.txt` only the names that the site mentions.

    python tools/docs_inventory.py

The site mentions a name in code between backticks, on a page, in a docstring or in an
example: `jax.vmap`, `jnp.where(x, 0)`. Add new names to the file by hand, below the
address of their library, and run this to find those that no text mentions.
"""

import re
from pathlib import Path

from docs_hooks import full_name, INVENTORY, inventory


ROOT = Path(__file__).resolve().parent.parent
CODE = r"`([a-z]\w*(?:\.\w+)+)(?:\([^`]*\))?`"


def mentioned() -> set[str]:
    """The full names in code of all texts that the site shows."""
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    files += (ROOT / "examples").glob("*.py")
    texts = (file.read_text(encoding="utf-8") for file in files)
    return {full_name(name) for text in texts for name in re.findall(CODE, text)}


def pruned() -> str:
    """The inventory without the names that nothing mentions."""
    lines = INVENTORY.read_text(encoding="utf-8").splitlines(keepends=True)
    unused = inventory().keys() - mentioned()
    return "".join(line for line in lines if line.split(" ")[0].strip() not in unused)


if __name__ == "__main__":
    INVENTORY.write_text(pruned(), encoding="utf-8")
