// Makes conversations in which a user message directly follows a tool result work with every chat template.

#include "chat.h"

#include <exception>
#include <vector>

common_chat_params moe_edge_templates_apply(
    // defined in moe-edge-tools.cpp
    const common_chat_templates * templates, const common_chat_templates_inputs & inputs);

namespace {

// Appends each user message that directly follows a tool result to that result. Returns whether any message was
// appended.
bool append_to_results(std::vector<common_chat_msg> & messages) {
    std::vector<common_chat_msg> made;
    for (const common_chat_msg & each : messages) {
        if (each.role == "user" && !made.empty() && made.back().role == "tool") {
            common_chat_msg & result = made.back();
            result.content = result.render_content() + "\n\n" + each.render_content();
            result.content_parts.clear();
        } else {
            made.push_back(each);
        }
    }
    const bool has_some = made.size() < messages.size();
    messages.swap(made);
    return has_some;
}

}  // namespace

// Renders the prompt of a request. If the template refuses the request, appends each user message that directly follows
// a tool result to that result, and tries again. Some templates refuse such messages, because user and assistant do not
// alternate. Used instead of upstream's common_chat_templates_apply.
common_chat_params moe_edge_templates_apply_in_turns(
        const common_chat_templates * templates, const common_chat_templates_inputs & inputs) {
    try {
        return moe_edge_templates_apply(templates, inputs);
    } catch (const std::exception &) {
        common_chat_templates_inputs changed = inputs;
        if (!append_to_results(changed.messages)) {
            throw;
        }
        return moe_edge_templates_apply(templates, changed);
    }
}
