// Implements transitions: changes of an expert's tier that are read in the background and published at step boundaries.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include <algorithm>

bool moe_edge_store::transits(const moe_edge_prefetch_item & t) {
    return std::any_of(transitions.begin(), transitions.end(),
        [&](const moe_edge_prefetch_item & other) { return other.layer == t.layer && other.expert == t.expert; });
}

// Returns whether any matrix of this entry's expert is in transition (a background change of tier). Until the
// transition ends, no matrix of the expert is evicted.
bool moe_edge_store::in_transition(int32_t cell) const {
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        if (cells[cell_index(layer_of(cell), k, expert_of(cell))].in_transition()) {
            return true;
        }
    }
    return false;
}

// Starts a transition: expert t.expert changes to tier t.tier in the background. Each matrix that changes needs a free
// slot, because the old version keeps its slot until the transition ends. Returns whether the transition was started.
bool moe_edge_store::admit(const moe_edge_prefetch_item & t) {
    if (exact_tiers || transits(t)) {
        return false;
    }
    std::vector<int32_t> moving;
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        if (has_kind(t.layer, k)) {
            const int32_t cell = cell_index(t.layer, k, t.expert);
            const auto & c = cells[cell];
            const auto & pool = pool_of(cell, t.tier);
            if (!c.resident() || c.load() || (c.tier() != t.tier && (!pool.has_free() || pool.awaited()))) {
                return false;
            }
            if (c.tier() != t.tier) {
                moving.push_back(cell);
            }
        }
    }
    for (const int32_t cell : moving) {
        try_load(cell, t.tier, false, moe_edge_purpose::TRANSITION);
    }
    return !moving.empty();
}

int32_t moe_edge_store::transition(const moe_edge_prefetch_item * list, int32_t n) {
    call_lock lock(*this);
    const bool known = std::all_of(list, list + n, [this](const moe_edge_prefetch_item & t) {
        return t.layer >= 0 && t.layer < n_layers && t.expert >= 0 && t.expert < n_expert && t.tier < n_tiers;
    });
    if (!known) {
        return -1;
    }
    int32_t admitted = 0;
    for (int32_t i = 0; i < n; i++) {
        if (admit(list[i])) {
            transitions.push_back(list[i]);
            admitted++;
        }
    }
    stats.transitions_begun    += admitted;
    stats.transitions_rejected += n - admitted;
    if (admitted > 0) {
        reads.wake_for_transition();
        wake();
    }
    return admitted;
}

// Ends a transition (a background change of an expert's tier) if all its loads are complete, and returns whether it has
// ended. If a read failed, all matrices of the expert keep their old tier. Called between two steps.
bool moe_edge_store::conclude(const moe_edge_prefetch_item & t) {
    std::vector<int32_t> moving;  // without the matrices that a token has requested meanwhile
    bool broken = false;
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        const int32_t cell = cell_index(t.layer, k, t.expert);
        if (cells[cell].in_transition()) {
            if (!landed(cell)) {
                return false;
            }
            broken |= cells[cell].load()->has_failed();
            moving.push_back(cell);
        }
    }
    if (broken) {
        stats.transitions_failed++;
    } else if (!moving.empty()) {
        (t.tier < cells[moving[0]].tier() ? stats.experts_promoted : stats.experts_demoted)++;
    }
    for (const int32_t cell : moving) {
        broken ? discard_load(cell) : publish(cell);
    }
    return true;
}

// Ends all transitions (background changes of tier) that are complete. Called between two steps, when no op reads an
// expert.
void moe_edge_store::conclude_transitions() {
    transitions.erase(std::remove_if(transitions.begin(), transitions.end(),
        [this](const moe_edge_prefetch_item & t) { return conclude(t); }), transitions.end());
}

// Cancels one transition (a background change of tier) that holds a slot of this pool. The expert keeps its old tier,
// which may then be evicted. Returns false if no transition holds a slot of the pool.
bool moe_edge_store::revoke(const moe_edge_pool & pool) {
    int32_t of = -1;
    for (int32_t i = 0; i < pool.usable() && of < 0; i++) {
        const int32_t cell = pool[i].cell;
        if (cell >= 0 && in_transition(cell) && (cells[cell].in_transition() || !cells[cell].pinned() || cells[cell].lacks())) {
            of = cell;  // otherwise revoking would not free the slot
        }
    }
    if (of < 0) {
        return false;
    }
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        const int32_t cell = cell_index(layer_of(of), k, expert_of(of));
        if (!cells[cell].in_transition()) {
            continue;
        }
        dequeue(cell);
        auto & load = *cells[cell].load();
        load.revoke();
        if (load.arrived()) {
            // The slot of this load becomes free. Record its pool, so that wake() gives the slot to a waiting cache
            // entry. Do not call serve_waiting() here, because serve_waiting() itself may have called revoke().
            unserved.push_back(&pool_of(cell, load.tier()));
            free_load(cell);
        }
    }
    stats.transitions_failed++;
    return true;
}

void moe_edge_store::set_transition_rate(uint64_t bytes_per_s) {
    std::lock_guard<std::mutex> lock(mutex);
    reads.set_transition_rate(bytes_per_s);
    copy_cv.notify_all();
    wake();
}

void moe_edge_store::get_states(uint8_t * now, uint8_t * target) {
    std::lock_guard<std::mutex> lock(mutex);
    std::copy(resident.begin(), resident.end(), now);
    std::copy(resident.begin(), resident.end(), target);
    for (const auto & t : transitions) {
        target[(size_t) t.layer * n_expert + t.expert] = t.tier;
    }
}

void moe_edge_store::get_landed(uint8_t * out) {
    std::lock_guard<std::mutex> lock(mutex);
    std::fill_n(out, resident.size(), 0);
    for (const auto & t : transitions) {
        bool complete = true;
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            const int32_t cell = cell_index(t.layer, k, t.expert);
            complete &= !cells[cell].in_transition() || (landed(cell) && !cells[cell].load()->has_failed());
        }
        out[(size_t) t.layer * n_expert + t.expert] = complete;
    }
}

// Adds the tokens that the executor (the backend that computes the experts) has counted for each expert since the last
// call to `counts` and to the statistics. Does nothing if the steps had a route node, because the store has then
// counted the tokens.
void moe_edge_store::collect_counts() {
    if (n_uncollected == 0 || !runs_unwatched()) {
        n_uncollected = 0;
        return;
    }
    std::vector<uint32_t> fresh(counts.size());
    if (device) {
        device->counts(down_matrices.data(), down_matrices.size(), fresh.data());
    }
    for (size_t i = 0; i < fresh.size(); i++) {
        uint64_t asked = std::min<uint64_t>(fresh[i], n_uncollected);
        if (!device) {
            fresh[i] = unwatched[i].tokens.exchange(0, std::memory_order_relaxed);
            asked    = unwatched[i].steps.exchange(0, std::memory_order_relaxed);
        }
        counts[i] += fresh[i];
        if (asked == 0) {
            continue;
        }
        const int32_t layer = i / n_expert;
        stats.routed[phase][resident[i]] += asked;
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            if (has_kind(layer, k)) {
                stats.requests[phase] += asked;
                stats.hits[phase]     += asked;
                stats.computed[phase][cells[cell_index(layer, k, i % n_expert)].tier()] += asked;
            }
        }
    }
    n_uncollected = 0;
}

void moe_edge_store::take_counts(uint32_t * out) {
    std::lock_guard<std::mutex> lock(mutex);
    collect_counts();
    std::copy(counts.begin(), counts.end(), out);
    std::fill(counts.begin(), counts.end(), 0);
}
