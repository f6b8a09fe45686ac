// Computes a step of the server, which has tokens of several requests at once. Each request may be cancelled meanwhile.

#pragma once

#include "moe-edge-server-context.h"

#include <atomic>
#include <mutex>
#include <set>
#include <vector>

// Keeps track of cancelled sequences. Ends the running step early if all its sequences are cancelled, or if it contains a
// prompt of a cancelled sequence and can be repeated for the other sequences.
class moe_edge_cancels {
public:
    // Marks these sequences as cancelled. May be called from any thread.
    void cancel(const std::vector<int32_t> & sequences);

    // Marks a sequence as not cancelled. Must be called when another request starts on the sequence. May be called from
    // any thread.
    void forget(int32_t sequence);

    // Returns whether the running step must end early. Once true, it stays true until the next call of begin. May be
    // called from any thread.
    bool ends_step() const { return ends; }

    // Must be called before a step. Shortens the batch to the tokens before the first prompt token of a cancelled
    // sequence. Empties the batch if every sequence is cancelled. prompts: the sequences whose tokens belong to a
    // prompt. can_redo: whether a step that was ended early can be repeated for the other sequences.
    void begin(llama_batch_ext & batch, const std::set<int32_t> & prompts, bool can_redo);

    // Must be called before the image of a prompt is encoded or computed, instead of `begin`. Returns false if the
    // sequence is cancelled.
    bool begin_image(int32_t sequence);

    // Must be called after a step. Returns whether the step was ended early because of a cancelled sequence.
    bool end();

private:
    struct part {
        int32_t sequence;
        bool    is_prompt;
    };

    void update();

    mutable std::mutex mutex;
    std::set<int32_t>  cancelled;
    std::vector<part>  running;  // parts of the running step, in the order of the batch
    bool               can_redo = false;
    std::atomic<bool>  ends { false };
};

// Shortens a slot's list of tokens (prompt.tokens) to those that the context's memory contains. Called if a step was
// computed only in part or not at all. first: the position of the sequence's first token in the step.
void moe_edge_return_to_memory(llama_context * context, int32_t sequence, llama_pos first, server_prompt & prompt);

// Computes a step of the server. prompts: the sequences whose tokens belong to a prompt. compute: calls llama_process
// for a batch and returns its status. Returns 0, or 1 if the KV cache has no space for the batch. Throws
// std::runtime_error if the step failed. After a cancel or a failure, the list of tokens of each affected slot is
// shortened to the tokens in the context's memory.
int32_t moe_edge_compute_step(
    moe_edge_cancels & cancels, llama_context * context, llama_batch_ext & batch, const std::set<int32_t> & prompts,
    const moe_edge_undo_slot & undo, const std::function<int32_t(llama_batch_ext & batch)> & compute);
