// Changes the grammars of tool calls, so that the model makes a call if the request requires one.

#include "moe-edge-chat.h"
#include "moe-edge-calls.h"
#include "moe-edge-tools.h"

#include "chat.h"
#include "chat-peg-parser.h"
#include "common.h"
#include "json-schema-to-grammar.h"
#include "json.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace {

// Changes the grammar so that an answer contains only white space outside of its tool calls.
void leave_text_out(std::string & grammar, const common_json & parser) {
    const common_json & all = parser.at("parsers");
    for (const auto & each : all) {
        if (each.at("type") == "tag" && each.at("tag") == "content") {
            const size_t child = each.at("child").get<size_t>();
            if (all.at(child).at("type") == "until") {
                moe_edge_change_rule(grammar, "until-" + std::to_string(child), [](const std::string &) { return "space"; });
            }
        }
    }
}

// Changes the grammar so that an answer ends after its first tool call.
void allow_one_call(std::string & grammar) {
    moe_edge_change_rule(grammar, "tool-calls", [](std::string rule) {
        if (!rule.empty() && rule.back() == '+') {
            rule.pop_back();
        }
        return rule;
    });
}

// Returns whether a prompt contains a name, either as it is or escaped as in JSON.
bool shows(const std::string & prompt, const std::string & name) {
    const std::string quoted = common_json::make(name).dump_safe();
    return prompt.find(name) != std::string::npos ||
           prompt.find(quoted.substr(1, quoted.size() - 2)) != std::string::npos;
}

// The markers before and after the text of an answer. Reasoning may come before them.
struct text_marks {
    std::string begin, end;
};

// Returns the markers around the text of an answer, for the templates of Kimi K3 and Functionary. Returns empty markers
// for all other templates.
text_marks marks_of(const common_chat_params & made) {
    if (made.thinking_start_tag == "<|open|>think<|sep|>") {
        return { "<|open|>response<|sep|>", "<|close|>response<|sep|>" };
    }
    return { string_ends_with(made.generation_prompt, ">>>") ? "all\n" : "", "" };
}

// The key in a tool's parameters that holds another schema, which is used only for the grammar of its calls. The model
// does not see this schema.
const char * const GRAMMAR_SCHEMA = "x-moe-edge-grammar";

// Removes the schema at the key GRAMMAR_SCHEMA from the parameters of each tool, so that the model does not see it.
// Returns a copy of the tools in which these schemas replace the parameters, for making the grammar. Returns an empty
// list if no tool has such a schema.
std::vector<common_chat_tool> take_grammar_schemas(std::vector<common_chat_tool> & tools) {
    std::vector<common_chat_tool> made;
    for (common_chat_tool & tool : tools) {
        if (tool.parameters.find(GRAMMAR_SCHEMA) == std::string::npos) {
            continue;
        }
        common_json parameters = common_json::parse(tool.parameters);
        if (parameters.is_object() && parameters.contains(GRAMMAR_SCHEMA)) {
            made.resize(tools.size());
            made[&tool - tools.data()].parameters = parameters.at(GRAMMAR_SCHEMA).dump();
            parameters.erase(GRAMMAR_SCHEMA);
            tool.parameters = parameters.dump();
        }
    }
    for (size_t i = 0; i < made.size(); i++) {
        const std::string other = made[i].parameters;
        made[i] = tools[i];
        made[i].parameters = other.empty() ? tools[i].parameters : other;
    }
    return made;
}

// Returns only the prompt of a request. No grammar is made, because upstream fails to make one for some schemas.
std::string prompt_of(const common_chat_templates * templates, common_chat_templates_inputs inputs) {
    inputs.tool_choice = COMMON_CHAT_TOOL_CHOICE_NONE;
    return moe_edge_apply_continued(templates, inputs).prompt;
}

bool begins_call(const std::string & tag) {
    return tag == "<tool_call>";
}

// Returns whether upstream's grammar makes every answer conform to the request's schema. It does not if upstream
// ignores schemas for this template, or if the model's reasoning may end with a tool call.
bool keeps_schema(const common_chat_params & made) {
    const auto & tags = made.thinking_end_tags;
    return made.grammar.find("response-format") != std::string::npos && !std::any_of(tags.begin(), tags.end(), begins_call);
}

// Returns the tag that ends the model's reasoning, or an empty string if the template has no such tag.
std::string end_of_reasoning(const common_chat_params & made) {
    for (const std::string & tag : made.thinking_end_tags) {
        if (!tag.empty() && !isspace(static_cast<unsigned char>(tag[0])) && !begins_call(tag)) {
            return tag;
        }
    }
    return "";
}

// Replaces the parser and the grammar of a request, so that the answer is a text that conforms to the schema. Reasoning
// may come before the text.
void keep_schema(common_chat_params & made, const common_json & schema, bool with_reasoning) {
    const text_marks marks = marks_of(made);
    const std::string start = made.thinking_start_tag, end = end_of_reasoning(made);
    const bool thinks = made.supports_thinking && !start.empty() && !end.empty();
    const common_peg_arena parser = build_chat_peg_parser([&](common_chat_peg_builder & p) {
        auto answer = p.content(p.schema(p.json(), "response-format", schema));
        if (!string_ends_with(made.generation_prompt, marks.begin)) {
            answer = p.literal(marks.begin) + answer;
        }
        if (!marks.end.empty()) {
            answer = answer + p.space() + p.optional(p.literal(marks.end) + p.rest());
        }
        auto thought = p.eps();
        if (thinks) {
            const auto text = p.until(end);
            thought = p.optional(
                p.literal(start) + p.space() + (with_reasoning ? p.reasoning(text) : p.content(text)) + p.literal(end) + p.space());
        }
        return p.prefix(made.generation_prompt, thinks ? start : "") + thought + answer + p.space() + p.end();
    });
    made.parser       = parser.save();
    made.grammar      = build_grammar([&](const common_grammar_builder & builder) { parser.build_grammar(builder, false); });
    made.grammar_lazy = false;
    made.grammar_triggers.clear();
}

}  // namespace

// Renders the prompt of a request and makes the grammar of its answer. Used instead of upstream's
// common_chat_templates_apply. If the request requires a tool call, the answer must be a call without other text. If
// the request has a schema, the answer must conform to the schema.
common_chat_params moe_edge_templates_apply(
        const common_chat_templates * templates, const common_chat_templates_inputs & asked) {
    common_chat_templates_inputs inputs = asked;
    // Set this variable explicitly if it is false. Upstream would leave it undefined, which some templates take for
    // true.
    inputs.chat_template_kwargs.emplace("add_generation_prompt", "false");
    const bool offered  = !inputs.tools.empty() && inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
    const bool required = offered && inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED;
    if (moe_edge_is_own_form(common_chat_templates_source(templates))) {
        inputs.parallel_tool_calls = false;
    }
    if (required) {
        inputs.json_schema.clear();  // the schema is for a text, and the answer will have none
    }
    const bool has_schema = !inputs.json_schema.empty();
    if (has_schema) {
        inputs.tool_choice = COMMON_CHAT_TOOL_CHOICE_NONE;  // the answer is a text that conforms to the schema
    }
    const std::vector<common_chat_tool> kept = take_grammar_schemas(inputs.tools);
    const bool differ = offered && !has_schema && !kept.empty();
    const common_chat_templates_inputs visible = inputs;
    if (differ) {
        inputs.tools = kept;
    }
    common_chat_params made = moe_edge_apply_continued(templates, inputs);
    if (differ) {
        made.prompt = prompt_of(templates, visible);
    }
    if (has_schema && !keeps_schema(made)) {
        const bool with_reasoning = inputs.reasoning_format != COMMON_REASONING_FORMAT_NONE;
        keep_schema(made, common_json::parse(inputs.json_schema), with_reasoning);
    }
    if (!offered || has_schema) {
        return made;
    }
    if (!shows(made.prompt, inputs.tools[0].name)) {
        throw std::invalid_argument("this chat template does not show tools to the model: --chat-template FILE sets another template");
    }
    moe_edge_tighten_calls(made, inputs);
    if (!inputs.parallel_tool_calls) {
        allow_one_call(made.grammar);
    }
    if (required && made.grammar.empty()) {
        throw std::invalid_argument("this chat template has no form for tool calls: --chat-template FILE sets another template");
    }
    const bool thinks_in_text = made.supports_thinking && inputs.reasoning_format == COMMON_REASONING_FORMAT_NONE;
    if (required && !thinks_in_text && !made.parser.empty()) {
        leave_text_out(made.grammar, common_json::parse(made.parser));
    }
    return made;
}
