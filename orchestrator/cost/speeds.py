"""Compute speed of this machine, measured at several moments and kept.

It is the basis of time predictions.

Other programs can only slow a product down. So the minimum of its timings counts. A single timing
cannot show whether it was disturbed. So a product is timed again at later moments, until two
timings were made on a quiet machine. If the machine becomes slower, its old timings expire.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from time import time
from typing import NamedTuple

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import EMBEDDINGS, OUTPUT, GGMLType, layer_of, parse_expert_name
from gguf_tools.file.parse import TensorInfo
from gguf_tools.process import Disturbance, processor_name, trim_memory, usable_cores
from orchestrator.cache.files import digest, keep, recalled, user_folder
from orchestrator.cost.products import (
    POOL_BYTES,
    QUIET_SHARE,
    TIMING_S,
    Attention,
    Product,
    Small,
    Timer,
)
from orchestrator.errors import NativeError
from orchestrator.native.llama import Bindings
from orchestrator.plan.footprint import process_bytes, vocabulary_size
from orchestrator.plan.machine import probe
from orchestrator.plan.records import PlanRequest

DISTURBED = (
    "Other programs used the processor while its speed was measured, so predicted speeds may be "
    "too low. A run at least ten minutes later measures again."
)
# An operation is not timed again within this many seconds.
APART_S = 600.0
# Number of timings on a quiet machine after which an operation is not timed again, and the age in
# seconds of the last timing at which the stored time expires.
QUIET_TIMINGS = 2
OLD_S = 30 * 86400.0

# Rows of activations for which costs are measured. Costs are interpolated linearly between them,
# and are proportional to the rows beyond the last one.
ROWS = (1, 4, 16, 64, 256)
# Layouts of experts: as in the file; in slots in the CPU's own layout; as llama.cpp repacks them,
# which it multiplies row by row.
FILE, OWN, UPSTREAM = "file", "cpu", "upstream"

# Version 3: one record for each operation.
_FORMAT = "moe-edge speed 3"
# Maximum repetitions of a timing during which threads waited for a core: per timing, and in total.
_TRIES, _REPEATS = 3, 30
# Number of rounds for the operations of an answer's token. A machine's speed changes within
# seconds, so the operations are timed in turns.
_ROUNDS = 3
# Minimum rows for tiles, as with plain rows, in the CPU's own layout (see
# patches/native/moe-edge-layout.cpp), and minimum rows for matrix products. With fewer rows, rows
# are multiplied one by one.
_TILES_FROM, _GEMM_LEAST = 8, 4
# Small operations of a layer, in addition to one for each expert that a token uses: norms,
# rotations, the router, copies into the KV cache.
_NODES = 32
# Overhead in units of small operations: of a step (0.10 to 0.18 ms for the demo, whose operation
# takes 0.6 us; 0.33 to 0.46 ms for the shapes of Qwen3-30B and OLMoE, whose operation takes 2 us),
# and of a policy's decision for a layer (26 to 34 us there).
_STEP_NODES, _ASKED_NODES = 200, 16
# Sampling of a token, in operations over the vocabulary: two for 50,000 and for 150,000 tokens.
_CHOICE_NODES = 2
# Maximum rows of the matrix that represents all dense matrices of a type.
_DENSE_ROWS = 4096
_CELLS = 512
# Lengths of representative small operations: over a model's width, and over its vocabulary.
_WIDE, _MANY = 4096, 131072
# For rough timings: maximum rows, beyond which time is proportional, and seconds of a timing.
_ROUGH_ROWS, _ROUGH_S = 64, 0.04
# A lower bound of the memory for measurements.
_LEAST_SPARE_BYTES = 8 << 20


class Timing(NamedTuple):
    """The stored summary of all timings of one operation.

    seconds: the shortest timing. n_quiet: the number of timings that were made while hardly any
    other program ran. at: system time of the last timing, in seconds.
    """

    seconds: float
    n_quiet: int
    at: float


class Timings:
    """Timings of operations on this machine. A key, which is a text, identifies each operation.

    The constructor receives the present time as `now`. It drops timings that are older than 30 days
    (OLD_S) or that are from the future.
    """

    def __init__(self, now: float, of: Mapping[str, Timing] | None = None) -> None:
        """Keep the stored timings that are still valid.

        now: system time in seconds. of: maps the key of an operation to its stored timing. Expired
        timings and timings from the future are dropped.
        """
        self._now = now
        self.of = {key: kept for key, kept in (of or {}).items() if 0 <= now - kept.at < OLD_S}

    @classmethod
    def load(cls, path: Path, form: str, now: float) -> Timings:
        """Read the timings that save() stored in a file.

        form: name of the file's format. The result has no timings if the file is missing, damaged
        or in another format.
        """
        known = recalled(path, form, "timings")
        with suppress(TypeError, ValueError):
            return cls(now, {key: _read(*kept) for key, kept in known.items()})
        return cls(now)

    def save(self, path: Path, form: str) -> None:
        """Store the timings in a file. Write errors are ignored.

        form: name of the file's format. It is written to the file, and `load` checks it.
        """
        keep(path, form, "timings", self.of)

    def least(self, key: str) -> float | None:
        """Return the minimum seconds of an operation; None if the operation was never timed."""
        return self.of[key].seconds if key in self.of else None

    def is_due(self, key: str, n_needed: int = QUIET_TIMINGS) -> bool:
        """Return whether the operation with this key should be timed now.

        The result is True if the operation was never timed. It is also True if two conditions hold:
        fewer than `n_needed` of its timings were made on a quiet machine, and the last timing is at
        least ten minutes old (APART_S). A machine is quiet if hardly any other program runs.
        """
        kept = self.of.get(key)
        return kept is None or (kept.n_quiet < n_needed and self._now - kept.at >= APART_S)

    def was_quiet(self, key: str) -> bool:
        """Return whether any timing of the operation with this key was made on a quiet machine.

        A machine is quiet if hardly any other program runs.
        """
        return key in self.of and self.of[key].n_quiet > 0

    def add(self, key: str, seconds: float, quiet: bool) -> None:
        """Add a new timing of the operation with this key.

        seconds: the time that the operation took. quiet: whether hardly any other program ran
        during the timing. The date of the timing is `now`, an argument of the constructor.
        """
        kept = self.of.get(key, Timing(math.inf, 0, self._now))
        self.of[key] = Timing(min(seconds, kept.seconds), kept.n_quiet + quiet, self._now)


def _read(seconds: object, n_quiet: object, at: object) -> Timing:
    """Parse one stored timing. Raises ValueError for invalid values."""
    times = isinstance(seconds, float) and isinstance(n_quiet, int) and isinstance(at, float)
    if not (times and 0.0 < seconds < 1e6):  # type: ignore[operator]
        raise ValueError
    return Timing(seconds, n_quiet, at)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds that each part of a model takes to compute on one machine.

    Tokens can be computed together, as a batch. The seconds of a batch are given for five batch
    sizes, which are in ROWS: 1, 4, 16, 64 and 256 tokens.

    - expert_s: one expert, for a batch of each size, float64 [n_layers, n_tiers, 5].
    - dense_s: everything except the experts and the output matrix, for a batch of each size,
      float64 [5].
    - output_s: the output matrix, for one token.
    - attention_s: attention of one token to one token of context, in all layers. The first value is
      for a batch of one token, the second for larger batches.
    - step_s: the rest of one pass through the model, such as sampling.
    - asked_s: one call of the policy for a layer.

    One field is not a time. expert_bytes has the bytes to read one expert from disk, int64
    [n_layers, n_tiers].
    """

    expert_s: np.ndarray
    expert_bytes: np.ndarray
    dense_s: np.ndarray
    output_s: float
    attention_s: tuple[float, float]
    step_s: float = 0.0
    asked_s: float = 0.0

    @property
    def n_layers(self) -> int:
        return len(self.expert_s)


def interpolated(curve: np.ndarray, rows: float | np.ndarray) -> np.ndarray:
    """Return the seconds that an operation takes for any number of rows, from measured seconds.

    - curve: the measured seconds of the operation, [len(ROWS)]. Value i is for ROWS[i] rows.
    - rows: the numbers of rows of activations, one row per token. The result has the same shape.

    Between the numbers in ROWS, the seconds are interpolated linearly. Below the first number, they
    are constant. Above the last number, they are proportional to the rows.
    """
    beyond = np.maximum(1.0, np.asarray(rows) / ROWS[-1])
    return np.asarray(np.interp(rows, ROWS, curve) * beyond)


def spare_bytes(request: PlanRequest, model: ExpertModel) -> int:
    """Return the memory that measurements may take before a model is loaded, in bytes.

    The limit for the process is --ram or the machine's free memory, whichever is less. The memory
    that the process needs without the model's weights and buffers is subtracted from this limit.
    The result is three quarters of the rest, but at least 8 MiB.
    """
    free = probe().memory_bytes
    left = min(request.config.ram or free, free) - process_bytes(model, request)
    return max(_LEAST_SPARE_BYTES, left * 3 // 4)


class Speeds(Closing):
    """Measures the seconds of matrix products and other operations on this machine.

    The timings are stored in the user cache. The seconds of an operation are the minimum of its
    timings at several moments.
    """

    def __init__(
        self,
        bindings: Bindings,
        threads: int,
        pool_bytes: int = POOL_BYTES,
        measures: bool = True,
        rough: bool = False,
        steady: bool = True,
    ) -> None:
        """Prepare timings on this machine with a number of threads.

        - pool_bytes: memory that a timing may take, at most POOL_BYTES. Results with less memory
          are not stored.
        - measures: if False, an operation without a stored timing raises NativeError.
        - rough: time only one matrix product of each type and layout, and predict the others from
          it, in proportion to their bytes. This is for models that are not on this machine.
        - steady: repeat the timings of operations for a single token, in `time_again`.
        """
        self._bindings, self._threads = bindings, threads
        self._pool_bytes = min(POOL_BYTES, pool_bytes)
        self._measures, self._rough, self._steady = measures, rough, steady
        self._kept = Timings.load(self._path, _FORMAT, time())
        self._used: dict[str, float] = {}
        # (seconds, whether the machine was quiet) of each round.
        self._measured: dict[str, list[tuple[float, bool]]] = {}
        self._once: dict[str, Product | Small | Attention] = {}  # of a token, timed in one round
        self._repeats = _REPEATS
        self._timer: Timer | None = None

    @cached_property
    def _path(self) -> Path:
        system = self._bindings.api.llama_print_system_info().decode("utf-8", "replace")
        name = digest(processor_name(), system, self._threads)
        return user_folder("cache") / "speed" / f"{name}.json"

    def seconds(self, what: Product | Small | Attention) -> float:
        """Return the seconds that an operation takes on this machine.

        what: a matrix product, the attention of one layer, or an operation without weights (Small),
        such as a norm. If the stored timings of the operation do not suffice, the operation is
        timed now. Later calls return the same seconds until `time_again` is called. Raises
        NativeError if the operation cannot be timed.
        """
        what, scale = _stands_for(what) if self._rough else (what, 1.0)
        key = f"{type(what).__name__} {' '.join(map(str, map(int, what)))}"
        if key not in self._used:
            known = self._kept.least(key)
            may_keep = self._pool_bytes >= POOL_BYTES
            confirms = may_keep and self._measures
            n_needed = 1 if self._rough else QUIET_TIMINGS
            if known is None or (confirms and self._kept.is_due(key, n_needed)):
                self._measured[key] = [self._timed(what)]
                if what.rows == 1 and self._steady:
                    self._once[key] = what
                known = self._standing(key)
            self._used[key] = known
        return self._used[key] * scale

    def time_again(self) -> bool:
        """Time operations for a single token twice more, so that they depend less on one moment.

        Only operations that `seconds` has timed since the last call of `time_again` are repeated.
        Each then has three times. The result is the median of those that were measured on a quiet
        machine, or the shortest of the three if the machine was never quiet.

        Afterwards, `seconds` returns either this result or the time in the user cache from earlier
        runs, whichever is shorter.

        Returns True if any operation was timed again. Raises NativeError if an operation cannot be
        timed.
        """
        once, self._once = self._once, {}
        for _ in range(_ROUNDS - 1):
            for key, what in once.items():
                self._measured[key].append(self._timed(what))
        self._used |= {key: self._standing(key) for key in once}
        return bool(once)

    def _standing(self, key: str) -> float:
        """Return the seconds of an operation that was timed in this process.

        The result is the minimum of the stored timings and the median of the current rounds.
        """
        known = self._kept.least(key)
        now, _ = _middle(self._measured[key])
        return now if known is None else min(now, known)

    def _timed(self, what: Product | Small | Attention) -> tuple[float, bool]:
        """Time one operation, and return (seconds, whether the machine was quiet).

        If other programs disturb a timing, it is repeated a few times. The result is the first
        timing on a quiet machine, or else the minimum.
        """
        if not self._measures:
            raise NativeError(f"{what} was not measured on this machine yet")
        timer = self._timer = self._timer or Timer(
            self._bindings.api._lib,
            self._threads,
            self._pool_bytes,
            _ROUGH_S if self._rough else TIMING_S,
        )
        least = math.inf
        for _ in range(_TRIES):
            others = Disturbance()
            found = timer.seconds(what)
            # With more threads than cores they wait for each other.
            if self._threads > usable_cores() or others.share() < QUIET_SHARE:
                return found, True
            least = min(least, found)
            if self._repeats <= 0:
                break
            self._repeats -= 1
        return least, False

    @property
    def disturbed(self) -> bool:
        """Whether an operation was timed only while other programs ran.

        The time that `seconds` returned for such an operation may be too long. Only operations
        whose time was requested from this object count.
        """
        now = {key for key, rounds in self._measured.items() if _middle(rounds)[1]}
        before = set(filter(self._kept.was_quiet, self._used))
        return not self._used.keys() <= now | before

    def costs(self, model: ExpertModel, tiers: tuple[int, ...], layout: str) -> Costs:
        """Return the seconds that each part of a model takes to compute on this machine.

        The parts are one expert of each layer, the other weights, attention, and the overhead of a
        step.

        - tiers: the precisions of the experts, as indices of the file's precisions.
        - layout: the layout of experts in memory. FILE is that of the file, OWN is the expert
          store's layout with interleaved rows, and UPSTREAM is llama.cpp's repacked layout.

        Operations that were never timed are timed now, which takes some seconds. Raises NativeError
        if an operation cannot be timed.
        """
        found = self._costs(model, tiers, layout)
        return self._costs(model, tiers, layout) if self.time_again() else found

    def _costs(self, model: ExpertModel, tiers: tuple[int, ...], layout: str) -> Costs:
        """Return the seconds of a model's parts, with each operation timed at most once.

        tiers: indices of the file's precisions. layout: FILE for the layout of the file, OWN for
        interleaved rows in slots, or UPSTREAM for llama.cpp's repacked layout.
        """
        interleaves = self._bindings.library().interleaves

        def product(info: Product) -> float:
            """Return the seconds of one expert's matrix product in the requested layout.

            All products are timed in huge pages, as in slots. Without an expert store, small pages
            cost about as much as the tables of slots do with a store. Neither cost is counted, so
            that predictions with and without a store are comparable.
            """
            kind, n_in, n_out, rows = info[:4]
            plain = info._replace(routed=True, in_slots=True)
            if layout == FILE or not interleaves(kind, n_in, n_out):
                return self.seconds(plain)
            one_by_one = plain._replace(repacked=True)
            if layout == UPSTREAM or rows < _GEMM_LEAST:
                return self.seconds(one_by_one)
            together = self.seconds(one_by_one._replace(routed=False))
            return min(together, self.seconds(plain)) if rows >= _TILES_FROM else together

        @cache
        def curve(kind: GGMLType, shape: tuple[int, int]) -> np.ndarray:
            return np.array([product(Product(kind, *shape, n)) for n in ROWS])

        expert_s = np.zeros((model.n_layers, len(tiers), len(ROWS)))
        expert_bytes = np.zeros((model.n_layers, len(tiers)), np.int64)
        for layer, (shapes, slices) in enumerate(zip(model.shapes, model.slices, strict=True)):
            for shape, by_tier in zip(shapes, slices, strict=True):
                for at, tier in enumerate(tiers):
                    piece = by_tier[tier]
                    if shape is None or piece is None:
                        continue
                    expert_bytes[layer, at] += piece.expert_bytes
                    expert_s[layer, at] += curve(piece.type, shape)
        dense_s, output_s = self._dense_seconds(model, layout)
        step_s, asked_s = self._overhead_seconds(model)
        attention_s = self._attention_seconds(model)
        return Costs(expert_s, expert_bytes, dense_s, output_s, attention_s, step_s, asked_s)

    def _dense_seconds(self, model: ExpertModel, layout: str) -> tuple[np.ndarray, float]:
        """Return (dense_s, output_s) of Costs: the seconds of everything outside the experts.

        The largest matrix of each type is timed, and its time is scaled by bytes. layout: FILE for
        plain rows. With the layouts OWN and UPSTREAM, dense weights are in llama.cpp's repacked
        layout.
        """
        interleaves = self._bindings.library().interleaves
        tensors = _dense_matrices(model)
        output = _output_matrix(tensors)
        for name in (OUTPUT, EMBEDDINGS):
            tensors.pop(name, None)
        largest: dict[GGMLType, TensorInfo] = {}
        for info in (*tensors.values(), *([output] if output else ())):
            known = largest.get(info.type)
            largest[info.type] = info if known is None or info.nbytes > known.nbytes else known
        nbytes = Counter[GGMLType]()
        for info in tensors.values():
            nbytes[info.type] += info.nbytes

        def seconds(kind: GGMLType, nbytes: int, rows: int) -> float:
            n_in, n_out = largest[kind].shape[:2]
            stands = _timed_product(largest[kind], rows)
            scale = nbytes / stands.nbytes
            if layout == FILE or not interleaves(kind, n_in, n_out):
                return self.seconds(stands) * scale
            found = self.seconds(stands._replace(repacked=True))
            if layout == OWN and rows >= _TILES_FROM:
                # Tiles of plain rows are timed as an expert that every token is routed to.
                found = min(found, self.seconds(stands._replace(routed=True)))
            return found * scale

        nodes = len(model.hparams.n_head) * _NODES + model.n_layers * model.n_expert_used
        width = model.hparams.embedding_length
        small = np.array([self.seconds(Small(width, n)) for n in ROWS])
        dense = [sum(seconds(kind, size, n) for kind, size in nbytes.items()) for n in ROWS]
        output_s = seconds(output.type, output.nbytes, 1) if output else 0.0
        return np.array(dense) + nodes * small, output_s

    def output_seconds(self, model: ExpertModel, n_tokens: int) -> float:
        """Return the seconds to multiply the activations of n_tokens tokens by the output matrix.

        The result assumes large batches, so that it is proportional to n_tokens.
        """
        output = _output_matrix(_dense_matrices(model))
        if output is None:
            return 0.0
        stands = _timed_product(output, ROWS[-1])
        return self.seconds(stands) * output.nbytes / stands.nbytes * n_tokens / ROWS[-1]

    def _overhead_seconds(self, model: ExpertModel) -> tuple[float, float]:
        """Return (step_s, asked_s) of Costs: the overheads of a step and of a policy's decision."""
        small = self.seconds(Small(model.hparams.embedding_length, 1))
        choice = self.seconds(Small(max(1, vocabulary_size(model)), 1))
        return _STEP_NODES * small + _CHOICE_NODES * choice, _ASKED_NODES * small

    def _attention_seconds(self, model: ExpertModel) -> tuple[float, float]:
        """Return attention_s of Costs: the seconds of attention per token and KV cell."""
        hparams = model.hparams
        found = []
        for rows in (1, 64):
            total = 0.0
            for n_head, n_head_kv in zip(hparams.n_head, hparams.n_head_kv, strict=True):
                if not (n_head and n_head_kv and hparams.key_length and hparams.value_length):
                    continue
                lengths = hparams.key_length, hparams.value_length
                what = Attention(n_head, n_head_kv, *lengths, rows, _CELLS)
                total += self.seconds(what) / (rows * _CELLS)
            found.append(total)
        return found[0], found[1]

    def close(self) -> None:
        """Store the measurements in the user cache, and free the memory that the timings used.

        Write errors are ignored.
        """
        if self._timer is not None:
            self._timer.close()
            trim_memory()  # otherwise plans and limits of this process count freed memory
        if self._measured and self._pool_bytes >= POOL_BYTES:
            kept = Timings.load(self._path, _FORMAT, time())
            for key, rounds in self._measured.items():
                kept.add(key, *_middle(rounds))
            kept.save(self._path, _FORMAT)
        self._measured, self._once, self._timer = {}, {}, None


def _stands_for(what: Product | Small | Attention) -> tuple[Product | Small | Attention, float]:
    """Return (the operation that is timed instead of this one, the factor between their times).

    Rough timings use one operation of each kind to predict all operations of this kind.
    """
    if what.rows > _ROUGH_ROWS:
        stands, scale = _stands_for(what._replace(rows=_ROUGH_ROWS))
        return stands, scale * what.rows / _ROUGH_ROWS
    if isinstance(what, Small):
        n = _MANY if what.n > _MANY // 8 else _WIDE
        return Small(n, what.rows), max(1.0, what.n / n) if n == _WIDE else what.n / n
    if isinstance(what, Attention):
        # Each head of a query goes through its keys and values.
        heads = Attention(32, 8, 128, 128, what.rows, what.cells)
        lengths = what.key_length + what.value_length
        return heads, what.n_head * lengths / (heads.n_head * 256)
    product = what._replace(n_in=2048, n_out=1024)
    return product, what.nbytes / product.nbytes


def _middle(rounds: list[tuple[float, bool]]) -> tuple[float, bool]:
    """Return (seconds, whether the machine was quiet) for several rounds of one operation.

    The seconds are the median of the rounds on a quiet machine. If there was no such round, they
    are the minimum of all rounds.
    """
    quiet = [seconds for seconds, was_quiet in rounds if was_quiet]
    if quiet:
        return statistics.median(quiet), True
    return min(seconds for seconds, _ in rounds), False


def _dense_matrices(model: ExpertModel) -> dict[str, TensorInfo]:
    """Return the descriptions of all matrices of products except the experts, by name.

    A matrix that several files of the model contain is returned once.
    """
    found: dict[str, TensorInfo] = {}
    for part in model.parts:
        for info in part.tensors.values():
            layer = layer_of(info.name)
            proper = layer is None or layer < model.hparams.routed_blocks
            # A routing table is looked up, not multiplied.
            is_dense = parse_expert_name(info.name) is None and info.type is not GGMLType.I32
            if len(info.shape) == 2 and proper and is_dense:
                found.setdefault(info.name, info)
    return found


def _output_matrix(tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the output matrix among dense matrices, or the embeddings that a model uses as one."""
    return tensors.get(OUTPUT) or tensors.get(EMBEDDINGS)


def _timed_product(matrix: TensorInfo, n_rows: int) -> Product:
    """Return the product that is timed for a dense matrix: the matrix with at most 4,096 rows."""
    n_in, n_out = matrix.shape[:2]
    return Product(matrix.type, n_in, min(n_out, _DENSE_ROWS), n_rows)
