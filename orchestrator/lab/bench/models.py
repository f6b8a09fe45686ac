"""The models that a benchmark runs: random weights of a known shape, or the demo model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gguf_tools import synthetic
from gguf_tools.pack import export
from orchestrator.errors import MoeEdgeError
from orchestrator.files import user_folder
from orchestrator.lab.bench.options import BenchOptions

HIGH, LOW = "q4_k", "q2_k"
DEMO_FOLDER = Path(__file__).resolve().parents[3] / "models" / "demo"
DEMO_MODEL = DEMO_FOLDER / "moe-edge-demo.gguf"
DEMO_TEXT = DEMO_FOLDER / "conversations.txt"

Note = Callable[[str], None]


def cache_folder() -> Path:
    """Where generated models are kept between runs."""
    return user_folder("cache") / "bench"


def build_models(options: BenchOptions, note: Note) -> tuple[Path, Path]:
    """The model in the high and in the low precision, written when not there yet.

    The names hold a digest of what they are made from, so that a changed generator or demo
    model never meets old files. Raises MoeEdgeError where the demo model is not installed.
    """
    if options.trained:
        for path in (DEMO_MODEL, DEMO_TEXT):
            if not path.is_file():
                raise MoeEdgeError(f"{path} is not here: choose another --shape")
        sources = [DEMO_MODEL]
        stem = options.model_name
    else:
        sources = sorted(Path(str(synthetic.__file__)).parent.glob("*.py"))
        layers = "" if options.layers is None else f"-{options.layers}"
        stem = f"{options.model_name}{layers}-{options.routing}-{options.seed}"
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    folder = cache_folder()
    paths = []
    for tier in (HIGH, LOW):
        path = folder / f"{stem}-{tier}-{digest.hexdigest()[:12]}.gguf"
        if not path.exists():
            note(f"writing {path}")
            for stale in folder.glob(f"{stem}-{tier}-*.gguf"):
                stale.unlink()
            _write(path, tier, options)
        paths.append(path)
    return paths[0], paths[1]


def _write(path: Path, tier: str, options: BenchOptions) -> None:
    if options.trained:
        path.parent.mkdir(parents=True, exist_ok=True)
        export(DEMO_MODEL, path, tier)
        return
    shape = synthetic.preset(options.model_name)
    if options.layers is not None:
        shape = replace(shape, n_layer=options.layers)
    synthetic.write(path, shape, tiers=(tier,), routing=options.routing, seed=options.seed)
