"""Several specs on the same data, one after the other: what they are, running them, and what came of it."""

__all__: list[str] = []
