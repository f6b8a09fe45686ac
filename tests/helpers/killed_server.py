"""`kill -9` of a server with --prompt-cache at random moments, while two clients converse with it.

python tests/helpers/killed_server.py --kills 50 --seed 1

Answers run alone, with --exact. Each answer with its probabilities is compared, bit for bit, with
that of a server that is never killed, keeps nothing on disk, and reads the same parts at once. Each
file that remains after a kill is checked. The files at the end are restored and written again.
Prints one JSON object. The status is 1 if anything is wrong.
"""

import argparse
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.error import HTTPError

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from conversing import WORDS  # noqa: E402
from served import DEMO, serving  # noqa: E402

from orchestrator.runtime.answering import Answering  # noqa: E402
from orchestrator.runtime.prompt_copies import _describe, _is_whole  # noqa: E402
from orchestrator.runtime.runtime import Runtime  # noqa: E402
from orchestrator.serve.settings import options_of  # noqa: E402

TURNS, FEW = 3, 16
OPTIONS = {"policy": "lru", "ram": "300MiB", "ctx": "1024", "cache-ram": "0", "temp": "0"}
GIVEN = ["-m", str(DEMO), "--exact", *(text for k, v in OPTIONS.items() for text in (f"--{k}", v))]


def asked(server, said):
    """Return (the answer with its probabilities, prompt tokens read, prompt tokens reused)."""
    wanted = {"messages": said, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    answer = server.post("/v1/chat/completions", wanted)
    choice, timings = answer["choices"][0], answer["timings"]
    said_so = choice["message"]["content"], choice["logprobs"]
    return said_so, timings["prompt_n"], timings["cache_n"]


def question(number, turn):
    words = random.Random(f"{number}.{turn}").choices(WORDS, k=60)
    return {"role": "user", "content": f"{number}.{turn} {' '.join(words)}?"}


class Load:
    """Two clients, each with one conversation at a time."""

    def __init__(self):
        self.server = None
        self.broken = self.refused = 0
        # By (number of the conversation, turn): (messages, answer, tokens read, tokens reused).
        self.answers = {}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(n,)) for n in range(2)]
        for each in self._threads:
            each.start()

    def end(self):
        self._stop.set()
        for each in self._threads:
            each.join()

    def _talk(self, number):
        said = []
        while not self._stop.is_set():
            turn = len(said) // 2
            if turn == TURNS:
                number, said = number + 2, []
                continue
            server, wanted = self.server, [*said, question(number, turn)]
            if server is None:
                time.sleep(0.01)
                continue
            try:
                answer = asked(server, wanted)
            except HTTPError:
                self.refused += 1
            except (OSError, http.client.HTTPException):
                self.broken += 1
            else:
                self.answers[number, turn] = (wanted, *answer)
                said = [*wanted, {"role": "assistant", "content": answer[0][0]}]


def way_to(answers, number, turn):
    """Return the turns that the server read in sequence before an answer.

    Turns between them were lost.

    A turn is listed twice if a first answer to it was written but did not arrive.
    """
    cached = answers[number, turn][-1]
    known = [n for n in range(turn + 1) if sum(answers[number, n][2:]) <= cached + FEW]
    if turn in known:
        return [*range(turn + 1), turn]
    return [*way_to(answers, number, known[-1]), turn] if known else [turn]


def compared(cache, answers):
    """Count the answers that equal those of a server that is never killed.

    That server reads the same turns.
    """
    found = Counter()
    with serving(cache, *GIVEN) as server:
        at = None
        for number, turn in sorted(answers):
            *before, _ = way = way_to(answers, number, turn)
            if (number, before) != at:
                asked(server, [question(-1, 0)])  # evicts the earlier conversation
                for each in before:
                    asked(server, answers[number, each][0])
            said, answer, n_read, _ = answers[number, turn]
            again, n, _ = asked(server, said)
            same = "same" if again == answer else "OTHER"
            found[same if abs(n - n_read) < FEW else f"{same}, read otherwise"] += 1
            at = number, way
    return found


def written_again(files, to):
    """Count the files whose bytes differ after they are restored and saved."""
    # The context has its full size from the beginning, because no prompt makes it grow here.
    config, _ = options_of({"model": DEMO, "policy": "plain", "ctx": OPTIONS["ctx"]})
    other = 0
    with Runtime.open(config, answering=Answering()) as runtime:
        for path in files:
            with open(path, "rb") as file:
                listed = _describe(file, path)
            assert runtime._native.restore(0, path)
            runtime._native.save(0, to)
            other += path.read_bytes()[: listed.state_end] != to.read_bytes()
    return other


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=2.0, help="Most seconds until a kill.")
    wanted = parser.parse_args()
    moments, begin_s = random.Random(wanted.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        cache, folder = Path(name), Path(name) / "prompts"
        load, incomplete, sentences = Load(), 0, []
        for _ in range(wanted.kills):
            with serving(cache, *GIVEN, "--prompt-cache", str(folder)) as server:
                load.server = server
                time.sleep(moments.uniform(0, wanted.longest))
                load.server = None
                _, text = server.end(signal.SIGKILL)
            sentences += [line for line in text.splitlines() if "damaged" in line]
            files = list(folder.glob("*.prompt"))
            for path in files:
                with open(path, "rb") as file:
                    incomplete += not _is_whole(file)
        load.end()
        found = compared(cache, load.answers)
        other = written_again(files, cache / "again")
    back = [n > 50 for (_, turn), (*_, n) in load.answers.items() if turn]
    said = {
        **{"kills": wanted.kills, "answers": len(load.answers), "broken off": load.broken},
        **{"refused": load.refused, "later turns": len(back), "that came back": sum(back)},
        **{"compared": dict(found), "files at the end": len(files), "incomplete": incomplete},
        **{"said to be damaged": len(sentences), "restored with other bytes": other},
        "seconds": round(time.monotonic() - begin_s),
    }
    print(json.dumps(said))
    raise SystemExit(1 if found["OTHER"] or incomplete or sentences or other or load.refused else 0)


if __name__ == "__main__":
    main()
