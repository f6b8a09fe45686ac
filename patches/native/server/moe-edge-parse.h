// Included before all other headers in upstream's server-task.cpp. Answers that do not follow the form of their chat
// template are returned as text.

#pragma once

#include "chat.h"
#include "server-task.h"

// Parses an answer as common_chat_parse does. Text that is not in the expected form becomes content, with a note for
// the log. The arguments of tool calls are always valid JSON, even if the model's form allows other strings. sent: the
// part of the message that a streaming client has received.
common_chat_msg moe_edge_parse_answer(
    const std::string & text, bool is_partial, const common_chat_parser_params & params, const common_chat_msg & sent);

// Returns the message `now` with the tool calls of `before` that it lacks, because a stream cannot take back a part
// that was sent.
common_chat_msg moe_edge_with_calls_of(const common_chat_msg & before, const common_chat_msg & now);

// Sets the note for the log of the request that this thread answers.
void moe_edge_note(const std::string & sentence);

// Upstream uses these names in methods of task_result_state, whose member chat_msg is the message so far.
#define common_chat_parse(text, is_partial, params) moe_edge_parse_answer(text, is_partial, params, chat_msg)
#define compute_diffs(before, now) compute_diffs(before, moe_edge_with_calls_of(before, now))
