"""Runs every case in processes of its own, in turn, and puts the figures together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools import synthetic, synthetic_vocab, synthetic_weights
from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads
from orchestrator.bench import disk, host
from orchestrator.bench.job import Job
from orchestrator.bench.plan import (
    MANAGED,
    NO_REPACK,
    PLAIN,
    QUICK_SHAPE,
    REPACK,
    BenchOptions,
    Case,
    cases,
)
from orchestrator.errors import MoeEdgeError

HIGH, LOW = "q4_k", "q2_k"
START_SECONDS = 300.0

Note = Callable[[str], None]


def cache_folder() -> Path:
    """Where generated models are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-edge" / "bench"


def build_models(options: BenchOptions, note: Note) -> tuple[Path, Path]:
    """The model in the high and in the low precision, written when not there yet.

    The names hold a digest of the generator, so that a changed one never meets old files.
    """
    digest = hashlib.sha256()
    for module in (synthetic, synthetic_vocab, synthetic_weights):
        digest.update(Path(str(module.__file__)).read_bytes())
    shape = QUICK_SHAPE if options.quick else options.shape
    stem = f"{shape}-{options.routing}-{options.seed}"
    folder = cache_folder()
    paths = []
    for tier in (HIGH, LOW):
        path = folder / f"{stem}-{tier}-{digest.hexdigest()[:12]}.gguf"
        if not path.exists():
            note(f"writing {path}")
            for stale in folder.glob(f"{stem}-{tier}-*.gguf"):
                stale.unlink()
            synthetic.write(path, shape, tiers=(tier,), routing=options.routing, seed=options.seed)
        paths.append(path)
    return paths[0], paths[1]


def run(options: BenchOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measures everything and returns one JSON-ready object; note gets progress lines.

    Raises MoeEdgeError where no model can be made or read; a case that fails is reported
    in its row instead.
    """
    high, low = build_models(options, note)
    with_low = ExpertModel.open(high, low)
    bench = _Bench(options, high, low, with_low, note)
    listed = cases(options)
    results: dict[str, list[dict[str, Any]]] = {case.key: [] for case in listed}
    bandwidths = []
    with contextlib.nullcontext() if options.quick else host.first_in_line():
        for number in range(options.runs):
            bandwidths.append(bench.bandwidth(number))
            for case in listed:
                earlier = results[case.key]
                if any("error" in each for each in earlier):
                    continue
                note(f"run {number + 1} of {options.runs}: {case.key}")
                earlier.append(bench.measure(case, number))
    return bench.report(listed, results, bandwidths)


class _Bench:
    def __init__(
        self, options: BenchOptions, high: Path, low: Path, model: ExpertModel, note: Note
    ) -> None:
        self.options, self.high, self.low, self.model, self.note = options, high, low, model, note
        self.file_bytes = high.stat().st_size
        self.skipped: list[str] = []

    def skip(self, reason: str) -> None:
        if reason and reason not in self.skipped:
            self.skipped.append(reason)
            self.note(reason)

    def forget(self) -> None:
        """Takes the model out of the page cache; a quick pass leaves the machine alone."""
        if not self.options.quick:
            self.skip(host.forget_files([self.high, self.low]))

    def bandwidth(self, number: int) -> disk.Bandwidth:
        seconds = 0.1 if self.options.quick else 1.5
        self.forget()
        return disk.read_bandwidth(
            self.model, threads=self.options.io_threads, seconds=seconds, seed=number
        )

    def measure(self, case: Case, number: int) -> dict[str, Any]:
        """One process of one case: what it printed, or {"error": reason}."""
        options = self.options
        settings = dict(case.settings)
        limit = None if case.cap is None else int(case.cap * self.file_bytes)
        if case.system == "engine":
            settings["io_threads"] = options.io_threads
            if limit and options.quick:
                settings["expert_ram"] = int(case.cap * self.model.tier_bytes[0])  # type: ignore[operator]
            elif limit:
                settings["ram"] = limit
        job = Job(
            system=case.system,
            model=str(self.high),
            low=str(self.low) if settings.get("low_tier") == LOW else None,
            settings=settings,
            n_ctx=options.n_ctx,
            n_ubatch=options.prompt_tokens,
            threads=options.threads or default_threads(),
            prompt_tokens=options.prompt_tokens,
            warmup=options.warmup,
            tokens=options.tokens,
            max_seconds=options.max_seconds,
            seed=options.seed * 1000 + number,
            warm=case.cap is None,
            routing=case.role == "reference" and number == 0,
        )
        self.forget()
        if limit is None:
            return self._spawn(job, None)
        if options.quick:
            self.skip("quick: the expert slots are capped, not the process; upstream is not capped")
            return self._spawn(job, None)
        with host.memory_group(limit) as group:
            if isinstance(group, str):
                self.skip(f"memory is not capped: {group}; mmap figures are of no use then")
                return self._spawn(job, None)
            return self._spawn(job, group)

    def _spawn(self, job: Job, group: host.MemoryGroup | None) -> dict[str, Any]:
        def enter_group() -> None:
            if group is not None:
                group.procs.write_text("0")

        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.bench.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=enter_group,
        )
        try:
            timeout = START_SECONDS + 2 * job.max_seconds
            out, err = process.communicate(job.to_json(), timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"still not done after {timeout:.0f} s"}
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode == -signal.SIGKILL and group is not None and group.was_killed():
            return {"error": "does not fit: ended by the kernel, out of memory"}
        if process.returncode < 0:
            return {"error": f"died of {signal.Signals(-process.returncode).name}"}
        if process.returncode or not out.strip():
            last = err.strip().splitlines()[-1:] or [f"status {process.returncode}"]
            return {"error": f"failed: {last[0]}"}
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return result

    def report(
        self,
        listed: list[Case],
        results: dict[str, list[dict[str, Any]]],
        bandwidths: list[disk.Bandwidth],
    ) -> dict[str, Any]:
        options = self.options
        rows = [self._row(case, results[case.key]) for case in listed]
        _compare(rows, [each.bytes_per_s for each in bandwidths])
        routing = next(
            (each["routing"] for row in results.values() for each in row if "routing" in each), None
        )
        return {
            "machine": {
                "processor": _processor(),
                "cores": len(os.sched_getaffinity(0)),
                "system": platform.platform(),
            },
            "model": {
                "path": str(self.high),
                "shape": QUICK_SHAPE if options.quick else options.shape,
                "file_bytes": self.file_bytes,
                "tiers": [tier.name for tier in self.model.tiers],
                "n_layers": self.model.n_layers,
                "n_expert": self.model.n_expert,
                "n_expert_used": self.model.n_expert_used,
            },
            "options": {
                "routing": options.routing,
                "tokens": options.tokens,
                "prompt_tokens": options.prompt_tokens,
                "runs": options.runs,
                "retention": options.retention,
                "io_threads": options.io_threads,
            },
            "routing": routing,
            "bandwidth": {
                "bytes_per_s": statistics.median(each.bytes_per_s for each in bandwidths),
                "runs": [each.bytes_per_s for each in bandwidths],
                "direct": all(each.direct for each in bandwidths),
                "slice_bytes": bandwidths[0].slice_bytes,
                "threads": options.io_threads,
            },
            "ratios": _resident_ratios(rows),
            "cases": rows,
            "skipped": self.skipped,
        }

    def _row(self, case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """The figures of one case over its runs.

        Speeds come from medians, of a run's steps and then of the runs: other work on the
        machine moves a mean far more. p99 is that of all steps together.
        """
        limit = None if case.cap is None or self.options.quick else int(case.cap * self.file_bytes)
        row: dict[str, Any] = {"name": case.name, "cap": case.cap, "role": case.role}
        row["limit_bytes"] = limit
        failed = [each["error"] for each in runs if "error" in each]
        if failed:
            return row | {"error": failed[0]}
        steps = np.concatenate([each["step_ms"] for each in runs])
        medians = [float(np.median(each["step_ms"])) for each in runs]
        tpot_ms = statistics.median(medians)
        row |= {
            "tokens": len(steps),
            "tpot_ms_p50": tpot_ms,
            "tpot_ms_p99": float(np.percentile(steps, 99)),
            "tpot_ms_mean": float(np.mean(steps)),
            "tpot_ms_p50_runs": medians,
            "tokens_per_s": 1e3 / tpot_ms,
            "ttft_ms": statistics.median(each["ttft_ms"] for each in runs),
            "ttft_ms_runs": [each["ttft_ms"] for each in runs],
            "peak_rss_bytes": max(each["peak_rss"] for each in runs),
            "mode": runs[0].get("mode", "upstream"),
        }
        if limit and case.system == "engine":
            row["over_promise"] = row["peak_rss_bytes"] > limit
        stores = [each["store"] for each in runs if "store" in each]
        if stores:
            requests = sum(each["requests"] for each in stores)
            routed = {
                key: sum(each["routed"][key] for each in stores) for key in stores[0]["routed"]
            }
            total = sum(routed.values())
            row |= {
                "hit_rate": sum(each["hits"] for each in stores) / requests if requests else None,
                "bytes_per_token": statistics.median(each["bytes_per_token"] for each in stores),
                "needed_bytes_per_token_runs": [each["needed_bytes_per_token"] for each in stores],
                "wait_ms_per_token": statistics.median(
                    each["wait_ms_per_token"] for each in stores
                ),
                "mix": {key: n / total if total else 0.0 for key, n in routed.items()},
                "budget_bytes": stores[0]["budget_bytes"],
                "direct_io": stores[0]["direct_io"],
            }
            callbacks = [each["callback_us"] for each in runs if each["callback_us"] is not None]
            row["callback_us_p50"] = statistics.median(callbacks) if callbacks else None
        return row


def _compare(rows: list[dict[str, Any]], bytes_per_s: list[float]) -> None:
    """Adds the bound and the ratios of each row, run by run: what a run compares ran within
    minutes of each other, and a machine's speed drifts.

    Bound of a token (DESIGN section 8): max(computing, missed bytes / bandwidth), computing
    being the managed path with everything resident.
    """
    good = [row for row in rows if "error" not in row]
    reference = next((row["tpot_ms_p50_runs"] for row in good if row["role"] == "reference"), None)
    for row in good:
        steps = row["tpot_ms_p50_runs"]
        if row["cap"] is None:
            continue
        needed = row.get("needed_bytes_per_token_runs")
        if needed and reference:
            bounds = [
                max(compute_ms, moved / speed * 1e3)
                for compute_ms, moved, speed in zip(reference, needed, bytes_per_s, strict=True)
            ]
            row["bound_tpot_ms"] = statistics.median(bounds)
            row["of_bound"] = _median_ratio(bounds, steps)
        mapped = [
            each["tpot_ms_p50_runs"]
            for each in good
            if each["role"] == "mmap" and each["cap"] == row["cap"]
        ]
        if mapped:
            row["speedup_mmap"] = _median_ratio(
                [min(each) for each in zip(*mapped, strict=True)], steps
            )


def _resident_ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Speed with everything resident against upstream, medians over the runs."""
    steps = {
        row["name"]: row["tpot_ms_p50_runs"]
        for row in rows
        if row["cap"] is None and "error" not in row
    }
    upstream = [steps[name] for name in (REPACK, NO_REPACK) if name in steps]
    ratios = {}
    if PLAIN in steps and upstream:
        best = [min(each) for each in zip(*upstream, strict=True)]
        ratios["plain_of_best_upstream"] = _median_ratio(best, steps[PLAIN])
    if MANAGED in steps and NO_REPACK in steps:
        ratios["managed_of_upstream_without_repack"] = _median_ratio(
            steps[NO_REPACK], steps[MANAGED]
        )
    return ratios


def _median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


__all__ = ["MoeEdgeError", "build_models", "cache_folder", "run"]
