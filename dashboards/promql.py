"""Pieces of PromQL that the boards share."""

from __future__ import annotations

__all__ = ["JOB", "RATE", "of_job", "rate", "ratio_without_zero"]

JOB = '{job="$job"}'
RATE = "[$__rate_interval]"


def of_job(**labels: str) -> str:
    """Return a selector of the board's job with more labels."""
    return "{" + ", ".join(['job="$job"', *(f'{name}="{value}"' for name, value in labels.items())]) + "}"


def rate(name: str, by: str = "", selector: str = JOB) -> str:
    """Return the sum of a counter's rate, by some labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{selector}{RATE}))"


def ratio_without_zero(part: str, whole: str) -> str:
    """Return ``part / whole`` where ``whole`` is not zero: a share of nothing is absent, neither 0 nor 1."""
    return f"{part} / ({whole} > 0)"
