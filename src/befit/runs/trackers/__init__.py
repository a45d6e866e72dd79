"""Runs in TensorBoard, Weights & Biases and MLflow, from what the journal writes; off unless one is named."""

from befit.runs.trackers.base import Tracker, check_trackers, make_tracker
from befit.runs.trackers.follow import Follower, tracked

__all__ = ["Follower", "Tracker", "check_trackers", "make_tracker", "tracked"]
