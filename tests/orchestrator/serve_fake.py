"""A real server over a fake cluster, for tests that need a process: ``python -m tests.orchestrator.serve_fake``."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.api.app import create_app
from orchestrator.server import serve
from orchestrator.settings import Settings
from tests.orchestrator.fakes import FakeLauncher, FakePlanner


def run(state_dir: Path, port: int, delay_s: float) -> None:
    launcher = FakeLauncher()
    launcher.delay_s = delay_s
    app = create_app(Settings.from_environment(state_dir=state_dir, port=port), launcher, FakePlanner())
    serve(app, "127.0.0.1", port)
    heavy = {"torch", "transformers", "dmuon_runtime"} & set(sys.modules)
    print(f"ended; launcher closed: {launcher.closed}; heavy: {sorted(heavy)}", flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
