"""Uniform types: files with all experts in one type, made from a model's best tier.

Studies compare precision mixes with them in the same memory.
"""

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
from orchestrator.plan.footprint import model_shape
from orchestrator.runtime.load import Progress

# Default types, which take seconds to quantize. The IQ types take ten times as long.
USUAL = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
NONE = "none"


@dataclass(frozen=True, slots=True)
class UniformFile:
    """A file with all experts in one type.

    - method: quantization method, "" if the file does not name it.
    - n_bytes: size of its experts, which is their memory if everything fits.
    - slot_bytes: memory of their slots.
    - bits: mean bits per expert weight.
    """

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
    """The uniform types to compare with.

    They are created one after another in a temporary folder, and each is deleted before the next.
    Files that the user named are used instead.
    """

    def __init__(self, config: Config, options: EvalOptions) -> None:
        """Choose the types.

        Raises ConfigError for types that cannot be created, MismatchError for files of another
        model.
        """
        self._model, self._calib, self._threads = config.model, options.calib, config.threads
        asked = USUAL if options.uniform is None else options.uniform
        asked = () if asked == (NONE,) else asked
        self._files = [Path(name) for name in asked if name.endswith(".gguf")]
        with ExpertModel.open(self._model) as model:
            tiers = {tier.name for tier in model.tiers}
            shapes = [shape for layer in model.shapes for shape in layer if shape is not None]
            types = self._types(model, [name for name in asked if not name.endswith(".gguf")])
            if options.uniform is None:
                # Keep types that are smaller than the best tier and fit the rows of all experts.
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
            # Tiers of the model itself are not created again.
            if each not in IMPORTANCE_TYPES and each.tier_name not in tiers:
                self._kinds.append((each, RTN))
            if self._calib is not None:
                self._kinds.append((each, IMATRIX))

    def _types(self, model: ExpertModel, names: list[str]) -> list[GGMLType]:
        """Parse the type names. Returns the types, smallest first."""
        try:
            types = parse_types(names, importance=True)
        except QuantizeError as error:
            raise ConfigError(f"--uniform: {error}") from error
        needy = [each.tier_name for each in types if each in IMPORTANCE_TYPES]
        if needy and self._calib is None:
            raise ConfigError(
                f"--uniform {needy[0]} needs an importance matrix: give --calib TEXT, a text "
                f"to calibrate on"
            )
        return sorted(types, key=bits_per_weight)

    @property
    def n_files(self) -> int:
        """Number of files to compare with."""
        return len(self._files) + len(self._kinds)

    def cost(self) -> str | None:
        """Return a sentence about the work of creating the files; None if there is none."""
        if not self._kinds:
            return None
        calibrated = f"{self._calib} is read once, then " if self._calib else ""
        types = ", ".join(dict.fromkeys(each.tier_name for each, _ in self._kinds))
        return (
            f"--uniform: {calibrated}{self._n_weights / 1e6:,.0f} million weights are quantized "
            f"{len(self._kinds)} times ({types}), one file at a time of at most "
            f"{format_size(self._largest)} in {spill_folder()}. --uniform none skips this."
        )

    def files(self, report: Progress) -> Iterator[UniformFile]:
        """Yield each file. It is valid until the next one is requested.

        Raises ConfigError if the folder has too little free space, QuantizeError as pack does.
        """
        for path in self._files:
            yield _read(path)
        if not self._kinds:
            return
        free = shutil.disk_usage(spill_folder()).free
        if self._largest > free:
            raise ConfigError(
                f"--uniform: a file needs up to {format_size(self._largest)} in "
                f"{spill_folder()}, which has {format_size(free)} free: set TMPDIR to another "
                f"folder, or use --uniform none"
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
    """Describe one tier of a model as a uniform type."""
    stored = next(kind[tier] for kind in model.slices[0] if kind and kind[tier])
    part = model.parts[stored.file_index if stored else 0]
    said = one_line(metadata_value(part, KEY_QUANTIZATION, str, "")).split(",")[0]
    method, found = RTN if said == "ggml" else said, model.tiers[tier]
    sizes = model.tier_bytes[tier], model_shape(model, (tier,)).all_slot_bytes()
    return UniformFile(found.name, method, part.path, *sizes, found.bpw)


def tiers_of(config: Config) -> dict[str, UniformFile]:
    """Return each tier of a model as a uniform type, by name."""
    with ExpertModel.open(config.model, config.low) as model:
        found = (_described(model, tier) for tier in range(len(model.tiers)))
        return {each.tier: each for each in found}
