#include "moe-edge-chat.h"
#include "moe-edge-tools.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <deque>
#include <unordered_map>

namespace {

const size_t ID_SIZE = 9;
const std::string ID_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

bool is_short_id(const std::string & id) {
    return id.size() == ID_SIZE && std::all_of(id.begin(), id.end(), [](unsigned char c) { return isalnum(c); });
}

// Converts an id of a tool call to nine letters or digits. The result is the id without OpenAI's prefix if nine letters
// or digits remain, and otherwise a hash of the id.
std::string short_id(const std::string & id) {
    for (const std::string prefix : { "", "call_", "fc_" }) {
        if (id.compare(0, prefix.size(), prefix) == 0 && is_short_id(id.substr(prefix.size()))) {
            return id.substr(prefix.size());
        }
    }
    uint64_t hash = 14695981039346656037u;  // the FNV-1a hash
    for (const unsigned char each : id) {
        hash = (hash ^ each) * 1099511628211u;
    }
    std::string made;
    for (size_t i = 0; i < ID_SIZE; i++) {
        made += ID_CHARACTERS[hash % ID_CHARACTERS.size()];
        hash /= ID_CHARACTERS.size();
    }
    return made;
}

std::string text_at(const json & object, const char * name) {
    return object.contains(name) && object.at(name).is_string() ? object.at(name).get<std::string>() : "";
}

// Gives tool calls and their results ids of nine characters. A call without an id gets one based on its number. A
// result without an id gets the id of the first call that has no result yet.
void shorten_ids(json & messages) {
    std::deque<std::string> unanswered;
    size_t n_calls = 0;
    for (auto & message : messages) {
        if (message.contains("tool_calls") && message.at("tool_calls").is_array()) {
            unanswered.clear();
            for (auto & call : message.at("tool_calls")) {
                const std::string id = text_at(call, "id");
                unanswered.push_back(short_id(id.empty() ? std::to_string(n_calls) : id));
                call["id"] = unanswered.back();
                n_calls++;
            }
        }
        if (message.value("role", "") != "tool") {
            continue;
        }
        const std::string id = text_at(message, "tool_call_id");
        const std::string made = !id.empty() ? short_id(id) : unanswered.empty() ? short_id("") : unanswered.front();
        message["tool_call_id"] = made;
        unanswered.erase(std::remove(unanswered.begin(), unanswered.end(), made), unanswered.end());
    }
}

// Returns whether a chat template needs tool-call ids of nine characters, as Mistral's templates do.
bool wants_short_ids(const common_chat_templates * templates) {
    return common_chat_templates_source(templates).find("[TOOL_CALLS]") != std::string::npos;
}

size_t n_calls_of(const json & message) {
    return message.contains("tool_calls") && message.at("tool_calls").is_array() ? message.at("tool_calls").size() : 0;
}

bool has_text(const json & message) {
    return message.contains("content") && !message.at("content").is_null() && !message.at("content").empty() &&
           message.at("content") != "";
}

// Returns for each tool call of a message the indices of its results in `results`. A result belongs to the call with
// the same id. If a call or a result has no id, the first result belongs to the first call, and so on.
std::vector<std::vector<size_t>> results_by_call(const json & message, const std::vector<json> & results) {
    std::unordered_map<std::string, std::vector<size_t>> by_id;
    for (size_t i = 0; i < results.size(); i++) {
        by_id[text_at(results[i], "tool_call_id")].push_back(i);
    }
    std::vector<std::vector<size_t>> found(n_calls_of(message));
    for (size_t i = 0; i < found.size(); i++) {
        const std::string id = text_at(message.at("tool_calls").at(i), "id");
        if (i < results.size() && (id.empty() || text_at(results[i], "tool_call_id").empty())) {
            found[i] = { i };
        } else if (!id.empty()) {
            found[i].swap(by_id[id]);  // each result belongs to one call only
        }
    }
    return found;
}

// Appends one message for each tool call of `message`, followed by the results of that call. Calls without a result
// come first, so that the conversation does not end with such a call. Results without a call come last.
void append_calls_apart(json & made, const json & message, const std::vector<json> & results) {
    const auto by_call = results_by_call(message, results);
    std::vector<bool> taken(results.size(), false);
    const auto take = [&](size_t i) {
        if (!taken[i]) {
            made.push_back(results[i]);
            taken[i] = true;
        }
    };
    json one = message;
    for (const bool is_answered : { false, true }) {
        for (size_t i = 0; i < by_call.size(); i++) {
            if (by_call[i].empty() == is_answered) {
                continue;
            }
            one["tool_calls"] = json::array({ message.at("tool_calls").at(i) });
            made.push_back(one);
            one["content"] = "";  // text and reasoning stay with the first call only
            one.erase("reasoning_content");
            std::for_each(by_call[i].begin(), by_call[i].end(), take);
        }
    }
    for (size_t i = 0; i < results.size(); i++) {
        take(i);
    }
}

// Splits assistant messages that a template cannot render, and returns all messages. If the template shows only one
// tool call of a message, each call becomes a message. If it drops the text of a message with calls, the text becomes a
// message.
json with_calls_apart(const json & messages, const common_chat_templates * templates) {
    const bool one_call = !common_chat_templates_get_caps(templates)["supports_parallel_tool_calls"];
    const bool no_text  = moe_edge_wants_text_apart(templates);
    json made = json::array();
    for (size_t at = 0; at < messages.size(); at++) {
        json message = messages.at(at);
        if (no_text && n_calls_of(message) > 0 && has_text(message)) {
            json text = message;
            text.erase("tool_calls");
            made.push_back(text);
            message["content"] = "";
            message.erase("reasoning_content");
        }
        if (!one_call || n_calls_of(message) < 2) {
            made.push_back(message);
            continue;
        }
        std::vector<json> results;
        while (at + 1 < messages.size() && messages.at(at + 1).value("role", "") == "tool") {
            at++;
            results.push_back(messages.at(at));
        }
        append_calls_apart(made, message, results);
    }
    return made;
}

bool needs_calls_apart(const json & messages) {
    for (const auto & message : messages) {
        if (n_calls_of(message) > 1 || (n_calls_of(message) == 1 && has_text(message))) {
            return true;
        }
    }
    return false;
}

// Joins the parts of each message's content to one text, one part per line, because many templates read only the first
// part. Contents with parts that are not text stay unchanged.
void join_text_parts(json & messages) {
    for (auto & message : messages) {
        if (!message.contains("content") || !message.at("content").is_array()) {
            continue;
        }
        std::string text;
        bool is_text = true;
        for (const auto & part : message.at("content")) {
            is_text = is_text && part.is_object() && part.value("type", "") == "text" && part.contains("text") &&
                      part.at("text").is_string();
            text += is_text ? (text.empty() ? "" : "\n") + part.at("text").get<std::string>() : "";
        }
        if (is_text) {
            message["content"] = text;
        }
    }
}

bool ends_with_assistant(const json & body) {
    const json & messages = body.at("messages");
    return !messages.empty() && messages.back().value("role", "") == "assistant";
}

bool begins_with(const std::string & text, const std::string & part) {
    return text.compare(0, part.size(), part) == 0;
}

// Parses the generation prompt, the last part of the rendered prompt. If the answer continues a message, this part
// contains the text of that message so far. Returns the parsed message.
common_chat_msg begun(const common_chat_parser_params & parser) {
    return common_chat_parse("", true, parser);
}

// Parses the generation prompt of `made`. Returns whether the content of the parsed message is `text`, and the message
// has no reasoning and no tool calls.
bool reads(const common_chat_params & made, const common_chat_templates_inputs & inputs, const std::string & text) {
    common_chat_parser_params parser(made);
    parser.reasoning_format = inputs.reasoning_format;
    try {
        parser.parser.load(made.parser);
        const common_chat_msg found = begun(parser);
        return found.content == text && found.reasoning_content.empty() && found.tool_calls.empty();
    } catch (const std::exception &) {
        return false;
    }
}

// Returns the part of the rendered prompt before the text of the last message. Returns an empty string if the template
// refuses the conversation or changes the text.
std::string before_last_text(const common_chat_templates * templates, common_chat_templates_inputs inputs) {
    const std::string mark = "MOE-EDGE-CONTINUES-HERE";
    common_chat_msg & last = inputs.messages.back();
    last.content_parts.clear();
    last.content = mark;
    inputs.continue_final_message = COMMON_CHAT_CONTINUATION_NONE;
    inputs.add_generation_prompt  = false;
    try {
        const std::string prompt = common_chat_templates_apply(templates, inputs).prompt;
        const size_t at = prompt.rfind(mark);
        return at == std::string::npos ? "" : prompt.substr(0, at);
    } catch (const std::exception &) {
        return "";
    }
}

// Returns whether a text starts the model's reasoning without ending it.
bool is_in_reasoning(const std::string & text, const common_chat_params & made) {
    const size_t at = made.thinking_start_tag.empty() ? std::string::npos : text.rfind(made.thinking_start_tag);
    const auto & ends = made.thinking_end_tags;
    return at != std::string::npos && std::none_of(ends.begin(), ends.end(), [&](const std::string & end) {
        return text.find(end, at) != std::string::npos;
    });
}

}  // namespace

common_chat_params moe_edge_apply_continued(
        const common_chat_templates * templates, const common_chat_templates_inputs & inputs) {
    common_chat_params made = common_chat_templates_apply(templates, inputs);
    if (inputs.continue_final_message == COMMON_CHAT_CONTINUATION_NONE || inputs.messages.empty()) {
        return made;
    }
    const common_chat_msg & last = inputs.messages.back();
    const std::string text = last.render_content(), before = before_last_text(templates, inputs);
    const std::string base = made.prompt.substr(0, made.prompt.size() - made.generation_prompt.size());
    if (text.empty() || !last.reasoning_content.empty() || before.empty() || before.compare(0, base.size(), base) != 0) {
        return made;
    }
    common_chat_params own = made;
    own.prompt             = before + text;
    own.generation_prompt  = own.prompt.substr(base.size());
    if (is_in_reasoning(own.generation_prompt, made)) {
        return made;
    }
    if (!reads(own, inputs, text)) {
        own.generation_prompt = made.generation_prompt;  // the parser may only know upstream's markup
    }
    return reads(own, inputs, text) ? own : made;
}

json moe_edge_chat_params_parse(json & body, const server_chat_params & params, std::vector<raw_buffer> & files) {
    const bool has_messages = body.contains("messages") && body.at("messages").is_array();
    if (has_messages) {
        join_text_parts(body.at("messages"));
    }
    if (has_messages && needs_calls_apart(body.at("messages"))) {
        body["messages"] = with_calls_apart(body.at("messages"), params.tmpls.get());
    }
    if (has_messages && wants_short_ids(params.tmpls.get())) {
        shorten_ids(body.at("messages"));
    }
    json made = oaicompat_chat_params_parse(body, params, files);
    if (has_messages && ends_with_assistant(body) && !made.contains("continue_final_message")) {
        made["continue_final_message"] = params.prefill_assistant;
    }
    return made;
}

common_chat_msg moe_edge_chat_parse(
        const std::string & text, bool is_partial, const common_chat_parser_params & params) {
    common_chat_msg found = common_chat_parse(text, is_partial, params);
    if (!params.is_continuation || params.echo) {
        return found;
    }
    const common_chat_msg before = begun(params);
    for (const auto part : { &common_chat_msg::content, &common_chat_msg::reasoning_content }) {
        // Remove the text of the continued message (`before`) from the answer. Either text may be the beginning of the
        // other, because a parser may drop white space at the end of a text.
        if (begins_with(found.*part, before.*part) || begins_with(before.*part, found.*part)) {
            (found.*part).erase(0, (before.*part).size());
        }
    }
    return found;
}

std::string moe_edge_tool_call_id() {
    return short_id(gen_tool_call_id());
}
