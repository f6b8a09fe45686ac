"""Compare models with a dense one: `python -m models.real.judge FILE --dense F16.gguf --data DIR`.

Every model reads the same windows on llama.cpp's own path, each window in one step. The
results are the KL divergence from the dense model in nats per token, the share of tokens with the
same most likely token, and the relative perplexity. All have 95 % intervals over documents.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.columns import aligned
from gguf_tools.process import compute_threads
from models.real.bootstrap import Values, interval
from models.real.command import reporting_errors
from models.real.text import JUDGED, WINDOW, judged_documents, judged_windows
from orchestrator.lab.observe import Observer, observe

# Limits of --equal: maximum KL divergence in nats per token, and minimum share of tokens with the
# same most likely token.
MOST_KL, LEAST_SAME = 1e-5, 0.999


@dataclass(frozen=True, slots=True)
class Tokens:
    """Scores of the n scored tokens of a text by one model, each [n].

    nll: negative log-likelihood in nats. kl: KL divergence from the dense model in nats. same: 1 if
        the most likely token is that of the dense model, else 0.
    """

    nll: Values
    kl: Values
    same: Values


def log_softmax(logits: npt.NDArray[np.float32]) -> Values:
    """Return the log-probabilities [n, n_vocab] of logits."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def compare(
    dense: Path,
    others: Sequence[Path],
    windows: Sequence[Sequence[int]],
    threads: int | None = None,
) -> tuple[Values, list[Tokens]]:
    """Compare models with a dense model on a text that is cut into windows.

    Returns the dense model's negative log-likelihood of each token, and the scores of each other
    model. The first token of a window has no score. Raises NativeError if a model cannot be
    evaluated.
    """
    threads = compute_threads(threads)
    length = max(map(len, windows))
    base: list[Values] = []
    found: list[list[tuple[Values, Values, npt.NDArray[np.bool_]]]] = [[] for _ in others]
    with ExitStack() as stack:
        readers = [
            stack.enter_context(
                observe(path, length, threads, lambda node: False, lambda node: None)
            )
            for path in (dense, *others)
        ]
        for number, window in enumerate(windows):
            reference = _read(readers[0], window)
            target = (np.arange(len(window) - 1), window[1:])
            base.append(-reference[target])
            p = np.exp(reference)
            for reader, parts in zip(readers[1:], found, strict=True):
                other = _read(reader, window)
                kl = (p * (reference - other)).sum(axis=1)
                same = reference.argmax(axis=1) == other.argmax(axis=1)
                parts.append((-other[target], kl, same))
            print(f"\rwindow {number + 1} of {len(windows)}", end="", file=sys.stderr)
        print(file=sys.stderr)
    scores = [
        Tokens(*(np.concatenate(each).astype(np.float64) for each in zip(*parts, strict=True)))
        for parts in found
    ]
    return np.concatenate(base), scores


def _read(reader: Observer, window: Sequence[int]) -> Values:
    """Evaluate a window of n tokens, and return the log-probabilities of all but the first.

    They are [n - 1, n_vocab].
    """
    reader.read(window)
    return log_softmax(reader.logits(len(window))[:-1])


def judge(
    dense: Path,
    others: Sequence[Path],
    data: Path,
    text: str,
    n_tokens: int,
    length: int = WINDOW,
    threads: int | None = None,
) -> dict[str, Any]:
    """Compare models with a dense model on one of the texts in JUDGED. Returns a dict for JSON.

    - data: folder of the text collection. text: name of the text.
    - n_tokens: approximate number of tokens.
    - length: number of tokens that are read of each document.

    Raises MoeEdgeError if a model or the text cannot be read.
    """
    documents = judged_documents(data, text, 64 * n_tokens)
    threads = compute_threads(threads)
    with observe(dense, WINDOW, threads, lambda node: False, lambda node: None) as reader:
        cut = judged_windows(
            lambda each: reader.model.tokenize(each, add_special=True, parse_special=True),
            documents,
            n_tokens,
            length,
            1,
        )
    windows = [window for _, window in cut]
    names = np.repeat([number for number, _ in cut], [len(window) - 1 for window in windows])
    base, scores = compare(dense, others, windows, threads)
    models: dict[str, Any] = {}
    for path, score in zip(others, scores, strict=True):
        models[path.name] = {
            "kl": interval(score.kl, names),
            "same_top": interval(score.same, names),
            "perplexity": float(np.exp(score.nll.mean())),
            "ratio": [float(np.exp(each)) for each in interval(score.nll - base, names)],
        }
    return {
        "text": text,
        "tokens": len(base),
        "documents": len(set(names.tolist())),
        "dense_perplexity": float(np.exp(base.mean())),
        "models": models,
    }


def render(found: dict[str, Any]) -> str:
    """Format the result of `judge` as text."""
    rows = [["model", "perplexity", "ratio (95 %)", "KL from dense (95 %)", "same top token"]]
    rows.append(["dense", f"{found['dense_perplexity']:.2f}", "", "", ""])
    for name, each in found["models"].items():
        ratio, kl = each["ratio"], each["kl"]
        rows.append(
            [
                name,
                f"{each['perplexity']:.2f}",
                f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})",
                f"{kl[0]:.3g} ({kl[1]:.3g} to {kl[2]:.3g})",
                f"{100 * each['same_top'][0]:.2f} %",
            ]
        )
    head = f"{found['text']}: {found['tokens']} tokens of {found['documents']} documents"
    return "\n".join([head, *aligned(rows)])


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 1 after an error, or if a model fails the limits of --equal."""
    parser = argparse.ArgumentParser(prog="python -m models.real.judge", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="models to compare with the dense one")
    parser.add_argument("--dense", type=Path, required=True, help="the dense model in F16")
    parser.add_argument("--data", type=Path, required=True, help="folder of the text collection")
    parser.add_argument("--text", choices=list(JUDGED), nargs="+", default=["wikitext"])
    parser.add_argument(
        "--tokens", type=int, default=2048, help="number of tokens to read of each text"
    )
    parser.add_argument(
        "--window", type=int, default=128, help="number of tokens to read of each document"
    )
    parser.add_argument("--threads", type=int, help="compute threads [default: free cores]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--equal",
        action="store_true",
        help=f"fail if a KL is above {MOST_KL:g} or fewer than {LEAST_SAME:.1%} of the most likely "
        "tokens are the same".replace("%", "%%"),
    )
    args = parser.parse_args(argv)
    equal = True
    for text in args.text:
        found = judge(
            args.dense, args.models, args.data, text, args.tokens, args.window, args.threads
        )
        print(json.dumps(found) if args.json else render(found))
        equal &= all(
            each["kl"][0] <= MOST_KL and each["same_top"][0] >= LEAST_SAME
            for each in found["models"].values()
        )
    if args.equal and not equal:
        print("error: a model is not equal to the dense model", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
