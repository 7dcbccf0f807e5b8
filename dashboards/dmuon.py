"""The DMuon dashboard of one job: first what hid and what ran, then how training goes, then the service."""

from __future__ import annotations

from dashboards.panels import Board, PanelSpec, Query, RowSpec

__all__ = ["DMUON"]

JOB = '{job="$job"}'
RATE = "[$__rate_interval]"


def _rate(name: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{JOB}{RATE}))"


WIRES = RowSpec(
    "Wires: how much communication there was, and how much of it hid behind compute",
    (
        PanelSpec(
            title="Overlap by route",
            question="Which share of each route's communication time was hidden behind compute?",
            when_red="Look at the exposed seconds beside it: little communication may be exposed without harm. "
            "If the seconds are high too, look for a slow rank or a prefetch that came too late.",
            queries=(
                Query(
                    f"1 - {_rate('dmuon_comm_exposed_seconds_total', 'route')}"
                    f" / {_rate('dmuon_comm_seconds_total', 'route')}",
                    "{{route}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            warn_below=0.5,
        ),
        PanelSpec(
            title="Exposed communication by route and phase",
            question="For how many seconds of each second did compute wait, and for what? Summed over ranks.",
            when_red="The tallest series names the route and the phase to work on.",
            queries=(Query(_rate("dmuon_comm_exposed_seconds_total", "route, phase"), "{{route}} {{phase}}"),),
            unit="s",
            minimum=0,
        ),
        PanelSpec(
            title="Payload bytes a step, measured and planned",
            question="Did every collective of the plan run, and no other?",
            when_red="A measured line away from its planned one means that the runtime sent something else than it "
            "planned: read the condition RoutesVerified of the job.",
            queries=(
                Query(
                    f"{_rate('dmuon_comm_bytes_total', 'route')} / scalar({_rate('dmuon_steps_total')})",
                    "{{route}} measured",
                ),
                Query(f"sum by (route) (dmuon_comm_planned_bytes_per_step{JOB})", "{{route}} planned"),
            ),
            unit="bytes",
            minimum=0,
        ),
    ),
)

OWNERS = RowSpec(
    "Owners and kernels: who did the work, with what",
    (
        PanelSpec(
            title="Owner imbalance, measured and planned",
            question="How much more than the mean does the busiest rank do? 1 is perfect.",
            when_red="Measured far above planned: a slow rank, or a cost model that misprices a shape. "
            "Both high: one matrix is larger than a rank's fair share.",
            queries=(
                Query(
                    f"max(rate(dmuon_owner_compute_seconds_total{JOB}{RATE}))"
                    f" / avg(rate(dmuon_owner_compute_seconds_total{JOB}{RATE}))",
                    "measured",
                ),
                Query(f"max(dmuon_owner_planned_cost{JOB}) / avg(dmuon_owner_planned_cost{JOB})", "planned"),
            ),
            minimum=1,
            warn_above=1.5,
            width=6,
        ),
        PanelSpec(
            title="Owner compute by rank",
            question="How many seconds of each second does a rank spend on the parameters it owns?",
            when_red="One rank far above the others: compare with its planned cost.",
            queries=(Query(f"rate(dmuon_owner_compute_seconds_total{JOB}{RATE})", "rank {{rank}}"),),
            unit="s",
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Newton-Schulz launches by kernel",
            question="Which kernel really ran, counted where it is launched?",
            when_red="A kernel that nobody chose means a fallback: look at the breaker and at the job's events.",
            queries=(Query(_rate("dmuon_ns_launches_total", "kernel, algorithm"), "{{kernel}} {{algorithm}}"),),
            unit="ops",
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Matrices orthogonalised over planned",
            question="Did every matrix of the plan go through Newton-Schulz in every step? 1 is right.",
            when_red="Below 1: some parameter is not trained by Muon. Stop and read the condition RoutesVerified.",
            queries=(
                Query(
                    f"{_rate('dmuon_ns_matrices_total')} / (sum(dmuon_ns_planned_matrices{JOB})"
                    f" * ({_rate('dmuon_steps_total')} - {_rate('dmuon_skipped_steps_total')}))",
                    "measured / planned",
                ),
            ),
            kind="stat",
            warn_below=0.99,
            width=6,
        ),
        PanelSpec(
            title="Orthogonality error",
            question="How far from 1 was the worst squared singular value of a sampled update?",
            when_red="A kernel or a coefficient set that does not converge: trip the kernel's breaker and compare.",
            queries=(Query(f"dmuon_ns_orthogonality_error{JOB}", "largest deviation"),),
            minimum=0,
            warn_above=0.6,
            width=6,
        ),
        PanelSpec(
            title="Seconds in Newton-Schulz",
            question="How many seconds of each second go to Newton-Schulz, by kernel? Summed over ranks.",
            when_red="Compare with the step time: the optimizer should be a small part of it.",
            queries=(Query(_rate("dmuon_ns_seconds_total", "kernel, algorithm"), "{{kernel}} {{algorithm}}"),),
            unit="s",
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Breaker",
            question="In which state is each kernel's breaker?",
            when_red="Open or forced_open: the fallback runs. The job's events say who tripped it and why.",
            queries=(Query(f"dmuon_breaker_state{JOB} == 1", "{{kernel}} {{state}}"),),
            kind="bargauge",
            width=6,
        ),
        PanelSpec(
            title="Kernel epoch by rank",
            question="Do all ranks run under the same kernel policy?",
            when_red="Ranks that stay apart for more than a report interval mean mixed kernels: cancel the job.",
            queries=(Query(f"dmuon_kernel_epoch{JOB}", "rank {{rank}}"),),
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Calls done by the fallback",
            question="How often did a kernel fail so that the fallback had to do its call?",
            when_red="Any: the job's kernel_failed events have rank, step and cause; the breaker opens by itself.",
            queries=(Query(_rate("dmuon_ns_fallback_calls_total"), "calls a second"),),
            minimum=0,
            width=6,
        ),
    ),
)

TRAINING = RowSpec(
    "Training",
    (
        PanelSpec(
            title="Loss",
            question="Is the model learning?",
            when_red="NaN or rising: look at the gradient norm, the learning rate and the skipped steps.",
            queries=(Query(f"dmuon_loss{JOB}", "loss"),),
        ),
        PanelSpec(
            title="Throughput",
            question="How many tokens a second do all ranks read together?",
            when_red="A drop with the same step count: a slow rank or more communication exposed.",
            queries=(Query(_rate("dmuon_tokens_total"), "tokens a second"),),
            minimum=0,
        ),
        PanelSpec(
            title="Step time",
            question="How long does a step take, typically and in the tail?",
            when_red="A tail far above the median: look for stalls in exposed communication.",
            queries=(
                Query(f"histogram_quantile(0.5, {_rate('dmuon_step_duration_seconds_bucket', 'le')})", "median"),
                Query(f"histogram_quantile(0.95, {_rate('dmuon_step_duration_seconds_bucket', 'le')})", "95 %"),
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
            title="Skipped steps",
            question="How many steps were skipped because a gradient was not finite?",
            when_red="The job's events name the parameters. Lower the rate, or check the data.",
            queries=(Query(f"sum(dmuon_skipped_steps_total{JOB})", "skipped"),),
            kind="stat",
            warn_above=0.5,
        ),
        PanelSpec(
            title="Learning rate by route",
            question="Which rate was used?",
            when_red="Compare with the schedule in the spec.",
            queries=(Query(f"dmuon_learning_rate{JOB}", "{{route}}"),),
            minimum=0,
        ),
        PanelSpec(
            title="Parameter elements by route",
            question="How is the model split over the routes?",
            when_red="Too little in muon: an override is too wide. Read the job's routing table.",
            queries=(Query(f"dmuon_parameter_elements{JOB}", "{{route}}"),),
            kind="bargauge",
        ),
        PanelSpec(
            title="Memory by rank",
            question="How much memory does each worker hold?",
            when_red="Growth over steps is a leak; one rank above the others owns more.",
            queries=(Query(f"dmuon_worker_memory_bytes{JOB}", "rank {{rank}}"),),
            unit="bytes",
            minimum=0,
        ),
    ),
)

SERVICE = RowSpec(
    "Service",
    (
        PanelSpec(
            title="Jobs by state",
            question="What is the service doing?",
            when_red="Many QUEUED: not enough room. Many FAILED: read their reasons.",
            queries=(Query("dmuon_jobs > 0", "{{state}}"),),
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Heartbeat age by rank",
            question="How long ago did each rank of the job report?",
            when_red="Growing on all ranks: the control plane is blind or the job hangs. On one: that worker is stuck.",
            queries=(Query(f"time() - dmuon_heartbeat_timestamp_seconds{JOB}", "rank {{rank}}"),),
            unit="s",
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="HTTP latency, 99 %",
            question="How long do callers wait, by handler?",
            when_red="A handler above a second blocks: look at the store and at the reconciler.",
            queries=(
                Query(
                    "histogram_quantile(0.99, sum by (le, handler) "
                    f"(rate(dmuon_http_request_duration_seconds_bucket{RATE})))",
                    "{{handler}}",
                ),
            ),
            unit="s",
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Reconciler pass, 95 %",
            question="How long does the loop that drives jobs take?",
            when_red="Above its interval: Ray or the store answers slowly.",
            queries=(
                Query(
                    f"histogram_quantile(0.95, sum by (le) (rate(dmuon_reconcile_duration_seconds_bucket{RATE})))",
                    "95 %",
                ),
            ),
            unit="s",
            minimum=0,
            width=6,
        ),
    ),
)

DMUON = Board(
    uid="dmuon-job",
    title="DMuon job",
    description="What the optimizer and the wires of one job are doing, against what was planned.",
    rows=(WIRES, OWNERS, TRAINING, SERVICE),
    by_job=True,
)
