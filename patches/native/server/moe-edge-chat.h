// Declares functions that upstream's server calls instead of its own, for requests that use a chat template.

#pragma once

#include "chat.h"
#include "server-common.h"

#include <string>
#include <vector>

// Converts a chat request to a request for a completion. Used instead of upstream's oaicompat_chat_params_parse. If the
// last message is from the assistant, the answer continues that message. Ids of tool calls are converted to the form
// that the template requires.
json moe_edge_chat_params_parse(json & body, const server_chat_params & params, std::vector<raw_buffer> & files);

// Parses the text of an answer to a message. Used instead of upstream's common_chat_parse. If the answer continues a
// message, the result does not contain the text of that message, unless the request has `echo`.
common_chat_msg moe_edge_chat_parse(
    const std::string & text, bool is_partial, const common_chat_parser_params & params);

// Returns a new id for a tool call, of nine letters or digits. Mistral's templates require this form, and all others
// accept it. Used instead of upstream's gen_tool_call_id.
std::string moe_edge_tool_call_id();

// Renders the prompt of a request like upstream's common_chat_templates_apply, except if the answer continues a
// message. Upstream may then put the role markers of another model before that message. This function uses the markers
// of the chat template, if the answer can be parsed with them.
common_chat_params moe_edge_apply_continued(
    const common_chat_templates * templates, const common_chat_templates_inputs & inputs);
