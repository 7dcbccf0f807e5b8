"""The distributed Muon runtime: routing, ownership, communication, kernels and state. Depends on torch alone."""

from dmuon_runtime._muon_adamw_record import MuonAdamWRecord
from dmuon_runtime.baselines import build_optimizers
from dmuon_runtime.clip import clip_grad_norm_
from dmuon_runtime.coefficients import KELLER_JORDAN_COEFFICIENTS, POLAR_EXPRESS_COEFFICIENTS, YOU_COEFFICIENTS
from dmuon_runtime.counters import CommCount, Counters, CountersSnapshot
from dmuon_runtime.dedicate import dedicate_params, plan_params
from dmuon_runtime.errors import (
    AlreadyDedicated,
    AlreadyOptimized,
    AlreadySharded,
    BoundaryError,
    CallMismatch,
    DMuonError,
    DtypeConflict,
    GradientMismatch,
    MeshError,
    NonFiniteGradient,
    NotDedicated,
    NothingMatched,
    ParametersChanged,
    ParamGroupError,
    PeerFailed,
    PlanMismatch,
    PolicyError,
    RouteRefused,
    SelectionError,
    SettingError,
    StateMismatch,
    UnmanagedParameters,
    UnsupportedFeature,
)
from dmuon_runtime.functional import direct_newton_schulz, gram_newton_schulz, newton_schulz
from dmuon_runtime.guests import ignore_in_ddp, ignored_params
from dmuon_runtime.kernels import get_backend_status, get_ns_backend
from dmuon_runtime.muon import Muon
from dmuon_runtime.muon_adamw import MuonAdamW
from dmuon_runtime.newton_schulz import NewtonSchulz, orthogonality_error
from dmuon_runtime.optimizer_state import get_optimizer_state_dict, set_optimizer_state_dict
from dmuon_runtime.outcome import StepOutcome
from dmuon_runtime.plan import BucketPlan, ParameterPlan, RankPlan, RuntimePlan, Traffic, UnitPlan
from dmuon_runtime.restarts import RestartChoice, search_restarts
from dmuon_runtime.runtime import fail_together, get_counters, get_plan, no_sync
from dmuon_runtime.shards import StatePart, StateTensor, load_state_parts, state_layout, state_parts
from dmuon_runtime.state import get_model_state_dict, set_model_state_dict
from dmuon_runtime.summaries import summarize_comm_plan, summarize_param_groups

__all__ = [
    "KELLER_JORDAN_COEFFICIENTS",
    "POLAR_EXPRESS_COEFFICIENTS",
    "YOU_COEFFICIENTS",
    "AlreadyDedicated",
    "AlreadyOptimized",
    "AlreadySharded",
    "BoundaryError",
    "BucketPlan",
    "CallMismatch",
    "CommCount",
    "Counters",
    "CountersSnapshot",
    "DMuonError",
    "DtypeConflict",
    "GradientMismatch",
    "MeshError",
    "Muon",
    "MuonAdamW",
    "MuonAdamWRecord",
    "NewtonSchulz",
    "NonFiniteGradient",
    "NotDedicated",
    "NothingMatched",
    "ParamGroupError",
    "ParameterPlan",
    "ParametersChanged",
    "PeerFailed",
    "PlanMismatch",
    "PolicyError",
    "RankPlan",
    "RestartChoice",
    "RouteRefused",
    "RuntimePlan",
    "SelectionError",
    "SettingError",
    "StateMismatch",
    "StatePart",
    "StateTensor",
    "StepOutcome",
    "Traffic",
    "UnitPlan",
    "UnmanagedParameters",
    "UnsupportedFeature",
    "build_optimizers",
    "clip_grad_norm_",
    "dedicate_params",
    "direct_newton_schulz",
    "fail_together",
    "get_backend_status",
    "get_counters",
    "get_model_state_dict",
    "get_ns_backend",
    "get_optimizer_state_dict",
    "get_plan",
    "gram_newton_schulz",
    "ignore_in_ddp",
    "ignored_params",
    "load_state_parts",
    "newton_schulz",
    "no_sync",
    "orthogonality_error",
    "plan_params",
    "search_restarts",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "state_layout",
    "state_parts",
    "summarize_comm_plan",
    "summarize_param_groups",
]  # fmt: skip
