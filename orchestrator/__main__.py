"""``python -m orchestrator`` is ``dmuonctl``."""

from orchestrator.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
