// Implements the store's work during a step: it applies the decisions about a layer's experts, and hands experts to the
// ops that compute them.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include <algorithm>

namespace {

// The matrix kinds in the order in which a layer computes them.
constexpr int32_t KINDS_BY_RANK[MOE_EDGE_N_KINDS] = { MOE_EDGE_GATE, MOE_EDGE_GATE_UP, MOE_EDGE_UP, MOE_EDGE_DOWN };

}  // namespace

// ---- decisions

bool moe_edge_store::route() {
    const bool asked = asks(phase);
    std::fill(tier_out.begin(), tier_out.end(), asked ? 0 : default_tier);
    std::fill(passing_out.begin(), passing_out.end(), 0);
    decision.n_prefetch  = 0;
    decision.renormalize = 0;
    if (asked) {
        {
            call_lock lock(*this);
            resident_view = resident;
            missing_view  = missing;
        }
        const uint64_t t0 = now_us();
        const int rc = callback(callback_user);
        const uint64_t t1 = now_us();
        call_lock lock(*this);
        stats.callbacks[phase]++;
        stats.callback_us[phase] += t1 - t0;
        if (rc != 0) {
            fail_locked("the route callback failed");
        }
    }
    if (aborted()) {
        return false;
    }
    routed.clear();
    for (size_t i = 0; i < (size_t) event.n_tokens * n_expert_used; i++) {
        if (!seen[ids[i]]) {
            seen[ids[i]] = 1;
            routed.push_back(ids[i]);
        }
    }
    routed_tiers.clear();
    routed_passing.clear();
    for (const int32_t e : routed) {
        seen[e] = 0;
        routed_tiers.push_back(tier_out[e]);
        routed_passing.push_back(passing_out[e]);
    }
    call_lock lock(*this);
    const size_t first = (size_t) event.layer * n_expert;
    for (size_t i = 0; i < (size_t) event.n_tokens * n_expert_used && !device_counts(); i++) {
        counts[first + ids[i]] += (int32_t) (i % n_expert_used) < event.n_used;
    }
    for (size_t i = 0; !asked && !exact_tiers && i < routed.size(); i++) {
        routed_tiers[i] = std::min(routed_tiers[i], resident[first + routed[i]]);
    }
    apply_locked(event.layer, MOE_EDGE_N_KINDS, routed.data(), routed_tiers.data(), routed_passing.data(), routed.size(),
        event.n_tokens);
    routed_of[event.layer] = routed;
    prefetch_locked(event.layer, prefetch_out.data(), std::min<int32_t>(decision.n_prefetch, prefetch_out.size()));
    return !failed;
}

// Checks that a matrix kind of a layer and these experts exist in the model. Otherwise makes the step fail and returns
// false.
bool moe_edge_store::check_layer(int32_t layer, int32_t kind, const int32_t * experts, int32_t n) {
    const bool exists = layer >= 0 && layer < n_layers && kind >= 0 && (kind == MOE_EDGE_N_KINDS ||
        (kind < MOE_EDGE_N_KINDS && has_kind(layer, kind)));
    if (!exists || !std::all_of(experts, experts + n, [this](int32_t e) { return e >= 0 && e < n_expert; })) {
        fail_locked(format("layer %d, kind %d: no such matrix or expert", layer, kind));
        return false;
    }
    return true;
}

bool moe_edge_store::has_matrix(int32_t layer, int32_t kind, const int32_t * experts, int32_t n) {
    call_lock lock(*this);
    return kind != MOE_EDGE_N_KINDS && check_layer(layer, kind, experts, n);
}

void moe_edge_store::apply(int32_t layer, const int32_t * experts, const uint8_t * tiers, const uint8_t * passing, int32_t n) {
    call_lock lock(*this);
    if (check_layer(layer, MOE_EDGE_N_KINDS, experts, n)) {
        const std::vector<uint8_t> defaults(n, default_tier);
        directed |= tiers != nullptr;
        apply_locked(layer, MOE_EDGE_N_KINDS, experts, tiers ? tiers : defaults.data(), passing, n, 1);
    }
}

void moe_edge_store::apply_locked(int32_t layer, int32_t kind, const int32_t * experts, const uint8_t * tiers,
                                  const uint8_t * passing, int32_t n, int32_t n_tokens) {
    const auto each_cell = [&](auto && visit) {
        for (const int32_t k : KINDS_BY_RANK) {
            for (int32_t i = 0; has_kind(layer, k) && (kind == k || kind == MOE_EDGE_N_KINDS) && i < n; i++) {
                visit(cell_index(layer, k, experts[i]), i);
            }
        }
    };
    for (int32_t i = 0; i < n; i++) {
        if (tiers[i] != MOE_EDGE_SKIP && tiers[i] >= n_tiers) {
            fail_locked(format("the policy requested tier %d of expert %d in layer %d, but the model has %d tiers", tiers[i],
                experts[i], layer, n_tiers));
            return;
        }
        if (kind >= MOE_EDGE_DOWN && !device_counts()) {  // counts each expert once: every layer has a down matrix
            stats.routed[phase][tiers[i] == MOE_EDGE_SKIP ? MOE_EDGE_MAX_TIERS : tiers[i]]++;
        }
    }
    // Pin all entries that this step needs first, so that none of the loads started below evicts them.
    each_cell([&](int32_t cell, int32_t i) {
        auto & c = cells[cell];
        n_decided += c.decide(tiers[i], passing && passing[i]);
        if (exact_tiers && c.pinned() && c.better_than(c.want())) {
            evict(cell);
        }
        if (c.pinned() && !c.passing()) {
            touch(cell);
        }
    });
    cancel_stale(layer);
    choose_places(layer, kind, experts, n, n_tokens);
    each_cell([&](int32_t cell, int32_t) {
        if (cells[cell].pinned()) {
            ask(cell);
        }
    });
    wake();
}

void moe_edge_store::prefetch(const moe_edge_prefetch_item * list, int32_t n) {
    call_lock lock(*this);
    prefetch_locked(-1, list, n);
}

// Handles one request of the running step. If the resident tier is good enough, the request is a hit. If the entry is
// being loaded, the request joins that load. Otherwise a load is started, or the entry waits for a slot.
void moe_edge_store::ask(int32_t cell) {
    auto & c = cells[cell];
    const bool watched = !device_counts();
    stats.requests[phase] += watched;
    if (c.satisfied()) {
        stats.hits[phase] += watched;
        stats.prefetch_used += pool_of(cell, c.tier()).used_as_foreseen(c.slot());
        return;
    }
    if (c.load() && ask_for_load(cell)) {
        return;
    }
    if (!try_in_place(cell)) {
        load_or_wait(cell);
    }
}

// Handles a request for an entry that is already being loaded, for example by a prefetch. Returns false if that load
// was cancelled and the entry needs a new load.
bool moe_edge_store::ask_for_load(int32_t cell) {
    auto & c    = cells[cell];
    auto & load = *c.load();
    const bool good_enough = load.tier() <= c.want() && !load.given_up();
    const bool was_ahead   = load.purpose() == moe_edge_purpose::AHEAD;
    if (!good_enough && load.untouched() && !rigid) {
        cancel_read(cell);
        return c.load() != nullptr;
    }
    if (!good_enough && !load.untouched() && load.slotless()) {
        stats.prefetch_cancelled += was_ahead && !load.given_up();
        abandon(cell);
        return true;  // settle() continues when the load ends
    }
    dequeue(cell);
    load.ask();
    if (load.slotless() && !claim_slot(cell) && load.untouched()) {
        stats.prefetch_cancelled += was_ahead;
        discard_load(cell);
        return c.load() != nullptr;
    }
    stats.prefetch_used += good_enough && was_ahead;
    if (load.queued()) {
        enqueue(cell);
    } else if (load.arrived()) {  // a transition that waited for the next step
        settle(cell);
    }
    return true;  // if this tier is worse than the requested one, publish() starts the next load
}

// Prefetches the experts of a list. layer: the layer that is being computed, or -1 if no layer is being computed.
// Experts of this layer are ignored, because a prefetch would come too late for them.
void moe_edge_store::prefetch_locked(int32_t layer, const moe_edge_prefetch_item * list, int32_t n) {
    const auto each_cell = [&](const moe_edge_prefetch_item & p, auto && visit) {
        if (p.layer < 0 || p.layer >= n_layers || p.layer == layer || p.expert < 0 || p.expert >= n_expert || p.tier >= n_tiers) {
            return;
        }
        for (const int32_t k : KINDS_BY_RANK) {
            if (has_kind(p.layer, k) && (p.kinds == 0 || p.kinds & (1 << k))) {
                visit(cell_index(p.layer, k, p.expert));
            }
        }
    };
    if (tables_fixed) {
        return;  // all experts are resident
    }
    // Number the list, and store the number in the cache entries of its experts. A prefetch of this list then does not
    // evict these experts.
    n_lists++;
    for (int32_t i = n; i-- > 0;) {
        each_cell(list[i], [&](int32_t cell) {
            cells[cell].foresee(n_lists);
            if (!list[i].passing) {
                touch(cell);
            }
        });
    }
    for (int32_t i = 0; i < n; i++) {
        const auto & p = list[i];
        each_cell(p, [&](int32_t cell) {
            const auto & c = cells[cell];
            if (!c.decided() && !c.load() && !c.as_good_as(p.tier)) {
                load_ahead(cell, p.tier, p.passing != 0, moe_edge_purpose::AHEAD);
            }
        });
    }
    wake();
}

// Cancels the prefetches of experts of this layer that its router has not selected.
void moe_edge_store::cancel_stale(int32_t layer) {
    std::vector<int32_t> stale;
    for (const auto * queue : { &reads.queue, &copies }) {
        queue->each_ahead([&](int32_t cell) {
            if (layer_of(cell) == layer && !cells[cell].pinned()) {
                stale.push_back(cell);
            }
        });
    }
    for (const int32_t cell : stale) {
        const auto & load = *cells[cell].load();
        if (load.untouched()) {
            cancel_read(cell);
        } else {
            stats.prefetch_cancelled += load.purpose() == moe_edge_purpose::AHEAD;
            abandon(cell);
        }
    }
}

// ---- executor

void moe_edge_store::begin(moe_edge_matrix & m, const int32_t * experts, int32_t n) {
    call_lock lock(*this);
    progress.layer.store(m.layer + 1, std::memory_order_relaxed);
    auto & op = ops[m.layer * MOE_EDGE_N_KINDS + m.kind];
    op.remaining.clear();  // keeps the capacity
    op.waited = false;
    std::vector<int32_t> undecided;  // experts that no route node has requested
    for (int32_t i = 0; i < n; i++) {
        const int32_t cell = cell_index(m.layer, m.kind, experts[i]);
        op.remaining.push_back(cell);
        if (!cells[cell].decided()) {
            undecided.push_back(experts[i]);
        }
    }
    if (!undecided.empty()) {
        // Request these experts in the default tier, but only their matrices of this kind. The ops of the other kinds
        // request the other matrices.
        const std::vector<uint8_t> tiers(undecided.size(), default_tier);
        apply_locked(m.layer, m.kind, undecided.data(), tiers.data(), nullptr, undecided.size(), INT32_MAX);
    }
}

// Writes all experts of an op to `out`. Returns false, and writes nothing, if the expert tables may change during the
// step, or if the store is on a device. Needs no lock, because tables_fixed does not change during a step.
bool moe_edge_store::serve_unwatched(const moe_edge_matrix & m, const int32_t * experts, const int32_t * first, int32_t n,
                                     moe_edge_ready * out) {
    if (device || !tables_fixed) {
        return false;
    }
    progress.layer.store(m.layer + 1, std::memory_order_relaxed);
    for (int32_t i = 0; i < n; i++) {
        const int32_t e = experts[i];
        out[i] = { m.table[e].data, e, m.table[e].type, 0 };
        if (m.kind == MOE_EDGE_DOWN) {
            auto & uses = unwatched[(size_t) m.layer * n_expert + e];
            uses.tokens.fetch_add(first[e + 1] - first[e], std::memory_order_relaxed);
            uses.steps.fetch_add(1, std::memory_order_relaxed);
        }
    }
    return true;
}

// Writes to `out` the experts that the router has selected for the next op of this matrix, and returns their number.
// Returns -1 if the host does not know the selection.
int32_t moe_edge_store::routed_to(const moe_edge_matrix & m, int32_t * out) {
    call_lock lock(*this);
    const auto & experts = routed_of[m.layer];
    const bool current = !experts.empty() && std::all_of(experts.begin(), experts.end(),
        [&](int32_t e) { return cells[cell_index(m.layer, m.kind, e)].decided(); });
    if (!current) {
        return -1;
    }
    std::copy(experts.begin(), experts.end(), out);
    return experts.size();
}

// Returns whether all matrices of this entry's expert that the running step still needs are available.
bool moe_edge_store::whole(int32_t cell) const {
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        const auto & c = cells[cell_index(layer_of(cell), k, expert_of(cell))];
        if (c.lacks() && !c.serves()) {
            return false;
        }
    }
    return true;
}

// Returns whether at least one missing matrix of this entry's expert is being loaded.
bool moe_edge_store::whole_comes(int32_t cell) const {
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        const auto & c = cells[cell_index(layer_of(cell), k, expert_of(cell))];
        if (c.lacks() && !c.serves() && c.load()) {
            return true;
        }
    }
    return false;
}

// Returns why next() waits for the remaining experts of an op, as an enum moe_edge_wait.
int32_t moe_edge_store::cause_of_wait(const op_state & op) const {
    int32_t cause = MOE_EDGE_WAIT_DISK;
    for (const int32_t cell : op.remaining) {
        const auto * load = cells[cell].load();
        if (!load || load->in_transition() || load->given_up()) {
            cause = MOE_EDGE_WAIT_TRANSITION;  // a transition holds the slot that it needs
        } else if (load->stage() == moe_edge_stage::QUEUED && staged(cell, load->tier()) && load->host_slot() < 0) {
            cause = MOE_EDGE_WAIT_HOST_TIER;
        } else {
            return MOE_EDGE_WAIT_DISK;
        }
    }
    return cause;
}

void moe_edge_store::waited(int32_t cause, uint64_t ns) {
    waits[phase][cause].n.fetch_add(1, std::memory_order_relaxed);
    waits[phase][cause].ns.fetch_add(ns, std::memory_order_relaxed);
}

// Returns the data of an expert for the op that computes it, or null data if the expert is skipped. An expert that is
// not skipped must be resident in the requested tier or a better one.
moe_edge_ready moe_edge_store::hand_out(const moe_edge_matrix & m, int32_t cell) {
    const auto & c = cells[cell];
    if (c.want() == MOE_EDGE_SKIP) {
        return { nullptr, expert_of(cell), -1, 0 };
    }
    const auto & entry = m.table[expert_of(cell)];
    const bool here = pool_of(cell, c.tier()).on_host;
    stats.computed[phase][c.tier()] += !device_counts();
    if (here) {
        count_in_place(slice_of(cell, c.tier()));
    }
    return { entry.data, expert_of(cell), entry.type, entry.ticket, here ? MOE_EDGE_MISS_COMPUTE : MOE_EDGE_MISS_COPY };
}

bool moe_edge_store::begin_layer(moe_edge_matrix * const * matrices, int32_t n, std::vector<moe_edge_ready> * out) {
    call_lock lock(*this);
    const int32_t layer = matrices[0]->layer;
    const auto & experts = routed_of[layer];
    const auto can_begin = [&](const moe_edge_matrix * m) {
        return std::all_of(experts.begin(), experts.end(), [&](int32_t e) {
            const auto & c = cells[cell_index(layer, m->kind, e)];
            const bool there = c.want() == MOE_EDGE_SKIP || (c.satisfied() && !pool_of(cell_index(layer, m->kind, e), c.tier()).on_host);
            return c.decided() && there;
        });
    };
    if (experts.empty() || aborted() || !std::all_of(matrices, matrices + n, can_begin)) {
        return false;
    }
    progress.layer.store(layer + 1, std::memory_order_relaxed);
    for (int32_t i = 0; i < n; i++) {
        auto & op = ops[layer * MOE_EDGE_N_KINDS + matrices[i]->kind];
        op.remaining.clear();
        op.waited = false;
        out[i].clear();
        for (const int32_t e : experts) {
            out[i].push_back(hand_out(*matrices[i], cell_index(layer, matrices[i]->kind, e)));
        }
    }
    return true;
}

int32_t moe_edge_store::next(moe_edge_matrix & m, moe_edge_ready * out) {
    call_lock lock(*this);
    auto & op = ops[m.layer * MOE_EDGE_N_KINDS + m.kind];
    for (;;) {
        if (device) {
            check_device();
        }
        if (aborted()) {
            return -1;
        }
        int32_t n    = 0;
        size_t  keep = 0;
        // With MOE_EDGE_WHOLE_EXPERTS, compute an incomplete expert only if no expert is complete or can become
        // complete. Otherwise incomplete experts could wait for each other's slots forever.
        const bool hold = whole_experts && std::any_of(op.remaining.begin(), op.remaining.end(),
            [this](int32_t cell) { return whole(cell) || whole_comes(cell); });
        for (const int32_t cell : op.remaining) {
            const auto & c = cells[cell];
            if (c.want() != MOE_EDGE_SKIP && hold && !whole(cell)) {
                op.remaining[keep++] = cell;
            } else if (c.want() == MOE_EDGE_SKIP || c.satisfied()) {
                out[n++] = hand_out(m, cell);
            } else if (c.serves()) {
                use_in_place(cell, &out[n++]);
            } else {
                op.remaining[keep++] = cell;
            }
        }
        op.remaining.resize(keep);
        if (n > 0 || keep == 0) {
            stats.waves += op.waited;
            op.waited = true;
            return n;
        }
        const uint64_t before = table_changes;
        serve_waiting(m);
        wake();
        if (table_changes != before) {
            continue;  // a load from the host tier is complete
        }
        const int32_t  cause    = cause_of_wait(op);
        const uint64_t began_ns = now_ns();
        stats.wait_us[phase] += wait_done(*lock, 50);  // with a time limit, because cancel() does not wake this thread
        waited(cause, now_ns() - began_ns);
    }
}

void moe_edge_store::wait(const moe_edge_ready * ready, int32_t n) {
    if (!device || std::all_of(ready, ready + n, [this](const moe_edge_ready & r) { return device->passed(r.ticket); })) {
        return;
    }
    const uint64_t began_ns = now_ns();
    for (int32_t i = 0; i < n; i++) {
        device->wait(ready[i].ticket);
    }
    waited(MOE_EDGE_WAIT_COPY, now_ns() - began_ns);
}

void moe_edge_store::release(moe_edge_matrix & m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after) {
    call_lock lock(*this);
    n_decided -= n;
    for (int32_t i = 0; i < n; i++) {
        const int32_t cell = cell_index(m.layer, m.kind, ready[i].expert);
        auto & c = cells[cell];
        c.release();
        // Kernels on the device may read the slot until `after` has passed, a ticket that marks a point in the device's
        // work. Record `after`, so that the next copy to the slot waits for it.
        if (device && ready[i].data && after != 0 && c.satisfied() && staged(cell, c.tier())) {
            pool_of(cell, c.tier()).read_until(c.slot(), after);
        }
        if (c.arrived()) {
            settle(cell);
        }
        if (m.kind == MOE_EDGE_DOWN && ready[i].data) {
            keep_used(m.layer, ready[i].expert);
        }
    }
    serve_waiting(m);
    wake();
}

// ---- simulation in virtual time

void moe_edge_store::simulate_speed(uint64_t bandwidth, uint64_t latency_us) {
    std::lock_guard<std::mutex> lock(mutex);
    reads.set_speed(bandwidth, latency_us);
}

uint64_t moe_edge_store::simulate_compute(uint64_t ns) {
    std::lock_guard<std::mutex> lock(mutex);
    return reads.simulated() ? reads.simulate_for(ns) : 0;
}

bool moe_edge_store::simulate_route(int32_t layer, int32_t n_tokens, int32_t n_ahead_present, bool has_importance) {
    const size_t n = n_tokens < 0 ? 0 : (size_t) n_tokens * n_expert_used;
    const bool counts = reads.simulated() && n_tokens >= 0 && n_tokens <= max_tokens && n_ahead_present >= 0 &&
        n_ahead_present <= n_ahead && n_ahead_present < n_layers - layer;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!check_layer(layer, MOE_EDGE_N_KINDS, ids.data(), counts ? n : 0)) {
            return false;
        }
        if (!counts) {
            fail_locked("moe_edge_sim_route needs a simulated store, and tokens and look-ahead layers within its configuration");
            return false;
        }
    }
    event.layer    = layer;
    event.n_tokens = n_tokens;
    event.n_ahead  = n_ahead_present;
    const auto row = ids.begin();
    event.n_used   = std::find(row + 1, row + n_expert_used, row[0]) - row;
    event.has_importance = has_importance;
    return route();
}

// ---- warm start, errors, statistics

int32_t moe_edge_store::warm(const moe_edge_prefetch_item * list, int32_t n,
                             void (*progress)(int32_t, int32_t, void *), void * user) {
    std::unique_lock<std::mutex> lock(mutex);
    std::vector<int32_t> asked;
    int32_t loaded = 0;
    for (int32_t i = 0; i < n; i++) {
        const auto & p = list[i];
        if (p.layer < 0 || p.layer >= n_layers || p.expert < 0 || p.expert >= n_expert || p.tier >= n_tiers) {
            return -1;
        }
        bool any = false;
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            const int32_t cell = cell_index(p.layer, k, p.expert);
            if (has_kind(p.layer, k) && !cells[cell].resident() && !cells[cell].load() &&
                pool_of(cell, p.tier).has_free() && try_load(cell, p.tier, false)) {
                asked.push_back(cell);
                any = true;
            }
        }
        loaded += any;
    }
    wake();
    running = true;
    const int32_t total = asked.size();
    for (;;) {
        const int32_t open = std::count_if(asked.begin(), asked.end(), [&](int32_t cell) { return cells[cell].load() != nullptr; });
        if (progress) {
            lock.unlock();
            progress(total - open, total, user);
            lock.lock();
        }
        if (open == 0 || aborted()) {
            break;
        }
        wait_done(lock, 100);
    }
    running = false;
    const bool complete = std::all_of(asked.begin(), asked.end(), [&](int32_t cell) { return cells[cell].resident(); });
    if (!complete && !aborted()) {
        fail_locked(failed_read.empty() ? "warm start: an expert could not be read" : failed_read);
    }
    return complete ? loaded : -1;
}

void moe_edge_store::fail_locked(const std::string & sentence) {
    if (!failed) {
        failure = sentence;
        failed  = true;
    }
    done_cv.notify_all();
}

void moe_edge_store::fail(const std::string & sentence) {
    std::lock_guard<std::mutex> lock(mutex);
    fail_locked(sentence);
}

const char * moe_edge_store::error() {
    std::lock_guard<std::mutex> lock(mutex);
    if (device) {
        check_device();
    }
    return failed ? failure.c_str() : nullptr;
}

void moe_edge_store::get_stats(moe_edge_stats * out) {
    std::lock_guard<std::mutex> lock(mutex);
    collect_counts();
    *out = stats;
    for (int32_t p = 0; p < 2; p++) {
        for (int32_t w = 0; w < MOE_EDGE_N_WAITS; w++) {
            out->waits[p][w]     = waits[p][w].n;
            out->waited_ns[p][w] = waits[p][w].ns;
        }
    }
}

void moe_edge_store::get_resident(uint8_t * out) {
    std::lock_guard<std::mutex> lock(mutex);
    std::copy(resident.begin(), resident.end(), out);
}

void moe_edge_store::reset_stats() {
    std::lock_guard<std::mutex> lock(mutex);
    collect_counts();
    moe_edge_stats fresh = {};
    fresh.budget_bytes      = stats.budget_bytes;
    fresh.slot_bytes        = stats.slot_bytes;
    fresh.slot_bytes_in_use = stats.slot_bytes_in_use;
    fresh.slot_bytes_peak   = stats.slot_bytes_in_use;
    fresh.direct_io         = stats.direct_io;
    fresh.host_bytes        = stats.host_bytes;
    fresh.host_pinned       = stats.host_pinned;
    fresh.misses            = stats.misses;
    stats = fresh;
    for (auto & of_phase : waits) {
        for (auto & wait : of_phase) {
            wait.n = wait.ns = 0;
        }
    }
}
