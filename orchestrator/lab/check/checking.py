"""The steps of a check, in order: the file, the tokenizer and template, and the compared runs."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gguf_tools import built
from gguf_tools.experts import ExpertModel
from gguf_tools.inspect import describe
from gguf_tools.pack import export
from gguf_tools.process import private_bytes, processor_name
from gguf_tools.units import format_least, format_size
from gguf_tools.verify import verify
from orchestrator.config import Config
from orchestrator.errors import GGUFError, MoeEdgeError
from orchestrator.lab.check.budgets import (
    PROMPT_TOKENS,
    CheckJob,
    budgets_of,
    half_way,
    machine_of,
    plain,
    run_job,
    settings_of,
)
from orchestrator.lab.children import Result
from orchestrator.plan.options import notes_of
from orchestrator.plan.records import Machine
from orchestrator.policy import ALLOWED_LOSS
from orchestrator.runtime.support import MANAGED, NOT, support_of

Bar = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of `moe-edge check`, which compares our engine's logits with those of llama.cpp.

    Both decode the same tokens, our engine with several memory budgets.

    - tokens: number of tokens that are decoded with each budget, and with llama.cpp.
    - all_tiers: compare in every lower precision (tier) of the model too.
    - verify: first check the whole model file for damage.
    """

    tokens: int = 64
    all_tiers: bool = False
    verify: bool = True


class ComparedTier(NamedTuple):
    """A precision (tier) in which our results are compared with those of llama.cpp.

    - path: the model file with the tier.
    - packed: whether the file has a better tier too. The tier is then exported to a file of its
      own, because llama.cpp reads only the best tier of a file.
    """

    path: Path
    tier: str
    packed: bool


def examine(config: Config, options: CheckOptions, bar: Bar) -> dict[str, Any]:
    """Check a model and return a JSON-ready report.

    The check passes if the file is valid, every run uses at most its planned memory, and every
    compared run computes exactly the same logits as llama.cpp. `problems` in the report is a list
    of sentences, and `ok` is True if the list is empty. `notes` are remarks that are not problems.
    `bar` is called with (activity, completed fraction or None).

    Raises NativeError if the library is missing, and ConfigError if the device is unknown.
    """
    check = _Check(config, options, bar)
    if check.look_at_the_file():
        check.run()
    return check.report | {"ok": not check.report["problems"]}


class _Check:
    """Performs a check step by step, and collects the report."""

    def __init__(self, config: Config, options: CheckOptions, bar: Bar) -> None:
        # Fix the number of threads, so that the runs do not depend on the machine's load.
        self.config = config.with_changes(threads=config.n_threads)
        self.options, self.bar = options, bar
        self.asked_ram = config.ram
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.machine = machine_of(config)
        self.report: dict[str, Any] = {
            "model": config.model.name,
            "low": config.low.name if config.low else None,
            "machine": describe_machine(self.machine),
            "problems": self.problems,
            "notes": self.notes,
            "file": None,
            "verified": None,
            "managed": None,
            "own_bytes": None,
            "words": None,
            "tiers": [],
            "as_asked": None,
        }
        self._n_runs = self._most_runs = 0

    def look_at_the_file(self) -> bool:
        """Verify the model file and describe it in the report.

        Returns False if the model cannot run at all.
        """
        config, report = self.config, self.report
        if self.options.verify:
            found = verify(
                config.model,
                config.low,
                progress=lambda share: self.bar("Verifying", share),
                threads=config.threads,
            )
            report["verified"] = {
                "ok": not found.problems,
                "findings": len(found.problems),
                "bytes": found.nbytes,
                "seconds": found.seconds,
            }
            for each in found.problems:
                self._problem(each.text)
        try:
            with ExpertModel.open(config.model, config.low) as model:
                report["file"] = describe(model) | {
                    "file": model.path.name,
                    "files": [path.name for path in model.files],
                }
                self.notes += notes_of(config, model)
        except GGUFError as error:
            self._problem(str(error))
            return False
        support = support_of(config.model)
        report["managed"] = support is not None and support.runs == MANAGED
        if not report["managed"]:
            self._problem(
                support.sentence
                if support
                else "it is unknown whether llama.cpp supports the model"
            )
        return support is None or support.runs != NOT

    def run(self) -> None:
        """Perform the runs of the check, and store their results in `report`.

        For each requested precision, the logits of our engine are compared with those of llama.cpp.
        The last run loads the model with the user's own options, as a chat would. It measures
        memory and speed.
        """
        asked = self._as_asked()
        if self.asked_ram is not None:
            # --ram limits this process together with the process of a run.
            own = self.report["own_bytes"] = private_bytes()
            self.config = self.config.with_changes(ram=max(1, self.asked_ram - own))
        subjects = list(self._subjects())
        managed = bool(self.report["managed"])
        self._most_runs = len(subjects) * (1 + managed * (len(half_way()) + 2)) + managed
        with tempfile.TemporaryDirectory(prefix="moe-edge-check-") as folder:
            for subject in subjects:
                self.report["tiers"].append(self._compare(subject, Path(folder)))
            if asked is not None:
                rows = str(Path(folder) / "rows")
                settings = settings_of(asked.with_changes(ram=self.config.ram))
                # A prompt of a whole micro-batch uses all the planned scratch memory.
                chosen = asked.policy != self.config.policy
                job = CheckJob(
                    settings,
                    rows,
                    None,
                    self.options.tokens,
                    chosen=chosen,
                    answers=True,
                    conversations=True,
                )
                self.report["as_asked"] = self._measure("as asked", job)

    def _as_asked(self) -> Config | None:
        """Return the config that a chat would run, or None if that fails.

        Learning is disabled, so that the check's text leaves no trace. If a loss budget is set, a
        child process chooses the policy first, as for a chat with all of --ram. A child process is
        used because planning leaves memory allocated.
        """
        if not self.report["managed"]:
            return None
        config = self.config
        if config.policy is None and config.given(ALLOWED_LOSS) is not None:
            self.bar("Measuring this machine", None)
            settings, own = settings_of(config), private_bytes()
            job = CheckJob(settings, os.devnull, None, 0, other_bytes=own, conversations=True)
            found = run_job(job)
            if "error" in found:
                self._problem(f"as asked: {found['error']}")
                return None
            config = Config.build(**found["settings"])
        return config.with_changes(remember=False)

    def _subjects(self) -> Iterator[ComparedTier]:
        config = self.config
        with ExpertModel.open(config.model) as model:
            names = [tier.name for tier in model.tiers]
        high = config.high_tier or names[0]
        if high.lower() not in names:
            self._problem(
                f"{config.model} has no precision {high}: choose --high-tier from "
                f"{', '.join(names)}"
            )
            return
        wanted = names[names.index(high.lower()) :] if self.options.all_tiers else [high.lower()]
        for name in wanted:
            yield ComparedTier(config.model, name, packed=len(names) > 1 and name != names[0])
        if self.options.all_tiers and config.low is not None:
            with ExpertModel.open(config.low) as model:
                yield ComparedTier(config.low, model.tiers[0].name, packed=False)

    def _compare(self, subject: ComparedTier, folder: Path) -> Result:
        """Run one tier with llama.cpp and with our engine, and return the compared results.

        Temporary files are written to `folder`.
        """
        rows = folder / "plain"
        found: Result = {"tier": subject.tier, "plain": None, "runs": []}
        source = subject.path
        try:
            if subject.packed:
                source = folder / "tier.gguf"
                self.bar(f"Exporting {subject.tier}", None)
                export(subject.path, source, subject.tier)
            config = plain(self.config, source, self.machine)
        except MoeEdgeError as error:
            self._problem(
                f"llama.cpp cannot compute the precision {subject.tier} for comparison: {error}"
            )
            return found
        job = CheckJob(
            settings_of(config),
            str(rows),
            PROMPT_TOKENS,
            self.options.tokens,
            answers=True,
            conversations=True,
        )
        run = found["plain"] = self._measure(f"{subject.tier}, llama.cpp's own path", job)
        reference = None if "error" in run else run
        if self.report["managed"]:
            try:
                self.bar("Planning", None)
                budgets = budgets_of(self.config, subject.path, subject.tier)
            except MoeEdgeError as error:
                self._problem(self._with_own_memory(str(error), getattr(error, "needed_bytes", 0)))
                budgets = []
            for name, config in budgets:
                run = self._against(job, reference, rows, name, config, folder)
                found["runs"].append(run)
        if subject.packed:
            source.unlink(missing_ok=True)
        return found

    def _against(
        self,
        plain: CheckJob,
        reference: Result | None,
        rows: Path,
        name: str,
        config: Config,
        folder: Path,
    ) -> Result:
        """Run one lossless config on the same tokens as llama.cpp, and compare the logits.

        - plain: the job of llama.cpp's run.
        - reference: the result of llama.cpp's run, or None if the run failed.
        - rows: file with llama.cpp's logits.
        - name: name of the memory budget.
        """
        label = f"{config.high_tier}, {name} ({config.policy})"
        job = replace(
            plain,
            settings=settings_of(config),
            rows=str(folder / "managed"),
            answers=False,
            conversations=False,
        )
        if reference is not None:
            job = replace(job, prompt=reference["prompt"], answer=reference["answer"])
        run: Result = {"budget": name} | self._measure(label, job)
        if "error" in run or reference is None:
            return run
        run["compared"] = found = compare_rows(Path(job.rows), rows, reference["n_vocab"])
        if not found["finite"]:
            self._problem(f"{label}: some logits are NaN or infinite")
        if not found["equal"]:
            layer = self._first_layer(plain, job, reference, found["first"], folder)
            self._problem(f"{label}: {describe_difference(found, layer)}")
            found["layer"] = layer
        return run

    def _measure(self, label: str, job: CheckJob) -> Result:
        """Run a job in a child process, and return its result with the used memory.

        `label` names the run in messages. Problems of the run are added to the report.
        """
        self._n_runs += 1
        self.bar(f"Run {self._n_runs} of {self._most_runs}: {label}", None)
        run = run_job(job)
        if "error" in run:
            said = self._with_own_memory(run["error"], run.get("needed_bytes", 0))
            self._problem(f"{label}: {said}")
            return run
        words = run.pop("text", None)
        if words is not None and self.report["words"] is None:
            self.report["words"] = words
            self.problems += words["problems"]
            self.notes += words["notes"]
        used = run["device_bytes" if "device_bytes" in run else "peak_rss"]
        run["used_bytes"] = used
        promised = run["promised_bytes"]
        if promised is not None and used > promised:
            more = format_size(used - promised, up=True)
            self._problem(f"{label}: used {format_size(used)} of memory, {more} more than planned")
        return run

    def _first_layer(
        self, plain: CheckJob, job: CheckJob, reference: Result, row: int, folder: Path
    ) -> tuple[int, float | None] | None:
        """Find the first layer whose expert outputs differ, and their largest difference.

        `row` is the first row of logits that differs. Our engine (`job`) and llama.cpp (`plain`)
        read the tokens before it again. Returns None if this fails or if all layers agree.
        """
        prompt, answer = reference["prompt"], reference["answer"][:row]
        paths = [folder / f"layers-{number}.npz" for number in range(2)]
        for each, path in zip((job, plain), paths, strict=True):
            self.bar("Finding the layer", None)
            asked = replace(
                each, rows=str(path), prompt=prompt, answer=answer, layers=True, answers=False
            )
            run = run_job(asked)
            if "error" in run:
                self._problem(
                    f"cannot find the first layer that differs from llama.cpp's: {run['error']}"
                )
                return None
        return first_layer(*paths)

    def _with_own_memory(self, sentence: str, needed_bytes: int) -> str:
        """Add this process's memory to the minimum in a run's error that --ram is too small.

        `sentence` is the error, and needed_bytes is the minimum of the run. Returns the new error.
        All other errors are returned unchanged. Errors about caps on expert slots or GPU memory are
        among them, because these caps do not include this process.
        """
        asked, own = self.asked_ram, self.report["own_bytes"]
        if not needed_bytes or asked is None or self.config.expert_ram or self.machine.device:
            return sentence
        needed = needed_bytes + own
        return (
            f"--ram {format_size(asked)} is too small. The minimum is {format_least(needed)} "
            f"({format_size(needed_bytes)} for the model, {format_size(own)} for moe-edge check)"
        )

    def _problem(self, sentence: str) -> None:
        """Add a problem to the report, unless the report already has the same sentence.

        The user's folders are removed from the sentence, because reports are shared.
        """
        for path in filter(None, (self.config.model, self.config.low)):
            sentence = sentence.replace(str(path), path.name)
        if sentence not in self.problems:
            self.problems.append(sentence)


def compare_rows(rows: Path, reference: Path, n_vocab: int) -> dict[str, Any]:
    """Compare the logits of our engine with those of llama.cpp, bit by bit.

    `rows` and `reference` are files with the logits of our engine and of llama.cpp, float32 [n,
    n_vocab]. A row has the logits after one token.

    Returns a dict. Its differences are None if they are NaN or infinite.

    - "rows": number of rows of our engine.
    - "equal": whether all bits are equal.
    - "first": index of the first row that differs, or None.
    - "first_error": largest absolute difference in the row "first".
    - "most": largest absolute difference in all rows.
    - "choices": number of rows in which the most likely token differs.
    - "finite": whether all logits of our engine are finite.
    """
    ours, theirs = (
        np.memmap(path, np.float32, "r").reshape(-1, n_vocab) for path in (rows, reference)
    )
    pairs = list(enumerate(zip(ours, theirs, strict=False)))
    differ = [(row, a, b) for row, (a, b) in pairs if a.tobytes() != b.tobytes()]
    first = differ[0][0] if differ else len(pairs) if len(ours) != len(theirs) else None
    errors = [largest(a, b) for _, a, b in differ]
    return {
        "rows": len(ours),
        "equal": first is None,
        "first": first,
        "first_error": errors[0] if errors else 0.0,
        "most": None if None in errors else max((e for e in errors if e is not None), default=0.0),
        "choices": sum(int(a.argmax() != b.argmax()) for _, a, b in differ),
        "finite": all(bool(np.isfinite(a).all()) for _, (a, _) in pairs),
    }


def largest(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return the largest absolute difference of two arrays, or None if it is not finite."""
    error = float(np.abs(a.astype(np.float64) - b).max())
    return error if np.isfinite(error) else None


def first_layer(ours: Path, reference: Path) -> tuple[int, float | None] | None:
    """Compare two files of expert outputs per layer (.npz), bit by bit.

    Returns (first layer that differs, largest absolute difference), or None if all layers agree.
    """
    with np.load(ours) as mine, np.load(reference) as other:
        for name in sorted(set(mine.files) & set(other.files), key=int):
            a, b = mine[name], other[name]
            if a.tobytes() != b.tobytes():
                return int(name), largest(a, b)
    return None


def describe_difference(found: Result, layer: tuple[int, float | None] | None) -> str:
    """Describe where our engine's logits differ from llama.cpp's, and by how much.

    Returns a text for the report.

    - found: the result of compare_rows, which has compared the logits.
    - layer: the first layer whose expert outputs differ, and their largest difference. The
      difference is None if it is not finite. The whole argument is None if no such layer was found.
    """

    def amount(error: float | None) -> str:
        return "NaN or infinite" if error is None else f"{error:.3g}"

    row = found["first"]
    where = "after the prompt" if row == 0 else f"after answer token {row}"
    first, most = amount(found["first_error"]), amount(found["most"])
    text = (
        f"the logits differ from llama.cpp's. The first difference is {where}. Largest difference "
        f"of a logit: {first} at the first different position, {most} at any position. The most "
        f"likely token differs at {found['choices']} of {found['rows']} positions"
    )
    if layer is None:
        return (
            f"{text}. A second run read the tokens up to the first difference again, as many as "
            f"fit in one micro-batch. It did not find the layer that causes the difference"
        )
    number, error = layer[0], amount(layer[1])
    return (
        f"{text}. The first layer whose experts give other results than in llama.cpp is layer "
        f"{number}. The largest difference of these results is {error}"
    )


def describe_machine(machine: Machine) -> dict[str, Any]:
    """Return the versions and the hardware of this machine, for the report."""
    return {
        "versions": {
            "moe-edge": next((each.version for each in distributions(name="moe-edge")), None),
            "llama_cpp_python": built.stamp().get("version"),
        },
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "usable_bytes": machine.usable_bytes,
        "device": machine.device.description if machine.device else None,
        "device_bytes": machine.device.usable_bytes if machine.device else None,
    }
