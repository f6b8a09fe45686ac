// Step boundaries, and the reports about steps.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include <algorithm>
#include <map>

namespace {

// Returns the indices of the last `most` tokens of each prompt in a micro-batch, in ascending order. Returns none if
// `most` is 0 or negative.
std::vector<int32_t> last_of_prompts(const moe_edge_batch & batch, int32_t most) {
    std::vector<int32_t> out;
    std::map<int32_t, int32_t> taken;
    for (int32_t t = (int32_t) batch.phases.size() - 1; t >= 0 && most > 0; t--) {
        if (batch.phases[t] == MOE_EDGE_PREFILL && taken[batch.sequences[t]]++ < most) {
            out.push_back(t);
        }
    }
    std::reverse(out.begin(), out.end());
    return out;
}

}  // namespace

// For a store without a model.
void moe_edge_store::begin_step(int32_t new_phase) {
    call_lock lock(*this);
    batch = {};
    open_step(new_phase == MOE_EDGE_DECODE ? MOE_EDGE_DECODE : MOE_EDGE_PREFILL);
    std::fill(phases.begin(), phases.end(), phase);
    std::fill(sequences.begin(), sequences.end(), 0);
}

void moe_edge_store::begin_step(moe_edge_batch micro_batch) {
    call_lock lock(*this);
    batch   = std::move(micro_batch);
    running = true;
    progress.layer   = 0;
    progress.in_step = batch.phases.size();
    batch.window = last_of_prompts(batch, importance_window);
    const bool prompt = std::count(batch.phases.begin(), batch.phases.end(), MOE_EDGE_PREFILL) > 0;
    open_step(prompt ? MOE_EDGE_PREFILL : MOE_EDGE_DECODE);
}

void moe_edge_store::open_step(int32_t new_phase) {
    if (phase != new_phase || asks(new_phase) || !transitions.empty() || owed_bytes > 0) {
        collect_counts();  // these counts belong to the old phase and the old tables
    }
    n_uncollected++;
    phase = new_phase;
    event.phase = phase;
    event.step++;
    if (reads.queue.empty() && copies.empty()) {
        ahead_seq = 0;
    }
    failed = false;
    failure.clear();
    if (n_decided != 0) {
        drop_step();  // a store without a model is not told when a step ends
    }
    const uint64_t began_ns = now_ns(), changes = table_changes;
    const bool moving = !transitions.empty();
    conclude_transitions();
    if (owed_bytes > 0) {
        fit();
    }
    if (device) {
        check_device();
        hosted_expected_s = HOSTED_PRIOR_S + HOSTED_KEPT * (hosted_expected_s - HOSTED_PRIOR_S);
        hosted_took_s     = HOSTED_PRIOR_S + HOSTED_KEPT * (hosted_took_s - HOSTED_PRIOR_S);
    }
    fix_tables();
    if (device) {
        device->step_boundary(all_matrices.data(), all_matrices.size(), tables_fixed);
    }
    if (moving || table_changes != changes) {
        waited(MOE_EDGE_WAIT_TRANSITION, now_ns() - began_ns);
    }
}

// Releases everything that an aborted step still holds: the pinned entries, the places in waiting queues, and the reads
// that no thread has started.
void moe_edge_store::drop_step() {
    n_decided = 0;
    for (auto & pool : pools) {
        pool.forget_waiting();
    }
    for (auto & op : ops) {
        op = {};
    }
    for (auto & c : cells) {
        c.forget_request();
    }
    for (size_t i = 0; i < cells.size(); i++) {
        const auto * load = cells[i].load();
        if (load && load->arrived()) {
            settle(i);
        } else if (load && load->untouched() && !load->in_transition()) {
            cancel_read(i);
        }
    }
}

// Fills the phases and the sequences of the route event's tokens. A token that is not in the running step's micro-batch
// gets the store's phase and sequence -1. This happens, for example, if no step is running.
void moe_edge_store::describe_tokens() {
    for (int32_t t = 0; t < event.n_tokens; t++) {
        const bool known = (size_t) tokens[t] < batch.phases.size();
        phases[t]    = known ? batch.phases[tokens[t]] : phase;
        sequences[t] = known ? batch.sequences[tokens[t]] : -1;
    }
}

// Ends the step of a model, whether it was computed or aborted. Releases everything that an aborted step still holds.
void moe_edge_store::close_step() {
    call_lock lock(*this);
    batch   = {};
    running = false;
    progress.in_step = 0;
    if (n_decided != 0) {
        drop_step();
        wake();
    }
}

double moe_edge_store::tokens_done() const {
    const int32_t layer = progress.layer;  // the layer that is being computed, counted from 1
    return progress.done + (layer > 0 ? (double) progress.in_step * (layer - 1) / n_layers : 0.0);
}

bool moe_edge_store::end_step(uint64_t us) {
    {
        call_lock lock(*this);
        running = false;
        progress.done += progress.in_step.exchange(0);
        if (!step_callback) {
            return true;
        }
        ends.assign(ended.begin(), ended.end());
        ended.clear();
        live.insert(batch.members.begin(), batch.members.end());
    }
    const moe_edge_step report = {
        event.step, us, phase, (int32_t) batch.phases.size(),
        (int32_t) batch.starts.size(), (int32_t) batch.prompt_ends.size(), (int32_t) ends.size(), 0,
        batch.starts.data(), batch.prompt_ends.data(), ends.data(),
    };
    if (step_callback(&report, step_user) != 0) {
        fail("the step callback failed");
        return false;
    }
    return true;
}

void moe_edge_store::end_sequence(int32_t sequence) {
    std::lock_guard<std::mutex> lock(mutex);
    if (sequence < 0) {
        ended.insert(live.begin(), live.end());
        live.clear();
    } else if (live.erase(sequence) > 0) {
        ended.insert(sequence);
    }
}
