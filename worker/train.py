"""The training loop of one rank: join, build, confirm the plan, step, report."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import dmuon_runtime as dmuon
from dmuon_runtime import ledger
from dmuon_runtime.newton_schulz import Choices
from dmuon_runtime.progress import PROGRESS
from worker.attestation import Attestation
from worker.baseline_plan import BaselinePlan
from worker.batches import micro_batches, num_micro_batches
from worker.checkpointing import RunCheckpoints, kernel_record, open_checkpoints
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.manifest import KernelRecord
from worker.contract.errors import ErrorValue
from worker.contract.messages import NsTotals, RankError
from worker.contract.spec import DmuonOptimizer
from worker.control import Agreement, Directive
from worker.corpus import Corpus, load_corpus
from worker.kernel_control import KernelControl
from worker.kernels import KernelSwitch, NsCalls, ns_calls
from worker.model import build_model
from worker.optimizers import DmuonDriver, Driver, baseline_driver, dmuon_driver
from worker.planner import job_plan
from worker.rendezvous import join_group, leave_group
from worker.report import Reporter, StepFacts, differences
from worker.schedule import lr_ratio
from worker.seat import Phase, Rank, tell
from worker.seeds import seed_step
from worker.settings import prepare_for_gpu

__all__ = ["Outcome", "Phase", "PlanDisagreement", "Rank", "train"]


_log = logging.getLogger(__name__)
_CHOICES = "ns_choices"


class Outcome(StrEnum):
    """How training ended when nothing failed."""

    COMPLETED = "completed"
    STOPPED = "stopped"


class PlanDisagreement(RuntimeError):
    """Ranks, or a rank and the job, have different plans or data."""


def train(rank: Rank) -> Outcome:
    """Run the whole job on this rank. Leaves the process group in any case.

    Raises:
        ContractError, ValueError: the job cannot be built.
        PlanDisagreement: this rank's plan is not that of the others or of the job.
        dmuon_runtime.DMuonError: the runtime refused a step.
    """
    try:
        if rank.device.type == "cuda":
            prepare_for_gpu(rank.rank, shares_it=rank.spec.resources.gpus_per_worker < 1)
        join_group(
            rank.store, rank.rank, rank.spec.world_size, rank.device,
            join_timeout_s=rank.settings.join_timeout_s, timeout_s=rank.settings.collective_timeout_s,
        )  # fmt: skip
        PROGRESS.enter("set_up")
        rank.phase = Phase.BUILDING
        tell(rank, "group_formed", f"{rank.spec.world_size} ranks joined", rank_zero_only=True)
        loop = _build(rank)
        rank.phase = Phase.TRAINING
        try:
            outcome = loop.run()
        finally:
            loop.checkpoints.close()
        if rank.save is not None:
            _save(loop.driver, rank)
        return outcome
    finally:
        rank.phase = Phase.DONE if rank.phase == Phase.TRAINING else rank.phase
        leave_group()


def _build(rank: Rank) -> _Loop:
    spec, device = rank.spec, rank.device
    corpus = load_corpus(spec.data, rank.settings.cache_directory)
    model = build_model(spec, corpus.vocab_size).to(device)
    plan = job_plan(spec, model)
    _confirm(rank, plan.hash, corpus.fingerprint)
    mesh = init_device_mesh(device.type, (spec.mesh.replicate, spec.mesh.shard), mesh_dim_names=("replicate", "shard"))
    driver: Driver
    switch: KernelSwitch | None = None
    control: KernelControl | None = None
    attestation: Attestation | None = None
    if isinstance(plan, BaselinePlan):
        driver = baseline_driver(spec, model, mesh, device)
    else:
        switch = KernelSwitch(spec.kernels, device, rank.mailbox.first)
        driver = dmuon_driver(spec, model, mesh, switch)
        calls = _ns_calls(rank, plan)
        _prepare(rank, calls, switch)
        control = KernelControl(rank.rank, switch, calls)
        attestation = Attestation(rank.rank, plan, switch, calls)
    exchange = Exchange(rank.store, rank.rank, spec.world_size, rank.settings.collective_timeout_s)
    checkpoints = open_checkpoints(rank, driver.checkpointed(exchange), corpus, plan.hash)
    voice = tuple[int, ...] if control is None else control.voice
    agreement = Agreement(rank.mailbox, timeout_s=rank.settings.collective_timeout_s, voice=voice)
    reporter = Reporter(rank.rank, device, driver, checkpoints.first_step)
    return _Loop(rank, corpus, plan, driver, switch, control, attestation, agreement, reporter, checkpoints)


def _confirm(rank: Rank, plan_hash: str, fingerprint: str) -> None:
    """Compare plans and data before the first collective that depends on them.

    Raises:
        PlanDisagreement: naming the ranks and what they have.
    """
    if rank.plan_hash is not None and rank.plan_hash != plan_hash:
        raise PlanDisagreement(
            f"rank {rank.rank} planned {plan_hash[:12]}, but the job was accepted with plan {rank.plan_hash[:12]}; "
            "workers and control plane have different versions of the code or of transformers: plan the job again"
        )
    mine = f"{plan_hash} {fingerprint}"
    rank.store.set(f"plan/{rank.rank}", mine)
    others = [rank.store.get(f"plan/{other}").decode() for other in range(rank.spec.world_size)]
    differing = [f"rank {other}: {text}" for other, text in enumerate(others) if text != mine]
    if differing:
        raise PlanDisagreement(
            f"rank {rank.rank} has plan and data {mine}, but {'; '.join(differing)}; all workers need the same code, "
            "the same Python and the same files"
        )
    message = f"{rank.spec.world_size} ranks agree on plan {plan_hash[:12]} and data {fingerprint}"
    tell(rank, "plan_confirmed", message, rank_zero_only=True, plan_hash=plan_hash, data_fingerprint=fingerprint)


def _ns_calls(rank: Rank, plan: dmuon.RuntimePlan) -> NsCalls:
    assert isinstance(rank.spec.optimizer, DmuonOptimizer)
    return ns_calls(plan, rank.spec.optimizer.muon.ns_steps, rank.spec.world_size)


def _prepare(rank: Rank, calls: NsCalls, switch: KernelSwitch) -> None:
    """Measure on rank 0, take its choices over on every rank so that all compute the same bits, and compile.

    On a CPU nothing is compiled, and the rule that counts FLOPs decides: a spec gives the same bits every time.
    """
    if rank.device.type == "cpu" or not rank.settings.prepare_kernels:
        return
    PROGRESS.enter("compile")
    if rank.rank == 0:
        choices = switch.measure(calls, lambda message: _log.info("Newton-Schulz: %s", message))
        rank.store.set(_CHOICES, json.dumps(choices.to_json()))
    rank.store.wait([_CHOICES], timedelta(seconds=rank.settings.collective_timeout_s))
    switch.prepare(calls, rank.rank, Choices.from_json(json.loads(rank.store.get(_CHOICES))))
    PROGRESS.enter("set_up")


def _save(driver: Driver, rank: Rank) -> None:
    state = driver.whole_state()
    if rank.rank == 0 and rank.save is not None:
        partial = rank.save.with_name(rank.save.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, rank.save)


@dataclass(slots=True)
class _Loop:
    rank: Rank
    corpus: Corpus
    plan: dmuon.RuntimePlan | BaselinePlan
    driver: Driver
    switch: KernelSwitch | None
    """Of the runtime's Newton-Schulz; None with a baseline, which has its own."""
    control: KernelControl | None
    attestation: Attestation | None
    agreement: Agreement
    reporter: Reporter
    checkpoints: RunCheckpoints
    verified: bool = False
    ns: tuple[NsTotals, ...] = ()
    """Newton-Schulz work of this rank since the run began."""
    base_lr: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.base_lr = [float(group["lr"]) for group in self.driver.optimizer.param_groups]

    def run(self) -> Outcome:
        """Do all steps that are left, or stop where all ranks agreed to."""
        num_steps, first = self.rank.spec.training.steps, self.checkpoints.first_step
        if first == num_steps:
            self.agreement.next(last=True)  # what was announced must not be left under way
        for step in range(first, num_steps):
            directive = self.agreement.next(last=step + 1 == num_steps)
            if directive.stop:
                PROGRESS.enter("checkpoint")
                self.checkpoints.before_stop(step, self.ns, self._kernels())
                tell(self.rank, "stopping", f"stopped after step {step}", rank_zero_only=True, step=step)
                return Outcome.STOPPED
            self._apply(directive, step)
            self.rank.step = step + 1
            self._step(step)
            self.rank.steps_done += 1
            PROGRESS.enter("checkpoint")
            self.checkpoints.after_step(step + 1, self.ns, self._kernels())
            PROGRESS.enter("publish")
        return Outcome.COMPLETED

    def _apply(self, directive: Directive, step: int) -> None:
        if self.switch is None or self.control is None or not isinstance(self.driver, DmuonDriver):
            return
        for note in self.control.begin(directive, step + 1):
            self.rank.sink(note)
        self.driver.optimizer.set_newton_schulz(self.switch.newton_schulz)

    def _kernels(self) -> KernelRecord:
        if self.switch is None:
            return kernel_record(self.rank.spec, self.rank.device, None)
        spec = self.rank.spec.model_copy(update={"kernels": self.switch.spec})  # as swapped since
        return kernel_record(spec, self.rank.device, self.switch.epoch)

    def _step(self, step: int) -> None:
        begin, spec = time.perf_counter(), self.rank.spec
        self._set_rates(step)
        seed_step(spec.training.seed, step, self.rank.rank)
        before = ledger.snapshot()
        with self._together():
            loss = self._accumulate(step)
        PROGRESS.enter("reduce")
        loss_work = dist.all_reduce(loss, async_op=True)
        clip = spec.training.clip_grad_norm
        if clip is not None:
            self.driver.clip(clip)
        self._update(step)
        assert loss_work is not None, "this rank is in the group"
        with PROGRESS.waiting("all-reduce of the loss"):
            loss_work.wait()
            self.driver.settle()
        ahead = self.reporter.ahead()
        report = self.reporter.report(self._facts(step, float(loss), begin, before), ahead)
        self.rank.sink(report)
        if self.control is not None:
            for note in self.control.end(step + 1, skipped=report.skipped):
                self.rank.sink(note)
        self.ns = report.ns
        if isinstance(self.plan, dmuon.RuntimePlan) and not self.verified and report.skipped_total == 0:
            self.verified = True
            found = [*differences(spec, self.plan, self.rank.rank, report, report.steps_done), *report.offenders]
            message = "; ".join(found) or "the first step did exactly what the plan says"
            tell(self.rank, "routes_verified", message, rank_zero_only=not found, ok=not found)

    def _facts(
        self, step: int, loss: float, begin: float, before: Mapping[tuple[str, str], ledger.NsCount]
    ) -> StepFacts:
        spec = self.rank.spec
        return StepFacts(
            step=step + 1,
            loss=loss / spec.world_size,
            seconds=time.perf_counter() - begin,
            tokens=spec.training.global_batch // spec.world_size * spec.data.sequence_length,
            kernel=None if self.switch is None else self.switch.kernel,
            kernel_epoch=None if self.switch is None else self.switch.epoch,
            orthogonality_error=None if self.switch is None else self.switch.newton_schulz.last_error,
            ns_before=before,
            fallback_calls=0 if self.switch is None else self.switch.guard.fallback_calls,
            offenders=() if self.attestation is None else self.attestation.offenders,
        )

    def _update(self, step: int) -> None:
        if self.switch is not None:
            self.switch.newton_schulz.sample_next = step % self.rank.settings.orthogonality_every_steps == 0
        PROGRESS.enter("newton_schulz")
        if self.attestation is None:
            self.driver.optimizer.step()
        else:
            self.attestation.begin()
            self.driver.optimizer.step()
            self._attest(step)
        assert self.driver.optimizer.last_step is not None, "a step was done"
        self.driver.optimizer.last_step.send()
        PROGRESS.enter("publish")
        self.driver.optimizer.zero_grad()

    def _attest(self, step: int) -> None:
        assert self.attestation is not None and isinstance(self.driver, DmuonDriver), "the two come together"
        optimizer = self.driver.optimizer
        assert optimizer.last_step is not None, "a step was done"
        self.attestation.end(step + 1, optimizer.orthogonalized, computed=optimizer.last_step.computed)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """An error in here is told at once, and then ends the other ranks too, which would wait for this one."""
        together = dmuon.fail_together(self.driver.model) if isinstance(self.driver, DmuonDriver) else nullcontext()
        with together:
            try:
                yield
            except dmuon.PeerFailed:
                raise
            except Exception as error:
                self.rank.told = error
                self.rank.sink(RankError(at=time.time(), error=ErrorValue.from_exception(error, rank=self.rank.rank)))
                raise

    def _set_rates(self, step: int) -> None:
        training = self.rank.spec.training
        ratio = lr_ratio(training.schedule, training.steps, step)
        for group, base in zip(self.driver.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = base * ratio

    def _accumulate(self, step: int) -> Tensor:
        """Do the forwards and backwards; return this rank's mean loss, float64 on the device."""
        num_micro = num_micro_batches(self.rank.spec)
        total = torch.zeros((), dtype=torch.float64, device=self.rank.device)
        batches = micro_batches(self.rank.spec, self.corpus, self.rank.rank, step, self.rank.device)
        for index, (inputs, targets) in enumerate(batches):
            if index + 1 < num_micro:
                with self.driver.no_sync():
                    total += self._backward(inputs, targets, num_micro)
            else:
                total += self._backward(inputs, targets, num_micro)
        return total

    def _backward(self, inputs: Tensor, targets: Tensor, num_micro: int) -> Tensor:
        PROGRESS.enter("forward")
        logits = self.driver.forward(inputs)
        PROGRESS.enter("backward")
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / num_micro
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().double()
