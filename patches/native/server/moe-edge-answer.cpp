#include "moe-edge-answer.h"

#include "server-common.h"

#undef server_task_result_cmpl_final

#include <string>

namespace {

// Marks a response of OpenAI's Responses API as cut off by the limit on the answer's length. Also marks the last item
// of its output.
void mark_incomplete(json & response) {
    response["status"] = "incomplete";
    response["incomplete_details"] = { { "reason", "max_output_tokens" } };
    if (response.contains("completed_at")) {
        response["completed_at"] = nullptr;
    }
    json & output = response.at("output");
    if (!output.empty()) {
        output.back()["status"] = "incomplete";
    }
}

// Marks the last events of a stream of OpenAI's Responses API as cut off by the limit on the answer's length.
void mark_events_incomplete(json & events) {
    for (auto & event : events) {
        json & data = event.at("data");
        if (data.at("type") != "response.completed") {
            continue;
        }
        event["event"] = data["type"] = "response.incomplete";
        mark_incomplete(data.at("response"));
        const json & output = data.at("response").at("output");
        for (auto & other : events) {
            json & said = other.at("data");
            if (!output.empty() && said.contains("item") && said.at("item").at("id") == output.back().at("id")) {
                said.at("item")["status"] = "incomplete";
            }
        }
    }
}

}  // namespace

// Called when the answer is complete. Removes an incomplete UTF-8 character from the end of the answer, because a
// stream would not send it either.
void moe_edge_answer::update(task_result_state & state) {
    content.resize(validate_utf8(content));
    moe_edge_answer_ended(id_slot, stop, truncated);
    server_task_result_cmpl_final::update(state);
}

json moe_edge_answer::to_json() {
    json made = server_task_result_cmpl_final::to_json();
    if (res_type == TASK_RESPONSE_TYPE_OAI_RESP && stop == STOP_TYPE_LIMIT) {
        stream ? mark_events_incomplete(made) : mark_incomplete(made);
    }
    return made;
}
