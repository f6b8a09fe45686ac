"""Renderings of chat templates and parsed answers.

The templates are upstream's, and small ones of the same kinds.
"""

import json
import time

import pytest
from templates import (
    AT_ONCE,
    BEGUN,
    CALLING,
    COLUMNS,
    RESULT,
    RESULTS,
    RIGHT,
    SYSTEM,
    TABLE,
    TOOL,
    USER,
    has_call,
    has_text,
    library,
    outcomes,
    upstream_templates,
)

from orchestrator.runtime.overflow import FILLER, PromptLengths, parts_of

ROWS = json.loads(TABLE.read_text())
GENERATION = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TURNS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "CALLS<|end|>\n{% endfor %}" + GENERATION
)
TAGGED = (
    '{% for call in message.tool_calls or [] %}<call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</call>{% endfor %}'
)
OWN_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zagreb"}}\n</tool_call>'
TAGGED_CALL = OWN_CALL.replace("tool_call>\n", "call>").replace("\n</tool_call>", "</call>")
LISTED = (
    "{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PYTHON_CALL = '<|tool_call_start|>[get_weather(city="Zagreb")]<|tool_call_end|>'

# (template, the model's form of a call, the tools' text in the prompt)
SMALL = {
    "functions as a text": (
        "{% if functions %}{{ 'Functions: ' + functions }}\n{% endif %}"
        + TURNS.replace("CALLS", TAGGED),
        TAGGED_CALL,
        '"name": "get_weather"',
    ),
    "functions as a list": (
        "{% for each in functions or [] %}- {{ each.name }}: {{ each.description }} "
        "{{ each.parameters | tojson }}\n{% endfor %}" + TURNS.replace("CALLS", TAGGED),
        TAGGED_CALL,
        "- get_weather: The weather of a city.",
    ),
    "calls alone": (
        TURNS.replace("CALLS", TAGGED),
        TAGGED_CALL,
        '<call>{"name": "FUNCTION_NAME", "arguments": {"ARGUMENT_NAME": "ARGUMENT_VALUE"}}</call>',
    ),
    "a list of tools alone": (
        LISTED,
        PYTHON_CALL,
        '"name": "get_weather"',
    ),
    "neither": (TURNS.replace("CALLS", ""), OWN_CALL, "For each call write\n<tool_call>\n"),
}


def made_of(template, *cases):
    """Return the server's result for each (request, answers of the model)."""
    asked = [{"request": request, "answers": answers} for request, answers in cases]
    return library().try_template(template, asked)


@pytest.mark.parametrize("name", ROWS)
def test_upstream_template(name):
    """The outcomes of upstream's template equal its row in templates.json."""
    sources = upstream_templates()
    assert outcomes(sources[name], ROWS[name]) == ROWS[name]["outcomes"]


def test_the_table_has_every_template():
    assert ROWS.keys() == upstream_templates().keys()
    assert all(tuple(row["outcomes"]) == COLUMNS for row in ROWS.values())


@pytest.mark.parametrize("name", SMALL)
def test_tools_and_calls_are_shown(name):
    template, call, shown = SMALL[name]
    tools = {"messages": [USER], "tools": [TOOL]}
    plain, asked, forced, after = made_of(
        template,
        ({"messages": [USER]}, ["Hello."]),
        (tools, [call, "Hello."]),
        (tools | {"tool_choice": "required"}, [call, "Hello."]),
        ({"messages": [USER, CALLING, RESULT], "tools": [TOOL]}, []),
    )
    assert "tool" not in plain["prompt"].replace("tool_list", "") and "NAME" not in plain["prompt"]
    assert shown in asked["prompt"] and "The weather of a city." in asked["prompt"]
    has_call(asked["answers"][0])
    has_text(asked["answers"][1], "Hello.")
    assert [each["matches"] for each in forced["answers"]] == [True, False]
    since = after["prompt"].split(USER["content"])[1]
    assert since.index(call) < since.index(RESULT["content"])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be brief."}],
        [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        [CALLING, RESULT],
    ],
    ids=["no user", "content in parts", "begins with a call"],
)
def test_tools_are_described_without_a_plain_message_of_the_user(messages):
    template = SMALL["calls alone"][0]
    (made,) = made_of(template, ({"messages": messages, "tools": [TOOL]}, []))
    assert "The weather of a city." in made["prompt"]


TEXT_OR_CALL = TURNS.replace(
    "{{ message.content or '' }}CALLS",
    "{% if message.tool_calls %}" + TAGGED + "{% else %}{{ message.content }}{% endif %}",
)
ONE_CALL = TURNS.replace("CALLS", TAGGED.replace("or []", "and message.tool_calls[:1] or []"))
REFUSES_TWO = (
    "{% for message in messages if message.tool_calls and message.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endfor %}"
)
ALTERNATES = (
    "{% set seen = namespace(user=false) %}"
    "{% for message in messages if message.role == 'user' or "
    "(message.role == 'assistant' and not message.tool_calls) %}"
    "{% if (message.role == 'user') == seen.user %}{{ raise_exception('in turns') }}{% endif %}"
    "{% set seen.user = not seen.user %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "order"),
    [
        (TURNS.replace("CALLS", TAGGED), "I will look. Zagreb Split rains snows"),
        (TEXT_OR_CALL, "I will look. Zagreb Split rains snows"),
        (ONE_CALL, "I will look. Zagreb rains Split snows"),
        (REFUSES_TWO + TURNS.replace("CALLS", TAGGED), "I will look. Zagreb rains Split snows"),
        # The template leaves out the text, and would refuse two messages.
        (ALTERNATES + TEXT_OR_CALL, "Zagreb Split rains snows"),
    ],
    ids=["all", "text or calls", "one call", "refuses two calls", "text or calls, in turns"],
)
def test_text_and_calls_of_one_message_are_shown(template, order):
    end = [{"role": "assistant", "content": "So it is."}, USER]
    for messages in ([USER, AT_ONCE, *RESULTS], [USER, AT_ONCE, *RESULTS, *end]):
        (made,) = made_of(template, ({"messages": messages, "tools": [TOOL]}, []))
        since = made["prompt"].split(USER["content"])[1]
        places = [since.index(word) for word in order.replace("I will look.", "look").split()]
        assert places == sorted(places)
        assert all(since.count(word) == 1 for word in ("Zagreb", "Split", "rains", "snows"))


@pytest.mark.parametrize(
    "template",
    [SMALL["neither"][0], LISTED, ONE_CALL],
    ids=["our own format", "a list of tools alone", "one call"],
)
def test_calls_take_time_in_proportion_to_their_number(template):
    """Rendering four times as many calls takes less than eight times as long.

    The test compares CPU times, because steps of the template are not counted. Copying all calls
    for each call would take 16 times as long.
    """

    def seconds(n_calls):
        message = {**CALLING, "tool_calls": n_calls * CALLING["tool_calls"]}
        request = {"messages": [USER, message, RESULT], "tools": [TOOL]}
        begin = time.thread_time()
        (made,) = made_of(template, (request, []))
        assert made["prompt"].count("Zagreb") == n_calls
        return time.thread_time() - begin

    few = min(seconds(250) for _ in range(3))
    assert min(seconds(1000) for _ in range(3)) < 8 * few


def test_results_in_another_order_follow_their_calls():
    messages = [USER, AT_ONCE, *reversed(RESULTS)]
    (made,) = made_of(ONE_CALL, ({"messages": messages, "tools": [TOOL]}, []))
    since = made["prompt"].split(USER["content"])[1]
    places = [since.index(word) for word in ("Zagreb", "rains", "Split", "snows")]
    assert places == sorted(places)


# Like GLM's templates: text parts in the user's messages, and results that are strings.
PARTS_OF_THE_USER = TURNS.replace(
    "{{ message.content or '' }}CALLS",
    "{% if message.content is string %}{{ message.content }}{% elif message.role == 'user' %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}" + TAGGED,
)


@pytest.mark.parametrize(
    "template",
    [*(template for template, _, _ in SMALL.values()), PARTS_OF_THE_USER],
    ids=[*SMALL, "parts of the user alone"],
)
def test_all_parts_of_a_text_are_shown(template):
    said = [{"type": "text", "text": text} for text in ("one", "two", "three")]
    messages = [
        {"role": "user", "content": said[:2]},
        {**CALLING, "content": said[:2]},
        {**RESULT, "content": said},
        {"role": "assistant", "content": []},
        {"role": "user", "content": said[2:]},
    ]
    (made,) = made_of(template, ({"messages": messages, "tools": [TOOL]}, []))
    assert made["prompt"].count("one\ntwo") == 3 and made["prompt"].count("two\nthree") == 1


@pytest.mark.parametrize("n_result", [0, 1])
def test_a_call_without_a_result_is_shown(n_result):
    messages = [USER, AT_ONCE, RESULTS[n_result]]
    (made,) = made_of(ONE_CALL, ({"messages": messages, "tools": [TOOL]}, []))
    since = made["prompt"].split(USER["content"])[1]
    assert since.index("Zagreb") < since.index("It ") and since.index("Split") < since.index("It ")


def test_a_template_that_cannot_show_tools_refuses_them():
    template = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    plain, asked = made_of(
        template, ({"messages": [USER]}, []), ({"messages": [USER], "tools": [TOOL]}, [])
    )
    assert plain["prompt"] == str(len(USER["content"]))
    assert "does not show tools to the model: --chat-template" in asked["error"]


@pytest.mark.parametrize("name", ["get-weather.2", "météo", 'say "hello"', "back\\slash"])
@pytest.mark.parametrize("template", SMALL)
def test_tools_of_any_name_are_shown(template, name):
    tool = {**TOOL, "function": {**TOOL["function"], "name": name}}
    (made,) = made_of(SMALL[template][0], ({"messages": [USER], "tools": [tool]}, []))
    assert "The weather of a city." in made["prompt"]


MISTRAL = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '[TOOL_CALLS][{"name": "{{ call.function.name }}", "arguments": '
    '{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}]{% endfor %}'
    "{% if message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}: {{ message.content }}"
    "{% else %}{{ message.content or '' }}{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("given", "result", "shown"),
    [
        ("abcDEF123", "abcDEF123", "abcDEF123"),
        ("call_abcDEF123", "call_abcDEF123", "abcDEF123"),
        ("toolu_01A09q90qw90lq917835lq9", "toolu_01A09q90qw90lq917835lq9", None),
        ("functions.get_weather:0", "functions.get_weather:0", None),
        ("", "", None),
        (None, None, None),
    ],
)
def test_ids_of_other_clients_fit_mistral(given, result, shown):
    call = {key: value for key, value in CALLING["tool_calls"][0].items() if key != "id"}
    call |= {} if given is None else {"id": given}
    after = {key: value for key, value in RESULT.items() if key != "tool_call_id"}
    after |= {} if result is None else {"tool_call_id": result}
    messages = [USER, {**CALLING, "tool_calls": [call]}, after]
    (made,) = made_of(MISTRAL, ({"messages": messages, "tools": [TOOL]}, []))
    since = made["prompt"].split(USER["content"])[1]
    found = since.split('"id": "')[1].split('"')[0]
    assert len(found) == 9 and found.isalnum() and shown in (None, found)
    assert f"[TOOL_RESULTS]{found}: It rains." in since


def test_results_without_ids_belong_to_the_calls_in_their_order():
    calls = [
        {**CALLING["tool_calls"][0], "id": name, "function": {"name": name, "arguments": "{}"}}
        for name in ("first", "second")
    ]
    results = [{"role": "tool", "content": name} for name in ("one", "two")]
    messages = [USER, {**CALLING, "tool_calls": calls}, *results]
    (made,) = made_of(MISTRAL, ({"messages": messages}, []))
    ids = [part.split('"')[0] for part in made["prompt"].split('"id": "')[1:]]
    assert len(set(ids)) == 2
    assert f"{ids[0]}: one" in made["prompt"] and f"{ids[1]}: two" in made["prompt"]


@pytest.mark.parametrize("name", SMALL)
def test_calls_get_ids_of_nine_characters(name):
    template, call, _ = SMALL[name]
    (made,) = made_of(template, ({"messages": [USER], "tools": [TOOL]}, 2 * [call]))
    ids = [answer["message"]["tool_calls"][0]["id"] for answer in made["answers"]]
    assert len(set(ids)) == 2 and all(len(each) == 9 and each.isalnum() for each in ids)


# (template, text before the answer that is continued)
THINKING = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% else %}"
    "<think></think>{% endif %}{% endif %}"
)
CONTINUED = {
    "plain": (TURNS.replace("CALLS", ""), "<|assistant|>"),
    "thinking": (THINKING, "<|assistant|>"),
    "a list of tools alone": (LISTED, "<|im_start|>assistant\n"),
}


@pytest.mark.parametrize("echo", [None, False, True])
@pytest.mark.parametrize("name", CONTINUED)
def test_an_answer_continues_the_last_message(name, echo):
    template, before = CONTINUED[name]
    begun = BEGUN["content"]
    request = {"messages": [USER, BEGUN]} | ({} if echo is None else {"echo": echo})
    explicit = request | {"continue_final_message": True, "add_generation_prompt": False}
    for made in made_of(template, *((each, [" is fine."]) for each in (request, explicit))):
        assert made["prompt"].endswith(before + begun)
        assert made["prompt"].count(begun) == 1
        has_text(made["answers"][0], f"{begun} is fine." if echo else " is fine.")


@pytest.mark.parametrize("begun", ["The weather ", "The weather\n", "  The", "{", "日"])
def test_white_space_and_marks_are_continued_as_they_are(begun):
    said = {"role": "assistant", "content": begun}
    for template, before in CONTINUED.values():
        (made,) = made_of(template, ({"messages": [USER, said]}, ["is fine.", ""]))
        assert made["prompt"].endswith(before + begun)
        has_text(made["answers"][0], "is fine.")
        has_text(made["answers"][1], "")


def test_reasoning_is_continued():
    begun = {"role": "assistant", "content": "", "reasoning_content": "First"}
    answer = [", the sun.</think>It is fine."]
    template = THINKING.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>"
        "{% endif %}{{ message.content }}",
    )
    (made,) = made_of(template, ({"messages": [USER, begun]}, answer))
    assert made["prompt"].endswith("<think>First")
    has_text(made["answers"][0], "It is fine.", ", the sun.")


def test_most_templates_are_right():
    """At least 481 outcomes in the table are right, and the others are known faults."""
    cells = [cell for row in ROWS.values() for cell in row["outcomes"].values()]
    assert all(cell == RIGHT or cell.startswith("known: ") for cell in cells)
    assert sum(cell == RIGHT for cell in cells) >= 481


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_is_as_long_as_its_parts(name):
    """The lengths of the parts decide which of them leave a long conversation."""
    template, answer = upstream_templates()[name], {"role": "assistant", "content": "It rains."}
    messages = [SYSTEM, USER, answer, {**USER, "content": "And tomorrow?"}, answer, USER]

    prompts = PromptLengths()

    def length_of(request):
        (found,) = library().try_template(template, [{"request": json.loads(request)}])
        return len(found["prompt"])

    def count(messages, _is_head):
        return prompts.of(json.dumps({"messages": messages}).encode(), length_of)

    lengths = [part.length(count) for part in parts_of(messages[1:])]
    assert count([SYSTEM, FILLER], True) + sum(lengths) == count(messages, True)
