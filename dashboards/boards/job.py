"""Job: how the training of one job goes, with its attempts and kernel changes marked."""

from __future__ import annotations

from dashboards.boards.marks import JOB_MARKS
from dashboards.panels import Board, PanelSpec, Query, RowSpec
from dashboards.promql import JOB, rate

__all__ = ["JOB_BOARD"]

TRAINING = RowSpec(
    "Training",
    (
        PanelSpec(
            title="Loss",
            question="Is the model learning?",
            when_red="NaN or rising: look at the gradient norm, the learning rate and the skipped steps.",
            queries=(Query(f"dmuon_loss{JOB}", "loss"),),
            width=12,
        ),
        PanelSpec(
            title="Throughput",
            question="How many tokens a second do all ranks read together?",
            when_red="A drop with the same step count: a slow rank or more exposed communication; see the DMuon board.",
            queries=(Query(rate("dmuon_tokens_total"), "tokens a second"),),
            minimum=0,
            width=12,
        ),
        PanelSpec(
            title="Step time",
            question="How long does a step take, typically and in the tail?",
            when_red="A tail far above the median: look for stalls in exposed communication.",
            queries=(
                Query(f"histogram_quantile(0.5, {rate('dmuon_step_duration_seconds_bucket', 'le')})", "median"),
                Query(f"histogram_quantile(0.95, {rate('dmuon_step_duration_seconds_bucket', 'le')})", "95 %"),
            ),
            unit="s",
            minimum=0,
        ),
        PanelSpec(
            title="Gradient norm",
            question="How large is the gradient before clipping?",
            when_red="Spikes before a loss spike: lower the learning rate or clip.",
            queries=(Query(f"dmuon_gradient_norm{JOB}", "global norm"),),
            minimum=0,
        ),
        PanelSpec(
            title="Update RMS by route",
            question="How far do weights move in a step, by route? Muon scaled to match AdamW should be near it.",
            when_red="A route at zero is not trained; routes orders of magnitude apart have mismatched rates.",
            queries=(Query(f"dmuon_update_rms{JOB}", "{{route}}"),),
            minimum=0,
        ),
        PanelSpec(
            title="Learning rate by route",
            question="Which rate was used?",
            when_red="Compare with the schedule in the spec.",
            queries=(Query(f"dmuon_learning_rate{JOB}", "{{route}}"),),
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Skipped steps",
            question="How many steps were skipped because a gradient was not finite?",
            when_red="The job's events name the parameters. Lower the rate, or check the data.",
            queries=(Query(f"sum(dmuon_skipped_steps_total{JOB})", "skipped"),),
            kind="stat",
            warn_above=0.5,
            width=6,
        ),
        PanelSpec(
            title="Parameters by route",
            question="How many parameters does each route train?",
            when_red="Not what the spec meant: read the job's routing table, which names the rule of each.",
            queries=(Query(f"dmuon_parameters{JOB}", "{{route}}"),),
            kind="bargauge",
            width=6,
        ),
        PanelSpec(
            title="Parameter elements by route",
            question="How is the model split over the routes?",
            when_red="Too little in muon: an override is too wide. Read the job's routing table.",
            queries=(Query(f"dmuon_parameter_elements{JOB}", "{{route}}"),),
            kind="bargauge",
            width=6,
        ),
    ),
)

LIFE = RowSpec(
    "Life",
    (
        PanelSpec(
            title="State",
            question="Where in its life is the job?",
            when_red="RESTARTING or FAILED: `dmuonctl get JOB` has the reason and each rank's own error.",
            queries=(Query(f"dmuon_job_state{JOB} == 1", "{{state}}"),),
            kind="stat",
            named=True,
            width=6,
        ),
        PanelSpec(
            title="Attempts",
            question="How many tries did it take so far?",
            when_red="More than one: the mark on the charts is the restart; the events before it say why.",
            queries=(Query(f"sum(dmuon_job_attempts_total{JOB})", "attempts"),),
            kind="stat",
            warn_above=2,
            width=6,
        ),
        PanelSpec(
            title="Conditions",
            question="What is known of the job: is it reachable, did what ran match the plan?",
            when_red="RoutesVerified False: what ran is not what was planned, the message names the offenders; do not "
            "trust the run. Reachable Unknown: the control plane is blind, the job itself may be well.",
            queries=(Query(f"dmuon_job_condition{JOB} == 1", "{{type}} {{status}}"),),
            kind="stat",
            named=True,
            width=12,
        ),
        PanelSpec(
            title="Heartbeat age by rank",
            question="How long ago did each rank report?",
            when_red="Growing on all ranks: the control plane is blind or the job hangs. On one: that worker is stuck.",
            queries=(Query(f"time() - dmuon_heartbeat_timestamp_seconds{JOB}", "rank {{rank}}"),),
            unit="s",
            minimum=0,
        ),
        PanelSpec(
            title="Memory by rank",
            question="How much memory does each worker hold?",
            when_red="Growth over steps is a leak; one rank above the others owns more.",
            queries=(Query(f"dmuon_worker_memory_bytes{JOB}", "rank {{rank}}"),),
            unit="bytes",
            minimum=0,
        ),
        PanelSpec(
            title="Age of the last checkpoint",
            question="How much work would a crash cost now?",
            when_red="Older than a few intervals: saving fails. The job's events of kind checkpoint_failed say why.",
            queries=(Query(f"time() - dmuon_checkpoint_timestamp_seconds{JOB}", "age"),),
            unit="s",
            minimum=0,
            filled_by="the first checkpoint of the job",
        ),
    ),
)

JOB_BOARD = Board(
    uid="dmuon-job",
    title="Job",
    description="How the training of one job goes: loss, speed, attempts, checkpoints; kernel changes are marked.",
    rows=(TRAINING, LIFE),
    by_job=True,
    annotations=JOB_MARKS,
)
