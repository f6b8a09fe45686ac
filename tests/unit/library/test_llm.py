"""`LLM`: answers as the server gives them, scores as the evaluator does, and nothing else."""

import gc
import json
import math
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from command_line import DEMO, python
from tables import cases
from waiting import wait_until

import orchestrator
from orchestrator import (
    LLM,
    BudgetError,
    ClosedError,
    ConfigError,
    GGUFError,
    HubError,
    MoeEdgeError,
    PolicyError,
    record,
)
from orchestrator.lab.eval.judge import Judge
from orchestrator.policy import POLICIES
from orchestrator.policy.base import About
from orchestrator.policy.lru import LRU

RAM = "400MiB"
PARIS = "What is the capital of France?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def llm(library, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # a user folder of its own, as each test has
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        made = LLM(DEMO, RAM, expert_ram="16MiB", policy="lru", temp=0.0, ctx=512)
    with made:
        yield made


def test_a_chat(llm):
    answer = llm.chat(PARIS, max_tokens=12)
    assert answer.text and answer.finish_reason in ("stop", "length")
    assert 0 < answer.tokens <= 12 and answer.prompt_tokens > 0 and not answer.tool_calls
    assert answer.message == {"role": "assistant", "content": answer.text}
    assert answer.openai["object"] == "chat.completion"
    assert answer.openai["timings"]["hit_rate"] is not None  # the costs, as the server has them
    same = llm.chat([{"role": "user", "content": PARIS}], max_tokens=12, seed=3)
    assert same.text == answer.text


def test_a_stream_has_the_text_of_the_whole_answer(llm):
    whole = llm.chat(PARIS, max_tokens=12)
    chunks = list(llm.chat(PARIS, max_tokens=12, stream=True))
    assert "".join(each.text for each in chunks) == whole.text
    assert chunks[-1].openai["timings"]["bytes_read"] >= 0
    assert {each.openai["object"] for each in chunks} == {"chat.completion.chunk"}
    reasons = [each.finish_reason for each in chunks if each.finish_reason]
    assert reasons == [whole.finish_reason]


def test_a_stream_that_is_left(llm):
    with llm.chat(PARIS, stream=True, max_tokens=400, ignore_eos=True) as stream:
        next(stream)
    assert llm.stats.finish == "cancelled" and llm.stats.tokens < 400
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    left = llm.chat(PARIS, stream=True, max_tokens=40)
    assert llm.chat(PARIS, max_tokens=4).tokens == 4  # waits for the unread answer
    assert "".join(each.text for each in left)


def test_a_completion(llm):
    whole = llm.generate("The capital of France is", max_tokens=6, ignore_eos=True)
    assert whole.text and whole.tokens == 6 and whole.openai["object"] == "text_completion"
    tokens = llm.tokenize("The capital of France is")
    assert llm.generate(tokens, max_tokens=6, ignore_eos=True).text == whole.text
    chunks = llm.generate("The capital of France is", max_tokens=6, ignore_eos=True, stream=True)
    assert "".join(each.text for each in chunks) == whole.text
    schema = {"enum": ["red", "green"]}
    assert json.loads(llm.generate("A colour:", schema=schema).text) in ("red", "green")


def test_a_schema_and_a_tool(llm):
    schema = {"type": "object", "properties": {"n": {"enum": [2, 3]}}, "required": ["n"]}
    found = json.loads(llm.chat("How many?", schema=schema, max_tokens=40).text)
    assert found in ({"n": 2}, {"n": 3})
    answer = llm.chat("Weather?", tools=[WEATHER], tool_choice="required", max_tokens=200)
    (call,) = answer.tool_calls
    assert call.name == "weather" and call.arguments["city"] in ("Paris", "Rome")
    said = [
        {"role": "user", "content": "Weather?"},
        answer.message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert llm.chat(said, tools=[WEATHER], max_tokens=4).tokens > 0


def test_tokens(llm):
    text = "The capital of France: Paris, \u00e9t\u00e9."
    assert llm.detokenize(llm.tokenize(text)) == text
    plain = llm.tokenize(text, special=False)
    assert plain == llm.tokenize(text)[-len(plain) :]
    with pytest.raises(ConfigError, match="token -1 does not exist"):
        llm.detokenize([-1])


def test_a_score_is_the_evaluators(llm):
    text = "The capital of France is Paris. It has a tower."
    score = llm.score(text)
    assert "".join(score.texts) == text and len(score.tokens) == len(score.logprobs)
    tokens = llm.tokenize(text)
    with llm._runtime.evaluator() as evaluator:
        logp, _ = Judge(evaluator).continuation(tokens[:1], tokens[1:])
    own = [each for each in score.logprobs if not math.isnan(each)]
    np.testing.assert_allclose(own[-8:], logp[-8:], atol=0.1)  # prefill, and one by one
    assert score.total == pytest.approx(sum(own)) and score.perplexity > 1
    assert llm.score(tokens).logprobs[1:] == pytest.approx(score.logprobs[-len(tokens) + 1 :])


def test_what_is_known(llm):
    assert llm.plan.policy == "lru" and llm.plan.mode.startswith("managed: lru ")
    assert llm.plan.n_ctx == 512 and 0 < llm.plan.expert_bytes <= 16 << 20
    assert llm.plan.ram_bytes == 400 << 20
    llm.chat(PARIS, max_tokens=8)
    assert llm.stats.tokens_per_s > 0 and 0 <= llm.stats.hit_rate <= 1
    assert llm._runtime.config.remember is False


@cases(
    "call, kind, said",
    (lambda m: m.embed("text"), ConfigError, "computes no embeddings"),
    (lambda m: m.chat(PARIS, max_tokns=3), ConfigError, "did you mean 'max_tokens'"),
    (lambda m: m.chat(PARIS, temp=-1.0), ConfigError, "'temp' must be 0.0 to 100.0"),
    (lambda m: m.chat(PARIS, think="maybe"), ConfigError, "'think' must be on or off"),
    (lambda m: m.chat("long " * 3000), ConfigError, "the context holds 512"),
    (lambda m: m.chat([{"role": "user"}, 3]), ConfigError, "messages"),
    (lambda m: m.chat(PARIS, tools=[WEATHER], tool_choice="no"), ConfigError, "tool_choice"),
    (lambda m: m.chat(PARIS, schema={"not": {}}), ConfigError, "schema"),
    (lambda m: m.chat("half of \ud83d"), ConfigError, "has a lone surrogate"),
    (lambda m: m.chat(PARIS, max_tokens=0), ConfigError, "max_tokens must be -1 or a whole number"),
    (lambda m: record("t.npz", DEMO, PARIS), ConfigError, "another model is open in this process"),
    (lambda m: m.chat(PARIS, n=2), ConfigError, "unknown option 'n'"),
    (lambda m: m.generate([-5]), ConfigError, ""),
    (lambda m: m.score(""), ConfigError, "the text is empty"),
    (lambda m: m.score("long " * 3000), ConfigError, "exceeds the available context"),
    (lambda m: LLM(DEMO), ConfigError, "another model is open in this process"),
    (lambda m: LLM(DEMO, "3kiB"), BudgetError, "the smallest --ram that works"),
    (lambda m: LLM(DEMO, "3 apples"), ConfigError, "is not a size"),
    (lambda m: LLM(DEMO, RAM, polcy="lru"), ConfigError, "did you mean 'policy'"),
    (lambda m: LLM(DEMO, RAM, policy="belady"), ConfigError, "or plain, not 'belady'"),
    (lambda m: LLM(DEMO, RAM, policy=int), PolicyError, "is not a policy"),
    (lambda m: LLM("/no/such/model.gguf", RAM), GGUFError, "model.gguf"),
    (lambda m: LLM("hf:only-one-word", RAM), HubError, "write it as hf:OWNER/NAME"),
)
def test_errors(llm, call, kind, said):
    """Each error is one sentence, its class tells what to do, and the model still works."""
    with pytest.raises(kind) as found:
        call(llm)
    assert isinstance(found.value, MoeEdgeError)
    assert said in str(found.value) and "\n" not in str(found.value)
    assert llm.chat(PARIS, max_tokens=2).tokens == 2


class Failing(LRU):
    about = About(
        name="failing", precisions=LRU.precisions, wants=LRU.about.wants, reason="is no good"
    )

    def on_step(self, report):
        raise ZeroDivisionError("it was written so")


@pytest.fixture
def no_policies_left():
    before = set(POLICIES)
    yield
    for name in set(POLICIES) - before:
        del POLICIES[name]


def test_the_error_of_a_policy_is_the_cause(library, no_policies_left):
    with (
        LLM(DEMO, RAM, expert_ram="16MiB", policy=Failing) as llm,
        pytest.raises(PolicyError, match="ZeroDivisionError: it was written so") as found,
    ):
        llm.chat(PARIS, max_tokens=4)
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert found.value.__cause__.__traceback__ is not None


def test_a_closed_model_says_so(library):
    llm = LLM(DEMO, RAM)
    stream = llm.chat(PARIS, stream=True, max_tokens=400, ignore_eos=True)
    next(stream)
    llm.close()
    llm.close()
    stream.close()
    for call in (
        lambda: llm.chat(PARIS),
        lambda: llm.score("a b"),
        lambda: llm.plan,
        lambda: llm.tokenize("a"),
        lambda: llm.detokenize([1]),
    ):
        with pytest.raises(ClosedError, match="this model is closed"):
            call()


def test_a_model_that_is_not_used_any_more_is_freed(library):
    llm = LLM(DEMO, RAM)
    llm.chat(PARIS, max_tokens=2)
    next(llm.chat(PARIS, max_tokens=400, stream=True))
    there, task = weakref.ref(llm), llm._worker._task
    del llm
    gc.collect()
    wait_until(lambda: there() is None)  # after the worker has closed the answer
    task.join(60)
    assert not task.is_alive()


def test_answers_of_many_threads(llm):
    expected = {n: llm.generate(f"Number {n} is", max_tokens=5).text for n in range(4)}
    found = {}

    def ask(n):
        found[n] = llm.generate(f"Number {n} is", max_tokens=5).text
        llm.tokenize("some text")

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == expected


PROGRAM = f"""
import os, signal, sys, threading, time, traceback
from orchestrator import LLM, ClosedError, record
DEMO = {str(DEMO)!r}

def press(*_):
    os.kill(os.getpid(), signal.SIGINT)

def own(number, frame):
    raise KeyboardInterrupt("of the program's own handler")

def soon(call, after_s=0.05):
    timer = threading.Timer(after_s, press)
    timer.start()
    try:
        call()
    except KeyboardInterrupt as error:
        assert "own handler" in str(error), traceback.format_exc()
    else:
        raise AssertionError("it was not interrupted")
    timer.cancel()
"""
INTERRUPTS = """
from orchestrator.runtime.evaluator import Evaluator
signal.signal(signal.SIGINT, own)
others = (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
before = [signal.getsignal(each) for each in others]  # nohup ignores SIGHUP
from orchestrator.library import progress
stage = progress.Bars.stage
def press_once(*_):
    progress.Bars.stage = stage
    press()
progress.Bars.stage = press_once
soon(lambda: LLM(DEMO, "400MiB"), after_s=600)
with LLM(DEMO, "400MiB", ctx=1024, ubatch=4, policy="lru", expert_ram="16MiB") as llm:
    text = "a text of some words, " * 100
    soon(lambda: llm.chat(text, max_tokens=1))
    soon(lambda: llm.chat("hello", max_tokens=3000, ignore_eos=True))
    soon(lambda: list(llm.chat("hello", stream=True, max_tokens=3000, ignore_eos=True)))
    soon(lambda: llm.score(text))
    # An interrupt cancels an evaluation: this one waits until it is cancelled.
    cancelled, cancel, each = threading.Event(), Evaluator.cancel, Evaluator.eval_each
    def noted(self):
        cancel(self)
        cancelled.set()
    def waiting(self, *args, **kwargs):
        press()
        assert cancelled.wait(600)
        return each(self, *args, **kwargs)
    Evaluator.cancel, Evaluator.eval_each = noted, waiting
    soon(lambda: llm.score(text), after_s=600)
    Evaluator.cancel, Evaluator.eval_each = cancel, each
    assert llm.chat("hello", max_tokens=3, ignore_eos=True).tokens == 3
    assert len(llm.score("a few words").tokens) > 1
assert signal.getsignal(signal.SIGINT) is own
assert [signal.getsignal(each) for each in others] == before
assert sys.unraisablehook is sys.__unraisablehook__
"""
FORK = """
llm = LLM(DEMO, "400MiB")
answer = llm.chat("hello", max_tokens=3)
pid = os.fork()
if not pid:
    said = []
    for call in (lambda: llm.chat("hello"), lambda: llm.score("a b"), lambda: llm.plan,
                 lambda: LLM(DEMO, "400MiB"), lambda: record("t.npz", DEMO, "a b")):
        try:
            call()
        except ClosedError as error:
            said.append(str(error))
    llm.close()
    sys.exit(0 if len(said) == 5 and all("fork" in each for each in said) else 1)
assert os.waitpid(pid, 0)[1] == 0
assert llm.chat("hello", max_tokens=3, ignore_eos=True).tokens == 3
print("the parent goes on")
"""
TWO = """
from orchestrator import ConfigError
from orchestrator.library import progress
stage = progress.Bars.stage
told = []
def stage_once(*args):
    try:
        told or LLM(DEMO)
    except ConfigError as error:
        told.append(str(error))
progress.Bars.stage = stage_once
LLM(DEMO).close()  # while it is loaded, a second model needs ram
LLM(DEMO).close()  # a closed model and one that failed do not count
print(told[0][:21])
"""
CLOSE = """
llm = LLM(DEMO, "400MiB")
close = llm._runtime.close
def slow():
    time.sleep(0.5)
    close()
    print("closed at the end")
llm._runtime.close = slow
try:
    threading.Timer(0.1, press).start()
    llm.close()
except KeyboardInterrupt:
    print("interrupted")
"""
CYCLES = """
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])
for n in range(1, 31):
    with LLM(DEMO, "400MiB", **({"policy": "lru", "expert_ram": "16MiB"} if n % 2 else {})) as llm:
        llm.chat("hello", max_tokens=2)
    if n in (10, 30):
        print(rss())
"""
LEFT = """
llm = LLM(DEMO, "400MiB")
stream = llm.chat("hello", stream=True, max_tokens=3000, ignore_eos=True)
print(next(stream).openai["object"])
"""


@cases(
    "program, said",
    (INTERRUPTS, ""),
    (FORK, "the parent goes on\n"),
    (TWO, "another model is open\n"),
    (CLOSE, "interrupted\nclosed at the end\n"),
    (LEFT, "chat.completion.chunk\n"),
)
def test_in_a_process_of_its_own(library, program, said):
    """Interrupts stop native work; a fork raises one sentence and ends; an open model is closed."""
    done = python("-c", PROGRAM + program)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", said)


def test_nothing_stays(library):
    """Threads, file descriptors and the interval of switching threads.

    A thread that computes opens its kernel statistics when it first waits for others, at most
    twice. Such a file is only left open while its thread lives.
    """
    import os
    import sys

    def there():
        files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists()]
        statistics = [each for each in files if each.endswith("/schedstat")]
        assert all(Path(each).exists() for each in statistics)
        assert all(statistics.count(each) <= 2 for each in statistics)
        return threading.active_count(), len(files) - len(statistics)

    def used():
        with LLM(DEMO, RAM) as llm:
            llm.chat(PARIS, max_tokens=2)
            next(llm.chat(PARIS, max_tokens=2, stream=True))
            llm.score("a few words")
            left = llm.chat(PARIS, max_tokens=400, stream=True)
        del left  # a stream that outlives its model

    used()
    before, interval = there(), sys.getswitchinterval()
    for _ in range(3):
        used()
    assert there() == before and sys.getswitchinterval() == interval


def test_memory_of_closed_models_is_used_again(library):
    """More than a tenth of the memory would be added, if garbage lay between the free blocks."""
    done = python("-c", PROGRAM + CYCLES)
    assert (done.returncode, done.stderr) == (0, "")
    early, late = map(int, done.stdout.split())
    assert late < 1.04 * early


def test_the_command_line_does_not_import_the_library():
    program = (
        "import sys, orchestrator, orchestrator.cli.main\n"
        "print([each for each in sys.modules if 'library' in each or each in ('numpy', 'tqdm')])"
    )
    assert python("-c", program).stdout == "[]\n"
    assert "LLM" in dir(orchestrator)
    with pytest.raises(AttributeError):
        _ = orchestrator.nothing_there
