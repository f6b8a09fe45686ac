"""Recorded routing, and the same policies and cache over it without a model."""

from orchestrator.replay.file import read_trace, write_trace
from orchestrator.replay.report import ReplayOptions, render, replay
from orchestrator.replay.trace import Trace

__all__ = ["ReplayOptions", "Trace", "read_trace", "render", "replay", "write_trace"]
