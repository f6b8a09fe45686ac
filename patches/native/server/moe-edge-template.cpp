// Tests a chat template without a model: shows how the server would convert requests to prompts and answers to
// messages.

#include "moe-edge-server.h"
#include "moe-edge-chat.h"
#include "moe-edge-parse.h"
#include "moe-edge-grammar.h"
#include "moe-edge-tools.h"

#include "chat.h"
#include "common.h"
#include "json.h"
#include "log.h"
#include "server-chat.h"
#include "server-common.h"
#include "server-task.h"

#include <exception>
#include <string>
#include <vector>

namespace {

server_chat_params chat_params_of(const json & asked) {
    const std::string bos = asked.value("bos_token", ""), eos = asked.value("eos_token", "");
    const std::string source = moe_edge_template_with_tools(nullptr, asked.at("template").get<std::string>());
    const common_params defaults = {};
    server_chat_params params = {};
    params.use_jinja         = true;
    params.prefill_assistant = defaults.prefill_assistant;
    params.reasoning_format  = defaults.reasoning_format;
    params.tmpls             = common_chat_templates_init(nullptr, source, bos, eos);
    params.enable_thinking   = common_chat_templates_support_enable_thinking(params.tmpls.get());
    return params;
}

// Returns the parser for the answers to a converted chat request.
common_chat_parser_params parser_of(const json & made, const server_chat_params & params) {
    common_chat_parser_params parser;
    parser.format            = static_cast<common_chat_format>(made.at("chat_format").get<int>());
    parser.reasoning_format  = params.reasoning_format;
    parser.generation_prompt = made.at("generation_prompt").get<std::string>();
    parser.parse_tool_calls  = made.value("parse_tool_calls", false);
    parser.echo              = made.value("echo", false);
    if (made.contains("continue_final_message")) {
        parser.is_continuation =
            common_chat_continuation_parse(made.at("continue_final_message")) != COMMON_CHAT_CONTINUATION_NONE;
    }
    if (made.contains("chat_parser")) {
        parser.parser.load(made.at("chat_parser").get<std::string>());
    }
    return parser;
}

// Returns the message that a client receives for an answer of the model: whole, or as the sum of the parts of a stream.
json message_of(const common_chat_parser_params & parser, const std::string & text, bool is_stream) {
    task_result_state state(parser);
    std::vector<common_chat_msg_diff> diffs;
    if (!is_stream) {
        return state.update_chat_msg(text, false, diffs).to_json_oaicompat();
    }
    common_chat_msg sum;
    const auto add = [&](const std::string & part, bool is_partial) {
        diffs.clear();
        state.update_chat_msg(part, is_partial, diffs, true);
        for (const auto & diff : diffs) {
            sum.content           += diff.content_delta;
            sum.reasoning_content += diff.reasoning_content_delta;
            if (diff.tool_call_index != std::string::npos) {
                sum.tool_calls.resize(std::max(sum.tool_calls.size(), diff.tool_call_index + 1));
                common_chat_tool_call & call = sum.tool_calls[diff.tool_call_index];
                call.name      += diff.tool_call_delta.name;
                call.id        += diff.tool_call_delta.id;
                call.arguments += diff.tool_call_delta.arguments;
            }
        }
    };
    size_t at = 0;
    while (at < text.size()) {
        size_t end = at + 1;
        while (end < text.size() && (text[end] & 0xC0) == 0x80) {
            end++;
        }
        add(text.substr(at, end - at), true);
        at = end;
    }
    add("", false);
    sum.role = "assistant";
    return sum.to_json_oaicompat();
}

json error_of(const std::exception & failure) {
    return { { "error", std::string(failure.what()) } };
}

json answer_of(const common_chat_parser_params & parser, const json & made, const std::string & text) {
    json answer = json::object();
    for (const bool is_stream : { false, true }) {
        const char * name = is_stream ? "streamed" : "message";
        try {
            answer[name] = message_of(parser, text, is_stream);
        } catch (const std::exception & failure) {
            answer[name] = error_of(failure);
        }
    }
    if (made.contains("grammar")) {
        answer["matches"] = moe_edge_grammar_matches(
            made.at("grammar").get<std::string>(), made.at("generation_prompt").get<std::string>() + text);
    }
    return answer;
}

json case_of(const json & asked, const server_chat_params & params) {
    json body = asked.at("request");
    std::vector<raw_buffer> files;
    const json made = moe_edge_chat_params_parse(body, params, files);
    json found = json::object();
    for (const char * name : { "prompt", "generation_prompt", "grammar", "grammar_lazy", "grammar_triggers", "stop" }) {
        if (made.contains(name)) {
            found[name] = made.at(name);
        }
    }
    if (asked.contains("answers")) {
        const auto parser = parser_of(made, params);
        json answers = json::array();
        for (const auto & text : asked.at("answers")) {
            answers.push_back(answer_of(parser, made, text.get<std::string>()));
        }
        found["answers"] = answers;
    }
    return found;
}

}  // namespace

const char * moe_edge_server_try_template(const char * question) {
    static thread_local std::string reply;
    try {
        common_log_set_verbosity_thold(-1);
        const json asked = json::parse(question);
        const auto params = chat_params_of(asked);
        json found = json::array();
        for (const auto & each : asked.at("cases")) {
            try {
                found.push_back(case_of(each, params));
            } catch (const std::exception & failure) {
                found.push_back(error_of(failure));
            }
        }
        reply = found.dump_safe();
    } catch (const std::exception & failure) {
        reply = error_of(failure).dump_safe();
    }
    return reply.c_str();
}
