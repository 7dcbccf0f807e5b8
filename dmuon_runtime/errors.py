"""Everything that the runtime can refuse, as one tree. A message says what, which, what disagrees and the cure.

Each error carries the names it is about in ``names`` and survives pickling, because ``args`` holds all of its fields.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AlreadyDedicated",
    "AlreadyOptimized",
    "AlreadySharded",
    "BoundaryError",
    "CallMismatch",
    "DMuonError",
    "DtypeConflict",
    "GradientMismatch",
    "MeshError",
    "NonFiniteGradient",
    "NotDedicated",
    "NothingMatched",
    "ParamGroupError",
    "ParametersChanged",
    "PeerFailed",
    "PlanMismatch",
    "PolicyError",
    "RouteRefused",
    "SelectionError",
    "SettingError",
    "StateMismatch",
    "UnmanagedParameters",
    "UnsupportedFeature",
]


class DMuonError(ValueError):
    """Base of the tree: a message and the names (parameters, ranks, keys) that it is about."""

    code = "dmuon_error"

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        self.message = message
        self.names = tuple(names)
        super().__init__(message, self.names)

    def __str__(self) -> str:
        return self.message


class SettingError(DMuonError):
    """An argument of a public call has a value that means nothing."""

    code = "setting_invalid"


class PolicyError(DMuonError):
    """``param_policy`` has unknown keys, fields, routes or dtypes; all of them are listed."""

    code = "policy_invalid"


class RouteRefused(DMuonError):
    """Strict routing found parameters that Newton-Schulz must not touch; ``names`` are all of them."""

    code = "route_refused"


class BoundaryError(DMuonError):
    """No module on the way to the root can carry the hooks of a parameter."""

    code = "hook_boundary"


class DtypeConflict(DMuonError):
    """Parameters at one boundary ask for activation casts that contradict each other."""

    code = "dtype_conflict"


class MeshError(DMuonError):
    """The mesh has the wrong number of axes or does not contain this rank."""

    code = "mesh_invalid"


class AlreadyDedicated(DMuonError):
    """The model, or one of its parameters, is already under the runtime."""

    code = "already_dedicated"


class AlreadyOptimized(DMuonError):
    """The model has a Muon already, which would update the same weights."""

    code = "already_optimized"


class NotDedicated(DMuonError):
    """The model has not been given to the runtime."""

    code = "not_dedicated"


class NothingMatched(DMuonError):
    """The predicate chose no parameter."""

    code = "nothing_matched"


class UnmanagedParameters(DMuonError):
    """Trainable parameters that nobody would update."""

    code = "unmanaged_parameters"


class ParametersChanged(DMuonError):
    """The model's parameters are no longer the ones that were dedicated, or another runtime has them too."""

    code = "parameters_changed"


class ParamGroupError(DMuonError):
    """Optimizer groups with duplicates, foreign tensors or omissions."""

    code = "param_groups"


class PlanMismatch(DMuonError):
    """Ranks computed different plans."""

    code = "plan_mismatch"


class CallMismatch(DMuonError):
    """Ranks made different collective calls at the same point."""

    code = "call_mismatch"


class PeerFailed(DMuonError):
    """Another rank raised inside ``fail_together``; the message has its rank and its error."""

    code = "peer_failed"


class StateMismatch(DMuonError):
    """A state dict with missing, unexpected or differently shaped entries; nothing was changed."""

    code = "state_mismatch"


class UnsupportedFeature(DMuonError, NotImplementedError):
    """A declared feature that this version does not have; the message names what to use instead."""

    code = "unsupported"


class AlreadySharded(UnsupportedFeature):
    """The predicate chose parameters that FSDP2 or DDP has already taken."""

    code = "already_sharded"


class NonFiniteGradient(DMuonError):
    """``non_finite="raise"`` met an infinite or NaN gradient; no weight was changed on any rank."""

    code = "non_finite"


class SelectionError(DMuonError):
    """An explicit selection of parameters that is empty, repeats itself or names what Muon cannot train."""

    code = "selection_invalid"


class GradientMismatch(DMuonError):
    """Gradients that do not fit their parameters, or belong to none; nothing was updated."""

    code = "gradient_mismatch"
