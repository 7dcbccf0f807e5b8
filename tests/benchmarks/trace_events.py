"""Events of a trace as torch's profiler writes them; times in microseconds."""

from __future__ import annotations

__all__ = ["kernel", "launch", "span"]


def span(name: str, begin: float, end: float) -> dict[str, object]:
    """Return a range of the host's only thread."""
    return {"ph": "X", "cat": "user_annotation", "name": name, "tid": 7, "ts": begin, "dur": end - begin}


def launch(number: int, moment: float) -> dict[str, object]:
    """Return the host's launch of kernel ``number``."""
    arguments = {"correlation": number}
    return {"ph": "X", "cat": "cuda_runtime", "name": "launch", "tid": 7, "ts": moment, "dur": 1.0, "args": arguments}


def kernel(name: str, stream: int, number: int, begin: float, end: float) -> dict[str, object]:
    """Return what ran on the device; ``Memcpy`` is no kernel."""
    arguments, cat = {"stream": stream, "correlation": number}, "gpu_memcpy" if name == "Memcpy" else "kernel"
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": arguments}
