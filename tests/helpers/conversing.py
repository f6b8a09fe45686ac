"""Conversations of several turns with a server or a fleet.

python tests/helpers/conversing.py URL --conversations 200 --turns 5 --at-once 6 [--header '']

Prints one JSON object. found: the fraction of tokens of earlier turns that were reused. whole: the
number of complete answers. broken: incomplete streams. refused: counts by status. ms_token and
ms_first: time of a token after the first, and of the first token of a request (medians).

--answers FILE stores all requests and answers. --again FILE repeats these requests, and with --last
only the last turn of each conversation. Then found is a fraction of all tokens, and other counts
the answers with a different text.
"""

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

HANG_S = 900
WORDS = "boat river stone garden winter lamp bread copper letter bridge horse window".split()


class Talks:
    """All conversations with one server, and their results."""

    def __init__(self, url, answer_tokens, header, longest, system):
        self._where = urlsplit(url)
        self._answer_tokens, self._header, self._longest = answer_tokens, header, longest
        text = " ".join(random.Random(0).choices(WORDS, k=system))
        self._system = [{"role": "system", "content": text}] if system else []
        self._lock = threading.Lock()
        self.earlier = self.found = self.whole = self.broken = 0
        self.refused = Counter()
        self.first_s = []
        self.token_s = []
        self.answers = []

    def talk(self, number, turns):
        """Run one conversation."""
        words, said, before = random.Random(number), list(self._system), 0
        for turn in range(turns):
            text = " ".join(words.choices(WORDS, k=self._longest))
            said.append({"role": "user", "content": f"{number}.{turn}: tell of {text}."})
            read, cached, made, text = self.ask(f"conversation {number}", said)
            with self._lock:
                self.earlier += before
                self.found += min(before, cached)
                self.answers.append((f"conversation {number}", list(said), text))
            before = read + cached + made
            said.append({"role": "assistant", "content": text})

    def again(self, name, said, text):
        """Repeat a request. Return whether the answer differs."""
        read, cached, _, now = self.ask(name, said)
        with self._lock:
            self.earlier += read + cached
            self.found += cached
        return now != text

    def ask(self, name, said):
        """Return (tokens read, tokens reused, tokens made, the answer).

        Repeat a request that breaks off.
        """
        while True:
            answer = self._ask(name, said)
            if answer is not None:
                return answer

    def _ask(self, name, said):
        """Like `ask`, but return None if the request breaks off."""
        head = {"Content-Type": "application/json"}
        if self._header:
            head[self._header] = name
        body = {"messages": said, "stream": True, "temperature": 0}
        body["max_tokens"] = self._answer_tokens
        connection = http.client.HTTPConnection(self._where.hostname, self._where.port, HANG_S)
        begin_s = time.monotonic()
        texts, timings, first_s, is_whole = [], {}, None, False
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
            reply = connection.getresponse()
            if reply.status != 200:
                with self._lock:
                    self.refused[reply.status] += 1
                time.sleep(0.2)
                return None
            for event in _events(reply):
                if event is None:
                    is_whole = True
                    break
                timings = event.get("timings", timings)
                for choice in event.get("choices", ()):
                    text = choice["delta"].get("content")
                    if text:
                        first_s = first_s or time.monotonic()
                        texts.append(text)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        with self._lock:
            if not is_whole or not timings:
                self.broken += 1
                return None
            self.whole += 1
            if first_s is not None and timings["predicted_n"] > 1:
                self.first_s.append(first_s - begin_s)
                self.token_s.append((time.monotonic() - first_s) / (timings["predicted_n"] - 1))
        return timings["prompt_n"], timings["cache_n"], timings["predicted_n"], "".join(texts)


def _events(reply):
    """Yield the events of a stream, and None at its end."""
    for line in reply:
        if line.startswith(b"data: "):
            yield None if line.strip() == b"data: [DONE]" else json.loads(line[6:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="First conversation.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--system", type=int, default=0, help="Words of the system prompt.")
    parser.add_argument("--header", default="x-session-id", help="Its name.")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--last", action="store_true")
    asked = parser.parse_args()
    talks = Talks(asked.url, asked.answer_tokens, asked.header, asked.words, asked.system)
    numbers = range(asked.first, asked.first + asked.conversations)
    kept = json.loads(asked.again.read_text()) if asked.again else []
    if asked.last:
        kept = list({name: (name, *rest) for name, *rest in kept}.values())
    begin_s = time.monotonic()
    with ThreadPoolExecutor(asked.at_once) as pool:
        if asked.again:
            others = list(pool.map(lambda each: talks.again(*each), kept))
        else:
            list(pool.map(lambda n: talks.talk(n, asked.turns), numbers))
    found = {
        "found": round(talks.found / max(1, talks.earlier), 4),
        "earlier": talks.earlier,
        "whole": talks.whole,
        "broken": talks.broken,
        "refused": dict(talks.refused),
        "ms_token": round(1e3 * statistics.median(talks.token_s or [0]), 2),
        "ms_first": round(1e3 * statistics.median(talks.first_s or [0]), 1),
        "seconds": round(time.monotonic() - begin_s, 1),
    }
    if asked.again:
        found["other"] = sum(others)
    if asked.answers:
        asked.answers.write_text(json.dumps(sorted(talks.answers, key=lambda each: each[0])))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
