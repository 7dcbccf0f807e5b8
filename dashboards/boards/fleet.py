"""Fleet: which jobs there are, what waits, what there is room for, and what had to be restarted."""

from __future__ import annotations

from dashboards.panels import Board, PanelSpec, Query, RowSpec
from dashboards.promql import RATE, ratio_without_zero

__all__ = ["FLEET"]

JOBS = RowSpec(
    "Jobs",
    (
        PanelSpec(
            title="Jobs by state",
            question="What is the service doing?",
            when_red="Many QUEUED: not enough room, see capacity. Many FAILED: read 'Jobs that ended, by reason'.",
            queries=(Query("dmuon_jobs > 0", "{{state}}"),),
            minimum=0,
            width=12,
        ),
        PanelSpec(
            title="Live jobs and their states",
            question="Which jobs live, by name, and where in their life is each?",
            when_red="A job that stays in STARTING or STOPPING: ask `dmuonctl events JOB` what it waits for.",
            queries=(
                Query(
                    "(dmuon_job_state == 1) * on (job) group_left (name) dmuon_job_info", "{{name}} {{job}}: {{state}}"
                ),
            ),
            kind="stat",
            named=True,
            width=12,
        ),
        PanelSpec(
            title="Jobs that ended, by reason, in an hour",
            question="How do jobs end, and whose fault is it?",
            when_red="worker_lost, node_lost and stalled are the machines' fault; user_error, non_finite and "
            "spec_invalid the job's; internal is ours. `dmuonctl get JOB` has each rank's own error.",
            queries=(Query("increase(dmuon_jobs_finished_total[1h]) > 0", "{{reason}}"),),
            kind="bargauge",
            minimum=0,
            filled_by="a job that ends",
            width=6,
        ),
        PanelSpec(
            title="Restarts by reason, in an hour",
            question="How often did an attempt have to follow another one, and why?",
            when_red="Several of one reason: the same node or the same job. The job's board marks its attempts.",
            queries=(Query("round(increase(dmuon_restarts_total[1h]))", "{{reason}}"),),
            kind="bargauge",
            minimum=0,
            warn_above=3,
            width=6,
        ),
        PanelSpec(
            title="Kernel swaps by result, in a day",
            question="How many swaps of a running job's kernel were committed, and how many were taken back?",
            when_red="rolled_back: the swap's message names the rank and the reason; the job trains on as before.",
            queries=(Query("increase(dmuon_kernel_swaps_total[1d])", "{{result}}"),),
            kind="bargauge",
            minimum=0,
            filled_by="the first kernel swap",
            width=6,
        ),
        PanelSpec(
            title="Breaker changes, in a day",
            question="Which kernels' breakers moved, by an operator's word or by themselves?",
            when_red="to open by itself: that kernel fails somewhere; `dmuonctl breaker KERNEL` says where.",
            queries=(
                Query("increase(dmuon_breaker_transitions_total[1d])", "{{kernel}}: {{from_state}} to {{to_state}}"),
            ),
            kind="bargauge",
            minimum=0,
            filled_by="the first change of a breaker",
            width=6,
        ),
        PanelSpec(
            title="Throughput by job",
            question="How many tokens a second does each job read?",
            when_red="A job far below its usual rate: open its board, and look at exposed communication first.",
            queries=(Query(f"sum by (job) (rate(dmuon_tokens_total{RATE}))", "{{job}}"),),
            minimum=0,
            width=12,
        ),
        PanelSpec(
            title="Overlap by job",
            question="Which share of each job's communication time was hidden behind compute?",
            when_red="Open the DMuon board of the job that is lowest: it has the same figure by route and phase.",
            queries=(
                Query(
                    "1 - "
                    + ratio_without_zero(
                        f"sum by (job) (rate(dmuon_comm_exposed_seconds_total{RATE}))",
                        f"sum by (job) (rate(dmuon_comm_seconds_total{RATE}))",
                    ),
                    "{{job}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            warn_below=0.5,
            width=12,
        ),
    ),
)

ROOM = RowSpec(
    "Queue and capacity",
    (
        PanelSpec(
            title="Queue depth",
            question="How many jobs wait?",
            when_red="Growing while CPUs or GPUs are free: read the reason of the oldest job, `dmuonctl list` has it.",
            queries=(Query("dmuon_queue_depth", "waiting"),),
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Queue wait",
            question="How long do jobs wait from submission to their first attempt, typically and in the tail?",
            when_red="A tail of hours: large gangs wait for room that small jobs take. Add machines or raise priority.",
            queries=(
                Query("histogram_quantile(0.5, sum by (le) (dmuon_queue_wait_seconds_bucket))", "median"),
                Query("histogram_quantile(0.95, sum by (le) (dmuon_queue_wait_seconds_bucket))", "95 %"),
            ),
            unit="s",
            minimum=0,
            width=6,
            filled_by="the first job that starts",
        ),
        PanelSpec(
            title="CPUs",
            question="How many CPUs has the cluster, and how many are free?",
            when_red="Total falls: a node is gone. None: Ray cannot be asked, see the control plane's board.",
            queries=(Query('dmuon_cluster_resources{resource="cpus"}', "{{amount}}"),),
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="GPUs",
            question="How many GPUs has the cluster, and how many are free?",
            when_red="Free GPUs while jobs wait: the gangs are larger than the room that is left on any node.",
            queries=(Query('dmuon_cluster_resources{resource="gpus"}', "{{amount}}"),),
            minimum=0,
            width=6,
        ),
        PanelSpec(
            title="Processes on GPUs without a job",
            question="Does something hold a GPU, which is promised to jobs, and belong to no attempt that lives?",
            when_red="Any, for minutes: `dmuonctl gpus` on the service's machine names process, user and why it is "
            "nobody's. End it on its node by its id, as the runbook says under DMuonGpuLeak. No value: that GPU was "
            "not seen, look at 'GPUs that cannot be watched'.",
            queries=(Query("max by (node, gpu) (dmuon_gpu_stray_processes)", "{{node}} GPU {{gpu}}"),),
            minimum=0,
            warn_above=1,
            width=12,
            filled_by="a node with a GPU",
        ),
        PanelSpec(
            title="GPUs that cannot be watched",
            question="Which nodes do not say who holds their GPUs, and where are processes that cannot be told?",
            when_red="not seen: `dmuonctl gpus` has the reason; the node is slow, has no driver or no nvidia-ml-py. "
            "not to be told: Ray's container needs the host's processes (`pid: host`). Neither says a GPU is free.",
            queries=(
                Query("1 - max by (node) (dmuon_gpu_node_seen)", "{{node}}: not seen"),
                Query("max by (node) (dmuon_gpu_unresolved_processes)", "{{node}}: not to be told"),
            ),
            minimum=0,
            warn_above=1,
            width=12,
            filled_by="a node with a GPU",
        ),
    ),
)

FLEET = Board(
    uid="dmuon-fleet",
    title="Fleet",
    description="All jobs of the service: what runs, what waits, what there is room for, what had to be restarted.",
    rows=(JOBS, ROOM),
    by_job=False,
)
