"""Answers have the form of their path: probabilities, stop reasons, errors, and empty answers."""

import json

import pytest
from asgi import SAID, ask
from fake_served import FakeRequest, FakeServed, app_for, assert_refused
from paths import CHAT, COMPLETIONS, MESSAGES, NATIVE
from tables import cases

from orchestrator.serve.wire import LIMITS


def token(text, logprob):
    other = {"token": "x", "logprob": -3.0, "id": 2, "bytes": [1]}
    own = {"token": text, "logprob": logprob, "id": 1, "bytes": [1]}
    return {**own, "top_logprobs": [own, other]}


def answered(path, data, *answers, status=200):
    """(body that llama.cpp gets, reply to the client, for a stream a list of events) if llama.cpp
    gives these answers."""
    is_stream = bool(data.get("stream"))
    parts = [json.dumps(each).encode() for each in answers]
    if is_stream:
        parts = [b"data: " + part + b"\n\n" for part in parts]
    served = FakeServed(FakeRequest(status, is_stream, parts))
    reply = ask(app_for(served), path, data)
    assert reply.status == status
    events = [line[6:] for line in reply.body.split(b"\n") if line.startswith(b"data: ")]
    got = [json.loads(each) for each in events] if is_stream else reply.json()
    return json.loads(served.asked[0][1]), got


def completion(text, *tokens, finish="length"):
    choice = {"index": 0, "text": text, "logprobs": {"content": list(tokens)}}
    return {"choices": [{**choice, "finish_reason": finish}]}


def test_a_completions_probabilities_have_openais_form():
    two = completion("ab", token("a", -1.0), token("b", -2.0))
    asked, got = answered(COMPLETIONS, {"prompt": "a", "logprobs": 2}, two)
    assert asked["logprobs"] == 2
    assert got["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"a": -1.0, "x": -3.0}, {"b": -2.0, "x": -3.0}],
        "text_offset": [0, 1],
    }
    asked, got = answered(COMPLETIONS, {"prompt": "a", "logprobs": 0}, two)
    assert asked["logprobs"] == 1 and got["choices"][0]["logprobs"]["top_logprobs"] is None


def test_offsets_go_on_through_a_stream():
    parts = [completion("ab", token("ab", -1.0)), completion("c", token("c", -1.0))]
    _, got = answered(COMPLETIONS, {"prompt": "a", "logprobs": 1, "stream": True}, *parts)
    assert [each["choices"][0]["logprobs"]["text_offset"] for each in got] == [[0], [2]]


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 0}])
def test_zero_top_logprobs_give_no_alternatives(more):
    answer = {"choices": [{"index": 0, "logprobs": {"content": [token("a", -1.0)]}}]}
    asked, got = answered(CHAT, {"messages": SAID, "logprobs": True, **more}, answer)
    assert asked["top_logprobs"] == 1
    (only,) = got["choices"][0]["logprobs"]["content"]
    assert only["top_logprobs"] == [] and only["logprob"] == -1.0


FIVE = {"prompt": "a", "logprobs": 5}


@cases(
    "path, data, most",
    (COMPLETIONS, FIVE, 426),
    (COMPLETIONS, FIVE | {"n_predict": -1}, 426),  # llama.cpp reads n_predict first
    (COMPLETIONS, FIVE | {"n_predict": -1, "max_tokens": 9}, 426),
    (COMPLETIONS, FIVE | {"max_completion_tokens": -1, "stream": True}, None),
    (COMPLETIONS, FIVE | {"prompt": ["a", "b"]}, 213),
    (COMPLETIONS, FIVE | {"prompt": [[1, 2], "b", [3]]}, 142),
    (COMPLETIONS, FIVE | {"prompt": [1, 2, 3]}, 426),
    (COMPLETIONS, FIVE | {"prompt": ["a", 2, "b"]}, 426),  # one prompt of texts and tokens
    (COMPLETIONS, FIVE | {"prompt": ["a"] * 64, "stream": True}, 53),
    (COMPLETIONS, FIVE | {"prompt": ["a"] * 64}, 6),
    (NATIVE, {"prompt": "a", "n_probs": 2559}, 1),
)
def test_probabilities_of_all_prompts_have_one_bound(path, data, most):
    """most: limit of tokens for each answer, or None if the context is shorter."""
    asked, _ = answered(path, data, {})
    limits = {name: asked[name] for name in LIMITS if name in asked}
    left = {name: data[name] for name in LIMITS if name in data}
    assert limits == (left if most is None else {"max_tokens": most})


@cases(
    "path, data, says",
    (COMPLETIONS, FIVE | {"max_tokens": 427}, "not enough memory for an answer of 427 tokens"),
    (COMPLETIONS, FIVE | {"prompt": ["a", "b"], "max_tokens": 214}, "at most 213 tokens"),
    (
        NATIVE,
        {"prompt": "a", "n_probs": 2560},
        "the limit is 2559 alternatives for each token of an answer",
    ),
    (
        NATIVE,
        {"prompt": ["a"] * 64, "n_probs": 40},
        "the limit is 39 alternatives for each token of each of 64 answers",
    ),
)
def test_more_probabilities_are_refused(path, data, says):
    assert_refused(app_for(FakeServed()), path, data, says)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_of_zero_tokens_is_empty(is_stream):
    usage = {"completion_tokens": 1, "prompt_tokens": 3, "total_tokens": 4}
    answer = {**completion("b", token("b", -1.0), finish="stop"), "usage": usage}
    data = {"prompt": "a", "max_tokens": 0, "logprobs": 1, "stream": is_stream}
    asked, got = answered(COMPLETIONS, data, answer)
    (last,) = got if is_stream else [got]
    assert asked["max_tokens"] == 1  # llama.cpp cannot read a prompt without generating a token
    nothing = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    assert last["choices"][0] == nothing
    assert last["usage"] == {"completion_tokens": 0, "prompt_tokens": 3, "total_tokens": 3}
    own = {"content": "b", "tokens": [1], "tokens_predicted": 1, "stop_type": "eos"}
    _, got = answered("/completion", {"prompt": "a", "n_predict": 0}, own)
    assert (got["content"], got["tokens_predicted"], got["stop_type"]) == ("", 0, "limit")


@cases(
    "reason, sequence, expected",
    ("end_turn", "###", ("stop_sequence", "###")),
    ("end_turn", "<|im_end|>", ("end_turn", None)),  # the chat template's own stop
    ("tool_use", "###", ("tool_use", "###")),
    ("max_tokens", None, ("max_tokens", None)),
)
def test_a_stop_sequence_is_the_stop_reason(reason, sequence, expected):
    said = {"stop_reason": reason, "stop_sequence": sequence}
    data = {"messages": SAID, "max_tokens": 5, "stop_sequences": ["###"]}
    _, whole = answered(MESSAGES, data, {"type": "message", **said})
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    event = {"type": "message_delta", "delta": said}
    _, (streamed,) = answered(MESSAGES, {**data, "stream": True}, event)
    assert tuple(streamed["delta"].values()) == expected


def test_anthropics_clients_get_their_form_of_errors():
    inner = {"code": 400, "message": "no such role", "type": "invalid_request_error"}
    data = {"messages": SAID, "max_tokens": 5}
    expected = {"type": "error", "error": inner}
    for path in (MESSAGES, "/v1/messages/count_tokens"):
        assert answered(path, data, {"error": inner}, status=400)[1] == expected
    assert answered(MESSAGES, {**data, "stream": True}, inner)[1] == [expected]
    for path in (CHAT, "/v1/chat/completions/input_tokens"):
        assert answered(path, data, {"error": inner}, status=400)[1] == {"error": inner}
