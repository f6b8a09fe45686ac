#include "moe-edge-server-step.h"

#include "llama-batch.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace {

const int32_t INVALID = -1, SUCCESS = 0, NO_SPACE = 1, ABORTED = 2;

// The microseconds for which the decode thread sleeps instead of computing a step, if all requests of the step are
// cancelled.
const useconds_t IDLE_US = 1000;

// The tokens of one sequence in a batch.
struct member {
    int32_t   sequence;
    llama_pos first;         // position of its first token
    size_t    n_tokens;
    size_t    n_computed;
};

std::vector<member> members_of(const llama_batch_ext & batch) {
    std::vector<member> out;
    for (const auto & token : batch.tokens) {
        for (const llama_seq_id sequence : token.seq_ids) {
            auto it = std::find_if(out.begin(), out.end(), [&](const member & m) { return m.sequence == sequence; });
            if (it == out.end()) {
                it = out.insert(out.end(), { sequence, token.pos[0], 0, 0 });
            }
            it->n_tokens++;
        }
    }
    return out;
}

void count_computed(std::vector<member> & members, const llama_batch_ext & batch) {
    for (auto & m : members) {
        m.n_computed = 0;
    }
    for (const auto & computed : members_of(batch)) {
        for (auto & m : members) {
            m.n_computed = m.sequence == computed.sequence ? computed.n_tokens : m.n_computed;
        }
    }
}

bool can_drop_last_tokens(const llama_context * context) {
    const llama_model * model = llama_get_model(context);
    return !llama_model_is_recurrent(model) && !llama_model_is_hybrid(model);
}

}  // namespace

// If the memory is recurrent, which means that it cannot remove single tokens, returns to the last checkpoint.
void moe_edge_return_to_memory(llama_context * context, int32_t sequence, llama_pos first, server_prompt & prompt) {
    llama_memory_t memory = llama_get_memory(context);
    llama_pos last = llama_memory_seq_pos_max(memory, sequence);
    if (last >= first && !can_drop_last_tokens(context)) {
        auto & checkpoints = prompt.checkpoints;
        if (checkpoints.empty()) {
            llama_memory_seq_rm(memory, sequence, -1, -1);
            prompt.clear();
            return;
        }
        checkpoints.back().load_tgt(context, sequence, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        last = checkpoints.back().n_tokens - 1;
        llama_memory_seq_rm(memory, sequence, last + 1, -1);
    }
    prompt.tokens.keep_first(last < 0 ? 0 : prompt.tokens.size_up_to_pos(last + 1));
}

void moe_edge_cancels::cancel(const std::vector<int32_t> & sequences) {
    std::lock_guard<std::mutex> lock(mutex);
    cancelled.insert(sequences.begin(), sequences.end());
    update();
}

void moe_edge_cancels::forget(int32_t sequence) {
    std::lock_guard<std::mutex> lock(mutex);
    cancelled.erase(sequence);
}

// Makes the running step end early if all its sequences are cancelled. Also does so if the step contains a prompt of a
// cancelled sequence and can be repeated for the other sequences.
void moe_edge_cancels::update() {
    const auto is_cancelled = [this](const part & p) { return cancelled.count(p.sequence) > 0; };
    const bool all    = !running.empty() && std::all_of(running.begin(), running.end(), is_cancelled);
    const bool prompt = can_redo && std::any_of(running.begin(), running.end(), [&](const part & p) {
        return p.is_prompt && is_cancelled(p);
    });
    if (all || prompt) {
        ends = true;
    }
}

void moe_edge_cancels::begin(llama_batch_ext & batch, const std::set<int32_t> & prompts, bool can_redo_step) {
    std::lock_guard<std::mutex> lock(mutex);
    ends     = false;
    can_redo = can_redo_step;
    running.clear();
    auto & tokens = batch.tokens;
    bool all = true;
    for (const auto & m : members_of(batch)) {
        const bool is_cancelled = cancelled.count(m.sequence) > 0;
        all = all && is_cancelled;
        if (is_cancelled && prompts.count(m.sequence) > 0) {
            tokens.erase(std::find_if(tokens.begin(), tokens.end(), [&](const auto & token) {
                return token.seq_ids.count(m.sequence) > 0;
            }), tokens.end());
        }
    }
    if (all) {
        tokens.clear();
    }
    for (const auto & m : members_of(batch)) {
        running.push_back({ m.sequence, prompts.count(m.sequence) > 0 });
    }
}

bool moe_edge_cancels::begin_image(int32_t sequence) {
    std::lock_guard<std::mutex> lock(mutex);
    ends     = false;
    can_redo = false;
    running  = { { sequence, true } };
    return cancelled.count(sequence) == 0;
}

bool moe_edge_cancels::end() {
    std::lock_guard<std::mutex> lock(mutex);
    running.clear();
    return ends;
}

int32_t moe_edge_compute_step(
        moe_edge_cancels & cancels, llama_context * context, llama_batch_ext & batch, const std::set<int32_t> & prompts,
        const moe_edge_undo_slot & undo, const std::function<int32_t(llama_batch_ext & batch)> & compute) {
    std::vector<member> members = members_of(batch);
    const size_t n_tokens = batch.tokens.size();
    int32_t status = SUCCESS;
    bool is_again = false;
    do {
        cancels.begin(batch, prompts, can_drop_last_tokens(context));
        for (const auto & m : is_again ? members_of(batch) : std::vector<member>()) {
            // Remove the tokens of the micro-batches that were computed before the step was aborted, because they will
            // be computed again.
            llama_memory_seq_rm(llama_get_memory(context), m.sequence, m.first, -1);
        }
        status = SUCCESS;
        if (batch.tokens.empty()) {
            usleep(IDLE_US);
        } else {
            status = compute(batch);
        }
        is_again = cancels.end() && status == ABORTED;
    } while (is_again);
    const bool is_whole = status == SUCCESS && batch.tokens.size() == n_tokens;
    if (is_whole || status == NO_SPACE) {
        return status;
    }
    count_computed(members, batch);
    for (const auto & m : members) {
        if (status != SUCCESS) {
            moe_edge_return_to_memory(context, m.sequence, m.first, undo(m.sequence, 0));
        } else if (m.n_computed < m.n_tokens) {
            server_prompt & prompt = undo(m.sequence, int32_t(m.n_tokens - m.n_computed));
            moe_edge_return_to_memory(context, m.sequence, m.first, prompt);
        }
    }
    if (status != SUCCESS) {
        throw std::runtime_error(status == INVALID ? "Invalid input batch." : "Compute error.");
    }
    return status;
}
