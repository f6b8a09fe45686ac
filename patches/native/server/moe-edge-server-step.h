// One step of the server: it computes the tokens of several requests at once, and each request may be cancelled
// while the step runs.

#pragma once

#include "moe-edge-server-context.h"

#include <atomic>
#include <mutex>
#include <set>
#include <vector>

// Knows which sequences were cancelled, and ends the running step early if a cancelled sequence would keep it busy.
class moe_edge_cancels {
public:
    // Any thread: the request on these sequences is over.
    void cancel(const std::vector<int32_t> & sequences);

    // Any thread, before a new request starts on these sequences, or on any sequence if there are none.
    void forget(const std::vector<int32_t> & sequences);

    // Any thread: true from the moment when the running step has to end until the next call of begin.
    bool ends_step() const { return ends; }

    // Removes the tokens at the end of a batch that are not worth computing: everything from the first prompt of a
    // cancelled sequence on, and all tokens if every sequence was cancelled. prompts: the sequences whose tokens belong
    // to a prompt. can_redo: the memory can drop the last tokens of a sequence, so that an aborted step can be computed
    // again for the other sequences.
    void begin(llama_batch_ext & batch, const std::set<int32_t> & prompts, bool can_redo);

    // After a step. Returns true if it was aborted because of a cancelled sequence.
    bool end();

private:
    struct part {
        int32_t sequence;
        bool    is_prompt;
    };

    void update();

    mutable std::mutex mutex;
    std::set<int32_t>  cancelled;
    std::vector<part>  running;  // of the step that is being computed, in the order of the batch
    bool               can_redo = false;
    std::atomic<bool>  ends { false };
};

// Computes a step. prompts: the sequences whose tokens belong to a prompt. compute: calls llama_process for a batch and
// returns its status. Returns 0, or 1 if the KV cache has no space for the batch. Throws std::runtime_error if the step failed. A slot whose tokens were not computed, because
// of a cancel or a failure, holds afterwards what the context's memory holds.
int32_t moe_edge_compute_step(
    moe_edge_cancels & cancels, llama_context * context, llama_batch_ext & batch, const std::set<int32_t> & prompts,
    const moe_edge_undo_slot & undo, const std::function<int32_t(llama_batch_ext & batch)> & compute);
