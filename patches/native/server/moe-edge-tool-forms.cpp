// Makes tool calls work with chat templates that do not show tools or earlier calls to the model. A prefix, which is
// Jinja code, is put before such a template and rewrites its inputs. The right prefix for a template is found by
// rendering a probe conversation with each prefix.

#include "moe-edge-grammar.h"
#include "moe-edge-template-bounds.h"
#include "moe-edge-tools.h"

#include "chat.h"
#include "json.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace {

// A Jinja comment at the beginning of the template prefix that introduces our own form of tool calls.
// moe_edge_is_own_form recognizes the prefix by this comment.
const char * const OWN_MARK = "{#- moe-edge: tools in our own form -#}";

// Our own form of a tool call, for templates without one. OWN_CALL: the form as it is described to the model.
// OWN_PROBE: a call of the probe function (the function of our test conversation) in this form.
const char * const OWN_CALL  = "<tool_call>\n{\"name\": NAME, \"arguments\": OBJECT}\n</tool_call>";
const char * const OWN_PROBE =
    "<tool_call>\n{\"name\": \"FUNCTION_NAME\", \"arguments\": {\"ARGUMENT_NAME\": \"ARGUMENT_VALUE\"}}\n</tool_call>";

// Prefixes (Jinja code before a template) for templates that read the tools from the variable `functions`, as a list or
// as a text.
const char * const FUNCTIONS_LIST = R"jinja({%- if tools -%}
    {%- set functions = tools | map(attribute="function") -%}
{%- endif %})jinja";
const char * const FUNCTIONS_TEXT = R"jinja({%- if tools -%}
    {%- set functions = tools | map(attribute="function") | tojson(indent=4) -%}
{%- endif %})jinja";

// The beginning of all template prefixes that rewrite the conversation's messages. New messages are collected in a list
// and joined once, because the operators `+` and `~` would copy the whole text for each part.
const char * const BEGIN = R"jinja({%- set rewritten = namespace(list=[], results=[], told=not tools) -%}
{%- macro add_results() -%}
    {%- if rewritten.results -%}
        {%- set text = rewritten.results | join("\n</tool_response>\n<tool_response>\n") -%}
        {%- set _ = rewritten.list.append({"role": "user", "content": "<tool_response>\n" ~ text ~ "\n</tool_response>"}) -%}
        {%- set rewritten.results = [] -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if false -%})jinja";

// Part of a template prefix: turns tool calls and their results into text, in our own form of calls. Consecutive
// results become one message, because some templates refuse two messages of the same role.
const char * const OWN_MESSAGES = R"jinja(
    {%- elif message.role == "tool" -%}
        {%- set _ = rewritten.results.append(message.content) -%}
    {%- elif message.tool_calls -%}
        {%- set _ = add_results() -%}
        {%- set parts = [message.content] if message.content else [] -%}
        {%- for call in message.tool_calls -%}
            {%- set function = call.function or call -%}
            {%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
            {%- set head = "{\"name\": " ~ (function.name | tojson) ~ ", \"arguments\": " ~ arguments ~ "}" -%}
            {%- set _ = parts.append("<tool_call>\n" ~ head ~ "\n</tool_call>") -%}
        {%- endfor -%}
        {%- set _ = rewritten.list.append({"role": message.role, "content": parts | join("\n")}) -%})jinja";

// Part of a template prefix: writes tool calls as text in the form of LFM2. Some LFM2 templates do not write the calls
// themselves.
const char * const PYTHON_CALLS = R"jinja(
    {%- elif message.tool_calls -%}
        {%- set calls = [] -%}
        {%- for call in message.tool_calls -%}
            {%- set parts = [] -%}
            {%- for name, value in call.function.arguments.items() -%}
                {%- set text = value | tojson if value is string or value is mapping else value | string -%}
                {%- set _ = parts.append(name ~ "=" ~ text) -%}
            {%- endfor -%}
            {%- set _ = calls.append(call.function.name ~ "(" ~ (parts | join(", ")) ~ ")") -%}
        {%- endfor -%}
        {%- set text = "<|tool_call_start|>[" ~ (calls | join(", ")) ~ "]<|tool_call_end|>" -%}
        {%- set _ = rewritten.list.append({"role": message.role, "content": (message.content or "") ~ text}) -%})jinja";
const char * const PYTHON_CALL =
    "<|tool_call_start|>[FUNCTION_NAME(ARGUMENT_NAME=\"ARGUMENT_VALUE\")]<|tool_call_end|>";

// Part of a template prefix: removes the content of an assistant's message that has only tool calls. Some templates
// would render an empty content as a separate message.
const char * const CALLS_WITHOUT_TEXT = R"jinja(
    {%- elif message.tool_calls and not message.content -%}
        {%- set _ = rewritten.list.append({"role": message.role, "content": none, "tool_calls": message.tool_calls}) -%})jinja";

// Part of a template prefix: puts a description of the tools before the text of the first user message. The Jinja macro
// about_tools writes the description.
const char * const DESCRIPTION = R"jinja(
    {%- elif message.role == "user" and not rewritten.told -%}
        {%- set _ = add_results() -%}
        {%- set rewritten.told = true -%}
        {%- if message.content is string -%}
            {%- set _ = rewritten.list.append({"role": "user", "content": about_tools() ~ message.content}) -%}
        {%- else -%}
            {%- set parts = [{"type": "text", "text": about_tools()}] + message.content -%}
            {%- set _ = rewritten.list.append({"role": "user", "content": parts}) -%}
        {%- endif -%})jinja";
// The Jinja macro that writes the description of the tools. The C++ function description() replaces CALL with the form
// of a tool call.
const char * const ABOUT_TOOLS = R"jinja({%- macro about_tools() -%}
    {{- "You may call these functions:\n" -}}
    {%- for tool in tools -%}{{- tool | tojson ~ "\n" -}}{%- endfor -%}
    {{- "For each call write\n" ~ CALL ~ "\n\n" -}}
{%- endmacro -%}
)jinja";

const char * const END = R"jinja(
    {%- else -%}
        {%- set _ = add_results() -%}
        {%- set _ = rewritten.list.append(message) -%}
    {%- endif -%}
{%- endfor -%}
{%- set _ = add_results() -%}
)jinja";
const char * const TELL_AT_END = R"jinja({%- if not rewritten.told -%}
    {%- set _ = rewritten.list.append({"role": "user", "content": about_tools()}) -%}
{%- endif -%}
)jinja";
const char * const SET_MESSAGES = "{%- set messages = rewritten.list %}";
const char * const HIDE_TOOLS = "{%- set tools = none -%}\n";

std::string description(const std::string & call) {
    std::string text = ABOUT_TOOLS;
    const std::string place = "~ CALL ~";
    const std::string quoted = common_json::make(call).dump();
    return text.replace(text.find(place), place.size(), "~ " + quoted + " ~");
}

std::string with_described_tools(const std::string & call, const char * messages) {
    return description(call) + BEGIN + messages + DESCRIPTION + END + TELL_AT_END;
}

// The words of the probe conversation, which has a function with one argument. They occur in no template, so a prompt
// that contains them shows which parts of the conversation the template uses.
const std::string NAME = "FUNCTION_NAME", ARGUMENT = "ARGUMENT_NAME", VALUE = "ARGUMENT_VALUE";
const std::string DESCRIPTION_TEXT = "PROBE_DESCRIPTION", RESULT = "PROBE_RESULT", TEXT = "PROBE_TEXT", END_TEXT = "PROBE_END";

common_chat_tool probe_tool() {
    common_chat_tool tool;
    tool.name        = NAME;
    tool.description = DESCRIPTION_TEXT;
    tool.parameters  = R"({"type": "object", "properties": {"ARGUMENT_NAME": {"type": "string"}}, "required": ["ARGUMENT_NAME"]})";
    return tool;
}

common_chat_msg message_of(const std::string & role, const std::string & content) {
    common_chat_msg message;
    message.role    = role;
    message.content = content;
    return message;
}

common_chat_msg probe_call() {
    common_chat_msg message = message_of("assistant", "");
    message.tool_calls = { { NAME, "{\"" + ARGUMENT + "\": \"" + VALUE + "\"}", "call00001" } };
    return message;
}

common_chat_msg probe_result() {
    common_chat_msg message = message_of("tool", RESULT);
    message.tool_call_id = "call00001";
    message.tool_name    = NAME;
    return message;
}

common_chat_templates_inputs inputs_of(std::vector<common_chat_msg> messages, bool has_tools) {
    common_chat_templates_inputs inputs;
    inputs.messages         = std::move(messages);
    inputs.use_jinja        = true;
    inputs.enable_thinking  = false;
    inputs.chat_template_kwargs["add_generation_prompt"] = "false";  // as in moe_edge_templates_apply
    inputs.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
    if (has_tools) {
        inputs.tools       = { probe_tool() };
        inputs.tool_choice = COMMON_CHAT_TOOL_CHOICE_REQUIRED;
    }
    return inputs;
}

const common_chat_msg HELLO = message_of("user", "PROBE_HELLO");

bool has(const std::string & text, const std::string & part) {
    return text.find(part) != std::string::npos;
}

// Returns whether the grammar and the parser of a request both accept an answer as exactly one call of the probe
// function (the function of our test conversation).
bool is_whole_call(const common_chat_params & params, const std::string & answer) {
    common_chat_parser_params parser(params);
    parser.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
    try {
        if (params.grammar.empty() || !moe_edge_grammar_matches(params.grammar, params.generation_prompt + answer)) {
            return false;
        }
        parser.parser.load(params.parser);
        const common_chat_msg found = common_chat_parse(answer, false, parser);
        return found.tool_calls.size() == 1 && found.tool_calls[0].name == NAME &&
               common_json::parse(found.tool_calls[0].arguments) == common_json{ { ARGUMENT, VALUE } };
    } catch (const std::exception &) {
        return false;
    }
}

// Returns whether an answer is the call of the probe function (the function of our test conversation), alone or after
// the end of the model's reasoning.
bool is_call(const common_chat_params & params, const std::string & answer) {
    const auto & ends = params.thinking_end_tags;
    return is_whole_call(params, answer) ||
           (!ends.empty() && is_whole_call(params, ends[0] + answer));
}

// Returns the call of the probe function (the function of our test conversation) in the form that the template renders
// and its parser reads. Returns an empty string if there is no such form.
std::string form_of_calls(const common_chat_templates * templates) {
    try {
        auto inputs = inputs_of({ HELLO, message_of("assistant", TEXT), HELLO }, true);
        const std::string plain = common_chat_templates_apply(templates, inputs).prompt;
        inputs.messages = { HELLO, probe_call(), probe_result() };
        const std::string called = common_chat_templates_apply(templates, inputs).prompt;
        inputs.messages = { HELLO };
        const common_chat_params params = common_chat_templates_apply(templates, inputs);
        const size_t begin =
            std::mismatch(plain.begin(), plain.end(), called.begin(), called.end()).second - called.begin();
        const size_t value = called.find(VALUE, begin);
        if (value == std::string::npos) {
            return "";
        }
        for (size_t end = value + VALUE.size(); end <= called.size(); end++) {
            const bool is_boundary = end == called.size() || (called[end] & 0xC0) != 0x80;
            if (is_boundary && is_call(params, called.substr(begin, end - begin))) {
                return called.substr(begin, end - begin);
            }
        }
    } catch (const std::exception &) {
        // The template refuses a conversation with tool calls. The result is then an empty string.
    }
    return "";
}

// The abilities that a chat template gives to the model.
struct abilities {
    bool can_call   = false;  // a required call has a grammar
    bool sees_tools = false;
    bool sees_calls = false;  // earlier calls and their results
};

abilities abilities_of(const common_chat_templates * templates) {
    abilities found;
    try {
        const auto params = common_chat_templates_apply(templates, inputs_of({ HELLO }, true));
        found.can_call    = !params.grammar.empty();
        found.sees_tools  = has(params.prompt, NAME) && has(params.prompt, DESCRIPTION_TEXT) && has(params.prompt, ARGUMENT);
        const std::string after =
            common_chat_templates_apply(templates, inputs_of({ HELLO, probe_call(), probe_result() }, true)).prompt;
        // The template shows earlier calls if the prompt contains the probe call after the user's message. The text
        // before that message may describe the tools with an example of a call.
        const std::string since = after.substr(std::min(after.size(), after.rfind(HELLO.content)));
        found.sees_calls = has(since, NAME) && has(since, VALUE) && has(since, RESULT);
    } catch (const std::exception &) {
        // The template refuses one of the probe conversations. The abilities that are not set yet stay false.
    }
    return found;
}

struct candidate {
    std::string source;
    std::string call;  // a call of the probe function, in the form that the model is told or was trained with
};

// Returns a template's source with added spaces that do not change its output. Upstream recognizes some templates by
// their source, and then uses special code for tool calls. It does not recognize the changed source.
std::string unrecognized(std::string source) {
    for (size_t at = 0; (at = source.find("{{'", at)) != std::string::npos; at += 4) {
        source.insert(at + 2, " ");
    }
    return source;
}

std::vector<candidate> candidates_for(const common_chat_templates * templates) {
    const std::string source = common_chat_templates_source(templates);
    std::vector<candidate> all = { { FUNCTIONS_TEXT + source, "" }, { FUNCTIONS_LIST + source, "" } };
    const std::string form = form_of_calls(templates);
    if (!form.empty()) {
        all.push_back({ with_described_tools(form, CALLS_WITHOUT_TEXT) + SET_MESSAGES + source, form });
        all.push_back({ with_described_tools(form, "") + SET_MESSAGES + source, form });
    }
    all.push_back({ std::string(BEGIN) + PYTHON_CALLS + END + SET_MESSAGES + source, PYTHON_CALL });
    const std::string own = OWN_MARK + with_described_tools(OWN_CALL, OWN_MESSAGES) + HIDE_TOOLS + SET_MESSAGES;
    all.push_back({ own + source, OWN_PROBE });
    all.push_back({ own + unrecognized(source), OWN_PROBE });
    return all;
}

}  // namespace

bool moe_edge_is_own_form(const std::string & source) {
    return source.compare(0, strlen(OWN_MARK), OWN_MARK) == 0;
}

bool moe_edge_wants_text_apart(const common_chat_templates * templates) {
    const common_chat_msg text = message_of("assistant", TEXT);
    common_chat_msg both = probe_call();
    both.content = TEXT;
    const auto shows_in_order = [&](const std::vector<common_chat_msg> & messages) {
        try {
            const std::string prompt = common_chat_templates_apply(templates, inputs_of(messages, true)).prompt;
            const size_t said = prompt.find(TEXT, prompt.find(HELLO.content)), called = prompt.find(VALUE, said);
            return called != std::string::npos && prompt.find(RESULT, called) != std::string::npos;
        } catch (const std::exception &) {
            return false;
        }
    };
    const auto call = probe_call(), result = probe_result(), end = message_of("assistant", END_TEXT);
    // Also try a longer conversation, because a template may refuse two assistant messages in a row only if the
    // conversation continues after them.
    return !shows_in_order({ HELLO, both, result }) && shows_in_order({ HELLO, text, call, result }) &&
           shows_in_order({ HELLO, text, call, result, end, HELLO });
}

void moe_edge_try_template(const llama_model * model, const std::string & given) {
    try {
        common_chat_templates_apply(common_chat_templates_init(model, given).get(), inputs_of({ HELLO }, false));
    } catch (const std::exception & failure) {
        moe_edge_template_failed(failure);
    }
}

std::string moe_edge_template_with_tools(const llama_model * model, const std::string & given) {
    const auto own = common_chat_templates_init(model, given);
    const abilities now = abilities_of(own.get());
    if (now.can_call && now.sees_tools && now.sees_calls) {
        return given;
    }
    const auto plain = inputs_of({ HELLO }, false);
    for (const candidate & each : candidates_for(own.get())) {
        try {
            const auto tried = common_chat_templates_init(model, each.source);
            const abilities then = abilities_of(tried.get());
            const bool is_same = common_chat_templates_apply(own.get(), plain).prompt ==
                                 common_chat_templates_apply(tried.get(), plain).prompt;
            const bool is_form = each.call.empty() ||
                is_call(common_chat_templates_apply(tried.get(), inputs_of({ HELLO }, true)), each.call);
            if (then.can_call && then.sees_tools && then.sees_calls && is_same && is_form) {
                return each.source;
            }
        } catch (const std::exception &) {
            continue;  // this prefix does not suit the template
        }
    }
    return given;
}
