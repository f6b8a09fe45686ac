"""How fast this disk delivers a model's experts, measured at some moments and kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from time import time

from gguf_tools.experts import ExpertModel
from orchestrator.cache.files import user_folder
from orchestrator.cache.profile import identity
from orchestrator.config import Config
from orchestrator.cost.disk import Bandwidth, read_bandwidth
from orchestrator.cost.predict import Reading
from orchestrator.cost.predictor import reading_of
from orchestrator.cost.timings import MOST_MOMENTS, Timings

_FORMAT = "moe-edge disk 1"
_MIB = 1 << 20
# A timing of nothing is none.
_LEAST_S = 1e-9


def device_of(path: Path) -> int:
    """The device that a file lies on: another one may be mounted at the same place."""
    return path.stat().st_dev


def kept_reading(model: ExpertModel, config: Config, measured: Bandwidth | None = None) -> Reading:
    """The disk, as it stands in the user cache for this file at this place: the best of
    MOST_MOMENTS, since other reads make a disk slower. Nothing tells whether a disk was quiet, so
    that two moments which agree may both have been disturbed, and all of them are measured. Each
    takes a second or two where it is due, unless it was `measured` just now. Raises OSError."""
    place = [str(model.path.resolve()), device_of(model.path), identity(model)]
    name = hashlib.sha256(json.dumps([*place, config.io_threads]).encode()).hexdigest()[:24]
    path = user_folder("cache") / "speed" / f"disk-{name}.json"
    timings = Timings.load(path, _FORMAT, time())
    keys = ("read", "core", "latency")
    if measured is not None or any(timings.is_due(each, MOST_MOMENTS) for each in keys):
        disk = measured or read_bandwidth(model, threads=config.io_threads)
        for each, seconds in (
            ("read", _MIB / disk.bytes_per_s),
            ("core", _MIB * disk.core_s_per_byte),
            ("latency", disk.latency_s),
        ):
            timings.add(each, max(_LEAST_S, seconds), quiet=True)
        timings.save(path, _FORMAT)
    read, core, latency = (timings.least(each) or _LEAST_S for each in keys)
    kept = Bandwidth(_MIB / read, True, 0, core / _MIB, latency)
    return reading_of(kept, config)
