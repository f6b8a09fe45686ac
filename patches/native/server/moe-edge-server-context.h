// Included before all other headers of upstream's server-context.cpp. It connects our code to two things that no
// public header offers: the cache of earlier prompts, and the slots whose tokens a step computes.

#pragma once

#include "llama.h"
#include "server-task.h"

#include <cstdint>
#include <functional>
#include <set>

// Called once, on the thread that creates the server, with upstream's cache of earlier prompts.
void moe_edge_prompts_made(server_prompt_cache * prompts);

struct moe_edge_prompt_cache : server_prompt_cache {
    moe_edge_prompt_cache(int32_t most_mib, size_t most_tokens) : server_prompt_cache(most_mib, most_tokens) {
        moe_edge_prompts_made(this);
    }
};

#define server_prompt_cache moe_edge_prompt_cache

// Undoes a slot's part of the running step: the slot will add the same tokens to a later step. n_prompt: how many of
// them belong to its prompt. Returns the slot's prompt, whose token list the caller still has to shorten.
using moe_edge_undo_slot = std::function<server_prompt & (int32_t slot, int32_t n_prompt)>;

// Returns the slots whose tokens in a step belong to a prompt. batch: upstream's server_batch, of which the step computes
// the tokens from `first` on that were rendered. A slot's number is the name of its sequence.
template <typename Batch> std::set<int32_t> moe_edge_slots_with_prompts(const Batch & batch, int32_t first) {
    std::set<int32_t> out;
    for (int32_t i = first; i < first + batch.view.size(); i++) {
        if (batch.tokens[i].is_prompt) {
            out.insert(batch.tokens[i].id_slot);
        }
    }
    return out;
}

// Computes a step of the server's slots. prompts: the sequences whose tokens belong to a prompt. Returns llama_process's
// status. Throws std::runtime_error if the step failed; each slot then holds exactly the tokens that are in the context's
// memory.
int32_t moe_edge_server_step(
    llama_context * context, llama_process_type type, llama_batch_ext * step, const std::set<int32_t> & prompts,
    const moe_edge_undo_slot & undo);

// The call is inside a method of the class that owns `slots` and `batch`, with `off`, the batch's first token in the step.
#undef llama_process
#define llama_process(context, type, step)                                                              \
    moe_edge_server_step(context, type, step, moe_edge_slots_with_prompts(batch, off),                  \
                         [&](int32_t number, int32_t n_prompt) -> server_prompt & {                     \
        auto & slot = slots[number];                                                                    \
        slot.i_batch = -1;                                                                              \
        if (slot.state == SLOT_STATE_DONE_PROMPT) {                                                     \
            slot.state = SLOT_STATE_PROCESSING_PROMPT;                                                  \
        }                                                                                               \
        if (slot.state == SLOT_STATE_PROCESSING_PROMPT) {                                               \
            slot.stats.n_prompt_processed -= n_prompt; /* upstream adds all tokens of the batch */      \
        }                                                                                               \
        return slot.prompt;                                                                             \
    })
