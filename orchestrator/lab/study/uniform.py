"""Uniform types that fit whole: every expert in one type, made from the best tier of a model. They
are the rival of every mix of tiers, in as many bytes of memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from gguf_tools.file.reader import metadata_value
from gguf_tools.pack import pack
from gguf_tools.quantize.methods import ExpertQuantizer
from gguf_tools.quantize.tiers import parse_types
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.calibrate.methods import IMATRIX, RTN, Method, open_quantizer
from orchestrator.lab.calibrate.spill import spill_folder
from orchestrator.lab.eval.run import EvalOptions, Report

# What is tried where nothing was asked for: types that take seconds to make. The IQ types take
# ten times as long.
USUAL = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
NONE = "none"


@dataclass(frozen=True, slots=True)
class UniformFile:
    """One uniform type as a file. method: how it was quantized, "" where the file does not say.
    n_bytes: of its experts, which is what they take in memory where everything fits; bits: a weight
    of theirs, the mean."""

    tier: str
    method: str
    path: Path
    n_bytes: int
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
        names = [name for name in asked if not name.endswith(".gguf")]
        self._files = [Path(name) for name in asked if name not in names]
        with ExpertModel.open(self._model) as model:
            self._tiers = {tier.name for tier in model.tiers}
            self._types = self._made_of(model, names, chosen=options.uniform is not None)
            self._dense_bytes = model.dense_bytes
            self._n_weights = _n_weights(model)
            for path in self._files:
                with ExpertModel.open(path) as other:
                    check_same(model, other)

    def _made_of(self, model: ExpertModel, names: list[str], chosen: bool) -> list[GGMLType]:
        """The types to make, the smallest first; of the usual ones those below the best tier."""
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
        if not chosen:
            rows = {shape[0] for layer in model.shapes for shape in layer if shape}
            best = model.tiers[0].bpw
            types = [
                each
                for each in types
                if bits_per_weight(each) < best
                and all(fitting_type(each, row) == each for row in rows)
            ]
        return sorted(types, key=bits_per_weight)

    def _kinds(self) -> list[tuple[GGMLType, str]]:
        """(type, method) of each file to make. A tier of the model itself is not made again."""
        return [
            (each, method)
            for each in self._types
            for method in (RTN, IMATRIX)
            if not (method == RTN and (each in IMPORTANCE_TYPES or each.tier_name in self._tiers))
            and not (method == IMATRIX and self._calib is None)
        ]

    @property
    def n_files(self) -> int:
        """How many there will be."""
        return len(self._files) + len(self._kinds())

    def cost(self) -> str | None:
        """What making them takes, in a sentence; None where nothing is made."""
        kinds = self._kinds()
        if not kinds:
            return None
        calibrated = f"{self._calib} is read once, then " if self._calib else ""
        types = ", ".join(dict.fromkeys(each.tier_name for each, _ in kinds))
        return (
            f"--uniform: {calibrated}{self._n_weights / 1e6:,.0f} million weights are quantized "
            f"{len(kinds)} times ({types}), one file at a time of at most "
            f"{format_size(self._largest())} in {spill_folder()}. --uniform none leaves it out."
        )

    def _largest(self) -> int:
        bits = max(bits_per_weight(each) for each, _ in self._kinds())
        return self._dense_bytes + int(self._n_weights * bits / 8)

    def files(self, report: Report) -> Iterator[UniformFile]:
        """Each of them, valid until the next one is asked for.

        Raises ConfigError where the folder has no room, QuantizeError as pack does.
        """
        for path in self._files:
            with ExpertModel.open(path) as model:
                found = _described(model)
            yield found
        kinds = self._kinds()
        if not kinds:
            return
        free = shutil.disk_usage(spill_folder()).free
        if self._largest() > free:
            raise ConfigError(
                f"--uniform: a file takes up to {format_size(self._largest())} in "
                f"{spill_folder()}, where {format_size(free)} are free: set TMPDIR to another "
                f"folder, or give --uniform none"
            )
        with self._quantizer(report) as importance:
            for ggml_type, method in kinds:
                with tempfile.TemporaryDirectory(dir=spill_folder()) as folder:
                    path = Path(folder) / f"{ggml_type.tier_name}.gguf"
                    pack(
                        self._model,
                        path,
                        [ggml_type.tier_name],
                        quantizer=importance if method == IMATRIX else None,
                        progress=partial(report, f"Packing {ggml_type.tier_name}, {method}"),
                        threads=self._threads,
                    )
                    with ExpertModel.open(path) as model:
                        found = _described(model)
                    yield found

    @contextmanager
    def _quantizer(self, report: Report) -> Iterator[ExpertQuantizer | None]:
        """The method `imatrix` where there is a text to calibrate on."""
        with ExitStack() as stack:
            if self._calib is None:
                yield None
                return
            method = Method(IMATRIX, self._calib, threads=self._threads)
            progress = partial(report, "Calibrating")
            yield stack.enter_context(
                open_quantizer(method, self._model, progress, lambda note: None)
            )


def _n_weights(model: ExpertModel) -> int:
    """Weights of all experts."""
    shapes = (shape for layer in model.shapes for shape in layer if shape is not None)
    return model.n_expert * sum(length * rows for length, rows in shapes)


def _described(model: ExpertModel, tier: int = 0) -> UniformFile:
    """A tier of a model, as if it were all of it."""
    stored = next(kind[tier] for kind in model.slices[0] if kind and kind[tier])
    part = model.parts[stored.file_index if stored else 0]
    said = str(metadata_value(part, KEY_QUANTIZATION, str, "")).split(",")[0]
    method = RTN if said == "ggml" else said
    found = model.tiers[tier]
    return UniformFile(found.name, method, part.path, model.tier_bytes[tier], found.bpw)


def tiers_of(config: Config) -> dict[str, UniformFile]:
    """Each tier of a model as a uniform type, by name."""
    with ExpertModel.open(config.model, config.low) as model:
        found = (_described(model, tier) for tier in range(len(model.tiers)))
        return {each.tier: each for each in found}
