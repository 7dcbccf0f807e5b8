"""Checkpoints: written in parallel, complete or not there, loaded on any other mesh. This package imports no torch."""

from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.storage import CheckpointInfo, newest_complete

__all__ = ["CheckpointError", "CheckpointInfo", "newest_complete"]
