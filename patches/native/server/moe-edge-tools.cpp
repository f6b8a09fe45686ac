// The grammar of tool calls: a call that is required is made.

#include "moe-edge-chat.h"
#include "moe-edge-tools.h"

#include "chat.h"
#include "json.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace {

// The right side of a rule of a grammar, each of which has a line of its own: "NAME ::= RULE".
void change_rule(std::string & grammar, const std::string & name, const std::function<std::string(std::string)> & change) {
    const std::string head = name + " ::= ";
    size_t at = 0;
    while (at < grammar.size()) {
        const size_t end = std::min(grammar.find('\n', at), grammar.size());
        if (grammar.compare(at, head.size(), head) == 0) {
            at += head.size();
            const std::string rule = grammar.substr(at, end - at);
            grammar.replace(at, rule.size(), change(rule));
            return;
        }
        at = end + 1;
    }
}

// Lets an answer's text be nothing but white space. A text that ends before a mark is a rule of the
// grammar, by the number of its parser.
void leave_text_out(std::string & grammar, const common_json & parser) {
    const common_json & all = parser.at("parsers");
    for (const auto & each : all) {
        if (each.at("type") == "tag" && each.at("tag") == "content") {
            const size_t child = each.at("child").get<size_t>();
            if (all.at(child).at("type") == "until") {
                change_rule(grammar, "until-" + std::to_string(child), [](const std::string &) { return "space"; });
            }
        }
    }
}

// Ends an answer behind its first call, where the grammar lets calls follow each other.
void allow_one_call(std::string & grammar) {
    change_rule(grammar, "tool-calls", [](std::string rule) {
        if (!rule.empty() && rule.back() == '+') {
            rule.pop_back();
        }
        return rule;
    });
}

// Whether a prompt has a name, as it is or as JSON.
bool shows(const std::string & prompt, const std::string & name) {
    const std::string quoted = common_json::make(name).dump_safe();
    return prompt.find(name) != std::string::npos ||
           prompt.find(quoted.substr(1, quoted.size() - 2)) != std::string::npos;
}

}  // namespace

// Upstream's server calls this in the place of common_chat_templates_apply. Upstream lets an answer that has to
// call a tool begin with any text, and calls follow each other: a model that has never seen a tool comes to no
// end with either.
common_chat_params moe_edge_templates_apply(
        const common_chat_templates * templates, const common_chat_templates_inputs & asked) {
    common_chat_templates_inputs inputs = asked;
    // Upstream leaves it undefined if it is false, and some templates take that for true.
    inputs.chat_template_kwargs.emplace("add_generation_prompt", "false");
    const bool offered  = !inputs.tools.empty() && inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
    const bool required = offered && inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED;
    if (moe_edge_is_own_form(common_chat_templates_source(templates))) {
        inputs.parallel_tool_calls = false;
    }
    if (required) {
        inputs.json_schema.clear();  // it is about a text, and there will be none
    }
    common_chat_params made = moe_edge_apply_continued(templates, inputs);
    if (!offered) {
        return made;
    }
    if (!shows(made.prompt, inputs.tools[0].name)) {
        throw std::invalid_argument("this chat template does not show tools to the model: --chat-template FILE gives another one");
    }
    if (!inputs.parallel_tool_calls) {
        allow_one_call(made.grammar);
    }
    if (required && made.grammar.empty()) {
        throw std::invalid_argument("tool calls have no form in this chat template: --chat-template FILE gives another one");
    }
    const bool thinks_in_text = made.supports_thinking && inputs.reasoning_format == COMMON_REASONING_FORMAT_NONE;
    if (required && !thinks_in_text && !made.parser.empty()) {
        leave_text_out(made.grammar, common_json::parse(made.parser));
    }
    return made;
}
