"""What a spec says about failures: budgets of restarts, and how long a rank may stay in one phase."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from worker.contract._section import Section

__all__ = ["FailureSpec", "WatchdogSpec"]

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Restarts = Annotated[int, Field(ge=0, le=10_000)]


class FailureSpec(Section):
    """What to do when something goes wrong."""

    non_finite: Literal["skip", "raise"] = "skip"
    """A gradient with NaN or infinity: skip the step on all ranks, or end the job."""
    start_deadline_s: Seconds = 300.0
    """From STARTING until every worker has joined the process group."""
    infrastructure_restarts: Restarts = 3
    """How often a job is started again after a lost worker, node or supervisor, a stall, or a fault of the service."""
    user_error_restarts: Restarts = 0
    """The same after an exception of its own; what cannot be set up, planned or placed is never tried again."""
    backoff_s: Annotated[float, Field(ge=0, le=86_400)] = 2.0
    """Pause before the first restart; each further one is twice as long."""
    backoff_max_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    reset_after_steps: Annotated[int, Field(ge=1)] = 100
    """An attempt that did as many steps gives both budgets back, and its end counts as the first."""
    stop_patience_s: Seconds = 60.0
    """How long a job that is cancelled, paused or preempted may take to save and leave, before it is ended by force."""


class WatchdogSpec(Section):
    """How long a rank may stay in one phase, in seconds, and what is done about one that stays longer."""

    action: Literal["restart", "fail", "report"] = "restart"
    """``restart`` ends the attempt as ``stalled``, and the budgets of ``failure`` decide; ``fail`` ends the job;
    ``report`` only tells."""
    silent_s: Seconds = 30.0
    """How long a rank's process may answer nothing at all."""
    set_up_s: Seconds = 900.0
    """Reading data, making the model, loading a checkpoint: from the group's forming to the first step."""
    compile_s: Seconds = 1800.0
    """Measuring and compiling kernels; also the least that any phase of an attempt's first step may take."""
    forward_s: Seconds = 300.0
    backward_s: Seconds = 300.0
    reduce_s: Seconds = 300.0
    """Waiting for gradients of other ranks, clipping included."""
    newton_schulz_s: Seconds = 300.0
    """Update of what a rank owns."""
    publish_s: Seconds = 300.0
    """Between updates and next forward: giving new weights to others, agreeing on what comes next, reporting."""
    checkpoint_s: Seconds = 1800.0
