"""DMuon: what the optimizer and the wires of one job do, against what was planned."""

from __future__ import annotations

from dashboards.boards.marks import JOB_MARKS
from dashboards.panels import Board, PanelSpec, Query, RowSpec
from dashboards.promql import JOB, RATE, rate, ratio_without_zero

__all__ = ["DMUON"]

_OWNER_RATE = f"rate(dmuon_owner_compute_seconds_total{JOB}{RATE})"


def _overlap(by: str) -> str:
    exposed, total = rate("dmuon_comm_exposed_seconds_total", by), rate("dmuon_comm_seconds_total", by)
    return f"1 - {ratio_without_zero(exposed, total)}"


WIRES = RowSpec(
    "Wires: how much communication there was, and how much of it hid behind compute",
    (
        PanelSpec(
            title="Overlap by route",
            question="Which share of each route's communication time was hidden behind compute?",
            when_red="Look at the exposed seconds beside it: little communication may be exposed without harm. "
            "If the seconds are high too, look for a slow rank or a prefetch that came too late.",
            queries=(Query(_overlap("route"), "{{route}}"),),
            unit="percentunit",
            maximum=1,
            warn_below=0.5,
        ),
        PanelSpec(
            title="Overlap by route and phase",
            question="In which phase does a route lose its overlap?",
            when_red="forward or backward: weights come late, prefetch further ahead. reduce: the backward is too "
            "short for its gradients. publish: the owners' updates end late, see the owners below.",
            queries=(Query(_overlap("route, phase"), "{{route}} {{phase}}"),),
            unit="percentunit",
            maximum=1,
            warn_below=0.5,
        ),
        PanelSpec(
            title="Exposed communication by route and phase",
            question="For how many seconds of each second did compute wait, and for what? Summed over ranks.",
            when_red="The tallest series names the route and the phase to work on.",
            queries=(Query(rate("dmuon_comm_exposed_seconds_total", "route, phase"), "{{route}} {{phase}}"),),
            unit="s",
            minimum=0,
        ),
        PanelSpec(
            title="Communication by route and phase",
            question="For how many seconds of each second were collectives under way? Summed over ranks.",
            when_red="Growing with equal bytes: the wires or a late peer. A collective also lasts while it waits for "
            "the last rank to arrive.",
            queries=(Query(rate("dmuon_comm_seconds_total", "route, phase"), "{{route}} {{phase}}"),),
            unit="s",
            minimum=0,
        ),
        PanelSpec(
            title="Collectives a step",
            question="How many collectives does a step issue, by route? Few large ones are cheaper than many.",
            when_red="More than planned: see the bytes beside it and the condition RoutesVerified.",
            queries=(
                Query(
                    f"{rate('dmuon_comm_collectives_total', 'route')} / scalar({rate('dmuon_steps_total')})",
                    "{{route}}",
                ),
            ),
            minimum=0,
        ),
        PanelSpec(
            title="Payload bytes a step, measured and planned",
            question="Did every collective of the plan run, and no other?",
            when_red="A measured line away from its planned one means that the runtime sent something else than it "
            "planned: read the condition RoutesVerified of the job.",
            queries=(
                Query(
                    f"{rate('dmuon_comm_bytes_total', 'route')} / scalar({rate('dmuon_steps_total')})",
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
    "Owners: who did the work",
    (
        PanelSpec(
            title="Worst owner, measured",
            question="Which rank spends most time on the parameters it owns, in seconds of each second?",
            when_red="This is the rank that the others wait for. If its planned share is not the largest, it is slow.",
            queries=(Query(f"topk(1, {_OWNER_RATE})", "rank {{rank}}"),),
            unit="s",
            kind="stat",
            named=True,
            width=4,
        ),
        PanelSpec(
            title="Worst owner, planned",
            question="Which rank owns most work by the plan?",
            when_red="Not the rank measured as worst: the cost model misprices a shape, or that rank is slow.",
            queries=(Query(f"topk(1, dmuon_owner_planned_cost{JOB})", "rank {{rank}}"),),
            kind="stat",
            named=True,
            width=4,
        ),
        PanelSpec(
            title="Owner imbalance, measured and planned",
            question="How much more than the mean does the busiest rank do? 1 is perfect.",
            when_red="Measured far above planned: a slow rank, or a cost model that misprices a shape. "
            "Both high: one matrix is larger than a rank's fair share.",
            queries=(
                Query(f"max({_OWNER_RATE}) / avg({_OWNER_RATE})", "measured"),
                Query(f"max(dmuon_owner_planned_cost{JOB}) / avg(dmuon_owner_planned_cost{JOB})", "planned"),
            ),
            minimum=1,
            warn_above=1.5,
        ),
        PanelSpec(
            title="Owner compute by rank",
            question="How many seconds of each second does a rank spend on the parameters it owns?",
            when_red="One rank far above the others: compare with its planned cost.",
            queries=(Query(_OWNER_RATE, "rank {{rank}}"),),
            unit="s",
            minimum=0,
        ),
    ),
)

KERNELS = RowSpec(
    "Kernels: with what the work was done",
    (
        PanelSpec(
            title="Newton-Schulz launches by kernel",
            question="Which kernel really ran, counted where it is launched?",
            when_red="A kernel that nobody chose means a fallback: look at the breaker and at the job's events.",
            queries=(Query(rate("dmuon_ns_launches_total", "kernel, algorithm"), "{{kernel}} {{algorithm}}"),),
            unit="ops",
            minimum=0,
        ),
        PanelSpec(
            title="Matrices orthogonalised over planned",
            question="Did every matrix of the plan go through Newton-Schulz in every step? 1 is right.",
            when_red="Below 1: some parameter is not trained by Muon. Stop and read the condition RoutesVerified.",
            queries=(
                Query(
                    f"{rate('dmuon_ns_matrices_total')} / (sum(dmuon_ns_planned_matrices{JOB})"
                    f" * ({rate('dmuon_steps_total')} - {rate('dmuon_skipped_steps_total')}))",
                    "measured / planned",
                ),
            ),
            kind="stat",
            warn_below=0.99,
            width=4,
        ),
        PanelSpec(
            title="Breaker",
            question="In which state is each kernel's breaker?",
            when_red="Open or forced_open: the fallback runs. The job's events say who tripped it and why.",
            queries=(Query(f"dmuon_breaker_state{JOB} == 1", "{{kernel}} {{state}}"),),
            kind="stat",
            named=True,
            width=6,
        ),
        PanelSpec(
            title="Launches that were only compared",
            question="How much work goes into comparing a kernel with the fallback, by kernel?",
            when_red="More than a few percent of the launches: a breaker that is half open for long; see its state.",
            queries=(Query(rate("dmuon_ns_compared_launches_total", "kernel"), "{{kernel}}"),),
            unit="ops",
            minimum=0,
            width=6,
            filled_by="a comparison of a kernel with the fallback",
        ),
        PanelSpec(
            title="Calls done by the fallback",
            question="How often did a kernel fail so that the fallback had to do its call?",
            when_red="Any: the job's kernel_failed events have rank, step and cause; the breaker opens by itself.",
            queries=(Query(rate("dmuon_ns_fallback_calls_total"), "calls a second"),),
            minimum=0,
            warn_above=0.001,
            width=6,
        ),
        PanelSpec(
            title="Newton-Schulz error",
            question="How far from 1 was the worst squared singular value of a sampled update, at most? Up to 1.02 is "
            "healthy: a direction that the gradient does not have stays at 0, and the bound is up to 2 % above.",
            when_red="A kernel or a coefficient set that overshoots: trip the kernel's breaker and compare.",
            queries=(Query(f"dmuon_ns_orthogonality_error{JOB}", "deviation, at most"),),
            minimum=0,
            warn_above=1.05,
            width=6,
        ),
        PanelSpec(
            title="Seconds in Newton-Schulz",
            question="How many seconds of each second go to Newton-Schulz, by kernel? Summed over ranks.",
            when_red="Compare with the step time: the optimizer should be a small part of it.",
            queries=(Query(rate("dmuon_ns_seconds_total", "kernel, algorithm"), "{{kernel}} {{algorithm}}"),),
            unit="s",
            minimum=0,
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
    ),
)

DMUON = Board(
    uid="dmuon-runtime",
    title="DMuon",
    description="What the optimizer and the wires of one job are doing, against what was planned.",
    rows=(WIRES, OWNERS, KERNELS),
    by_job=True,
    annotations=JOB_MARKS,
)
