// Connects our code to parts of upstream's server that no public header exposes: the cache of earlier prompts, the
// slots, and the steps that compute their tokens. Included before all other headers in upstream's server-context.cpp.

#pragma once

#include "llama.h"
#include "mtmd-helper.h"
#include "server-task.h"

#include <cstdint>
#include <functional>
#include <set>

// Receives upstream's cache of copies of earlier prompts. Called once, on the thread that creates the server.
void moe_edge_prompts_made(server_prompt_cache * prompts);

// Replaces upstream's cache of copies of earlier prompts, so that upstream never exchanges a slot's contents for a
// copy. moe_edge_server_place does that instead, when it knows the tokens of the request.
struct moe_edge_prompt_cache : server_prompt_cache {
    moe_edge_prompt_cache(int32_t most_mib, size_t most_tokens) : server_prompt_cache(most_mib, most_tokens) {
        moe_edge_prompts_made(this);
    }
    server_prompt_cache_state * alloc(const server_prompt &, size_t, size_t) { return nullptr; }
    bool load(server_prompt &, const server_tokens &, llama_context *, llama_context *, int32_t) { return true; }
};

#define server_prompt_cache moe_edge_prompt_cache

// A slot on which no request decodes. Its number is also the id of its sequence in the context.
struct moe_edge_slot {
    int32_t         number;
    int32_t         n_ctx;   // maximum number of tokens
    server_prompt & prompt;  // its contents
};

// Called when a slot starts to decode a task. task: the number of the task, or of its parent if upstream has copied the
// task from a parent.
void moe_edge_server_launched(int32_t slot, int32_t task);

// Called when a request has received its slot, before its prompt is read. Fills the slot with the part of the prompt
// that the slot or a copy already contains. Also replaces tokens of the prompt by those in the slot that stand for the
// same text.
void moe_edge_server_place(const moe_edge_slot & slot, server_task & task);

template <typename Slot> llama_context * moe_edge_launched(llama_context * context, Slot & slot, server_task & task) {
    moe_edge_server_launched(slot.id, task.is_child() ? task.id_parent : task.id);
    if (task.type == SERVER_TASK_TYPE_COMPLETION && !task.is_child()) {
        moe_edge_server_place({ slot.id, slot.n_ctx, slot.prompt }, task);
    }
    return context;
}

// Does nothing. Upstream calls this overload only for a task that restores a slot from a file, which we never post.
template <typename Slot> llama_context * moe_edge_launched(llama_context * context, Slot *, server_task &) {
    return context;
}

#define validate(context) validate(moe_edge_launched(context, slot, task))

// Runs the work that do_with_slot has posted under the name `path`. Upstream calls this function instead of the one
// that writes a slot to a file. Returns 0 if there is no such work.
size_t moe_edge_server_work(const char * path, const moe_edge_slot & slot);

#define llama_state_seq_save_file(context, path, sequence, tokens, n_tokens) \
    moe_edge_server_work(path, { slot->id, slot->n_ctx, slot->prompt })

// Records the time of a token. Called when the next token of a task's answer is known.
void moe_edge_server_token(int32_t task);

#define update_gen_last() update_gen_last(); moe_edge_server_token(slot.task->id)

// The type of a function that undoes a slot's part of the running step, so that the slot adds these tokens to a later
// step again. n_prompt: how many of the tokens belong to its prompt. Returns the slot's prompt, whose token list the
// caller must shorten.
using moe_edge_undo_slot = std::function<server_prompt & (int32_t slot, int32_t n_prompt)>;

// Returns the numbers of the slots that have prompt tokens in a step. batch: upstream's server_batch. first: the index
// of the step's first token in the batch.
template <typename Batch> std::set<int32_t> moe_edge_slots_with_prompts(const Batch & batch, int32_t first) {
    std::set<int32_t> out;
    for (int32_t i = first; i < first + batch.view.size(); i++) {
        if (batch.tokens[i].is_prompt) {
            out.insert(batch.tokens[i].id_slot);
        }
    }
    return out;
}

// Computes a step of the server's slots and returns the status of llama_process. prompts: the sequences whose tokens
// belong to a prompt. Throws std::runtime_error if the step failed; each slot then contains exactly the tokens in the
// context's memory.
int32_t moe_edge_server_step(
    llama_context * context, llama_process_type type, llama_batch_ext * step, const std::set<int32_t> & prompts,
    const moe_edge_undo_slot & undo);

// Encodes the images of a sequence's prompt (mtmd_batch_encode). Returns 0 on success.
int32_t moe_edge_encode_images(int32_t sequence, mtmd_batch * images);

#define mtmd_batch_encode(images) moe_edge_encode_images(slot.id, images)

// Called after the tokens of an image could not be computed. Makes the slot contain exactly the tokens in the context's
// memory.
void moe_edge_image_failed(const moe_edge_slot & slot);

// Calls mtmd_helper_decode_image_chunk, which computes the tokens of an image, and returns its status. Upstream's caller
// promises not to change the slot, but a failed image changes the memory that the slot describes.
template <typename Slot, typename Compute> int32_t moe_edge_compute_image(const Slot & slot, const Compute & compute) {
    const int32_t status = compute();
    if (status != 0) {
        moe_edge_image_failed({ slot.id, slot.n_ctx, const_cast<server_prompt &>(slot.prompt) });
    }
    return status;
}

#define mtmd_helper_decode_image_chunk(...) \
    moe_edge_compute_image(slot, [&] { return (mtmd_helper_decode_image_chunk)(__VA_ARGS__); })

// Saves the external state of a slot's sequence (such as a policy's state). Called before the first token of an answer
// is computed. n_tokens: the number of tokens in the slot before the answer.
void moe_edge_server_answer_begins(int32_t slot, size_t n_tokens);

// Calls `mark` with the number of each slot that has an answer token in a step.
template <typename Batch, typename Mark> void moe_edge_mark_answers(const Batch & batch, int32_t first, const Mark & mark) {
    for (int32_t i = first; i < first + batch.view.size(); i++) {
        if (!batch.tokens[i].is_prompt) {
            mark(batch.tokens[i].id_slot);
        }
    }
}

// Replaces upstream's call of llama_process, which computes a step. Before an answer's first step, the macro also saves
// the sequence's external state, and makes a checkpoint at the end of the prompt if there is space for it. The next
// prompt can return to this checkpoint if it does not repeat the answer's tokens. `off`: the index of the step's first
// token.
#undef llama_process
#define llama_process(context, kind, step)                                                              \
    (moe_edge_mark_answers(batch, off, [&](int32_t number) {                                            \
        server_slot & slot = slots[number];                                                             \
        if (slot.stats.n_gen != 1 || slot.task->type != SERVER_TASK_TYPE_COMPLETION) {                  \
            return;                                                                                     \
        }                                                                                               \
        moe_edge_server_answer_begins(number, slot.prompt.tokens.size() - 1);                           \
        if (params_base.n_ctx_checkpoints >= 4 &&                                           \
            (n_swa > 0 || ctx_tgt_seq_rm_type == COMMON_CONTEXT_SEQ_RM_TYPE_FULL)) {                    \
            llama_memory_t memory = llama_get_memory(context);                                          \
            create_checkpoint(slot, 1, llama_memory_seq_pos_min(memory, number),                        \
                              llama_memory_seq_pos_max(memory, number));                                \
        }                                                                                               \
    }),                                                                                                 \
    moe_edge_server_step(context, kind, step, moe_edge_slots_with_prompts(batch, off),                  \
                         [&](int32_t number, int32_t n_prompt) -> server_prompt & {                     \
        auto & slot = slots[number];                                                                    \
        slot.i_batch = -1;                                                                              \
        if (slot.state == SLOT_STATE_DONE_PROMPT) {                                                     \
            slot.state = SLOT_STATE_PROCESSING_PROMPT;                                                  \
        }                                                                                               \
        if (slot.state == SLOT_STATE_PROCESSING_PROMPT) {                                               \
            slot.stats.n_prompt_processed -= n_prompt; /* upstream counts every token */                \
        }                                                                                               \
        return slot.prompt;                                                                             \
    }))
