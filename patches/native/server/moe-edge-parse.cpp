#include "moe-edge-parse.h"
#include "moe-edge-chat.h"

#undef common_chat_parse
#undef compute_diffs

#include <cstdio>
#include <stdexcept>
#include <string>

namespace {

const char * const NOT_IN_FORM = "an answer was not in the form of the chat template: its text was sent as content";

// Returns the arguments of a tool call as valid JSON. Line feeds and other control characters in strings are escaped.
std::string as_json(const std::string & arguments) {
    std::string made;
    bool in_string = false, is_escaped = false;
    for (const char c : arguments) {
        if (in_string && static_cast<unsigned char>(c) < ' ') {
            char escape[8];
            snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
            made += escape;
        } else {
            made += c;
            in_string = in_string != (c == '"' && !is_escaped);
        }
        is_escaped = in_string && c == '\\' && !is_escaped;
    }
    return made;
}

// Returns the position after the first occurrence of `part` in a text, searching from `from`. Returns `from` if the
// text does not contain it.
size_t after(const std::string & text, const std::string & part, size_t from) {
    const size_t at = text.find(part, from);
    return at == std::string::npos ? from : at + part.size();
}

// Returns the message for an answer that the parser refuses. It consists of the reasoning and the content that were
// already sent; the rest of the text is added to the content.
common_chat_msg as_text(const std::string & text, const common_chat_msg & sent) {
    common_chat_msg made;
    made.role = "assistant";
    made.reasoning_content = sent.reasoning_content;
    const size_t begin = after(text, sent.content, after(text, sent.reasoning_content, 0));
    made.content = sent.content + text.substr(begin);
    return made;
}

// Returns the end of a complete answer that the parser did not read. Returns an empty string for Gemma's models,
// because these may end an answer with markers that have no meaning.
std::string unread(const std::string & text, const common_chat_parser_params & params) {
    if (params.parser.empty() || params.format == COMMON_CHAT_FORMAT_PEG_GEMMA4) {
        return "";
    }
    const std::string all = params.generation_prompt + text;
    common_peg_parse_context context(all, COMMON_PEG_PARSE_FLAG_LENIENT);
    const std::string rest = all.substr(params.parser.parse(context).end);
    const bool is_blank = rest.find_first_not_of(" \t\r\n") == std::string::npos;
    return is_blank || rest.size() > text.size() ? "" : rest;
}

}  // namespace

common_chat_msg moe_edge_parse_answer(
        const std::string & text, bool is_partial, const common_chat_parser_params & params, const common_chat_msg & sent) {
    common_chat_msg found;
    try {
        found = moe_edge_chat_parse(text, is_partial, params);
    } catch (const std::runtime_error &) {
        if (is_partial) {
            return {};  // a later part may complete it, and the last part sends it in any case
        }
        moe_edge_note(NOT_IN_FORM);
        return as_text(text, sent);
    }
    const std::string rest = is_partial ? "" : unread(text, params);
    if (!rest.empty()) {
        moe_edge_note(NOT_IN_FORM);
        found.content += rest;
    }
    for (common_chat_tool_call & call : found.tool_calls) {
        call.arguments = as_json(call.arguments);
    }
    return found;
}

common_chat_msg moe_edge_with_calls_of(const common_chat_msg & before, const common_chat_msg & now) {
    common_chat_msg made = now;
    for (size_t i = now.tool_calls.size(); i < before.tool_calls.size(); i++) {
        made.tool_calls.push_back(before.tool_calls[i]);
    }
    return made;
}
