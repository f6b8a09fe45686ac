"""``verify``: every block of every tensor through ggml's own validation, and what the
metadata says of the file against what is there.

Other tools stop at the first thing that is wrong; here each finding is a sentence, and the
search goes on.
"""

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
from gguf_tools.verify.promises import model_problems
from gguf_tools.verify.report import Problem, VerifyReport
from gguf_tools.verify.structure import foreign_problems, layout_problems


def verify(
    path: str | Path,
    low: str | Path | None = None,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    ggml: Ggml | None = None,
) -> VerifyReport:
    """Check all parts of a model. ``low`` is checked as well, and that it is the same model in a
    lower precision. ``progress`` gets the finished share, 0 to 1.

    Findings are in the report. A file whose structure cannot be followed (cut short, counts
    that do not fit, overlapping tensors, a part missing) is one finding that ends the search.
    Raises GGUFError only where ggml cannot be loaded.
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
