"""What a token takes beside other work, against an idle machine.

    python tests/busy.py MODEL.gguf [--other FOLDER --python PYTHON] [--rounds 3]

The loads are busy loops, each from a terminal of its own, and a compiler with four jobs from one
terminal, in turns with none. Each load meets the plain path and the managed path with every expert
in memory, of this checkout and of another one where it is given. The machine has to be idle
otherwise: how many of its cores were busy is shown.

Linux shares cores among terminals (autogroups, or a service's cgroups) first, and then among the
threads of each. So the last row says what a fair share of the cores allows: the better of all
threads at once and of one, whose step is measured in each round, too. That one has a core of its
own and all others are busy, since cores that are threads of one core slow each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paired import HERE, Side

# Threads of each load that want a core, terminal by terminal.
LOADS = {"idle": (), "one loop": (1,), "two loops": (1, 1), "compiler -j4": (4,)}
STEPS = 60
# What the side with one thread meets, and nobody else.
ALONE, OTHERS = "one thread", "others busy"
# A translation unit that keeps a compiler busy for longer than a block takes.
SOURCE = "#include <map>\n#include <regex>\n" + "".join(
    f"struct t{i} {{ std::map<int, std::regex> m; int f() {{ return m.size(); }} }};\n"
    f"int g{i}() {{ return t{i}().f(); }}\n"
    for i in range(400)
)


@contextmanager
def load(name: str) -> Iterator[None]:
    """Other processes that compute, of this niceness, until the block ends."""
    loop = [sys.executable, "-c", "while True: pass"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "unit.cpp"
        source.write_text(SOURCE)
        compiler = f"while true; do c++ -O2 -c {source} -o /dev/null; done"
        commands = {
            "one loop": [loop],
            "two loops": [loop] * 2,
            OTHERS: [loop] * ((os.cpu_count() or 1) - 1),
            "compiler -j4": [["sh", "-c", f"({compiler})&" * 4 + "wait"]],
        }
        running = [
            subprocess.Popen(command, start_new_session=True) for command in commands.get(name, [])
        ]
        try:
            if running:
                time.sleep(1)
            yield
        finally:
            for process in running:
                os.killpg(process.pid, 9)
                process.wait()


def busy_s() -> float:
    """Core seconds that all processes have taken since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def fair_share(load: tuple[int, ...], cores: int) -> float:
    """Cores that one more terminal gets beside a load, where it has a thread for each core."""
    left = float(cores)
    for number, wanted in enumerate(sorted(load)):
        left -= min(wanted, left / (len(load) + 1 - number))
    return left


def bound_ms(idle: float, alone: float, share: float, cores: int) -> float:
    """The least milliseconds of a token with such a share of the cores, where nobody waits for a
    thread that is off its core. idle: with a thread for each core; alone: with one thread, while
    all other cores are busy."""
    return min(idle * cores / min(cores, share), alone / min(1.0, share))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--python", default=sys.executable, help="its Python, with its library")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="without it, as many as find a core")
    asked = parser.parse_args()

    common: dict[str, Any] = {"model": str(asked.model.resolve()), "ctx": 4096, "ubatch": 64}
    common["threads"] = asked.threads
    kinds = {
        "plain": common | {"policy": "plain"},
        "managed": common | {"policy": "lru", "force_managed": True},
    }
    checkouts = {"ours": (HERE, sys.executable)}
    if asked.other:
        checkouts["other"] = (asked.other, asked.python)
    sides = {
        f"{checkout} {kind}": Side(*checkouts[checkout], settings)
        for checkout in checkouts
        for kind, settings in kinds.items()
    }
    sides[ALONE] = Side(*checkouts["ours"], kinds["managed"] | {"threads": 1})
    ms: dict[tuple[str, str], list[float]] = {}
    for side in sides.values():
        side.run(STEPS, 0)
    for number in range(asked.rounds):
        for name in (*LOADS, OTHERS):
            for which, side in sides.items():
                if (which == ALONE) != (name == OTHERS):
                    continue
                with load(name):
                    before, start = busy_s(), time.perf_counter()
                    times = side.run(STEPS, 0)
                    cores = (busy_s() - before) / (time.perf_counter() - start)
                ms.setdefault((which, name), []).append(statistics.mean(times))
                print(
                    f"{number + 1} {name:13} {which:14} {ms[which, name][-1]:7.1f} ms a token,"
                    f" {cores:.2f} cores busy",
                    flush=True,
                )
    for side in sides.values():
        side.close()
    print(f"\n{'ms a token (over idle)':22}" + "".join(f"{name:>18}" for name in LOADS))

    def show(which: str, found: dict[str, float]) -> None:
        cells = (f"{value:9.1f} ({value / found['idle']:5.2f})" for value in found.values())
        print(f"{which:22}" + "".join(f"{cell:>18}" for cell in cells))

    median = {key: statistics.median(values) for key, values in ms.items()}
    for which in [each for each in sides if each != ALONE]:
        show(which, {name: median[which, name] for name in LOADS})
    cores, idle = os.cpu_count() or 1, median["ours managed", "idle"]
    alone = median[ALONE, OTHERS]
    shares = {name: fair_share(load, cores) for name, load in LOADS.items()}
    show("fair share", {name: bound_ms(idle, alone, each, cores) for name, each in shares.items()})
    print(f"one thread, all other cores busy: {alone:.1f} ms")


if __name__ == "__main__":
    main()
