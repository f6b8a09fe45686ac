"""Send requests with random fields to every route of a running server.

    python tests/fuzz/fields.py [--model M] [--seconds 3600] [--seed 0] [--key] [--stops 50]

The fields are upstream's declarations (`server-schema.cpp`) and those of the published description
(`/openapi.json`), each with values of its declared type, at its bounds, and of other types. Some
clients disconnect early, and some never read.

Findings about the process are its end, a traceback in its log, and memory above the limit. At the
end of the run, findings are a sequence that is not free, and an exit that takes longer than two
seconds. Findings about an answer are a status of 500, and a higher status without a message in an
error object. Exits with 1 if there was a finding.
"""

import argparse
import contextlib
import json
import random
import re
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from time import monotonic, perf_counter

HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HERE), str(HERE / "tests" / "helpers")]

from served import DEMO, HANG_S, serving

from orchestrator.serve.schemas import PATHS, SCHEMAS
from patches.upstream import cache_dir

CAP = 300 << 20
OPTIONS = ("--ram", str(CAP), "--parallel", "4", "--ctx", "512")
KEY = "a key"
MOST_END_S = 2.0
SENTENCE = rb'"(?:message|error)": ?"[^"]{8,400}"'  # Ollama's errors are not in an object
CLIENTS, MOST_HELD = 6, 12
# A request that succeeds, so that each test changes one thing.
MESSAGES = [{"role": "user", "content": "One two"}]
CHAT, PROMPT = {"messages": MESSAGES, "max_tokens": 4}, {"prompt": "One two", "max_tokens": 4}
VALID = {
    **{"ChatRequest": CHAT, "MessagesRequest": CHAT},
    **{"CompletionRequest": PROMPT, "NativeRequest": PROMPT},
    "ResponsesRequest": {"input": "One two", "max_output_tokens": 4},
    "OllamaChatRequest": {"messages": MESSAGES, "options": {"num_predict": 4}},
    "OllamaGenerateRequest": {"prompt": "One two", "options": {"num_predict": 4}},
    "InfillRequest": {"input_prefix": "One", "input_suffix": "three", "n_predict": 4},
    "TokenizeRequest": {"content": "One two"},
    "DetokenizeRequest": {"tokens": [1, 2, 3]},
    "TemplateRequest": {"messages": MESSAGES},
}
NUMBERS = (0, 1, -1, 2, 5, 20, 21, 64, 10**5, 2**31 - 1, 2**31, 2**32, 2**63, -(2**31), -(2**63))
FLOATS = (0.0, 0.5, 1.0, -0.5, 1e-30, 1e9, 1e308, -1e308)
WORDS = (
    *("", "a", "One", "\ud800", "\x00\x1b[31m\r\n", "\u202e\U0001f600" * 40, "word " * 3_000),
    *("(" * 20_000, "(.*)*(.*)*q~", "^(a|a)*$", "edkypmxt", 'root ::= "a" | "b"', "root ::= root"),
    *("root ::= [a-z]{1,100000}", "root ::= " + "(" * 300 + '"a"' + ")" * 300),
    'root ::= ("a"?){5000}',
)
PATTERNS = ("^a+$", "^(a|b)*c$", "^((((a*)*)*)*)*$", "[", "^")
# A placeholder for nesting that is too deep for Python's JSON encoder.
DEEP = "<deep>"


def nested(depth):
    made = 1
    for _ in range(depth):
        made = [made]
    return made


def schemas(rng):
    """Return a JSON schema that the converter to a grammar must handle."""
    many = {f"p{n}": {"type": "string"} for n in range(rng.choice((3, 40, 2_000)))}
    deep = {"type": "string"}
    for _ in range(rng.choice((2, 60, 200))):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return rng.choice(
        (
            {},
            {"type": "object", "properties": many},
            {"type": "object", "properties": many, "required": list(many)},
            deep,
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "minLength": 1, "maxLength": rng.choice((5, 10**5, 2**31))},
            {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**7},
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}}},
            {"$ref": "http://127.0.0.1:1/x"},
            {"$ref": "file:///etc/passwd"},
            {"anyOf": [{"const": n} for n in range(rng.choice((3, 3_000)))]},
            {"enum": ["x" * 500] * rng.choice((3, 300))},
            {"allOf": [{"type": "object"}, {"type": "string"}]},
            {"type": ["null", "odd"]},
        )
    )


CONSTANTS = (None, True, False)
# A kind is listed as often as its probability requires.
PLAIN = (CONSTANTS, CONSTANTS, NUMBERS, NUMBERS, FLOATS, WORDS, WORDS)


def anything(rng):
    """Return a value of any JSON type. Most are short."""
    few = rng.choice((0, 1, 3))
    kind = rng.choice((*PLAIN, "schema", "list", "object", "deep", "long"))
    if kind == "list":
        return [anything(rng) for _ in range(few)]
    if kind == "object":
        return {rng.choice(WORDS[:6]): anything(rng) for _ in range(few)}
    if kind == "deep":
        return rng.choice((nested(3), nested(100), nested(300), DEEP))
    if kind == "long":
        return [rng.choice((1, "a", [1, -1], {"a": 1}))] * rng.choice((10, 1_000, 50_000))
    return schemas(rng) if kind == "schema" else rng.choice(kind)


def of_kind(rng, kind):
    """Return a value of a type that upstream declares: bool, num, str, nested or json."""
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "num":
        return rng.choice(NUMBERS if rng.random() < 0.6 else FLOATS)
    if kind == "str":
        return rng.choice(WORDS)
    if kind == "nested":
        return {"include_usage": rng.random() < 0.5}
    return anything(rng)


def biases(rng):
    """Return values of `logit_bias`, which has several forms."""
    tokens = [[rng.randrange(300), rng.choice((-100, 5.5, False))] for _ in range(5)]
    many = {str(n): 1 for n in range(rng.choice((3, 50_000)))}
    return [tokens, many, {"word": -1, "1": False}, [["word " * 200, 1]] * rng.choice((3, 3_000))]


def tool(rng, name):
    """Return a tool with the fields of every route's form."""
    function = {"name": name, "parameters": schemas(rng)}
    own = {"input_schema": schemas(rng), "parameters": schemas(rng)}
    return {"type": "function", "name": name, "function": function, **own}


def message(rng):
    parts = [{"type": "text", "text": rng.choice(WORDS)}]
    content = rng.choice((rng.choice(WORDS), None, parts))
    role = rng.choice(("user", "assistant", "system", "tool", "odd", 5))
    return {"role": role, "content": content}


# Fields whose values have their own form: a choice of values, or a function that makes one.
FORMS = {
    "logit_bias": lambda rng: rng.choice(biases(rng)),
    "json_schema": schemas,
    "grammar": WORDS,
    "response_format": lambda rng: {
        "type": rng.choice(("json_object", "json_schema", "text", "odd")),
        "json_schema": {"name": "a", "schema": schemas(rng)},
    },
    "tools": lambda rng: [tool(rng, f"f{n}") for n in range(rng.choice((1, 2, 60)))],
    "tool_choice": (
        *("auto", "required", "none", {"type": "any"}),
        {"type": "function", "function": {"name": "f0"}},
    ),
    "stop": (["a"], ["", "e", "\ud800"], ["x" * 20] * 4_000, " ", [1, None]),
    "samplers": (["top_k", "odd"], "kfypmxt", ["temperature"] * 3_000),
    "messages": lambda rng: [message(rng) for _ in range(rng.choice((0, 1, 3, 400)))],
    "prompt": (
        *(["One", "two"], [[1, 2], [3]], [1, 2, 3], ["One"] * 40, [-1, 2**31], {"a": 1}),
        *WORDS,
    ),
    "n": (1, 2, 4, 5, -1),
    "stream": (True, True, False),
}


def declared(cache):
    """Return each field that upstream's server declares, and its kind.

    cache: has upstream's source.
    """
    found = {}
    for source in sorted(cache.glob("source/*/vendor/llama.cpp/tools/server/server-schema.cpp")):
        text = re.sub(r"(?ms)^#if 0.*?^#endif|//[^\n]*", "", source.read_text())
        for kind, name, rest in re.findall(r'new field_(\w+)\("([^"]+)"(.*?);', text, re.DOTALL):
            found[name] = kind
            found |= dict.fromkeys(re.findall(r'add_alias\("([^"]+)"', rest), kind)
    assert len(found) > 50, "upstream's server is not unpacked: run `make build` once"
    return found


BROKEN = (b"", b"[1]", b"{", b"\xff", b'{"a": NaN}', b"[" * 50_000)


class Requests:
    """Random requests to every path of the published description."""

    def __init__(self, seed):
        self._rng = random.Random(seed)
        self._declared = declared(cache_dir())
        self._paths = []
        for path, methods in PATHS.items():
            for method, operation in methods.items():
                body = operation.get("requestBody")
                if not body:
                    self._paths.append((method.upper(), path, ""))
                    continue
                name = body["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
                self._paths += [(method.upper(), path, name)] * 4

    def next(self):
        """Return (method, path, body)."""
        rng = self._rng
        method, path, name = rng.choice(self._paths)
        if not name:
            return method, path, b""
        if rng.random() < 0.02:
            return method, path, rng.choice(BROKEN)
        data = {**VALID[name]}
        own = list(SCHEMAS[name]["properties"])
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            field = rng.choice(own if rng.random() < 0.4 else list(self._declared))
            if rng.random() < 0.2:
                field = rng.choice(list(FORMS))
            kind = rng.random()
            if kind < 0.2:
                data[field] = anything(rng)
            elif field in FORMS:
                form = FORMS[field]
                data[field] = form(rng) if callable(form) else rng.choice(form)
            else:
                data[field] = of_kind(rng, self._declared.get(field, "json"))
        text = json.dumps(data).replace(json.dumps(DEEP), "[" * 20_000 + "]" * 20_000)
        return method, path, text.encode()


class Fuzz:
    """Concurrent clients, and the results of their requests."""

    def __init__(self, served, seed, key):
        self.served, self.seed, self.key = served, seed, key
        self.statuses = Counter()
        self.findings = []
        self.is_over = False
        self._ended = threading.Event()
        self._threads = []
        self._held = []
        self._asked = {}

    def start(self, clients):
        for number in range(clients):
            thread = threading.Thread(target=self._client, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self):
        self._ended.set()
        for thread in self._threads:
            thread.join(HANG_S)

    def close(self):
        """Close the connections that were left unread."""
        for sock in self._held:
            sock.close()

    def _client(self, number):
        requests, rng = Requests(self.seed + number), random.Random(number)
        while not self._ended.is_set() and self.served.process.poll() is None:
            method, path, body = requests.next()
            self._asked[number] = f"{path} {body[:1500]!r}"
            try:
                status = self._ask(rng, method, path, body)
            except (OSError, ValueError) as error:
                status = type(error).__name__
            self.statuses[status] += 1
            with contextlib.suppress(OSError):
                self._watch()

    def _watch(self):
        """Record the requests at the moment when the process first exceeds the limit."""
        peak = peak_bytes(self.served.process.pid)
        if peak > CAP and not self.is_over:
            self.is_over = True
            self.findings.append(f"peak {peak} bytes of {CAP} in {self.asked()}")

    def asked(self):
        """Return the last request of each client."""
        return "\n    ".join(["", *self._asked.values()])

    def _ask(self, rng, method, path, body):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        if self.key:
            key = rng.choice((KEY,) * 9 + ("wrong",))
            head += rng.choice((f"x-api-key: {key}\r\n", f"Authorization: Bearer {key}\r\n"))
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        with self.served.connected() as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(head.encode() + b"\r\n" + body)
            chance = rng.random()
            if chance < 0.05:
                return "left"
            if chance < 0.1:
                sock.recv(1)
                return "left"
            if chance < 0.11 and len(self._held) < MOST_HELD:
                self._held.append(sock.dup())
                return "held"
            if chance < 0.15:
                self._ended.wait(rng.random())
            said = bytearray()
            while part := sock.recv(1 << 16):
                said += part
        return self._judge(path, body, bytes(said))

    def _judge(self, path, body, said):
        found = re.match(rb"HTTP/1\.1 (\d+)", said)
        if not found:
            return "closed"
        status, text = int(found[1]), said.partition(b"\r\n\r\n")[2]
        if status >= 500 and status != 501 and not re.search(SENTENCE, text):
            self.findings.append(f"{path} {status} {text[:200]!r} to {body[:1500]!r}")
        if status == 500:
            self.findings.append(f"{path} 500 {text[:300]!r} to {body[:1500]!r}")
        return status


def peak_bytes(pid):
    """Return the peak resident memory of a process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found else 0  # the process has ended


def plain(served, key):
    """Return the status of a plain completion, or the error."""
    data = {"prompt": "Spain", "max_tokens": 8, "ignore_eos": True}
    head = {"x-api-key": KEY} if key else {}
    try:
        with contextlib.closing(served.asked("/v1/completions", data, **head)) as connection:
            answer = connection.getresponse()
            answer.read()
            return answer.status
    except (OSError, ValueError, HTTPException) as error:
        return repr(error)


def ended(served, what):
    """End the server by SIGTERM. Return findings about its status, its time, and its log."""
    start = perf_counter()
    status, said = served.end()
    took = perf_counter() - start
    print(f"{what}: {took:.2f} s", flush=True)
    lines = [line for line in said.splitlines() if "Traceback" in line or "\x1b" in line]
    found = [f"the log: {line[:300]!r}" for line in lines]
    if status or took > MOST_END_S:
        found.append(f"{what}: status {status} after {took:.2f} s: {said[-800:]}")
    return found


def fuzz(cache, options, seconds, seed, key):
    """Return the findings of one server.

    At the end it must answer four requests at once and end in time.
    """
    with serving(cache, *options) as served:
        run = Fuzz(served, seed, key)
        run.start(CLIENTS)
        end = monotonic() + seconds
        while monotonic() < end and served.process.poll() is None:
            threading.Event().wait(min(5.0, max(0.0, end - monotonic())))
        run.stop()
        findings = run.findings
        if served.process.poll() is not None:
            status, said = served.end()
            return [*findings, f"it ended with {status} in {run.asked()}: {said[-1500:]}"]
        with ThreadPoolExecutor(4) as pool:
            statuses = list(pool.map(plain, [served] * 4, [key] * 4))
        if statuses != [200] * 4:
            findings.append(f"four plain requests at the end got {statuses}")
        peak = peak_bytes(served.process.pid)
        findings += ended(served, "SIGTERM")
        run.close()
    said = f"{run.statuses.total()} requests, {dict(run.statuses)}"
    print(f"{said}, peak {peak / 2**20:.1f} MiB of {CAP >> 20}", flush=True)
    return findings


def stops(cache, options, times, seed, key):
    """Send SIGTERM at random moments. Each end must be clean and in time."""
    rng, findings = random.Random(seed), []
    for number in range(times):
        with serving(cache, *options) as served:
            run = Fuzz(served, seed + 100 * number, key)
            run.start(CLIENTS)
            threading.Event().wait(rng.uniform(0.0, 6.0))
            findings += ended(served, f"stop {number}")
            run.stop()
            run.close()
            findings += run.findings
    return findings


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", action="store_true", help="the server requires a key")
    parser.add_argument("--stops", type=int, default=0, help="number of runs that end by SIGTERM")
    asked = parser.parse_args()
    options = ["-m", str(asked.model.resolve()), *OPTIONS, *(["--api-key", KEY] * asked.key)]
    work, most = (stops, asked.stops) if asked.stops else (fuzz, asked.seconds)
    with tempfile.TemporaryDirectory() as folder:
        findings = work(Path(folder), options, most, asked.seed, asked.key)
    for finding in findings:
        print("FINDING", finding, flush=True)
    print(f"{len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
