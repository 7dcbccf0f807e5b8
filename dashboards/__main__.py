"""``python -m dashboards`` writes the generated files; ``--check`` fails when they differ from the code."""

from __future__ import annotations

import sys
from pathlib import Path

from dashboards.boards import BOARDS
from dashboards.build import render
from dashboards.panel_guide import panel_guide
from dashboards.rule_files import alert_routes, rule_file

__all__ = ["GENERATED", "generated_files", "main"]

GENERATED = Path(__file__).parent / "generated"


def generated_files() -> dict[Path, str]:
    """Return every generated file with its text."""
    files = {GENERATED / "grafana" / f"{board.uid}.json": render(board) for board in BOARDS}
    files[GENERATED / "prometheus" / "dmuon.rules.yml"] = rule_file()
    files[GENERATED / "alertmanager" / "alertmanager.yml"] = alert_routes()
    files[GENERATED / "panels.md"] = panel_guide()
    return files


def main(arguments: list[str]) -> int:
    """Write or check every file; return the exit status."""
    files = generated_files()
    found = {path for path in GENERATED.rglob("*") if path.is_file()}
    stale = [path for path, text in files.items() if path not in found or path.read_text() != text]
    stale += sorted(found - files.keys())
    if "--check" in arguments:
        if stale:
            names = ", ".join(str(path.relative_to(GENERATED)) for path in stale)
            print(f"generated files differ from the code: {names}; run `make dashboards`", file=sys.stderr)
        return 1 if stale else 0
    for path in found - files.keys():
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
