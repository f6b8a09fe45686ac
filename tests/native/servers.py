"""llama.cpp's server core on the demo model in this process, and requests to it."""

import json
from contextlib import contextmanager

from served import DEMO, library_path

from orchestrator.config import Config
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.bodies import Words
from orchestrator.serve.served import answering
from orchestrator.serve.settings import ServeSettings

from .conftest import HANG_S

MIB = 1 << 20
PROMPT = "<|im_start|>user\nTell me about Norway.<|im_end|>\n<|im_start|>assistant\n"


def config(**settings):
    return Config.build(**({"model": DEMO, "ctx": 512, "threads": 1, "ubatch": 64} | settings))


def how(made, parallel=1, template=None):
    """Return the server's answering settings with `parallel` sequences."""
    settings = ServeSettings(parallel=parallel, chat_template=template)
    return answering(made, settings, Words("gpt2", ""), "")


def server_request(made, parallel=1):
    return how(made, parallel).request(made)


@contextmanager
def serving(parallel=1, template=None, note=lambda _sentence: None, **settings):
    """Open the runtime of a server. note: receives the sentences of the server's log."""
    made = config(**settings)
    library_path()
    with Runtime.open(made, answering=how(made, parallel, template), say=note) as runtime:
        yield runtime


def posted(runtime, route, sequences=(), forget=(), **data):
    """Submit a request and return its running answer."""
    return runtime.submit(json.dumps(data).encode(), route, sequences, None, forget)


def whole(answer):
    """Wait for the end of an answer. Return (status, all its bytes), or raise its error."""
    text, is_all = b"", False
    while not is_all:
        assert answer.has_ended or answer.wait(HANG_S), "timed out: the answer has not ended"
        more, is_all = answer.take()
        text += more
    answer.close()
    if answer.error is not None:
        raise answer.error
    return answer.status, text


def ask(runtime, route, **data):
    """Post one request. Return (status, body); the body of a stream is the list of its events."""
    answer = posted(runtime, route, **data)
    status, text = whole(answer)
    if not answer.is_stream:
        return status, json.loads(text)
    lines = text.decode().splitlines()
    return status, [line.removeprefix("data: ") for line in lines if line]


def answered(runtime, route="/v1/completions", **data):
    """Post a greedy request that must succeed, and return its body."""
    status, body = ask(runtime, route, **({"temperature": 0} | data))
    assert status == 200, body
    answer = body
    return answer


def broken(*_):
    """Replacement of a policy's method that always fails."""
    raise RuntimeError("no idea")
