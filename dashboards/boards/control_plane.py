"""Control plane: is the service itself well, and does it see its jobs?"""

from __future__ import annotations

from dashboards.panels import Board, PanelSpec, Query, RowSpec
from dashboards.promql import RATE

__all__ = ["CONTROL_PLANE"]

_REQUESTS = "dmuon_http_request_duration_seconds_count"

HTTP = RowSpec(
    "HTTP",
    (
        PanelSpec(
            title="Requests by handler",
            question="How many requests a second does each handler answer?",
            when_red="One handler far above the rest: a client polls where it could follow the stream of events.",
            queries=(Query(f"sum by (handler) (rate({_REQUESTS}{RATE}))", "{{handler}}"),),
            unit="reqps",
            minimum=0,
        ),
        PanelSpec(
            title="Latency, 99 %",
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
            warn_above=1,
        ),
        PanelSpec(
            title="Share of requests that fail",
            question="Which share of answers is the service's own fault (5xx)?",
            when_red="Any: the server's log has the traceback. A refusal of a bad document is a 4xx and not counted.",
            queries=(
                Query(
                    f'(sum(rate({_REQUESTS}{{code=~"5.."}}{RATE})) or 0 * sum(rate({_REQUESTS}{RATE})))'
                    f" / sum(rate({_REQUESTS}{RATE}))",
                    "5xx",
                ),
            ),
            unit="percentunit",
            minimum=0,
            warn_above=0.01,
        ),
    ),
)

LOOP = RowSpec(
    "Reconciler",
    (
        PanelSpec(
            title="Reconciler pass, 95 %",
            question="How long does the loop that drives jobs take?",
            when_red="Above a second: Ray or the store answers slowly, and every job is driven later.",
            queries=(
                Query(
                    f"histogram_quantile(0.95, sum by (le) (rate(dmuon_reconcile_duration_seconds_bucket{RATE})))",
                    "95 %",
                ),
            ),
            unit="s",
            minimum=0,
            warn_above=1,
        ),
        PanelSpec(
            title="Age of the last pass",
            question="Is the loop alive, and is it this control plane that holds the lease?",
            when_red="Growing: the loop hangs in a call to Ray, or another control plane drives the jobs.",
            queries=(Query("time() - dmuon_reconcile_timestamp_seconds", "age"),),
            unit="s",
            minimum=0,
            warn_above=60,
        ),
        PanelSpec(
            title="Conditions that are not True",
            question="Of which jobs is something wrong or unknown?",
            when_red="Reachable Unknown: the control plane cannot ask a supervisor, which says nothing about the job. "
            "RoutesVerified False: what ran is not what was planned.",
            queries=(Query('sum by (type, status) (dmuon_job_condition{status!="True"})', "{{type}} {{status}}"),),
            minimum=0,
            warn_above=1,
        ),
    ),
)

WATCHING = RowSpec(
    "Watching itself",
    (
        PanelSpec(
            title="Oldest heartbeat",
            question="How long ago did the quietest rank of any live job report?",
            when_red="Growing while jobs run: those jobs hang, or nobody polls them.",
            queries=(
                Query(
                    "max(time() - dmuon_heartbeat_timestamp_seconds"
                    ' and on (job) (dmuon_job_state{state="RUNNING"} == 1))',
                    "age",
                ),
            ),
            unit="s",
            minimum=0,
            warn_above=60,
            width=6,
            filled_by="a job in RUNNING",
        ),
        PanelSpec(
            title="Reports dropped",
            question="Did a supervisor have to throw away reports because nobody fetched them?",
            when_red="The control plane was away for long. Totals are whole; single steps are missing from series.",
            queries=(Query(f"sum by (job) (rate(dmuon_reports_dropped_total{RATE}))", "{{job}}"),),
            minimum=0,
            warn_above=0.001,
            width=6,
        ),
        PanelSpec(
            title="Series by job, and over the budget",
            question="How many series does a job cost Prometheus, and how many had to be left out?",
            when_red="Left out: a gang with many ranks. Raise DMUON_METRICS_SERIES_BUDGET, or use the live page.",
            queries=(
                Query("dmuon_metrics_series", "{{job}}"),
                Query("dmuon_metrics_series_dropped", "{{job}} left out"),
            ),
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Open streams",
            question="How many clients follow events?",
            when_red="Growing without end: clients that do not close. Each costs little; thousands are fine.",
            queries=(Query("dmuon_open_streams", "streams"),),
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Scrape duration",
            question="How long does the service need to render its series?",
            when_red="Near the scrape timeout: too many live jobs for one page; raise scrape_interval and timeout.",
            queries=(Query('scrape_duration_seconds{job="dmuon"}', "scrape"),),
            unit="s",
            minimum=0,
            warn_above=3,
            width=6,
        ),
    ),
)

CONTROL_PLANE = Board(
    uid="dmuon-control-plane",
    title="Control plane",
    description="The service itself: requests, the loop that drives jobs, what it sees and what it cannot see.",
    rows=(HTTP, LOOP, WATCHING),
    by_job=False,
)
