"""A supervisor that dies takes along no report: what was told is read from disk, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import make_report
from worker.contract.messages import AttemptEnd, Entry, Milestone, RankReport
from worker.contract.reports import attempt_folder, rank_files, supervisor_files
from worker.contract.states import Reason
from worker.journal import Journal


class Teller:
    """A rank that writes what it tells, and hands over what it is asked to."""

    def __init__(self, world: World, job_id: str, rank: int) -> None:
        self.world, self.job_id, self.rank, self.number = world, job_id, rank, 0
        self.folder = attempt_folder(Path(world.attempt(job_id).start.report_directory), 1)
        self.journal = Journal(rank_files(self.folder, rank))

    def tell(self, body: RankReport | Milestone, *, handed_over: bool) -> None:
        self.number += 1
        attempt = self.world.attempt(self.job_id)
        self.journal.append(Entry(seq=0, rank=self.rank, number=self.number, body=body).model_dump_json())
        if handed_over:
            seq = len(attempt.entries) + 1
            attempt.entries.append(Entry(seq=seq, rank=self.rank, number=self.number, body=body))


def note(text: str, at: float) -> Milestone:
    return Milestone(name="checkpoint_saved", at=at, message=text, rank=0)


def steps_and_notes(world: World, job_id: str) -> tuple[list[tuple[int, int]], list[str]]:
    points: Any = world.client.get(f"/v1/jobs/{job_id}/metrics?attempt=1").json()["points"]
    events: Any = world.client.get(f"/v1/jobs/{job_id}/events?limit=1000").json()["events"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    return [(point["step"], point["ranks"]) for point in points], [
        event["message"] for event in events if event["kind"] == "checkpoint_saved"
    ]


def test_what_a_dead_supervisor_had_not_handed_over_is_stored_once(world: World) -> None:
    job_id = world.running()
    tellers = [Teller(world, job_id, rank) for rank in range(2)]
    for step in (1, 2):
        for teller in tellers:
            teller.tell(make_report(teller.rank, step), handed_over=True)
    tellers[0].tell(note("told to the supervisor", 1_000_002.5), handed_over=True)
    world.turn()
    for teller in tellers:
        teller.tell(make_report(teller.rank, 3), handed_over=False)
    tellers[0].tell(note("never handed over", 1_000_004.5), handed_over=False)
    for teller in tellers:
        teller.tell(make_report(teller.rank, 4), handed_over=False)
    world.attempt(job_id).dead = True
    world.turn(2)
    assert world.state(job_id) == "STOPPING", "its ranks hold their files: they may do more steps"
    assert steps_and_notes(world, job_id)[0] == [(1, 2), (2, 2)]
    tellers[1].tell(make_report(1, 5), handed_over=False)
    for teller in tellers:
        teller.journal.close()
    with rank_files(tellers[0].folder, 0)[0].open("ab") as file:
        file.write(b'{"seq": 0, "rank": 0, "numb')  # it was killed in the middle of a line
    world.turn()
    steps, notes = steps_and_notes(world, job_id)
    assert steps == [(1, 2), (2, 2), (3, 2), (4, 2), (5, 1)]
    assert notes == ["told to the supervisor", "never handed over"]
    assert world.state(job_id) == "RESTARTING"
    assert not tellers[0].folder.exists(), "what is stored is not kept twice"
    world.turn(2)
    assert steps_and_notes(world, job_id) == (steps, notes)


def test_the_end_that_a_dead_supervisor_had_told_nobody_counts(world: World) -> None:
    job_id = world.running()
    teller = Teller(world, job_id, 0)
    teller.tell(make_report(0, 5), handed_over=False)
    own, after = Journal(supervisor_files(teller.folder)), len(world.attempt(job_id).entries)
    for seq in (1, 2):  # what was handed over long ago stands there too
        own.append(Entry(seq=seq, body=Milestone(name="placed", at=1.0, message="long ago")).model_dump_json())
    end = AttemptEnd(at=1_000_000.0, reason=Reason.COMPLETED, message="all steps done")  # by a clock that is behind
    own.append(Entry(seq=after + 7, body=end).model_dump_json())
    own.close(), teller.journal.close()
    world.attempt(job_id).dead = True
    world.turn()
    assert (world.state(job_id), world.job(job_id)["reason"]) == ("SUCCEEDED", "completed")
    assert steps_and_notes(world, job_id)[0] == [(5, 1)]
    events: Any = world.client.get(f"/v1/jobs/{job_id}/events?limit=1000").json()["events"]
    assert "long ago" not in [event["message"] for event in events]
