"""`python -m tests.native.cuda.emulation` prints the path of the emulated GPU's libggml-cuda.so.

The library has all sources that a model needs. Missing objects are compiled.
"""

import sys
from pathlib import Path

from orchestrator.native.llama import Bindings
from patches import tree
from patches.upstream import cache_dir, cached_sdist, locked, read_upstream

from . import build


def main() -> None:
    compiler, upstream = build.find_compiler(), read_upstream()
    sdist = cached_sdist(upstream)
    if compiler is None or sdist is None:
        sys.exit("needs g++, nm, and upstream's source in the cache: run `make build`")
    with locked(cache_dir() / "lock"):
        llama = tree.sync_tree(sdist, upstream) / upstream.source
    libraries = Path(Bindings.load().api._lib._name).parent
    sources = [*build.CORE, *build.mmq_instances(build.MODEL_TYPES), *build.MODEL_SOURCES]
    store = cache_dir() / "emulation"
    print(build.build_backend(compiler, build.read_tree(llama), llama, libraries, sources, store))


if __name__ == "__main__":
    main()
