"""Checkpoints: written in parallel, complete or not there, and loaded on any other mesh. Importing this loads no torch."""

from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.storage import CheckpointInfo, newest_complete

__all__ = ["CheckpointError", "CheckpointInfo", "newest_complete"]
