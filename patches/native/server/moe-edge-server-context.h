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

// The parts of upstream's server_slot that our code uses. The number of a slot is also the id of its sequence in the
// context.
struct moe_edge_slot {
    int32_t         number;
    int32_t         n_ctx;   // maximum number of tokens
    server_prompt & prompt;  // its contents
};

// Called when a slot starts to decode a task. task: the number of the task, or of its parent if upstream has copied the
// task from a parent.
void moe_edge_server_launched(int32_t slot, int32_t task);

// Called when a request has received its slot, before its prompt is computed. If more of the prompt can be reused from
// a copy of an earlier prompt than from the slot, loads the copy into the slot. Also replaces tokens of the prompt that
// differ from the slot's although their text is the same (see moe_edge_as_held).
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

// Runs a function that do_with_slot has stored under the name `path`. do_with_slot posts a task for saving a slot to a
// file with this name. Upstream then calls moe_edge_server_work instead of writing the file. Returns 1, or 0 if the
// function does not exist or fails.
size_t moe_edge_server_work(const char * path, const moe_edge_slot & slot);

#define llama_state_seq_save_file(context, path, sequence, tokens, n_tokens) \
    moe_edge_server_work(path, { slot->id, slot->n_ctx, slot->prompt })

// Records the time of a token. Called when the next token of a task's answer is known.
void moe_edge_server_token(int32_t task);

#define update_gen_last() update_gen_last(); moe_edge_server_token(slot.task->id)

// The type of a function that prepares a slot after a step that did not compute all its tokens. Upstream then adds the
// uncomputed tokens to a later step. n_prompt: how many of them upstream has already counted as processed; the function
// subtracts this number. Returns the slot's prompt, from which the caller must remove the uncomputed tokens.
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
// belong to a prompt. Throws std::runtime_error if the step failed; the list of tokens of each slot is then shortened
// to the tokens in the context's memory.
int32_t moe_edge_server_step(
    llama_context * context, llama_process_type type, llama_batch_ext * step, const std::set<int32_t> & prompts,
    const moe_edge_undo_slot & undo);

// Encodes the images of a sequence's prompt (mtmd_batch_encode). Returns 0 on success.
int32_t moe_edge_encode_images(int32_t sequence, mtmd_batch * images);

#define mtmd_batch_encode(images) moe_edge_encode_images(slot.id, images)

// Called after the tokens of an image could not be computed. Shortens the slot's list of tokens to those that the
// context's memory contains.
void moe_edge_image_failed(const moe_edge_slot & slot);

// Calls `compute`, which computes the tokens of an image (mtmd_helper_decode_image_chunk), and returns its status.
// After a failure, the memory may contain a part of the image, so moe_edge_image_failed corrects the slot. Upstream
// passes the slot as const, hence the const_cast.
template <typename Slot, typename Compute> int32_t moe_edge_compute_image(const Slot & slot, const Compute & compute) {
    const int32_t status = compute();
    if (status != 0) {
        moe_edge_image_failed({ slot.id, slot.n_ctx, const_cast<server_prompt &>(slot.prompt) });
    }
    return status;
}

#define mtmd_helper_decode_image_chunk(...) \
    moe_edge_compute_image(slot, [&] { return (mtmd_helper_decode_image_chunk)(__VA_ARGS__); })

// Saves the caller's state of a slot's sequence (see moe_edge_server_notes). Called before the first token of an answer
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

// Replaces upstream's call of llama_process, which computes a step, with moe_edge_server_step. Before the first step of
// an answer, the macro also calls moe_edge_server_answer_begins, and may create a checkpoint at the end of the prompt.
// The sequence can return to this checkpoint if the next prompt does not contain the answer. The checkpoint is created
// only if the sequence can return only to checkpoints and may have at least four. `off`: upstream's variable with the
// index of the step's first token.
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
