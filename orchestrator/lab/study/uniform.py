"""Uniform types: files with all experts in one type, made from a model's best tier.

Studies compare precision mixes with them in the same memory.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import (
    KEY_QUANTIZATION,
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
from orchestrator.lab.calibrate.methods import RTN
from orchestrator.plan.footprint import model_shape
from orchestrator.runtime.load import Progress

# Types that take seconds to quantize. The IQ types take ten times as long.
USUAL = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")


@dataclass(frozen=True, slots=True)
class UniformFile:
    """A model file in which all experts have the same quantization type.

    - method: quantization method, "" if the file does not name it.
    - n_bytes: size of all experts.
    - slot_bytes: size of the slots that hold all experts in memory.
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
    """Creates copies of a model in which all experts have the same quantization type.

    They are compared with the model's mixed precisions. The types are common ones that have fewer
    bits than the model's best tier. Each copy is deleted before the next one is created.
    """

    def __init__(self, config: Config) -> None:
        """Choose the quantization types of the copies.

        Types in which the model's own file already stores the experts are left out.
        """
        self._model, self._threads = config.model, config.threads
        with ExpertModel.open(self._model) as model:
            tiers = {tier.name for tier in model.tiers}
            shapes = [shape for layer in model.shapes for shape in layer if shape is not None]
            self._kinds = [
                each
                for each in sorted(parse_types(list(USUAL)), key=bits_per_weight)
                if bits_per_weight(each) < model.tiers[0].bpw
                and each.tier_name not in tiers
                and all(fitting_type(each, length) == each for length, _ in shapes)
            ]
            self._n_weights = model.n_expert * sum(length * rows for length, rows in shapes)
            bits = max(map(bits_per_weight, self._kinds), default=0.0)
            self._largest = model.dense_bytes + int(self._n_weights * bits / 8)

    @property
    def n_files(self) -> int:
        """The number of model copies that `files` creates, one for each quantization type."""
        return len(self._kinds)

    def cost(self) -> str | None:
        """Return a sentence that tells the user the cost of creating copies of the model.

        All experts of a copy have the same quantization type, and the copies are compared with the
        model. The sentence has the number of weights to quantize, and the largest size of a copy.
        Returns None if no copy has to be created.
        """
        if not self._kinds:
            return None
        types = ", ".join(each.tier_name for each in self._kinds)
        return (
            f"For comparison, {self._n_weights / 1e6:,.0f} million weights are quantized to each "
            f"of these types: {types}. Each type needs a temporary file in {spill_folder()}, one "
            f"at a time, of at most {format_size(self._largest)}"
        )

    def files(self, report: Progress) -> Iterator[UniformFile]:
        """Create a copy of the model for each quantization type, and yield its file and properties.

        Each copy is a temporary file, which is deleted before the next copy is created. `report`
        shows the progress. Raises ConfigError if there is too little free space for the file, and
        QuantizeError if the model cannot be quantized to a type.
        """
        free = shutil.disk_usage(spill_folder()).free
        if self._largest > free:
            raise ConfigError(
                f"a temporary copy of the model needs up to {format_size(self._largest)} in "
                f"{spill_folder()}, which has {format_size(free)} free: set TMPDIR to another "
                f"folder"
            )
        for kind in self._kinds:
            with tempfile.TemporaryDirectory(dir=spill_folder()) as folder:
                path = Path(folder) / f"{kind.tier_name}.gguf"
                named = f"Packing {kind.tier_name}"
                progress = partial(report, named)
                pack(self._model, path, [kind.tier_name], progress=progress, threads=self._threads)
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
    """Describe each tier (stored precision) of the model that `config` names.

    The result maps the name of a tier to a UniformFile. It contains the tier's quantization method,
    and the size of all experts in bytes.
    """
    with ExpertModel.open(config.model, config.low) as model:
        found = (_described(model, tier) for tier in range(len(model.tiers)))
        return {each.tier: each for each in found}
