"""`moe-edge bench gpu`: upstream and every policy on a GPU, at equal shares of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.bench.loop import Loop
from orchestrator.bench.models import Note
from orchestrator.bench.plan import (
    BenchOptions,
    Case,
    policies,
)
from orchestrator.bench.report import WIDTH, document, mix_of, percent, tokens_of
from orchestrator.bench.rows import Result, case_row, median_ratio
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.llama import Bindings
from orchestrator.plan import device_fixed_bytes

UPSTREAM, UPSTREAM_CPU = "upstream, n-cpu-moe", "upstream, all on CPU"
RESIDENT, MANAGED = "upstream, all on GPU", "lru, all on GPU"


@dataclass(frozen=True, slots=True)
class GpuOptions(BenchOptions):
    """caps: shares of the expert bytes in the best precision that the GPU's memory holds beside
    everything else of the model. device: its name. Raises ConfigError."""

    routing: str = "zipf"
    caps: tuple[float, ...] = (0.25, 0.5)
    prompt_tokens: int = 2048
    device: str = "cuda0"


def gpu_cases(options: GpuOptions, n_layers: int) -> list[Case]:
    """Everything on the GPU; then, at each share: upstream with as many layers' experts on the
    CPU as do not fit, and with all of them; and our policies."""
    listed = [
        Case(RESIDENT, "upstream", None, "resident", {"gpu": True}),
        Case(MANAGED, "engine", None, "managed", {"policy": "lru", "force_managed": True}),
    ]
    for cap in options.caps:
        kept = int(n_layers * cap)
        some, none = ({"gpu": True, "cpu_moe": n} for n in (n_layers - kept, n_layers))
        listed += [
            Case(UPSTREAM, "upstream", cap, "upstream", some),
            Case(UPSTREAM_CPU, "upstream", cap, "upstream", none),
            *policies(cap, options.retention),
        ]
    return listed


class GpuLoop(Loop):
    """The cap is one on the GPU's memory."""

    def limit_bytes(self, case: Case) -> int | None:
        return None

    def cap_settings(self, case: Case) -> dict[str, Any]:
        assert isinstance(self.options, GpuOptions)
        settings: dict[str, Any] = {"device": self.options.device}
        return settings if case.cap is None else settings | {"vram": self.vram_bytes(case.cap)}

    def vram_bytes(self, share: float) -> int:
        """What the model takes beside its experts, and a share of those."""
        options = self.options
        config = Config.build(model=self.high, ctx=options.n_ctx, n_ubatch=options.n_ubatch)
        return device_fixed_bytes(config, self.model) + int(share * self.model.tier_bytes[0])


def check_device(name: str) -> None:
    """Raises ConfigError where there is no such GPU."""
    from orchestrator.accelerator import find_gpu

    if find_gpu(Bindings.load(), name) is None:
        raise ConfigError(f"--device {name}: the benchmark is for a GPU")


def run_gpu(options: GpuOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measures everything and returns one JSON-ready object, as bench.run does.

    Raises ConfigError without a GPU.
    """
    check_device(options.device)
    loop = GpuLoop.prepare(options, note)
    listed = gpu_cases(options, loop.model.n_layers)
    measured = loop.run(listed)
    rows = [case_row(case, measured.results[case.key], None) for case in listed]
    for row in rows:
        row["vram_bytes"] = None if row["cap"] is None else loop.vram_bytes(row["cap"])
    add_ratios(rows)
    return loop.describe(measured) | {"cases": rows}


def add_ratios(rows: list[Result]) -> None:
    """Speed and first token of each row against upstream's better one at the same share, run by
    run; of the managed path with everything there against upstream's."""
    good = [row for row in rows if "error" not in row]
    for row in good:
        role = "resident" if row["cap"] is None else "upstream"
        others = [each for each in good if (each["cap"], each["role"]) == (row["cap"], role)]
        if not others or row["role"] == role:
            continue
        for name, key in (("speedup", "tpot_ms_p50_runs"), ("ttft_speedup", "ttft_ms_runs")):
            best = [min(each) for each in zip(*(other[key] for other in others), strict=True)]
            row[name] = median_ratio(best, row[key])


_HEAD = (
    f"{'':22}{'tok/s':>8}{'p50 ms':>8}{'p99 ms':>8}{'TTFT ms':>9}{'hit %':>7}{'MB/tok':>8}"
    f"{'hi/lo/skip %':>14}{'x TPOT':>8}{'x TTFT':>8}"
)


def render_gpu(report: dict[str, Any]) -> str:
    """The report of run_gpu as text."""
    options = report["options"]
    intro = [
        f"{options['tokens']} decode steps with the same {tokens_of(report)} tokens for all, "
        f"{options['prompt_tokens']} before them, {options['runs']} runs in turn;",
        f"dymoe at r = {options['retention']}; x: against the better one of upstream's rows",
    ]
    return document(report, intro, lambda rows: [_HEAD, *(_row(row) for row in rows)])


def _row(row: Result) -> str:
    if "error" in row:
        return f"{row['name']:22} {row['error']}"[:WIDTH]
    moved = row.get("bytes_per_token")
    ratios = (row.get("speedup"), row.get("ttft_speedup"))
    cells = (
        f"{row['name']:22}{row['tokens_per_s']:8.1f}{row['tpot_ms_p50']:8.2f}"
        f"{row['tpot_ms_p99']:8.2f}{row['ttft_ms']:9.0f}{percent(row.get('hit_rate'), 1):>7}"
        f"{'' if moved is None else f'{moved / 1e6:.1f}':>8}{mix_of(row):>14}"
    )
    cells += "".join(f"{'' if each is None else f'{each:.2f}':>8}" for each in ratios)
    return cells.rstrip()
