"""The training loop of one rank: join, build, confirm the plan, step, report."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.nn import functional

import dmuon_runtime as dmuon
from dmuon_runtime import ledger
from dmuon_runtime.newton_schulz import Choices
from worker.batches import micro_batches, num_micro_batches
from worker.contract.messages import Milestone
from worker.contract.spec import JobSpec
from worker.control import Agreement, Mailbox
from worker.corpus import Corpus, load_corpus
from worker.kernel_control import KernelControl
from worker.kernels import KernelSwitch, ns_calls
from worker.model import build_model
from worker.planner import runtime_arguments, runtime_plan
from worker.rendezvous import join_group, leave_group
from worker.report import Reporter, Sink, StepFacts, differences
from worker.routing import is_managed
from worker.schedule import lr_ratio
from worker.settings import WorkerSettings

__all__ = ["Outcome", "Phase", "PlanDisagreement", "Rank", "train"]


_log = logging.getLogger(__name__)
_CHOICES = "ns_choices"


class Phase(StrEnum):
    """Where a rank is; what fails before ``TRAINING`` is a failure of the set-up."""

    JOINING = "joining"
    """Only this process exists; the process group is being formed."""
    BUILDING = "building"
    """The process group exists; corpus, model and optimizer are being made."""
    TRAINING = "training"
    """Everything exists; steps are being done."""
    DONE = "done"
    """The process group is gone."""


class Outcome(StrEnum):
    """How training ended when nothing failed."""

    COMPLETED = "completed"
    STOPPED = "stopped"


class PlanDisagreement(RuntimeError):
    """Ranks, or a rank and the job, have different plans or data."""


@dataclass(slots=True)
class Rank:
    """What one rank is given, and the phase it has come to."""

    spec: JobSpec
    rank: int
    device: torch.device
    store: Store
    settings: WorkerSettings
    mailbox: Mailbox
    sink: Sink
    plan_hash: str | None = None
    """The plan that the job was accepted with; None where there was no such step."""
    save: Path | None = None
    """Where rank 0 writes the final weights."""
    phase: Phase = Phase.JOINING


def train(rank: Rank) -> Outcome:
    """Run the whole job on this rank. Leaves the process group in any case.

    Raises:
        ContractError, ValueError: the job cannot be built.
        PlanDisagreement: this rank's plan is not that of the others or of the job.
        dmuon_runtime.DMuonError: the runtime refused a step.
    """
    try:
        join_group(
            rank.store, rank.rank, rank.spec.world_size, rank.device,
            join_timeout_s=rank.settings.join_timeout_s, timeout_s=rank.settings.collective_timeout_s,
        )  # fmt: skip
        rank.phase = Phase.BUILDING
        _tell(rank, "group_formed", f"{rank.spec.world_size} ranks joined", rank_zero_only=True)
        loop = _build(rank)
        rank.phase = Phase.TRAINING
        outcome = loop.run()
        if rank.save is not None:
            _save(loop.model, rank)
        return outcome
    finally:
        rank.phase = Phase.DONE if rank.phase == Phase.TRAINING else rank.phase
        leave_group()


def _tell(rank: Rank, name: str, message: str, *, rank_zero_only: bool = False, **data: str | int | bool) -> None:
    if rank_zero_only and rank.rank != 0:
        return
    rank.sink(
        Milestone.model_validate({"name": name, "at": time.time(), "message": message, "rank": rank.rank, "data": data})
    )


def _build(rank: Rank) -> _Loop:
    spec, device = rank.spec, rank.device
    corpus = load_corpus(spec.data, rank.settings.cache_directory)
    model = build_model(spec, corpus.vocab_size).to(device)
    plan = runtime_plan(spec, model)
    _confirm(rank, plan.hash, corpus.fingerprint)
    mesh = init_device_mesh(device.type, (spec.mesh.replicate, spec.mesh.shard), mesh_dim_names=("replicate", "shard"))
    dmuon.dedicate_params(
        model,
        mesh["shard"],
        is_managed,
        replicate_mesh=mesh["replicate"] if spec.mesh.replicate > 1 else None,
        **runtime_arguments(spec, model),
    )
    switch = KernelSwitch(spec.kernels, device, rank.mailbox.first)
    optimizer = _optimizer(spec, model, switch)
    _prepare(rank, plan, switch)
    torch.manual_seed(spec.training.seed * 1_000_003 + rank.rank)  # dropout differs by rank
    control = KernelControl(rank.rank, switch, ns_calls(plan, spec.optimizer.muon.ns_steps, spec.world_size))
    agreement = Agreement(rank.mailbox, timeout_s=rank.settings.collective_timeout_s, voice=control.voice)
    reporter = Reporter(rank.rank, device, model, optimizer)
    return _Loop(rank, corpus, model, plan, optimizer, switch, control, agreement, reporter)


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
    _tell(rank, "plan_confirmed", message, rank_zero_only=True, plan_hash=plan_hash, data_fingerprint=fingerprint)


def _prepare(rank: Rank, plan: dmuon.RuntimePlan, switch: KernelSwitch) -> None:
    """Measure on rank 0, take its choices over on every rank so that all compute the same bits, and compile.

    On a CPU nothing is compiled, and the rule that counts FLOPs decides: a spec gives the same bits every time.
    """
    if rank.device.type == "cpu" or not rank.settings.prepare_kernels:
        return
    calls = ns_calls(plan, rank.spec.optimizer.muon.ns_steps, rank.spec.world_size)
    if rank.rank == 0:
        choices = switch.measure(calls, lambda message: _log.info("Newton-Schulz: %s", message))
        rank.store.set(_CHOICES, json.dumps(choices.to_json()))
    rank.store.wait([_CHOICES], timedelta(seconds=rank.settings.collective_timeout_s))
    switch.prepare(calls, rank.rank, Choices.from_json(json.loads(rank.store.get(_CHOICES))))


def _optimizer(spec: JobSpec, model: nn.Module, switch: KernelSwitch) -> dmuon.Muon:
    muon, adamw = spec.optimizer.muon, spec.optimizer.adamw
    return dmuon.Muon(
        model,
        lr=muon.lr,
        momentum=muon.momentum,
        weight_decay=muon.weight_decay,
        nesterov=muon.nesterov,
        ns_steps=muon.ns_steps,
        ns_backend=switch.newton_schulz,
        scale=muon.scale,
        adamw_lr=adamw.lr,
        adamw_betas=adamw.betas,
        adamw_eps=adamw.eps,
        adamw_weight_decay=adamw.weight_decay,
        non_finite=spec.failure.non_finite,
    )


def _save(model: nn.Module, rank: Rank) -> None:
    state = dmuon.get_model_state_dict(model)
    if rank.rank == 0 and rank.save is not None:
        partial = rank.save.with_name(rank.save.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, rank.save)


@dataclass(slots=True)
class _Loop:
    rank: Rank
    corpus: Corpus
    model: nn.Module
    plan: dmuon.RuntimePlan
    optimizer: dmuon.Muon
    switch: KernelSwitch
    control: KernelControl
    agreement: Agreement
    reporter: Reporter
    verified: bool = False
    base_lr: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.base_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def run(self) -> Outcome:
        """Do all steps, or stop where all ranks agreed to."""
        num_steps = self.rank.spec.training.steps
        for step in range(num_steps):
            directive = self.agreement.next(last=step + 1 == num_steps)
            if directive.stop:
                _tell(self.rank, "stopping", f"stopped after step {step}", rank_zero_only=True, step=step)
                return Outcome.STOPPED
            for note in self.control.begin(directive, step + 1):
                self.rank.sink(note)
            self.optimizer.set_newton_schulz(self.switch.newton_schulz)
            self._step(step)
        return Outcome.COMPLETED

    def _step(self, step: int) -> None:
        begin, spec = time.perf_counter(), self.rank.spec
        self._set_rates(step)
        before = ledger.snapshot()
        loss = self._accumulate(step)
        loss_work = dist.all_reduce(loss, async_op=True)
        clip = spec.training.clip_grad_norm
        norm = None if clip is None else dmuon.clip_grad_norm_(self.optimizer, clip)
        self.switch.newton_schulz.sample_next = step % self.rank.settings.orthogonality_every_steps == 0
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert loss_work is not None, "this rank is in the group"
        loss_work.wait()
        facts = StepFacts(
            step=step + 1,
            loss=float(loss) / spec.world_size,
            grad_norm=None if norm is None else float(norm),
            seconds=time.perf_counter() - begin,
            tokens=spec.training.global_batch // spec.world_size * spec.data.sequence_length,
            kernel=self.switch.kernel,
            kernel_epoch=self.switch.epoch,
            orthogonality_error=self.switch.newton_schulz.last_error,
            ns_before=before,
            fallback_calls=self.switch.guard.fallback_calls,
        )
        report = self.reporter.report(facts)
        self.rank.sink(report)
        for note in self.control.end(step + 1, skipped=report.skipped):
            self.rank.sink(note)
        if not self.verified and report.skipped_total == 0:
            self.verified = True
            found = differences(spec, self.plan, self.rank.rank, report, step + 1)
            message = "; ".join(found) or "the first step did exactly what the plan says"
            _tell(self.rank, "routes_verified", message, rank_zero_only=not found, ok=not found)

    def _set_rates(self, step: int) -> None:
        training = self.rank.spec.training
        ratio = lr_ratio(training.schedule, training.steps, step)
        for group, base in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = base * ratio

    def _accumulate(self, step: int) -> Tensor:
        """Do the forwards and backwards; return this rank's mean loss, float64 on the device."""
        num_micro = num_micro_batches(self.rank.spec)
        total = torch.zeros((), dtype=torch.float64, device=self.rank.device)
        batches = micro_batches(self.rank.spec, self.corpus, self.rank.rank, step, self.rank.device)
        for index, (inputs, targets) in enumerate(batches):
            if index + 1 < num_micro:
                with dmuon.no_sync(self.model):
                    total += self._backward(inputs, targets, num_micro)
            else:
                total += self._backward(inputs, targets, num_micro)
        return total

    def _backward(self, inputs: Tensor, targets: Tensor, num_micro: int) -> Tensor:
        logits = self.model(input_ids=inputs).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / num_micro
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().double()
