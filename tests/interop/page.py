"""Puts the clients' own code into `ops/interop.md`: `python tests/interop/page.py` after a change of either."""

import re
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "ops" / "interop.md"
_BLOCK = re.compile(r"(<!-- from (?P<path>\S+) -->\n```\w+\n).*?(\n```\n)", re.DOTALL)
_SNIPPET = re.compile(r"^ *(?://|#) snippet\n(.*?)^ *(?://|#) end snippet$", re.DOTALL | re.MULTILINE)


def filled(page: str) -> str:
    """The page with each block as it stands in its file; of a Java class, the closing brace is added."""
    return _BLOCK.sub(lambda block: block[1] + _snippet(HERE / block["path"]) + block[3], page)


def _snippet(path: Path) -> str:
    found = _SNIPPET.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path} has no snippet")
    code = textwrap.dedent(found[1]).strip()
    return f"{code}\n}}" if path.suffix == ".java" else code


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
