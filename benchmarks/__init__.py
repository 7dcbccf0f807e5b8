"""Benchmarks: each runs its rival in the same process, prints a table and writes a JSON result."""
