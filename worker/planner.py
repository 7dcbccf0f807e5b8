"""Plan a job, or refuse it with every reason: shapes only, no process group, no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

import dmuon_runtime as dmuon
from dmuon_runtime.kernels import default_device
from worker.baseline_plan import BaselinePlan, baseline_plan
from worker.batches import num_micro_batches
from worker.contract.errors import ContractError, ErrorValue, FieldError, PlanRefused
from worker.contract.kernels import Kernel
from worker.contract.load import load_spec
from worker.contract.plan import CostPlan, ParameterPlan, PlanReport, RankPlan, RoutePlan, TrafficPlan
from worker.contract.planning import PlanAnswer, PlanRequest
from worker.contract.spec import DmuonOptimizer, JobSpec
from worker.corpus import Corpus, load_corpus
from worker.cost import cost_plan, decide_chip, ns_work
from worker.kernels import kernel_availability, make_newton_schulz
from worker.model import build_model
from worker.routing import hook_boundaries, is_managed, param_policy
from worker.settings import WorkerSettings, read_settings

__all__ = ["answer", "job_plan", "make_plan", "runtime_arguments", "runtime_plan", "traffic_factor"]

T = TypeVar("T")
_RUNTIME_POINTERS = {
    "policy_invalid": "/routing",
    "route_refused": "/routing",
    "hook_boundary": "/routing/hook_boundaries",
    "dtype_conflict": "/routing",
    "nothing_matched": "/routing/exclude",
    "unsupported": "/mesh",
}


def answer(request_json: str) -> str:
    """Answer one :class:`PlanRequest` with a :class:`PlanAnswer`, both as JSON; never raises."""
    try:
        request = PlanRequest.model_validate_json(request_json)
        if request.spec_json is None:
            result = PlanAnswer(kernels=kernel_availability(default_device()))
        else:
            result = PlanAnswer(plan=make_plan(load_spec(request.spec_json), chip=request.chip))
    except ContractError as error:
        result = PlanAnswer(errors=error.errors)
    except Exception as error:  # the answer must say so: the process that asked waits for a line
        result = PlanAnswer(failure=ErrorValue.from_exception(error))
    return result.model_dump_json()


def make_plan(spec: JobSpec, settings: WorkerSettings | None = None, *, chip: str | None = None) -> PlanReport:
    """Return the plan of ``spec`` for its world size, with its cost on ``chip`` (default: this machine's, if known).

    Raises:
        PlanRefused: with all that is wrong with mesh, data, model, routing, kernels and chip.
    """
    settings = settings or read_settings()
    errors: list[FieldError] = [*_mesh_errors(spec)]
    corpus = _collect(errors, lambda: load_corpus(spec.data, settings.cache_directory))
    _collect(errors, lambda: _check_kernels(spec))
    figures = _collect(errors, lambda: decide_chip(chip, spec))
    vocab_size = corpus.vocab_size if corpus is not None else 1
    model = _collect(errors, lambda: build_model(spec, vocab_size, meta=True))
    plan = None if model is None else _collect(errors, lambda: job_plan(spec, model))
    if errors or corpus is None or model is None or plan is None:
        raise PlanRefused(errors)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    if isinstance(plan, BaselinePlan):
        return _baseline_report(spec, plan, corpus, frozen)
    cost = None if figures is None else cost_plan(spec, model, plan, figures)
    return _report(spec, plan, corpus, frozen, cost)


def job_plan(spec: JobSpec, model: nn.Module) -> dmuon.RuntimePlan | BaselinePlan:
    """Return the plan of the spec's optimizer; refusals come as :class:`PlanRefused`."""
    if isinstance(spec.optimizer, DmuonOptimizer):
        return runtime_plan(spec, model)
    hook_boundaries(spec, model)
    return baseline_plan(spec, model)


def runtime_arguments(spec: JobSpec, model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments that planning and dedicating share."""
    boundaries = hook_boundaries(spec, model)
    return {
        "param_policy": param_policy(spec),
        "reshard_after_forward": spec.mesh.reshard_after_forward,
        "hook_boundary_predicate": boundaries,
        "hook_boundary_strict": boundaries is None,
        "strict_routes": spec.routing.strict,
    }


def runtime_plan(spec: JobSpec, model: nn.Module) -> dmuon.RuntimePlan:
    """Return the runtime's plan; its refusals come as :class:`PlanRefused`."""
    try:
        return dmuon.plan_params(
            model, (spec.mesh.replicate, spec.mesh.shard), is_managed, **runtime_arguments(spec, model)
        )
    except dmuon.DMuonError as error:
        raise PlanRefused(_runtime_errors(error)) from error


def _runtime_errors(error: dmuon.DMuonError) -> list[FieldError]:
    """Return one entry for each offender that the runtime lists, which it does a line each."""
    pointer = _RUNTIME_POINTERS.get(error.code, "/routing")
    head, *offenders = [line.strip() for line in str(error).splitlines()]
    return [FieldError(pointer=pointer, code=error.code, message=line) for line in offenders or [head]]


def traffic_factor(spec: JobSpec, phase: str) -> int:
    """Return how often a step repeats the planned collectives of ``phase``: once a micro batch, but one reduction."""
    return 1 if phase in ("reduce", "publish") else num_micro_batches(spec)


def _collect(errors: list[FieldError], make: Callable[[], T]) -> T | None:
    try:
        return make()
    except PlanRefused as refused:
        errors.extend(refused.errors)
        return None


def _mesh_errors(spec: JobSpec) -> list[FieldError]:
    if spec.mesh.tensor == 1:
        return []
    return [
        FieldError(
            pointer="/mesh/tensor",
            code="unsupported",
            message=f"found {spec.mesh.tensor}, but this version of the runtime has no tensor parallelism",
            suggestion="Set tensor to 1 and put the workers into /mesh/shard or /mesh/replicate.",
        )
    ]


def _check_kernels(spec: JobSpec) -> None:
    """Check coefficients, restarts and the kernel; a GPU's kernel is not judged from a machine without one."""
    if not isinstance(spec.optimizer, DmuonOptimizer):
        return
    on_workers = spec.resources.gpus_per_worker > 0 and default_device().type == "cpu"
    kernel = Kernel.AUTO if on_workers else spec.kernels.kernel
    try:
        make_newton_schulz(spec.kernels, kernel).plan(spec.optimizer.muon.ns_steps)
    except ValueError as error:
        code = str(getattr(error, "code", "bad_restarts"))
        part = {"kernel_unavailable": "kernel", "bad_coefficients": "coefficients"}.get(code, "restarts")
        pointer = f"/kernels/{part}"
        cure = "Use 'auto', which takes what is there." if part == "kernel" else None
        raise PlanRefused([FieldError(pointer=pointer, code=code, message=str(error), suggestion=cure)]) from error


def _report(
    spec: JobSpec, plan: dmuon.RuntimePlan, corpus: Corpus, frozen_elements: int, cost: CostPlan | None
) -> PlanReport:
    parameters = tuple(
        ParameterPlan(
            name=entry.name, aliases=entry.aliases, shape=entry.shape, elements=entry.elements, route=entry.route,
            rule=entry.rule, owner=entry.owner, unit=entry.unit,
        )
        for entry in plan.parameters
    )  # fmt: skip
    return PlanReport(
        plan_hash=plan.hash,
        world_size=spec.world_size,
        parameters=parameters,
        routes=_routes(parameters),
        traffic=_traffic(spec, plan),
        ranks=tuple(
            RankPlan(
                rank=entry.rank, cost=entry.cost, matrices=entry.matrices, resident_bytes=entry.resident_bytes,
                peak_bytes=entry.peak_bytes,
            )
            for entry in plan.ranks
        ),
        predicted_imbalance=plan.predicted_imbalance,
        ns_matrices=sum(entry.matrices for entry in plan.ranks),
        ns_flops=plan.ns_flops(ns_work(spec)),
        trainable_elements=sum(entry.elements for entry in parameters),
        frozen_elements=frozen_elements,
        data=corpus.plan(),
        tokens_per_step=spec.training.global_batch * spec.data.sequence_length,
        cost=cost,
        warnings=tuple(plan.warnings),
    )  # fmt: skip


def _baseline_report(spec: JobSpec, plan: BaselinePlan, corpus: Corpus, frozen_elements: int) -> PlanReport:
    return PlanReport(
        optimizer=spec.optimizer.kind,
        plan_hash=plan.hash,
        world_size=spec.world_size,
        parameters=plan.parameters,
        routes=_routes(plan.parameters),
        traffic=(),
        ranks=(),
        predicted_imbalance=None,
        ns_matrices=None,
        ns_flops=None,
        trainable_elements=sum(entry.elements for entry in plan.parameters),
        frozen_elements=frozen_elements,
        data=corpus.plan(),
        tokens_per_step=spec.training.global_batch * spec.data.sequence_length,
        warnings=plan.warnings,
    )


def _routes(parameters: tuple[ParameterPlan, ...]) -> tuple[RoutePlan, ...]:
    routes = dict.fromkeys(entry.route for entry in parameters)
    return tuple(
        RoutePlan(
            route=route,
            parameters=sum(entry.route == route for entry in parameters),
            elements=sum(entry.elements for entry in parameters if entry.route == route),
        )
        for route in routes
    )


def _traffic(spec: JobSpec, plan: dmuon.RuntimePlan) -> tuple[TrafficPlan, ...]:
    found: dict[tuple[str, str], list[dmuon.Traffic]] = {}
    for table in plan.rank_traffic:
        for key, entry in table.items():
            found.setdefault(key, []).append(entry)
    return tuple(
        TrafficPlan.model_validate(
            {
                "route": route,
                "phase": phase,
                "collectives": max(entry.collectives for entry in entries) * traffic_factor(spec, phase),
                "payload_bytes": max(entry.payload_bytes for entry in entries) * traffic_factor(spec, phase),
                "total_payload_bytes": sum(entry.payload_bytes for entry in entries) * traffic_factor(spec, phase),
            }
        )
        for (route, phase), entries in found.items()
    )
