"""Case 22: the client times out and retries, and two trainings start."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from orchestrator.cli.own_service import OwnService
from tests.e2e.jobs import small

pytestmark = pytest.mark.service


def post(service: OwnService, body: bytes) -> httpx.Response:
    headers = {"Authorization": f"Bearer {service.token}", "Idempotency-Key": "case-22"}
    headers["Content-Type"] = "application/json"
    return httpx.post(f"{service.url}/v1/jobs", content=body, headers=headers, timeout=30, trust_env=False)


def test_twenty_identical_submissions_are_one_job(service: OwnService) -> None:
    body = json.dumps(small(name="case-22", training={"steps": 1})).encode()
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: post(service, body), range(20)))
    late = [answer for answer in answers if answer.status_code == 409]  # one that found the first still in work
    done = [answer for answer in answers if answer.status_code == 201]
    assert len(late) + len(done) == 20 and done
    assert len({answer.json()["id"] for answer in done}) == 1
    assert post(service, body).json()["id"] == done[0].json()["id"]
    with service.client() as client:
        assert len([job for job in client.jobs(page_size=100).jobs if job.name == "case-22"]) == 1
    other = json.dumps(small(name="case-22", training={"steps": 2})).encode()
    refused = post(service, other)
    assert refused.status_code == 422 and refused.json()["code"] == "idempotency_mismatch"
