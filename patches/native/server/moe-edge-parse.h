// Included before everything else in upstream's server-task.cpp: answers that do not keep their chat template's form
// are returned as text.

#pragma once

#include "chat.h"
#include "server-task.h"

// Parse an answer as common_chat_parse does. Text that is not in the form that the parser expects becomes content, with
// a note for the log. The arguments of tool calls are valid JSON even if the model's form allows other strings.
// sent: the part of the message that the client of a stream has received.
common_chat_msg moe_edge_parse_answer(
    const std::string & text, bool is_partial, const common_chat_parser_params & params, const common_chat_msg & sent);

// The message `now` with the tool calls of `before` if it has fewer: a stream cannot take back what it has sent.
common_chat_msg moe_edge_with_calls_of(const common_chat_msg & before, const common_chat_msg & now);

// Add a sentence to the log of the request that this thread answers.
void moe_edge_note(const std::string & sentence);

// Upstream calls it in methods of task_result_state, whose chat_msg is the message so far.
#define common_chat_parse(text, is_partial, params) moe_edge_parse_answer(text, is_partial, params, chat_msg)
#define compute_diffs(before, now) compute_diffs(before, moe_edge_with_calls_of(before, now))
