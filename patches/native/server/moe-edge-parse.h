// Makes upstream's server return answers as text if they do not follow the form of their chat template. Included before
// all other headers in upstream's server-task.cpp.

#pragma once

#include "chat.h"
#include "server-task.h"

// Parses an answer like common_chat_parse. Text that does not follow the form of the chat template becomes content, and
// the server's log gets a note. The arguments of tool calls are always valid JSON. sent: the part of the message that a
// streaming client has already received.
common_chat_msg moe_edge_parse_answer(
    const std::string & text, bool is_partial, const common_chat_parser_params & params, const common_chat_msg & sent);

// Returns the message `now`, with the tool calls of `before` that `now` lacks. A stream has sent those calls already
// and cannot take them back.
common_chat_msg moe_edge_with_calls_of(const common_chat_msg & before, const common_chat_msg & now);

// Stores a sentence for the server's log in the request that this thread answers.
void moe_edge_note(const std::string & sentence);

// Make upstream's task_result_state::update_chat_msg call moe_edge_parse_answer and moe_edge_with_calls_of. chat_msg:
// the member of task_result_state that contains the message as it was parsed last.
#define common_chat_parse(text, is_partial, params) moe_edge_parse_answer(text, is_partial, params, chat_msg)
#define compute_diffs(before, now) compute_diffs(before, moe_edge_with_calls_of(before, now))
