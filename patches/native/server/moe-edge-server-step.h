// A step of the server. It computes the tokens of several requests at once, and each request may be cancelled
// meanwhile.

#pragma once

#include "moe-edge-server-context.h"

#include <atomic>
#include <mutex>
#include <set>
#include <vector>

// Keeps track of cancelled sequences, and ends the running step early if a cancelled sequence would prolong it.
class moe_edge_cancels {
public:
    // Marks the request on these sequences as cancelled. May be called from any thread.
    void cancel(const std::vector<int32_t> & sequences);

    // Must be called when another request starts on a sequence. May be called from any thread.
    void forget(int32_t sequence);

    // Returns true from the moment when the running step must end until the next call of begin. May be called from any
    // thread.
    bool ends_step() const { return ends; }

    // Removes tokens from the end of a batch that need not be computed: all tokens starting with the first prompt of a
    // cancelled sequence, or all tokens if every sequence was cancelled. prompts: the sequences whose tokens belong to
    // a prompt. can_redo: the memory can drop the last tokens of a sequence, so that an aborted step can be repeated
    // for the other sequences.
    void begin(llama_batch_ext & batch, const std::set<int32_t> & prompts, bool can_redo);

    // Must be called after a step. Returns true if the step was aborted because of a cancelled sequence.
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

// Computes a step. prompts: the sequences whose tokens belong to a prompt. compute: calls llama_process for a batch and
// returns its status. Returns 0, or 1 if the KV cache has no space for the batch. Throws std::runtime_error if the step
// failed. If the tokens of a slot were not computed, because of a cancel or a failure, the slot afterwards holds
// exactly the tokens in the context's memory.
int32_t moe_edge_compute_step(
    moe_edge_cancels & cancels, llama_context * context, llama_batch_ext & batch, const std::set<int32_t> & prompts,
    const moe_edge_undo_slot & undo, const std::function<int32_t(llama_batch_ext & batch)> & compute);
