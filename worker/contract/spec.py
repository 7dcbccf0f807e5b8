"""The job spec, version 1: what a researcher writes. Strict, frozen, and the same document everywhere.

Every section is a pydantic model that refuses unknown fields, NaN and infinity. :mod:`worker.contract.load` turns text
into a :class:`JobSpec` or into a list of all its mistakes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from worker.contract._section import Section
from worker.contract.failure import FailureSpec, WatchdogSpec
from worker.contract.kernels import Algorithm, CoefficientSet, Kernel

__all__ = [
    "OPTIMIZER_TAG", "AdamWOptimizer", "AdamWSettings", "BreakerSpec", "CheckpointSpec", "DataSpec", "DmuonOptimizer",
    "FailureSpec", "JobSpec", "KernelsSpec", "MeshSpec", "ModelSpec", "MuonOptimizer", "MuonSettings", "Optimizer",
    "Override", "PlainMuonSettings", "PolicyFields", "ResourcesSpec", "Route", "RoutingSpec", "ScheduleSpec",
    "TrainingSpec", "WatchdogSpec",
]  # fmt: skip

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
"""Lower-case letters, digits, ``.``, ``_`` and ``-``; 1 to 63 characters; starts and ends with a letter or digit."""
Route = Literal["muon", "adamw", "sharded_adamw"]
DType = Literal["float32", "bfloat16", "float16"]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
_SMALLEST_SHARE = 1e-4
"""Ray counts CPUs and GPUs in ten-thousandths, and refuses to reserve less."""


class ModelSpec(Section):
    """A causal language model from transformers: a configuration, or weights on disk."""

    type: Annotated[str, Field(min_length=1)] | None = None
    """transformers model type, such as ``llama``; with :attr:`config` it describes a model to initialise."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that type's transformers configuration. An absent ``vocab_size`` is the tokenizer's."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Directory with weights that ``from_pretrained`` reads; instead of :attr:`type`."""
    activation_checkpointing: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.type is None) == (self.path is None):
            found = "neither" if self.type is None else "both"
            raise ValueError(f"exactly one of type and path is needed, found {found}")
        return self


class DataSpec(Section):
    """Text to train on. Without ``files`` and ``directory`` it is the running Python's standard library."""

    files: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Glob patterns of text files."""
    directory: Annotated[str, Field(min_length=1)] | None = None
    """A directory whose files are all read, recursively."""
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    """``bytes`` (256 tokens), or the directory of a tokenizer that transformers loads."""
    sequence_length: Annotated[int, Field(ge=2, le=1 << 24)]
    """Tokens of one sample that the model reads."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.files is not None and self.directory is not None:
            raise ValueError("at most one of files and directory is allowed, found both")
        return self


class MeshSpec(Section):
    """How ranks are arranged. The number of workers is ``replicate * shard * tensor``."""

    replicate: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    shard: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    tensor: Annotated[int, Field(ge=1, le=1 << 10)] = 1
    reshard_after_forward: bool = True
    """True frees full parameters after the forward (Z3); False keeps them until the backward is done (Z2)."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.replicate * self.shard * self.tensor


class ScheduleSpec(Section):
    """Learning-rate multiplier by step: linear warm-up, then constant or a decay to ``final_ratio``."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class TrainingSpec(Section):
    """How long and in which pieces."""

    steps: Annotated[int, Field(ge=1, le=1 << 40)]
    global_batch: Annotated[int, Field(ge=1, le=1 << 24)]
    """Sequences in one optimizer step over all workers."""
    micro_batch: Annotated[int, Field(ge=1)] | None = None
    """Sequences in one forward of one worker; None takes a worker's whole share at once."""
    clip_grad_norm: Positive | None = None
    """Global norm over all routes; None leaves gradients as they are."""
    schedule: ScheduleSpec = ScheduleSpec()
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward; masters and optimizer state stay in float32."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


class MuonSettings(Section):
    """Muon (Jordan et al., 2024) with the scale of Moonlight (arXiv 2502.16982, section 2.2) by default."""

    lr: Positive = 0.02
    momentum: Fraction = 0.95
    nesterov: bool = True
    weight_decay: NonNegative = 0.0
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    scale: Literal["match_rms_adamw", "original", "none"] = "match_rms_adamw"


class AdamWSettings(Section):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    lr: Positive = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.01


class DmuonOptimizer(Section):
    """The distributed Muon runtime."""

    kind: Literal["dmuon"] = "dmuon"
    muon: MuonSettings = MuonSettings()
    adamw: AdamWSettings = AdamWSettings()


class PlainMuonSettings(MuonSettings):
    """Settings of ``torch.optim.Muon``: coefficients, precision and iteration are torch's own."""

    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """torch's ``adjust_lr_fn``."""


class MuonOptimizer(Section):
    """A baseline: torch's Muon on matrices and torch's AdamW on the rest, under FSDP2 or DDP, without the runtime."""

    kind: Literal["muon"]
    muon: PlainMuonSettings = PlainMuonSettings()
    adamw: AdamWSettings = AdamWSettings()
    weight_decay_exclude_1d: bool = False
    """Leave norms, biases and other parameters of at most one dim without decay."""
    adamw_name_hints: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """A matrix whose full name contains one of these is AdamW's; None takes the runtime's list."""


class AdamWOptimizer(Section):
    """A baseline: torch's AdamW on everything, under FSDP2 or DDP, without the runtime."""

    kind: Literal["adamw"]
    adamw: AdamWSettings = AdamWSettings()
    weight_decay_exclude_1d: bool = False
    """Leave norms, biases and other parameters of at most one dim without decay."""


OPTIMIZER_TAG = "kind="
"""Before the kind in the name of a union's member, so that it is told from a field in the place of an error."""


def _optimizer_tag(value: Any) -> str | None:
    """Return which member of the union ``value`` is; without a ``kind`` it is ``dmuon``'s."""
    if isinstance(value, dict):
        return f"{OPTIMIZER_TAG}{value.get('kind', 'dmuon')}"
    kind = getattr(value, "kind", None)
    return None if kind is None else f"{OPTIMIZER_TAG}{kind}"


Optimizer = Annotated[
    Annotated[DmuonOptimizer, Tag(f"{OPTIMIZER_TAG}dmuon")]
    | Annotated[MuonOptimizer, Tag(f"{OPTIMIZER_TAG}muon")]
    | Annotated[AdamWOptimizer, Tag(f"{OPTIMIZER_TAG}adamw")],
    Discriminator(_optimizer_tag),
]


class PolicyFields(Section):
    """What the runtime does with a parameter. A field that is absent leaves the earlier value."""

    route: Route | None = None
    param_dtype: DType | None = None
    grad_dtype: DType | None = None
    output_dtype: DType | None = None
    cast_forward_inputs: bool | None = None
    matrix_view: Literal["flatten", "experts", "transposed", "experts_transposed"] | None = None
    split_rows: tuple[Annotated[int, Field(ge=1)], ...] | None = None


class Override(Section):
    """``set`` applies to every parameter whose full name contains one of the tokens of ``name``."""

    name: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    set: PolicyFields


class RoutingSpec(Section):
    """Which parameters the runtime manages, and how: ``param_policy`` of the runtime, in JSON."""

    exclude: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Parameters whose full name contains one of these tokens are frozen."""
    defaults: PolicyFields = PolicyFields(route="muon")
    overrides: tuple[Override, ...] = ()
    hook_boundaries: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Module names or class names at which parameters are gathered; empty takes the runtime's default."""
    strict: bool = True
    """Refuse a plan that would orthogonalise what is no matrix."""


class BreakerSpec(Section):
    """When a kernel's breaker trips by itself, and how long it waits. A breaker guards a kernel, a size and a dtype."""

    relative_error: Annotated[float, Field(ge=0, le=10)] = 0.05
    """Largest difference from the fallback's result, in the directions that the gradient has."""
    orthogonality_error: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Largest excess over the fallback's root mean square of (squared singular value - 1)."""
    slow_factor: Annotated[float, Field(ge=1, le=1e6)] = 3.0
    """A compared call is slow when it takes more than this many times the fallback's time."""
    slow_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of slow calls among the last ``window`` compared ones that trips."""
    window: Annotated[int, Field(ge=1, le=10_000)] = 10
    minimum_calls: Annotated[int, Field(ge=1, le=10_000)] = 5
    """Compared calls before the share counts; not above ``window``."""
    check_every_calls: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    """Calls with matrices of a shape, one a step, from one comparison with the fallback to the next: within so many
    steps a kernel that is wrong is found out."""
    check_matrices: Annotated[int, Field(ge=1, le=1024)] = 1
    """Matrices of each shape in a comparison; those of a shape take turns."""
    open_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """From tripping to the first trial; doubled at each trial that fails, up to ``max_open_s``."""
    max_open_s: Annotated[float, Field(ge=0, le=604_800)] = 3600.0
    half_open_calls: Annotated[int, Field(ge=1, le=10_000)] = 5
    """Good compared calls on every rank that end a trial well."""
    half_open_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """After which a trial has failed."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.minimum_calls > self.window:
            raise ValueError(f"minimum_calls is {self.minimum_calls}, above window, which is {self.window}")
        if self.max_open_s < self.open_s:
            raise ValueError(f"max_open_s is {self.max_open_s:g}, below open_s, which is {self.open_s:g}")
        return self


def _coefficients_tag(value: Any) -> str:
    return "name" if isinstance(value, str) else "list"


Coefficients = Annotated[
    Annotated[CoefficientSet, Tag("name")] | Annotated[tuple[tuple[float, float, float], ...], Tag("list")],
    Discriminator(_coefficients_tag),
]
"""A set's name, or triples (a, b, c), one a step: what is wrong is told of the one that was meant."""


class KernelsSpec(Section):
    """Newton-Schulz: which iteration, with which coefficients, computed by what."""

    algorithm: Algorithm = Algorithm.GRAM
    kernel: Kernel = Kernel.AUTO
    coefficients: Coefficients = CoefficientSet.POLAR_EXPRESS
    restarts: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Steps (0-based) before which the Gram form starts anew; None takes the runtime's choice. A swap to the direct
    form leaves them where they are, for a swap back."""
    breaker: BreakerSpec = BreakerSpec()
    swap_deadline_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """How long all ranks may take to prepare a swap of the kernel; then it is rolled back."""


class CheckpointSpec(Section):
    """When a run saves, where, and what it continues from. It also saves at its end and before it stops."""

    every_steps: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """Steps between two checkpoints; None saves at the end and before a stop only."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """How many complete checkpoints stay; the last one is never removed."""
    directory: Annotated[str, Field(min_length=1)] | None = None
    """Absolute path that all workers share. None takes a place of the job's own; a run without a server then keeps
    checkpoints only if ``every_steps`` is given."""
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """``auto`` continues from the newest sound checkpoint in the directory, if there is one; ``never`` starts anew, but
    a restart or resumption continues what the job saved in a place of its own; an absolute path names a checkpoint, a
    directory of them, or a file of weights."""
    on_route_change: Literal["refuse", "keep", "cold"] = "refuse"
    """What becomes of the optimizer state of a parameter whose route has changed: the checkpoint is refused; state that
    means the same is kept; or it starts anew."""
    asynchronous: bool = True
    """Write behind the next steps; False waits for each checkpoint."""

    @model_validator(mode="after")
    def _absolute(self) -> Self:
        relative = [
            f"{name} {value!r}"
            for name, value in (("directory", self.directory), ("resume", self.resume))
            if value is not None and value not in ("auto", "never") and not value.startswith("/")
        ]
        if relative:
            raise ValueError(f"workers need absolute paths, found {' and '.join(relative)}")
        return self


def _whole_or_part(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"a worker has a part of one GPU (below 1) or whole ones, found {gpus:g}; take {int(gpus)}")
    if 0 < gpus < _SMALLEST_SHARE:
        raise ValueError(f"a part of a GPU is at least {_SMALLEST_SHARE:g}; take that, or 0 for CPUs")
    return gpus


class ResourcesSpec(Section):
    """What one worker needs."""

    cpus_per_worker: Annotated[float, Field(ge=_SMALLEST_SHARE, le=4096)] = 1.0
    gpus_per_worker: Annotated[float, Field(ge=0, le=64), AfterValidator(_whole_or_part)] = 0.0
    """0 for CPUs. Below 1, workers share a GPU, and talk over the network interface."""
    memory_bytes_per_worker: Annotated[int, Field(ge=1)] | None = None


class JobSpec(Section):
    """A whole job."""

    api_version: Literal["v1"]
    name: Name
    project: Name = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Jobs of a higher priority start first, and may take the place of running ones of a lower."""
    preemptible: bool = True
    """False keeps a running job from giving way to one of a higher priority."""
    model: ModelSpec
    data: DataSpec
    mesh: MeshSpec = MeshSpec()
    training: TrainingSpec
    optimizer: Optimizer = DmuonOptimizer()
    routing: RoutingSpec = RoutingSpec()
    kernels: KernelsSpec = KernelsSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    failure: FailureSpec = FailureSpec()
    watchdog: WatchdogSpec = WatchdogSpec()
    resources: ResourcesSpec = ResourcesSpec()

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.mesh.world_size
