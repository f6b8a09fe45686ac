"""llama.cpp's server on the demo model, in this process, and what tests ask of it."""

import json
from contextlib import closing, contextmanager

from orchestrator.serve.runtime import Backend
from served import DEMO, server_library

from orchestrator.config import Config
from orchestrator.serve.settings import ServeSettings

MIB = 1 << 20
PROMPT = "<|im_start|>user\nTell me about Norway.<|im_end|>\n<|im_start|>assistant\n"


def config(**settings):
    return Config.build(**({"model": DEMO, "ctx": 512, "threads": 1, "ubatch": 64} | settings))


@contextmanager
def serving(parallel=1, template=None, note=lambda _sentence: None, **settings):
    """A runtime that attends. note: gets the sentences for its log."""
    ours = ServeSettings(parallel=parallel, chat_template=template)
    made = Backend(config(**settings), ours, server_library(), lambda *_: None, note=note)
    with closing(made):
        made.attend()
        yield made


def posted(runtime, route, **data):
    return runtime.request(route, json.dumps(data).encode())


def ask(runtime, route, **data):
    """(status, body) of one request; the events of a stream as a list."""
    request = posted(runtime, route, **data)
    status, text = request.whole()
    if not request.is_stream:
        return status, json.loads(text)
    lines = text.decode().splitlines()
    return status, [line.removeprefix("data: ") for line in lines if line]


def answered(runtime, route="/v1/completions", **data):
    """What a request that has to succeed gets; greedy."""
    status, body = ask(runtime, route, **({"temperature": 0} | data))
    assert status == 200, body
    answer = body
    return answer


def broken(*_):
    """In the place of what a policy does."""
    raise RuntimeError("no idea")
