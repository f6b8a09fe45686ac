// Requests that go through a chat template, and answers to them: what upstream's server leaves open.

#pragma once

#include "chat.h"
#include "server-common.h"

#include <string>
#include <vector>

// Upstream's server calls these instead of oaicompat_chat_params_parse, common_chat_parse and gen_tool_call_id.

// An assistant message at the end of a request is one that the answer continues. Ids of tool calls get the form that the
// template demands.
json moe_edge_chat_params_parse(json & body, const server_chat_params & params, std::vector<raw_buffer> & files);

// An answer that continues a message leaves out the text of that message, unless the request has `echo`.
common_chat_msg moe_edge_chat_parse(
    const std::string & text, bool is_partial, const common_chat_parser_params & params);

// Nine letters or digits: Mistral's templates demand that, and all others take it.
std::string moe_edge_tool_call_id();

// Apply templates to a request as common_chat_templates_apply does. If the answer continues a message, the mark-up before
// its text is that which the template has for such a message. Upstream's may be for another model.
common_chat_params moe_edge_apply_continued(
    const common_chat_templates * templates, const common_chat_templates_inputs & inputs);
