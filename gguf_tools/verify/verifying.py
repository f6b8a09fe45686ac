"""Verify a model: collect all problems of its files instead of stopping at the first one."""

import time
from pathlib import Path

from gguf_tools.errors import GGUFError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.parts import open_model
from gguf_tools.file.reader import GGUFFile
from gguf_tools.process import compute_threads
from gguf_tools.progress import Progress
from gguf_tools.quantize.ggml import Ggml, load_ggml
from gguf_tools.verify.blocks import check_blocks
from gguf_tools.verify.report import Problem, VerifyReport
from gguf_tools.verify.structure import foreign_problems, layout_problems
from gguf_tools.verify.tiers import model_problems


def verify(
    path: str | Path,
    low: str | Path | None = None,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    ggml: Ggml | None = None,
) -> VerifyReport:
    """Check all files of a model for damage and inconsistencies, and return a report.

    A file that cannot be parsed is reported as one problem and not checked further. Raises
    GGUFError only if the ggml library cannot be loaded.

    low: a file of the same model in a lower precision, which is verified too.
    progress: called with the finished share, 0 to 1.
    threads: number of threads. Default: the usable cores.
    ggml: the ggml library. Default: that of the installed llama.cpp.
    """
    started = time.monotonic()
    models = [Path(path)] + ([] if low is None else [Path(low)])
    report = VerifyReport([], [])
    opened: list[list[GGUFFile]] = []
    try:
        for each in models:
            try:
                opened.append(open_model(each))
            except GGUFError as error:
                report.files.append(each)
                report.problems.append(Problem(str(error), str(each)))
        for parts in opened:
            report.files += [part.path for part in parts]
            for part in parts:
                report.problems += layout_problems(part)
            report.problems += foreign_problems(parts)
            report.problems += model_problems(parts, report)
        if low is not None and not report.problems:
            try:
                report.tiers = [tier.name for tier in ExpertModel.of_parts(*opened).tiers]
            except GGUFError as error:
                report.problems.append(Problem(str(error), str(models[1])))
        together = [part for parts in opened for part in parts]
        if together:
            check_blocks(together, report, ggml or load_ggml(), compute_threads(threads), progress)
    finally:
        for parts in opened:
            for part in parts:
                part.close()
    report.seconds = time.monotonic() - started
    return report
