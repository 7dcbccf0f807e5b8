"""``python -m dashboards`` writes the generated files; ``--check`` fails when they differ from the code."""

from __future__ import annotations

import sys
from pathlib import Path

from dashboards.build import render
from dashboards.dmuon import DMUON

__all__ = ["BOARDS", "GENERATED", "main"]

BOARDS = (DMUON,)
GENERATED = Path(__file__).parent / "generated"


def main(arguments: list[str]) -> int:
    """Write or check every board; return the exit status."""
    stale = []
    GENERATED.mkdir(exist_ok=True)
    for board in BOARDS:
        path, text = GENERATED / f"{board.uid}.json", render(board)
        if "--check" in arguments:
            if not path.exists() or path.read_text() != text:
                stale.append(path.name)
        else:
            path.write_text(text)
    if stale:
        print(f"generated dashboards differ from the code: {', '.join(stale)}; run `make dashboards`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
