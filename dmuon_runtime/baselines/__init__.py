"""The plain baselines: torch's own AdamW and Muon, on one device or under FSDP2 or DDP, to compare the runtime with."""

from dmuon_runtime.baselines.build import BaselineConfig, build_optimizers
from dmuon_runtime.baselines.split import DEFAULT_ADAMW_HINTS, RoutedParameter, route_parameters
from dmuon_runtime.baselines.tandem import Tandem
from dmuon_runtime.baselines.whole_matrix import WholeMatrixMuon

__all__ = [
    "DEFAULT_ADAMW_HINTS",
    "BaselineConfig",
    "RoutedParameter",
    "Tandem",
    "WholeMatrixMuon",
    "build_optimizers",
    "route_parameters",
]
