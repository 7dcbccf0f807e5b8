"""Specs and waiting that the end-to-end tests share."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import yaml

from orchestrator import resources as r
from orchestrator.client import Client
from tests.architecture.source import ROOT

__all__ = ["EXAMPLE", "small", "submit", "wait_for", "wait_until_ended"]

EXAMPLE = ROOT / "examples" / "llama-stdlib.yaml"


def small(**sections: Any) -> dict[str, Any]:
    """The example, small enough for 20 steps a second; ``sections`` replace fields of its sections."""
    document: dict[str, Any] = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text()))
    document["name"] = "small"
    document["model"]["config"].update(hidden_size=48, intermediate_size=96, num_hidden_layers=2)
    document["model"]["config"].update(num_attention_heads=4, num_key_value_heads=4)
    document["data"]["sequence_length"] = 32
    document["training"].update(steps=30, global_batch=4, schedule={"kind": "constant"})
    for section, fields in sections.items():
        if isinstance(fields, dict):
            document.setdefault(section, {}).update(fields)
        else:
            document[section] = fields
    return document


def submit(client: Client, document: dict[str, Any]) -> r.JobResource:
    """Submit a document."""
    return client.submit(json.dumps(document))


def wait_for(
    client: Client, job_id: str, condition: Callable[[r.JobResource], bool], *, timeout_s: float = 90.0
) -> r.JobResource:
    """Poll until ``condition`` holds; fail when the job ends first or time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        job = client.job(job_id)
        if condition(job):
            return job
        assert not job.terminal, f"ended as {job.state} {job.reason}: {job.message} {job.errors} {job.rank_errors}"
        assert time.monotonic() < deadline, f"still {job.state} after {timeout_s} s: {job.message}"
        time.sleep(0.2)


def wait_until_ended(client: Client, job_id: str, *, timeout_s: float = 90.0) -> r.JobResource:
    """Poll until the job is terminal."""
    return wait_for(client, job_id, lambda job: job.terminal, timeout_s=timeout_s)
