// Makes upstream's server use moe_edge_answer for the final result of an answer. The class corrects some results. For
// example, it removes an incomplete UTF-8 character from the end of an answer. Included before all other headers in
// upstream's server-context.cpp.

#pragma once

#include "server-task.h"

struct moe_edge_answer : server_task_result_cmpl_final {
    void update(task_result_state & state) override;
    json to_json() override;
};

// Called on the thread of a request when an answer has ended. slot: the number of the slot that made the answer. stop:
// upstream's stop_type. truncated: whether the context was full.
void moe_edge_answer_ended(int32_t slot, int stop, bool truncated);

#define server_task_result_cmpl_final moe_edge_answer
