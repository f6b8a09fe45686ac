// Implements cache misses that are served without a slot on the device: host threads compute the expert from the bytes
// in the host tier.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include <algorithm>
#include <cmath>

void moe_edge_store::open_in_place(const moe_edge_config & config) {
    if (config.misses < MOE_EDGE_MISS_COPY || config.misses > MOE_EDGE_MISS_AUTO || config.n_host_threads < 0 ||
        config.n_host_threads > 1024) {
        refuse("store: misses %d or n_host_threads %d is out of range", config.misses, config.n_host_threads);
    }
    copy_s_per_byte = config.copy_bytes_per_s > 0.0 ? 1.0 / config.copy_bytes_per_s : INFINITY;
    round_trip_s    = config.round_trip_us * 1e-6;

    misses = config.misses;
    if (misses == MOE_EDGE_MISS_AUTO && std::isinf(copy_s_per_byte)) {
        misses = MOE_EDGE_MISS_COPY;
    }
    if (misses == MOE_EDGE_MISS_COMPUTE || misses == MOE_EDGE_MISS_AUTO || split) {
        workers = std::make_unique<moe_edge_workers>(std::max(1, config.n_host_threads));
    }
    places.assign(n_expert, MOE_EDGE_MISS_COPY);
    stats.misses = misses;
}

// Returns whether the matrix of_kind (up, gate, gate_up or down) of an expert is a cache miss that is not served yet.
// Only matrices whose bytes go through the host tier count. kind: the only kind for which the result can be true, or
// MOE_EDGE_N_KINDS for all kinds.
bool moe_edge_store::is_missing(int32_t layer, int32_t kind, int32_t of_kind, int32_t expert) const {
    const int32_t cell = cell_index(layer, of_kind, expert);
    const auto & c = cells[cell];
    return has_kind(layer, of_kind) && (kind == of_kind || kind == MOE_EDGE_N_KINDS) && c.lacks() && !c.load() &&
        staged(cell, c.want());
}

uint64_t moe_edge_store::missing_bytes(int32_t layer, int32_t kind, int32_t expert) const {
    uint64_t bytes = 0;
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        if (is_missing(layer, kind, k, expert)) {
            const int32_t cell = cell_index(layer, k, expert);
            bytes += slice_of(cell, cells[cell].want()).expert_bytes;
        }
    }
    return bytes;
}

// Returns the seconds that the host threads need for the missing matrices of an expert. Returns infinity if they cannot
// compute one of the matrices.
double moe_edge_store::compute_seconds(int32_t layer, int32_t kind, int32_t expert) const {
    double seconds = 0.0;
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        if (is_missing(layer, kind, k, expert)) {
            const int32_t cell = cell_index(layer, k, expert);
            const double us = slice_of(cell, cells[cell].want()).compute_us;
            seconds += us > 0.0 ? us * 1e-6 : INFINITY;
        }
    }
    return seconds;
}

void moe_edge_store::multiply(const std::vector<moe_edge_product> & products, uint64_t began_us) {
    workers->multiply(products);
    if (misses == MOE_EDGE_MISS_AUTO) {
        std::lock_guard<std::mutex> lock(mutex);
        hosted_took_s += (now_us() - began_us) * 1e-6;
    }
}

// Chooses for each missing expert of a layer whether it is copied to the device or computed on the host. With
// MOE_EDGE_MISS_AUTO, the way that is expected to be faster is chosen for each expert.
void moe_edge_store::choose_places(int32_t layer, int32_t kind, const int32_t * experts, int32_t n, int32_t n_tokens) {
    if (misses == MOE_EDGE_MISS_COPY) {
        return;
    }
    const bool few = n_tokens <= MOE_EDGE_IN_PLACE_TOKENS;
    const double slower = hosted_took_s / hosted_expected_s;
    double link = 0.0, threads = 2.0 * round_trip_s;  // two synchronizations: before gate and up, and before down
    bool hosted = false;
    for (int32_t i = 0; i < n; i++) {
        auto & place = places[experts[i]];
        place = few ? misses : MOE_EDGE_MISS_COPY;
        const double bytes = missing_bytes(layer, kind, experts[i]);
        if (place != MOE_EDGE_MISS_AUTO) {
            continue;
        }
        if (bytes == 0.0) {  // its matrices are already being loaded into slots
            place = MOE_EDGE_MISS_COPY;
            continue;
        }
        const double computed = threads + compute_seconds(layer, kind, experts[i]);
        const double copied = link + bytes * copy_s_per_byte;
        if (slower * computed < copied) {
            place   = MOE_EDGE_MISS_COMPUTE;
            threads = computed;
            hosted  = true;
        } else {
            place = MOE_EDGE_MISS_COPY;
            link  = copied;
        }
    }
    hosted_expected_s += hosted ? threads : 0.0;
}

// Starts to serve a request without a slot, by computing the expert on the host. Returns false, and does nothing, if
// the expert was not chosen for this, or if too few slots of the host tier are free.
bool moe_edge_store::try_in_place(int32_t cell) {
    const auto & c = cells[cell];
    const int32_t place = misses == MOE_EDGE_MISS_COPY ? misses : places[expert_of(cell)];
    if (place == MOE_EDGE_MISS_COPY || !staged(cell, c.want()) || !host->lend(host_class(cell, c.want()))) {
        return false;
    }
    start_load(cell, moe_edge_load::in_place_of_slot(c.want()));
    stats.host_hits[phase] += c.load()->in_host_tier();
    return true;
}

void moe_edge_store::use_in_place(int32_t cell, moe_edge_ready * out) {
    const auto & load = *cells[cell].load();
    const auto & s    = slice_of(cell, load.tier());
    *out = { host->data(load.host_slot()) + offset_in_block(cell, load.tier()), expert_of(cell), s.type, 0,
        MOE_EDGE_MISS_COMPUTE };
    stats.computed[phase][load.tier()]++;
    count_in_place(s);
}

void moe_edge_store::count_in_place(const moe_edge_slices & s) {
    stats.host_computed[phase]++;
    stats.host_computed_bytes[phase] += s.expert_bytes;
}

// Starts to copy an expert to slots on the device, for later steps, after the host has computed it. Does nothing while
// another copy waits.
void moe_edge_store::keep_used(int32_t layer, int32_t expert) {
    // Copy nothing if each expert must be computed in exactly the requested tier (exact_tiers). A later step may
    // request a worse tier while the copy is running, and would then compute with the better tier.
    if (misses == MOE_EDGE_MISS_COPY || !copies.empty() || exact_tiers) {
        return;
    }
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        const int32_t cell = cell_index(layer, k, expert);
        const auto & c = cells[cell];
        if (has_kind(layer, k) && !c.decided() && !c.load() && c.want() != MOE_EDGE_SKIP && !c.satisfied() &&
            staged(cell, c.want()) && host->has(slice_id(cell, c.want()))) {
            load_ahead(cell, c.want(), c.passing(), moe_edge_purpose::AFTER_USE);
        }
    }
}
