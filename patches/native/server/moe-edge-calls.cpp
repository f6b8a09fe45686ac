#include "moe-edge-calls.h"

#include "json-schema-to-grammar.h"
#include "json.h"

#include <algorithm>
#include <cctype>
#include <vector>

void moe_edge_change_rule(
        std::string & grammar, const std::string & name, const std::function<std::string(std::string)> & change) {
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

namespace {

// The arguments of a tool, in the order of its JSON schema.
struct arguments {
    std::vector<std::string> names;
    std::vector<common_json> schemas;
    std::vector<bool>        required;

    bool has_required() const { return std::find(required.begin(), required.end(), true) != required.end(); }
};

arguments arguments_of(const common_json & schema) {
    arguments found;
    if (!schema.is_object() || !schema.contains("properties") || !schema.at("properties").is_object()) {
        return found;
    }
    std::vector<std::string> required;
    if (schema.contains("required") && schema.at("required").is_array()) {
        for (const auto & name : schema.at("required")) {
            required.push_back(name.get<std::string>());
        }
    }
    for (const auto & [name, each] : schema.at("properties").items()) {
        found.names.push_back(name);
        found.schemas.push_back(each);
        found.required.push_back(std::find(required.begin(), required.end(), name) != required.end());
    }
    return found;
}

// Returns the position after the element at `at` in a grammar rule. An element is a literal, a character class, a group
// or a single character.
size_t end_of_element(const std::string & rule, size_t at) {
    const char open = rule[at++];
    if (open == '"' || open == '[') {
        const char close = open == '"' ? '"' : ']';
        while (at < rule.size() && rule[at] != close) {
            at += rule[at] == '\\' ? 2 : 1;
        }
        return at + 1;
    }
    if (open == '(') {
        while (at < rule.size() && rule[at] != ')') {
            at = end_of_element(rule, at);
        }
        return at + 1;
    }
    return at;
}

// Returns the alternatives of the group that starts at `at` in a grammar rule. `end` receives the position after the
// group.
std::vector<std::string> alternatives(const std::string & rule, size_t at, size_t & end) {
    std::vector<std::string> found = { "" };
    end = end_of_element(rule, at);
    for (at++; at + 1 < end;) {
        if (rule[at] == '|') {
            found.back().pop_back();  // the space before it
            found.push_back("");
            at += 2;
            continue;
        }
        const size_t next = end_of_element(rule, at);
        found.back() += rule.substr(at, next - at);
        at = next;
    }
    return found;
}

std::string joined(const std::vector<std::string> & parts, const std::string & between) {
    std::string made;
    for (const std::string & each : parts) {
        made += (made.empty() ? "" : between) + each;
    }
    return made;
}

// Returns a grammar rule for a sequence of elements: all required elements in their order, followed by any number of
// the others. If no element is required, the sequence has at least one element. comma: rule for the text between two
// elements.
std::string in_order(
        const std::vector<std::string> & elements, const std::vector<bool> & required, const std::string & comma) {
    std::vector<std::string> first, others;
    for (size_t i = 0; i < elements.size(); i++) {
        (required[i] ? first : others).push_back("(" + elements[i] + ")");
    }
    const std::string any = others.empty() ? "" : "(" + joined(others, " | ") + ")";
    const std::string head = joined(first, " " + comma + " ");
    if (any.empty()) {
        return head;
    }
    const std::string more = "(" + comma + " " + any + ")*";
    return head.empty() ? any + " " + more : head + " " + more;
}

// Changes a grammar rule for the arguments of a call so that every required argument must be present. Knows the rules
// for calls in the forms of MiniCPM5 and LFM2, and returns other rules unchanged.
std::string with_required(const std::string & rule, const arguments & wanted) {
    const bool is_minicpm = rule.find("<param name=") != std::string::npos;
    const std::string after = is_minicpm ? " space)*" : " (\",\" space ";
    const std::string comma = is_minicpm ? "space" : "\",\" space";
    for (size_t at = rule.find("(("); at != std::string::npos; at = rule.find("((", at + 1)) {
        size_t end = 0;
        const size_t outer_end = end_of_element(rule, at);
        const std::vector<std::string> found = alternatives(rule, at + 1, end);
        if (found.size() != wanted.names.size() || rule.compare(end, after.size(), after) != 0) {
            continue;
        }
        const size_t repeated = rule[outer_end] == '*' ? 1 : 0;
        if (!wanted.has_required()) {
            break;  // the rule needs no change
        }
        return rule.substr(0, at) + in_order(found, wanted.required, comma) + rule.substr(outer_end + repeated);
    }
    return rule;
}

// Converts a text to the form of rule names in a grammar: each run of characters other than letters, digits and dashes
// becomes one dash.
std::string rule_name(const std::string & text) {
    std::string made;
    bool was_plain = true;
    for (const unsigned char c : text) {
        const bool is_plain = isalnum(c) || c == '-';
        if (is_plain || was_plain) {
            made += is_plain ? char(c) : '-';
        }
        was_plain = is_plain;
    }
    return made;
}

// Returns the grammar rule for a value that conforms to this JSON schema, written as gemma-4 writes values.
std::string gemma_value(const common_json & schema);

std::string gemma_object(const common_json & schema) {
    const arguments wanted = arguments_of(schema);
    std::vector<std::string> members;
    for (size_t i = 0; i < wanted.names.size(); i++) {
        if (wanted.names[i].empty() || wanted.names[i].find_first_of(":}") != std::string::npos) {
            return "gemma4-dict";  // such a name cannot be written in this form
        }
        members.push_back(gbnf_format_literal(wanted.names[i] + ":") + " space " + gemma_value(wanted.schemas[i]));
    }
    if (members.empty()) {
        return "gemma4-dict";
    }
    const std::string inner = in_order(members, wanted.required, "\",\" space");
    return "\"{\" space " + (wanted.has_required() ? inner : "(" + inner + ")?") + " \"}\"";
}

std::string gemma_value(const common_json & schema) {
    const bool has_type = schema.is_object() && schema.contains("type") && schema.at("type").is_string();
    const std::string type = has_type ? schema.at("type").get<std::string>() : "";
    if (type == "object") {
        return gemma_object(schema);
    }
    for (const char * plain : { "string", "array", "null" }) {
        if (type == plain) {
            return "gemma4-" + type;
        }
    }
    return type == "integer" || type == "number" ? "gemma4-number" : type == "boolean" ? "gemma4-bool" : "gemma4-value";
}

// Removes optional white space before the end of a tool call from the grammar, if the parser accepts no white space
// there.
void end_at_once(std::string & grammar, const common_json & parser) {
    const common_json & all = parser.at("parsers");
    for (const auto & each : all) {
        if (each.at("type") != "tag" || each.at("tag") != "tool-close") {
            continue;
        }
        const common_json & ahead = all.at(each.at("child").get<size_t>());
        if (ahead.at("type") != "and" || all.at(ahead.at("child").get<size_t>()).at("type") != "literal") {
            continue;
        }
        const std::string end =
            gbnf_format_literal(all.at(ahead.at("child").get<size_t>()).at("literal").get<std::string>());
        moe_edge_change_rule(grammar, "tool-call", [&](std::string rule) {
            const std::string loose = ") space " + end;
            for (size_t at = rule.find(loose); at != std::string::npos; at = rule.find(loose, at)) {
                rule.erase(at + 1, sizeof "space");
            }
            return rule;
        });
        return;
    }
}

}  // namespace

void moe_edge_tighten_calls(common_chat_params & made, const common_chat_templates_inputs & inputs) {
    if (made.grammar.empty() || made.parser.empty()) {
        return;
    }
    for (const common_chat_tool & tool : inputs.tools) {
        const common_json schema = common_json::parse(tool.parameters);
        moe_edge_change_rule(made.grammar, rule_name("tool-" + tool.name), [&](const std::string & rule) {
            const std::string dict = " gemma4-dict";
            if (rule.size() > dict.size() && rule.compare(rule.size() - dict.size(), dict.size(), dict) == 0) {
                return rule.substr(0, rule.size() - dict.size() + 1) + gemma_object(schema);
            }
            return with_required(rule, arguments_of(schema));
        });
    }
    end_at_once(made.grammar, common_json::parse(made.parser));
}
