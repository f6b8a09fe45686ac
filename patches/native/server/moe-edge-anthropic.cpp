// Anthropic's requests with the fields that llama.cpp's other forms have.

#include "server-chat.h"

// Upstream's: CMakeLists.txt gives it this name. It takes from a request what Anthropic's interface has, and
// drops all else.
json moe_edge_upstream_anthropic(const json & body);

// Upstream's server calls this.
json server_chat_convert_anthropic_to_oai(const json & body) {
    json made = moe_edge_upstream_anthropic(body);
    for (const char * name : { "response_format", "seed", "min_p", "repeat_penalty", "presence_penalty",
                               "frequency_penalty", "logit_bias", "return_progress", "parallel_tool_calls" }) {
        if (body.contains(name)) {
            made[name] = body.at(name);
        }
    }
    return made;
}
