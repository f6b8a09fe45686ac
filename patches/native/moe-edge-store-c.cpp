// Implements the store's functions of the C interface in moe-edge.h.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include "ggml.h"

#include <algorithm>

namespace {

// The stores that wait for a model to be loaded, in the order of their creation.
struct {
    std::mutex mutex;
    std::vector<moe_edge_store *> stores;
} waiting;

std::atomic<bool> in_turn { false };

}  // namespace

void moe_edge_in_turn(int32_t on) { in_turn = on != 0; }

bool moe_edge_is_in_turn() { return in_turn; }

void moe_edge_await_model(moe_edge_store * store) {
    std::lock_guard<std::mutex> lock(waiting.mutex);
    waiting.stores.push_back(store);
}

moe_edge_store * moe_edge_latest_waiting() {
    std::lock_guard<std::mutex> lock(waiting.mutex);
    return waiting.stores.empty() ? nullptr : waiting.stores.back();
}

void moe_edge_stop_waiting(const moe_edge_store * store) {
    std::lock_guard<std::mutex> lock(waiting.mutex);
    auto & stores = waiting.stores;
    stores.erase(std::remove(stores.begin(), stores.end(), store), stores.end());
}

int32_t moe_edge_abi_version(void) { return MOE_EDGE_ABI_VERSION; }

uint64_t moe_edge_slot_bytes(uint64_t offset, uint64_t expert_bytes) {
    return block_ceil(offset + expert_bytes) - block_floor(offset);
}

uint64_t moe_edge_device_slot_bytes(int32_t type, uint64_t expert_bytes, int64_t n_cols) {
    constexpr int64_t ROW_PADDING = 512;  // MATRIX_ROW_PADDING of ggml-cuda, to which its kernels round rows up
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size((ggml_type) type) == 0) {
        return 0;
    }
    const auto t = static_cast<ggml_type>(type);
    const bool quantized = ggml_is_quantized(t);
    const uint64_t past  = quantized && n_cols % ROW_PADDING != 0 ? ggml_row_size(t, ROW_PADDING - n_cols % ROW_PADDING) : 0;
    const uint64_t unit  = quantized ? ggml_type_size(t) : MOE_EDGE_DEVICE_ALIGN;
    return (expert_bytes + past + unit - 1) / unit * unit;
}

moe_edge_store * moe_edge_store_create(const moe_edge_config * config, char * err, size_t err_size) {
    try {
        auto * store = new moe_edge_store(*config);
        if (!(config->flags & MOE_EDGE_SIMULATED)) {
            moe_edge_await_model(store);
        }
        return store;
    } catch (const std::exception & e) {
        write_error(err, err_size, e.what());
        return nullptr;
    }
}

void moe_edge_store_free(moe_edge_store * store) {
    moe_edge_stop_waiting(store);
    if (store && store->detach) {
        const auto detach = std::move(store->detach);
        detach();
    }
    delete store;
}

int64_t moe_edge_store_limit(moe_edge_store * store, uint64_t bytes, char * err, size_t err_size) {
    try {
        return store->limit(bytes);
    } catch (const std::exception & e) {
        write_error(err, err_size, e.what());
        return -1;
    }
}

int32_t moe_edge_store_loading(moe_edge_store * store) { return store->loading(); }

double moe_edge_tokens_done(const moe_edge_store * store) { return store->tokens_done(); }

const moe_edge_event * moe_edge_store_event(moe_edge_store * store) { return &store->event; }

moe_edge_decision * moe_edge_store_decision(moe_edge_store * store) { return &store->decision; }

void moe_edge_set_callback(moe_edge_store * store, moe_edge_route_cb cb, void * user, int32_t default_tier, uint32_t phases) {
    store->callback        = cb;
    store->callback_user   = user;
    store->callback_phases = phases;
    store->default_tier  = default_tier >= 0 && default_tier < store->n_tiers ? default_tier : 0;
}

void moe_edge_set_step_callback(moe_edge_store * store, moe_edge_step_cb cb, void * user) {
    store->step_callback = cb;
    store->step_user     = user;
}

void moe_edge_set_room_callback(moe_edge_store * store, moe_edge_room_cb cb, void * user) {
    store->room_callback = cb;
    store->room_user     = user;
    store->given         = {};
}

void moe_edge_set_phase(moe_edge_store * store, int32_t phase) {
    store->declared_phases.reset();
    if (phase >= 0) {
        store->declared_phases = moe_edge_token_phases { phase, {} };
    }
}

void moe_edge_sequence_end(moe_edge_store * store, int32_t sequence) { store->end_sequence(sequence); }

void moe_edge_begin_step(moe_edge_store * store, int32_t phase) { store->begin_step(phase); }

const char * moe_edge_error(moe_edge_store * store) { return store->error(); }

void moe_edge_cancel(moe_edge_store * store, int32_t on) { store->cancel(on != 0); }

void moe_edge_get_stats(moe_edge_store * store, moe_edge_stats * out) { store->get_stats(out); }

void moe_edge_get_resident(moe_edge_store * store, uint8_t * out) { store->get_resident(out); }

void moe_edge_reset_stats(moe_edge_store * store) { store->reset_stats(); }

int32_t moe_edge_warm(moe_edge_store * store, const moe_edge_prefetch_item * list, int32_t n,
                      void (*progress)(int32_t, int32_t, void *), void * user) {
    return store->warm(list, n, progress, user);
}

int moe_edge_check(moe_edge_store * store, char * err, size_t err_size) {
    const std::string broken = store->check();
    write_error(err, err_size, broken);
    return broken.empty() ? 0 : -1;
}

void moe_edge_prefetch(moe_edge_store * store, const moe_edge_prefetch_item * list, int32_t n) { store->prefetch(list, n); }

int32_t moe_edge_transition(moe_edge_store * store, const moe_edge_prefetch_item * list, int32_t n) {
    return store->transition(list, n);
}

void moe_edge_set_transition_rate(moe_edge_store * store, uint64_t bytes_per_s) { store->set_transition_rate(bytes_per_s); }

void moe_edge_get_states(moe_edge_store * store, uint8_t * resident, uint8_t * target) { store->get_states(resident, target); }

void moe_edge_get_landed(moe_edge_store * store, uint8_t * out) { store->get_landed(out); }

void moe_edge_take_counts(moe_edge_store * store, uint32_t * out) { store->take_counts(out); }


int moe_edge_apply(moe_edge_store * store, int32_t layer, const int32_t * ids, const uint8_t * tiers,
                   const uint8_t * passing, int32_t n_ids) {
    store->apply(layer, ids, tiers, passing, n_ids);
    return store->error() ? -1 : 0;
}

int moe_edge_use(moe_edge_store * store, int32_t layer, int32_t kind, const int32_t * ids, int32_t n_ids,
                 void (*visit)(int32_t, int32_t, int32_t, const void *, uint64_t, void *), void * user) {
    if (!store->has_matrix(layer, kind, ids, n_ids)) {
        return -1;
    }
    auto & m = store->matrices[layer][kind];
    std::vector<moe_edge_ready> ready(n_ids);
    store->begin(m, ids, n_ids);
    for (int32_t left = n_ids; left > 0;) {
        const int32_t n = store->next(m, ready.data());
        if (n < 0) {
            return -1;
        }
        store->wait(ready.data(), n);
        for (int32_t i = 0; visit && i < n; i++) {
            const auto & r = ready[i];
            const auto of_type = std::find(m.types.begin(), m.types.end(), r.type);
            const int32_t tier = r.data ? of_type - m.types.begin() : MOE_EDGE_SKIP;
            visit(r.expert, tier, r.type, r.data, r.data ? store->slices[layer][kind][tier].expert_bytes : 0, user);
        }
        store->release(m, ready.data(), n, 0);
        left -= n;
    }
    return 0;
}

void moe_edge_sim_speed(moe_edge_store * store, uint64_t bytes_per_s, uint64_t latency_us) {
    store->simulate_speed(bytes_per_s, latency_us);
}

uint64_t moe_edge_sim_advance(moe_edge_store * store, uint64_t ns) { return store->simulate_compute(ns); }

int moe_edge_sim_route(moe_edge_store * store, int32_t layer, int32_t n_tokens, int32_t n_ahead,
                       int32_t has_importance) {
    return store->simulate_route(layer, n_tokens, n_ahead, has_importance != 0) ? 0 : -1;
}

int moe_edge_sim_use(moe_edge_store * store, int32_t layer, int32_t kind, const int32_t * ids, int32_t n_ids, uint64_t ns) {
    struct graph {
        moe_edge_store * store;
        uint64_t         ns;
    } graph = { store, ns };
    const auto compute = [](int32_t, int32_t, int32_t, const void * data, uint64_t, void * user) {
        const auto & g = *static_cast<struct graph *>(user);
        if (data) {
            g.store->simulate_compute(g.ns);
        }
    };
    return moe_edge_use(store, layer, kind, ids, n_ids, compute, &graph);
}
