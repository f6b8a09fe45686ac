"""`make gpu-check EMULATED=1`, killed at random moments, then to its end: what was done is kept.

    python tests/cut_off.py --times 10 --report /tmp/gpu-report.md

Each call is killed between --least and --most seconds behind its start. Behind each, every step
that had ended has to be in the report, and none of them may be lost later. A step that was cut off
twice is left aside, as on a GPU that it may have ended. Prints a line a kill, and in the end how
many steps there are of each outcome; status 1 where something was lost or failed.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from patches.gpu_check import Folder  # noqa: E402 - the checkout's own


def call(report: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "patches/tool.py", "gpu-check", "--emulated"]
    return subprocess.Popen(
        [*command, "--report", str(report)], cwd=REPO, stdout=subprocess.DEVNULL
    )


def lost(report: Path, known: set[str]) -> list[str]:
    """Steps that had ended and are no longer known, or that the report lacks."""
    text = report.read_text() if report.exists() else ""
    kept = {each.name for each in Folder(report).outcomes()}
    return [name for name in known if name not in kept or f"| {name} |" not in text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--least", type=float, default=60.0)
    parser.add_argument("--most", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"))
    options = parser.parse_args()
    chance, known = random.Random(options.seed), set[str]()
    for number in range(1, options.times + 1):
        process = call(options.report)
        time.sleep(chance.uniform(options.least, options.most))
        if process.poll() is not None:
            print("the call came to its own end")
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        gone = lost(options.report, known)
        ended = {each.name for each in Folder(options.report).outcomes()}
        print(
            f"kill {number}: {len(ended)} steps have ended, {len(ended - known)} more", flush=True
        )
        if gone:
            print(f"lost: {', '.join(gone)}")
            return 1
        # what ended as the call was killed is in the report of the next one
        known = ended
    status = call(options.report).wait()
    gone = lost(options.report, known)
    print(dict(Counter(each.outcome for each in Folder(options.report).outcomes())))
    print(f"lost: {', '.join(gone) or 'nothing'}")
    return 1 if gone else status


if __name__ == "__main__":
    sys.exit(main())
