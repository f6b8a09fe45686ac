"""Routing traces, and replays of policies and the expert cache over a trace without a model."""

from orchestrator.lab.replay.file import read_trace, write_trace
from orchestrator.lab.replay.report import ReplayOptions, render, replay
from orchestrator.lab.replay.trace import Trace

__all__ = ["ReplayOptions", "Trace", "read_trace", "render", "replay", "write_trace"]
