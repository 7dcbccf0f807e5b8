"""What a job's steps will cost on a chip whose figures are known."""

from __future__ import annotations

from torch import nn

import dmuon_runtime as dmuon
from dmuon_runtime.chips import CHIPS, ChipFigures, chip_key, find_chip
from dmuon_runtime.cost_model import StepWork, predict_step
from dmuon_runtime.newton_schulz import default_restarts
from dmuon_runtime.partition import DEFAULT_NS_WORK, NsWork
from worker.batches import num_micro_batches
from worker.contract.errors import FieldError, PlanRefused
from worker.contract.plan import CostPlan
from worker.contract.spec import DmuonOptimizer, JobSpec
from worker.device import gpu_model

__all__ = ["cost_plan", "decide_chip", "ns_work", "step_work"]


def decide_chip(asked: str | None, spec: JobSpec) -> ChipFigures | None:
    """Return the figures of the chip that was asked for; of this machine's GPU for a spec that wants some; or None.

    Raises:
        PlanRefused: there are no figures of the one that was asked for.
    """
    if asked is not None:
        try:
            return find_chip(asked)
        except ValueError as error:
            raise PlanRefused([FieldError(pointer="/chip", code="unknown_chip", message=str(error))]) from error
    model = gpu_model() if spec.resources.gpus_per_worker > 0 else None
    return None if model is None else CHIPS.get(chip_key(model))


def step_work(spec: JobSpec, model: nn.Module) -> StepWork:
    """Return what one worker computes in a step of ``model``, a language model of transformers (meta suffices)."""
    length = spec.data.sequence_length
    looked_up = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    config = getattr(model, "config", None)
    layers, hidden = (int(getattr(config, name, 0) or 0) for name in ("num_hidden_layers", "hidden_size"))
    return StepWork(
        tokens=spec.training.global_batch // spec.world_size * length,
        micro_batches=num_micro_batches(spec),
        looked_up=frozenset(looked_up),
        score_flops_per_token=2.0 * layers * hidden * length,  # causal: half of all pairs, in two products
        newton_schulz=ns_work(spec),
    )


def ns_work(spec: JobSpec) -> NsWork:
    """Return how a job's Newton-Schulz iterates before any swap; what is so by default where its optimizer has none."""
    if not isinstance(spec.optimizer, DmuonOptimizer):
        return DEFAULT_NS_WORK
    steps, kernels = spec.optimizer.muon.ns_steps, spec.kernels
    restarts = default_restarts(steps) if kernels.restarts is None else kernels.restarts
    return NsWork(steps, len(restarts), kernels.algorithm.value)


def cost_plan(spec: JobSpec, model: nn.Module, plan: dmuon.RuntimePlan, chip: ChipFigures) -> CostPlan:
    """Return the predicted cost of a step."""
    found = predict_step(plan, chip, step_work(spec, model))
    return CostPlan(
        chip=found.chip, step_s=found.step_s, adamw_step_s=found.adamw_step_s, overhead_ratio=found.overhead_ratio,
        compute_s=found.compute_s, update_s=found.update_s, adamw_update_s=found.adamw_update_s, ns_s=found.ns_s,
        ns_mean_s=found.ns_mean_s, largest_matrix_s=found.largest_matrix_s, exposed_s=found.exposed_s,
        adamw_exposed_s=found.adamw_exposed_s, publish_exposed_s=found.publish_exposed_s, assumed=chip.assumed,
    )  # fmt: skip
