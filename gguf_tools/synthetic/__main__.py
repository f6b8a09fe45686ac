"""Write a Mixture-of-Experts GGUF file with random weights."""

import argparse
import sys
from pathlib import Path

from gguf_tools.errors import GGUFError
from gguf_tools.synthetic.shapes import PRESETS
from gguf_tools.synthetic.writing import ROUTINGS, write


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gguf_tools.synthetic", description=__doc__)
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument(
        "--shape",
        choices=tuple(PRESETS),
        default="olmoe",
        help="model to imitate, with fewer layers (default: %(default)s)",
    )
    parser.add_argument(
        "--tiers",
        default="q4_k",
        help="comma-separated types of the tiers, the best first (default: %(default)s)",
    )
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="uniform",
        help="how often experts are used: all equally, or by a Zipf law (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random weights (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        tiers = tuple(args.tiers.split(","))
        write(args.path, args.shape, tiers=tiers, routing=args.routing, seed=args.seed)
    except (GGUFError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
