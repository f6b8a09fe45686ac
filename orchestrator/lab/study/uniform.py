"""Uniform types that fit whole: every expert in one type, made from the best tier of a model. They
are the rival of every mix of tiers, in as many bytes of memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gguf_tools.errors import QuantizeError
from gguf_tools.experts import ExpertModel
from gguf_tools.experts.pairing import check_same
from gguf_tools.file.layout import (
    IMPORTANCE_TYPES,
    KEY_QUANTIZATION,
    GGMLType,
    bits_per_weight,
    fitting_type,
)
from gguf_tools.file.reader import metadata_value, one_line
from gguf_tools.pack import pack
from gguf_tools.quantize.tiers import parse_types
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.calibrate.capture import spill_folder
from orchestrator.lab.calibrate.methods import IMATRIX, RTN, Method, open_quantizer
from orchestrator.lab.eval.run import EvalOptions
from orchestrator.memory.footprint import model_shape
from orchestrator.runtime.load import Progress

# What is tried where nothing was asked for: types that take seconds to make. The IQ types take
# ten times as long.
USUAL = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
NONE = "none"


@dataclass(frozen=True, slots=True)
class UniformFile:
    """One uniform type as a file. method: how it was quantized, "" where the file does not say.
    n_bytes: of its experts, which is what they take in memory where everything fits; slot_bytes:
    what their slots would take; bits: a weight of theirs, the mean."""

    tier: str
    method: str
    path: Path
    n_bytes: int
    slot_bytes: int
    bits: float

    @property
    def label(self) -> str:
        return f"{self.tier}, {self.method}" if self.method else self.tier


class UniformTypes:
    """The uniform types to compare with: made one after the other in a temporary folder, each gone
    before the next one is made; or the files that were given in their place."""

    def __init__(self, config: Config, options: EvalOptions) -> None:
        """Raises ConfigError for types that cannot be made, MismatchError for files of another
        model."""
        self._model, self._calib, self._threads = config.model, options.calib, config.threads
        asked = USUAL if options.uniform is None else options.uniform
        asked = () if asked == (NONE,) else asked
        self._files = [Path(name) for name in asked if name.endswith(".gguf")]
        with ExpertModel.open(self._model) as model:
            tiers = {tier.name for tier in model.tiers}
            shapes = [shape for layer in model.shapes for shape in layer if shape is not None]
            types = self._types(model, [name for name in asked if not name.endswith(".gguf")])
            if options.uniform is None:
                # Those that are smaller than the best tier, and that all experts can have.
                types = [
                    each
                    for each in types
                    if bits_per_weight(each) < model.tiers[0].bpw
                    and all(fitting_type(each, length) == each for length, _ in shapes)
                ]
            self._n_weights = model.n_expert * sum(length * rows for length, rows in shapes)
            bits = max(map(bits_per_weight, types), default=0.0)
            self._largest = model.dense_bytes + int(self._n_weights * bits / 8)
            for path in self._files:
                with ExpertModel.open(path) as other:
                    check_same(model, other)
        self._kinds: list[tuple[GGMLType, str]] = []
        for each in types:
            # A tier of the model itself is not made again.
            if each not in IMPORTANCE_TYPES and each.tier_name not in tiers:
                self._kinds.append((each, RTN))
            if self._calib is not None:
                self._kinds.append((each, IMATRIX))

    def _types(self, model: ExpertModel, names: list[str]) -> list[GGMLType]:
        """The smallest first."""
        try:
            types = parse_types(names, importance=True)
        except QuantizeError as error:
            raise ConfigError(f"--uniform: {error}") from error
        needy = [each.tier_name for each in types if each in IMPORTANCE_TYPES]
        if needy and self._calib is None:
            raise ConfigError(
                f"--uniform {needy[0]} needs an importance matrix: give --calib TEXT, a text to "
                f"calibrate on"
            )
        return sorted(types, key=bits_per_weight)

    @property
    def n_files(self) -> int:
        """How many there will be."""
        return len(self._files) + len(self._kinds)

    def cost(self) -> str | None:
        """What making them takes, in a sentence; None where nothing is made."""
        if not self._kinds:
            return None
        calibrated = f"{self._calib} is read once, then " if self._calib else ""
        types = ", ".join(dict.fromkeys(each.tier_name for each, _ in self._kinds))
        return (
            f"--uniform: {calibrated}{self._n_weights / 1e6:,.0f} million weights are quantized "
            f"{len(self._kinds)} times ({types}), one file at a time of at most "
            f"{format_size(self._largest)} in {spill_folder()}. --uniform none leaves it out."
        )

    def files(self, report: Progress) -> Iterator[UniformFile]:
        """Each of them, valid until the next one is asked for.

        Raises ConfigError where the folder has no room, QuantizeError as pack does.
        """
        for path in self._files:
            yield _read(path)
        if not self._kinds:
            return
        free = shutil.disk_usage(spill_folder()).free
        if self._largest > free:
            raise ConfigError(
                f"--uniform: a file takes up to {format_size(self._largest)} in "
                f"{spill_folder()}, where {format_size(free)} are free: set TMPDIR to another "
                f"folder, or give --uniform none"
            )
        with ExitStack() as stack:
            importance = None
            if self._calib is not None:
                method = Method(IMATRIX, self._calib, threads=self._threads)
                reading = partial(report, "Calibrating")
                importance = stack.enter_context(
                    open_quantizer(method, self._model, reading, lambda note: None)
                )
            for kind, how in self._kinds:
                with tempfile.TemporaryDirectory(dir=spill_folder()) as folder:
                    path = Path(folder) / f"{kind.tier_name}.gguf"
                    pack(
                        self._model,
                        path,
                        [kind.tier_name],
                        quantizer=importance if how == IMATRIX else None,
                        progress=partial(report, f"Packing {kind.tier_name}, {how}"),
                        threads=self._threads,
                    )
                    yield _read(path)


def _read(path: Path) -> UniformFile:
    with ExpertModel.open(path) as model:
        return _described(model, 0)


def _described(model: ExpertModel, tier: int) -> UniformFile:
    """A tier of a model, as if it were all of it."""
    stored = next(kind[tier] for kind in model.slices[0] if kind and kind[tier])
    part = model.parts[stored.file_index if stored else 0]
    said = one_line(metadata_value(part, KEY_QUANTIZATION, str, "")).split(",")[0]
    method, found = RTN if said == "ggml" else said, model.tiers[tier]
    sizes = model.tier_bytes[tier], model_shape(model, (tier,)).all_slot_bytes()
    return UniformFile(found.name, method, part.path, *sizes, found.bpw)


def tiers_of(config: Config) -> dict[str, UniformFile]:
    """Each tier of a model as a uniform type, by name."""
    with ExpertModel.open(config.model, config.low) as model:
        found = (_described(model, tier) for tier in range(len(model.tiers)))
        return {each.tier: each for each in found}
