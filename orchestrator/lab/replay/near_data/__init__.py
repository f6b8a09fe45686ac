"""A hardware model of a GPU and a CXL memory that computes (the near-data paper, section 5)."""

from orchestrator.lab.replay.near_data.machine import Machine
from orchestrator.lab.replay.near_data.report import (
    NearData,
    Workload,
    render_near_data,
    replay_near_data,
)
from orchestrator.lab.replay.near_data.routing import Generated

__all__ = [
    "Generated",
    "Machine",
    "NearData",
    "Workload",
    "render_near_data",
    "replay_near_data",
]
