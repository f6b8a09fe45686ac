// Included before all else of upstream's server-context.cpp: we are told of what keeps its copies of earlier
// conversations, which nothing else hands out.

#pragma once

#include "server-task.h"

// Called on the thread that creates the server.
void moe_edge_prompts_made(server_prompt_cache * prompts);

struct moe_edge_prompt_cache : server_prompt_cache {
    moe_edge_prompt_cache(int32_t most_mib, size_t most_tokens) : server_prompt_cache(most_mib, most_tokens) {
        moe_edge_prompts_made(this);
    }
};

#define server_prompt_cache moe_edge_prompt_cache
