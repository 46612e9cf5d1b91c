"""Put the tables of the last measurements into the README: ``python -m turbovit.benchmarks.readme README.md FOLDER``.

A table stands between ``<!-- bench NAME -->`` and ``<!-- end of bench -->``, and comes from ``FOLDER/NAME.md``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from turbovit.engines.errors import InputError

_PLACE = re.compile(r"<!-- bench ([\w/]+) -->\n.*?<!-- end of bench -->", re.DOTALL)


def filled_readme(text: str, folder: Path) -> str:
    """`text` with every table that `folder` has; the places of others are left as they are.

    Raises:
        InputError: the text has no place for a table.
    """
    if not _PLACE.search(text):
        raise InputError("the README has no line <!-- bench NAME --> with <!-- end of bench --> behind it")

    def table(place: re.Match[str]) -> str:
        path = folder / f"{place[1]}.md"
        if not path.is_file():
            return place[0]
        return f"<!-- bench {place[1]} -->\n{path.read_text(encoding='utf-8').strip()}\n<!-- end of bench -->"

    return _PLACE.sub(table, text)


def main() -> None:
    """Rewrite the README that the command line names."""
    readme, folder = map(Path, sys.argv[1:3])
    readme.write_text(filled_readme(readme.read_text(encoding="utf-8"), folder), encoding="utf-8")


if __name__ == "__main__":
    main()
