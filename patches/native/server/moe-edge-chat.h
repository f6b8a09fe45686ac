// Requests that use a chat template, and their answers: features that upstream's server lacks.

#pragma once

#include "chat.h"
#include "server-common.h"

#include <string>
#include <vector>

// Upstream's server calls these functions instead of oaicompat_chat_params_parse, common_chat_parse and
// gen_tool_call_id.

// Converts a chat request. If its last message is from the assistant, the answer continues that message. Ids of tool
// calls are converted to the form that the template requires.
json moe_edge_chat_params_parse(json & body, const server_chat_params & params, std::vector<raw_buffer> & files);

// Parses an answer. If it continues a message, the text of that message is left out, unless the request has `echo`.
common_chat_msg moe_edge_chat_parse(
    const std::string & text, bool is_partial, const common_chat_parser_params & params);

// Returns a new id of nine letters or digits. Mistral's templates require this form, and all others accept it.
std::string moe_edge_tool_call_id();

// Applies templates to a request as common_chat_templates_apply does. If the answer continues a message, the template's
// own markup before the text of such a message is used. Upstream's markup may belong to another model.
common_chat_params moe_edge_apply_continued(
    const common_chat_templates * templates, const common_chat_templates_inputs & inputs);
