"""llama.cpp's server on the demo model, in this process, and what tests ask of it."""

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
    """How a server with so many places answers with a model's config."""
    settings = ServeSettings(parallel=parallel, chat_template=template)
    return answering(made, settings, Words("gpt2", ""), "")


def server_request(made, parallel=1):
    return how(made, parallel).request(made)


@contextmanager
def serving(parallel=1, template=None, note=lambda _sentence: None, **settings):
    """The runtime of a server. note: gets the sentences for its log."""
    made = config(**settings)
    library_path()
    with Runtime.open(made, answering=how(made, parallel, template), say=note) as runtime:
        yield runtime


def posted(runtime, route, sequences=(), forget=(), **data):
    """The answer to a request, which has begun."""
    return runtime.submit(json.dumps(data).encode(), route, sequences, None, forget)


def whole(answer):
    """(status, all that comes) of an answer, once it has ended. Raises its error."""
    text, is_all = b"", False
    while not is_all:
        assert answer.has_ended or answer.wait(HANG_S), "the answer does not end"
        more, is_all = answer.take()
        text += more
    answer.close()
    if answer.error is not None:
        raise answer.error
    return answer.status, text


def ask(runtime, route, **data):
    """(status, body) of one request; the events of a stream as a list."""
    answer = posted(runtime, route, **data)
    status, text = whole(answer)
    if not answer.is_stream:
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
