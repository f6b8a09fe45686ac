"""What an expert's product costs in each layout of its weights, on this processor.

    python tests/layouts.py [--library FOLDER] [--rounds 12]

It measures upstream's plain kernels, its repacked gemv and gemm, its tiles over interleaved rows,
and how long changing the layout takes, for each type that upstream repacks on x86. --library: the
folder of another build of ours, for instance one without AVX-512 (tests/best_flags.py says how to
make one).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, help="a folder with libggml-cpu.so")
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()

    sys.path.insert(0, str(HERE))
    from orchestrator.native.llama import Bindings
    from patches.tree import sync_tree
    from patches.upstream import cache_dir, fetch_sdist, locked, read_upstream

    upstream = read_upstream()
    with locked(cache_dir() / "lock"):
        ggml = sync_tree(fetch_sdist(upstream), upstream) / upstream.source / "ggml"
    library = asked.library or Path(Bindings.load().api._lib._name).parent
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "layouts_bench"
        command = ["c++", "-std=c++17", "-O2", "-w"]
        command += [f"-I{ggml / part}" for part in ("include", "src", "src/ggml-cpu")]
        command += [f"-I{HERE / 'patches/native'}"]
        command += [str(HERE / "tests/native/layouts_bench.cpp"), f"-L{library}"]
        command += ["-lggml-cpu", "-lggml-base", f"-Wl,-rpath,{library}", "-o", str(program)]
        subprocess.run(command, check=True)
        # ggml says of each matrix that it repacks it.
        subprocess.run([program, str(asked.rounds)], stderr=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
