"""How a model can run: with managed experts, on llama.cpp's plain path, or not at all.

llama.cpp says so itself: it loads the header, without data, and makes a context. It may end its
process over a header that it did not expect, so that is done in another one: `python -m
orchestrator.support FILE` writes what it found as one JSON line.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import MoeEdgeError, NativeError

MANAGED, PLAIN, NOT = "managed", "plain", "not"
_N_CTX = 256
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Support:
    """runs: MANAGED, PLAIN or NOT. reason: why not more, empty for MANAGED."""

    runs: str
    reason: str

    @property
    def sentence(self) -> str:
        if self.runs == MANAGED:
            return "llama.cpp loads it, and moe-edge can manage its experts"
        if self.runs == PLAIN:
            return f"llama.cpp loads it, on the plain path alone: {self.reason}"
        return f"it cannot run: {self.reason}"


def support_of(path: Path, architecture: str) -> Support | None:
    """How the model of this file and architecture can run. None where llama.cpp cannot be asked,
    as without our build of it."""
    from orchestrator.llama import Bindings

    try:
        managed = Bindings.load().library().managed_architectures()
    except NativeError:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.support", str(path)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
    except subprocess.TimeoutExpired:
        return None
    said = done.stdout.strip().splitlines()
    if done.returncode < 0:
        lines = done.stderr.strip().splitlines() or ["without a word"]
        why = next((line for line in lines if "GGML_ASSERT" in line), lines[-1])
        why = re.sub(r"^\S*/", "", why)  # the folder in which it was compiled
        return Support(NOT, f"llama.cpp ends the process over its header ({why[:200]})")
    if done.returncode or not said:
        return None
    error = json.loads(said[-1])["error"]
    if error:
        return Support(NOT, error.removeprefix(f"{path}: "))
    if architecture in managed:
        return Support(MANAGED, "")
    return Support(
        PLAIN,
        f"moe-edge does not manage experts of the architecture {architecture}, so that all of it "
        f"has to fit the memory (`moe-edge architectures` lists those that it manages)",
    )


def try_load(path: Path) -> None:
    """Loads a model without its data, and makes a context. Raises NativeError with llama.cpp's
    reason."""
    from orchestrator.llama import Bindings, Context, Model

    bindings = Bindings.load()
    model = Model(
        bindings, path, managed=False, use_extra_bufts=False, use_mmap=False, no_data=True
    )
    try:
        Context(
            bindings,
            model,
            n_ctx=_N_CTX,
            n_ubatch=_N_CTX // 8,
            threads=1,
            all_logits=False,
            flash_attention=True,
        ).close()
    finally:
        model.close()


def _main() -> None:
    try:
        try_load(Path(sys.argv[1]))
        error = None
    except MoeEdgeError as caught:
        error = str(caught)
    print(json.dumps({"error": error}))


if __name__ == "__main__":
    _main()
