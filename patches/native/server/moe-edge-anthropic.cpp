// Makes llama.cpp's server accept more fields in Anthropic requests, such as `seed` and `min_p`. Upstream accepts these
// fields only in requests of its other APIs.

#include "server-chat.h"

// Upstream's function that converts Anthropic requests, under another name. It keeps only the fields of Anthropic's
// API.
json moe_edge_upstream_anthropic(const json & body);

// Called by upstream's server.
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
