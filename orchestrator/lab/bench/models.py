"""The models that benchmarks run: random weights of a known shape, or the demo model."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import BLOCK, row_bytes, type_by_name
from gguf_tools.pack import export
from gguf_tools.synthetic.drawn import DRAWN_TYPES
from gguf_tools.synthetic.weights import BLOCK_TYPES
from gguf_tools.units import format_size
from orchestrator.errors import MoeEdgeError
from orchestrator.lab.bench.options import BenchOptions

HIGH, LOW = "q4_k", "q2_k"
# Types to try as the uniform type of all experts, the largest first.
UNIFORM = ("q6_k", "q5_k", "q4_k", "iq4_xs", "q3_k", "iq3_xxs", "q2_k", "iq2_xs", "iq2_xxs")
# A message announces files that are larger than this before they are written.
LARGE_BYTES = 2**32
# In an installed wheel the models folder is inside the package `orchestrator`. In a checkout it is
# next to it.
_PACKAGE = Path(__file__).resolve().parents[2]
DEMO_FOLDER = (_PACKAGE if (_PACKAGE / "models").is_dir() else _PACKAGE.parent) / "models" / "demo"
DEMO_MODEL = DEMO_FOLDER / "moe-edge-demo.gguf"
DEMO_TEXT = DEMO_FOLDER / "conversations.txt"

Note = Callable[[str], None]


def build_models(options: BenchOptions, tiers: Sequence[str], note: Note) -> list[Path]:
    """Return a model file for each expert type in `tiers`. Missing files are generated.

    File names contain a hash of the generator or of the demo model, so outdated files are never
    used. `note` receives progress messages. Raises MoeEdgeError if the demo model is not installed
    or the disk is full.
    """
    if options.trained:
        for path in (DEMO_MODEL, DEMO_TEXT):
            if not path.is_file():
                raise MoeEdgeError(
                    f"--shape demo needs {path}, which does not exist: choose another --shape"
                )
    missing = [tier for tier in tiers if not _path(options, tier).exists()]
    if missing and not options.trained:
        _check_free_space(options, missing, note)
    for tier in missing:
        _write(options, tier, note)
    return [_path(options, tier) for tier in tiers]


def model_bytes(options: BenchOptions, tiers: Sequence[str]) -> int:
    """Return the total size of several model files with random weights, in bytes.

    The files differ only in the quantization type of their experts.

    - options: the options that select the shape of the model.
    - tiers: the quantization type of each file, such as "q4_k".
    """
    return sum(synthetic.file_bytes(_shape(options), tier) for tier in tiers)


def uniform_tiers(options: BenchOptions) -> tuple[str, ...]:
    """Return the quantization types in which `build_models` can write the benchmark's model.

    All experts in one file have the same type. Types have names such as "q4_k". They are sorted
    from the largest to the smallest.

    - options: the options that select the model.
    """
    if options.trained:
        with ExpertModel.open(DEMO_MODEL) as demo:
            found = [tier.name for tier in demo.tiers]
    else:
        found = [kind.tier_name for kind in (*DRAWN_TYPES, *BLOCK_TYPES)]
    return tuple(tier for tier in UNIFORM if tier in found)


def tier_expert_bytes(model: ExpertModel, tier: str) -> int | None:
    """Return the size in bytes that all experts of a model would have in the type `tier`.

    Returns None if a matrix row is not a whole number of the type's blocks.
    """
    kind = type_by_name(tier)
    shapes = [shape for layer in model.shapes for shape in layer if shape is not None]
    if kind is None or any(shape[0] % BLOCK[kind].weights for shape in shapes):
        return None
    return sum(row_bytes(kind, shape[0]) * shape[1] * model.n_expert for shape in shapes)


def _shape(options: BenchOptions) -> synthetic.Shape:
    shape = synthetic.preset(options.model_name)
    return replace(
        shape,
        n_layer=options.layers or shape.n_layer,
        n_vocab=options.vocab or shape.n_vocab,
    )


def _path(options: BenchOptions, tier: str) -> Path:
    if options.trained:
        sources, stem = [DEMO_MODEL], options.model_name
    else:
        sources = sorted(Path(str(synthetic.__file__)).parent.glob("*.py"))
        layers = "" if options.layers is None else f"-{options.layers}"
        vocab = "" if options.vocab is None else f"-v{options.vocab}"
        same = "-same" if options.same_layers else ""
        stem = f"{options.model_name}{layers}{same}{vocab}-{options.routing}-{options.seed}"
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return options.folder / f"{stem}-{tier}-{digest.hexdigest()[:12]}.gguf"


def _check_free_space(options: BenchOptions, tiers: Sequence[str], note: Note) -> None:
    """Check that the disk has enough free space for the model files to be generated.

    A large size is announced with `note`. Raises MoeEdgeError if the space is too small.
    """
    folder = _path(options, tiers[0]).parent
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    old = (_stale(_path(options, tier)) for tier in tiers)
    free += sum(path.stat().st_size for paths in old for path in paths)
    needed = model_bytes(options, tiers)
    if needed > LARGE_BYTES:
        note(
            f"writing model files of {format_size(needed)} to {folder}, which has "
            f"{format_size(free)} free"
        )
    if needed > free:
        raise MoeEdgeError(
            f"the model needs {format_size(needed)}, and {folder} has {format_size(free)} free: "
            f"delete files, set XDG_CACHE_HOME to a larger disk, or use fewer --layers"
        )


def _stale(path: Path) -> list[Path]:
    """Return the outdated files of the same model, which an earlier generator wrote."""
    stem = path.stem.rpartition("-")[0]
    return [each for each in path.parent.glob(f"{stem}-*.gguf") if each != path]


def _write(options: BenchOptions, tier: str, note: Note) -> None:
    path = _path(options, tier)
    note(f"writing {path}")
    for stale in _stale(path):
        stale.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.trained:
        export(DEMO_MODEL, path, tier)
    else:
        shape = _shape(options)
        synthetic.write(
            path,
            shape,
            tiers=(tier,),
            routing=options.routing,
            seed=options.seed,
            same_layers=options.same_layers,
        )
