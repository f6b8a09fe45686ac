// Creates stores: checks the configuration, opens the files and allocates memory.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

#include <sys/mman.h>

namespace {

void ops_begin(moe_edge_matrix * m, const int32_t * experts, int32_t n) { m->store->begin(*m, experts, n); }
int32_t ops_next(moe_edge_matrix * m, moe_edge_ready * out) { return m->store->next(*m, out); }
void ops_release(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after) {
    m->store->release(*m, ready, n, after);
}
void ops_wait(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n) { m->store->wait(ready, n); }
bool ops_fixed(moe_edge_matrix * m) { return m->store->fixed(); }
bool ops_unwatched(moe_edge_matrix * m, const int32_t * experts, const int32_t * first, int32_t n, moe_edge_ready * out) {
    return m->store->serve_unwatched(*m, experts, first, n, out);
}
int32_t ops_routed(moe_edge_matrix * m, int32_t * out) { return m->store->routed_to(*m, out); }
void ops_multiply(moe_edge_matrix * m, const std::vector<moe_edge_product> & products, uint64_t began_us) {
    m->store->multiply(products, began_us);
}

void ops_waited(moe_edge_matrix * m, int32_t cause, uint64_t ns) { m->store->waited(cause, ns); }

bool ops_begin_layer(moe_edge_matrix * const * matrices, int32_t n, std::vector<moe_edge_ready> * out) {
    return n > 0 && matrices[0]->store->begin_layer(matrices, n, out);
}

const moe_edge_ops STORE_OPS = {
    ops_begin, ops_next, ops_release, ops_wait, ops_fixed, ops_unwatched, ops_routed, ops_multiply, ops_waited, ops_begin_layer,
};

}  // namespace

// Returns the number of values in a row of an expert matrix. Only for slices whose interleaved_rows (the number of
// rows) is set.
int64_t moe_edge_store::row_length(const moe_edge_slices & s) {
    const auto type = (ggml_type) s.type;
    return s.expert_bytes / s.interleaved_rows / ggml_type_size(type) * ggml_blck_size(type);
}

// Returns the kernels for these expert matrices in the CPU's own layout (interleaved rows). Returns null if their slots
// hold the bytes of the file instead.
const moe_edge_kernels * moe_edge_store::kernels_of(const moe_edge_slices & s) {
    if (s.interleaved_rows == 0 || s.expert_bytes == 0) {
        return nullptr;
    }
    const bool known = s.type >= 0 && s.type < GGML_TYPE_COUNT && ggml_blck_size((ggml_type) s.type) > 0 && s.interleaved_rows > 0;
    const auto * kernels = known ? moe_edge_kernels_of(s.type, row_length(s), s.interleaved_rows) : nullptr;
    if (!kernels || ggml_row_size((ggml_type) s.type, row_length(s)) * s.interleaved_rows != s.expert_bytes) {
        refuse("store: interleaved_rows is set for a matrix for which this CPU has no own layout");
    }
    return kernels;
}

moe_edge_store::moe_edge_store(const moe_edge_config & config)
    : n_layers(config.n_layers), n_expert(config.n_expert), n_expert_used(config.n_expert_used),
      n_tiers(config.n_tiers), max_tokens(config.max_tokens), n_ahead(config.n_ahead),
      importance_window(config.importance_window), exact_tiers((config.flags & MOE_EDGE_EXACT_TIERS) != 0),
      whole_experts((config.flags & MOE_EDGE_WHOLE_EXPERTS) != 0), rigid((config.flags & MOE_EDGE_RIGID) != 0),
      in_turn(moe_edge_is_in_turn()) {
    if (n_layers < 1 || n_expert < 1 || n_expert > 65535 || n_expert_used < 1 || n_expert_used > n_expert ||
        n_tiers < 1 || n_tiers > MOE_EDGE_MAX_TIERS || max_tokens < 1 || config.n_files < 1 || config.n_groups < 1 ||
        n_ahead < 0 || n_ahead > MOE_EDGE_MAX_AHEAD || importance_window < -1 || config.n_io_threads < 1 || config.n_io_threads > 64) {
        refuse("store: a count in the configuration is out of range");
    }
    if (rigid && !(config.flags & MOE_EDGE_SIMULATED)) {
        refuse("store: only a simulated link is rigid");
    }
    for (int32_t l = 0; l < n_layers; l++) {
        il.push_back(config.layers[l].il);
        auto & of_layer = slices.emplace_back();
        for (int k = 0; k < MOE_EDGE_N_KINDS; k++) {
            std::copy_n(config.layers[l].slices[k], MOE_EDGE_MAX_TIERS, of_layer[k].begin());
        }
    }
    device = static_cast<moe_edge_device *>(config.device);
    matrices.resize(n_layers);
    cells.resize(n_layers * MOE_EDGE_N_KINDS * n_expert);
    ops.resize(n_layers * MOE_EDGE_N_KINDS);
    routed_of.resize(n_layers);
    for (int32_t l = 0; l < n_layers; l++) {
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            moe_edge_matrix & m = matrices[l][k];
            m.store = this;
            m.ops   = &STORE_OPS;
            m.layer = l;
            m.kind  = k;
            m.table.resize(n_expert);
            for (int32_t t = 0; t < n_tiers; t++) {
                m.types.push_back(slices[l][k][t].type);
                m.kernels.push_back(kernels_of(slices[l][k][t]));
                if (m.kernels.back() && device) {
                    refuse("store: interleaved_rows must be 0 for experts on a device");
                }
            }
        }
    }

    ids.resize((size_t) max_tokens * n_expert_used);
    weights.resize(ids.size());
    tokens.resize(max_tokens);
    phases.resize(max_tokens);
    sequences.resize(max_tokens);
    ahead_ids.resize((size_t) std::max(n_ahead, 1) * ids.size());
    ahead.resize(ahead_ids.size());
    importance.resize(max_tokens);
    resident.assign((size_t) n_layers * n_expert, MOE_EDGE_ABSENT);
    resident_view = resident;
    missing.resize(resident.size());
    for (size_t i = 0; i < missing.size(); i++) {
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            missing[i] |= has_kind((int32_t) (i / n_expert), k) << k;
        }
    }
    missing_view = missing;
    counts.resize(resident.size());
    unwatched = std::vector<unwatched_uses>(resident.size());
    tier_out.resize(n_expert);
    passing_out.resize(n_expert);
    prefetch_out.resize(MOE_EDGE_MAX_PREFETCH);
    seen.resize(n_expert);
    event    = { 0, 0, 0, 0, 0, 0, 0, ids.data(), weights.data(), tokens.data(), phases.data(), sequences.data(),
                 ahead_ids.data(), ahead.data(), importance.data(), resident_view.data(),
                 missing_view.data() };
    decision = { tier_out.data(), passing_out.data(), prefetch_out.data(), 0, 0 };

    stats.budget_bytes = config.budget_bytes;
    try {
        open_files(config);
        keep_checksums();
        make_pools(config);
        if (device) {
            open_device(config);
            if (host->bytes() >= MOE_EDGE_BLOCK) {
                reads.files.probe(host->data(0));
                stats.direct_io = stats.direct_io && reads.files.direct();
            }
        }
        reads.start(in_turn ? 0 : config.n_io_threads, (config.flags & MOE_EDGE_SIMULATED) != 0);
    } catch (...) {
        close_all();
        throw;
    }
}

moe_edge_store::~moe_edge_store() { close_all(); }

void moe_edge_store::close_all() {
    reads.stop();
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    copy_cv.notify_all();
    if (copy_thread.joinable()) {
        copy_thread.join();
    }
    for (const auto & pool : pools) {
        for (int32_t i = 0; i < pool.size(); i++) {
            if (pool[i].after != 0) {
                device->wait(pool[i].after);
            }
        }
    }
    host.reset();
    if (memory && device) {
        device->release(memory);
    }
    if (mapped) {
        munmap(mapped, mapped_bytes);
    }
}

void moe_edge_store::open_files(const moe_edge_config & config) {
    const bool direct = (config.flags & MOE_EDGE_DIRECT_IO) != 0, simulated = (config.flags & MOE_EDGE_SIMULATED) != 0;
    reads.files.open(config.files, config.n_files, direct, simulated);
    stats.direct_io = direct && (simulated || reads.files.direct());
    for (int32_t l = 0; l < n_layers; l++) {
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            for (int32_t t = 0; has_kind(l, k) && t < n_tiers; t++) {
                const auto & s = slices[l][k][t];
                if (s.file < 0 || s.file >= config.n_files || s.type < 0 || s.type >= GGML_TYPE_COUNT ||
                    ggml_blck_size((ggml_type) s.type) == 0 || s.expert_bytes == 0) {
                    refuse("store: layer %d, %s, tier %d: bad file number, type or size", il[l], KIND_NAMES[k], t);
                }
                const uint64_t size = reads.files.bytes(s.file);
                if (s.expert_bytes > size / n_expert || s.offset > size - s.expert_bytes * n_expert) {
                    refuse("%s: experts of layer %d (%s, tier %d) end at %llu, past the end of the file at %llu: the file is truncated",
                        reads.files.path(s.file).c_str(), il[l], KIND_NAMES[k], t,
                        (unsigned long long) (s.offset + s.expert_bytes * n_expert), (unsigned long long) size);
                }
            }
        }
    }
}

// Copies all expected checksums into the store, because the caller may free the configuration after the store is
// created.
void moe_edge_store::keep_checksums() {
    for (int32_t cell = 0; cell < (int32_t) cells.size(); cell++) {
        for (int32_t t = 0; t < n_tiers; t++) {
            const auto & s = slice_of(cell, t);
            if (!s.checksums || s.expert_bytes == 0) {
                continue;
            }
            checksums.keep(slice_id(cell, t), cells.size() * n_tiers, s.checksums[expert_of(cell)]);
        }
    }
    for (auto & of_layer : slices) {
        for (auto & of_kind : of_layer) {
            for (auto & s : of_kind) {
                s.checksums = nullptr;
            }
        }
    }
}

void moe_edge_store::make_pools(const moe_edge_config & config) {
    pools.resize(config.n_groups);
    uint64_t total = 0, on_device = 0, on_host = 0;
    for (int32_t g = 0; g < config.n_groups; g++) {
        const auto & group = config.groups[g];
        pools[g].on_host = device && group.place == MOE_EDGE_MISS_COMPUTE;
        split |= pools[g].on_host;
        const bool direct = !device || pools[g].on_host;
        if (group.place != MOE_EDGE_MISS_COPY && !pools[g].on_host) {
            refuse("store: group %d: place must be MOE_EDGE_MISS_COPY or, in a store on a device, MOE_EDGE_MISS_COMPUTE", g);
        }
        if (group.n_slots < 1 || group.slot_bytes == 0 || (direct && group.slot_bytes % MOE_EDGE_BLOCK != 0) ||
            group.slot_bytes > (UINT64_MAX - MOE_EDGE_DEVICE_ALIGN - total) / group.n_slots) {
            refuse("store: group %d needs at least one slot, and the size of its slots must be a multiple of %d bytes", g, (int) MOE_EDGE_BLOCK);
        }
        total += group.slot_bytes * group.n_slots;
        (direct ? on_host : on_device) += pool_bytes(group);
    }
    if (total > config.budget_bytes) {
        refuse("store: the slots take %llu bytes, more than the budget of %llu",
            (unsigned long long) total, (unsigned long long) config.budget_bytes);
    }
    for (int32_t l = 0; l < n_layers; l++) {
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            for (int32_t t = 0; has_kind(l, k) && t < n_tiers; t++) {
                const auto & s = slices[l][k][t];
                if (s.group < 0 || s.group >= config.n_groups) {
                    refuse("store: layer %d, %s, tier %d: no such group: %d", il[l], KIND_NAMES[k], t, s.group);
                }
                auto & pool = pools[s.group];
                if (pool.kind >= 0 && pool.kind != k) {
                    refuse("store: group %d has slices of two matrix kinds, but it may have only one", s.group);
                }
                pool.mixed |= pool.kind >= 0 && pool.tier != t;
                const bool there = device && !pool.on_host;
                if (there && pool.mixed) {
                    refuse("store: group %d has slices of two tiers, but on a device it may have only one", s.group);
                }
                pool.kind = k;
                pool.tier = t;
                if (there) {
                    // On a device, all expert matrices that share a group must have the same type and size. The padding
                    // after a matrix is never written, so a longer matrix in the same slot would leave its bytes there.
                    if (pool.type < 0) {
                        pool.type        = s.type;
                        pool.slice_bytes = s.expert_bytes;
                    }
                    const uint64_t slot_bytes = config.groups[s.group].slot_bytes;
                    if (pool.type != s.type || pool.slice_bytes != s.expert_bytes || slot_bytes < s.expert_bytes ||
                        slot_bytes % ggml_type_size((ggml_type) s.type) != 0) {
                        refuse("store: group %d: on a device all slices of a group must have one type and size, and slots must be whole blocks (layer %d, %s, tier %d)",
                            s.group, il[l], KIND_NAMES[k], t);
                    }
                    continue;
                }
                for (int32_t e = 0; e < n_expert; e++) {
                    if (config.groups[s.group].slot_bytes < moe_edge_slot_bytes(s.offset + e*s.expert_bytes, s.expert_bytes)) {
                        refuse("store: group %d: a slot of %llu bytes is too small for layer %d, %s, tier %d", s.group,
                            (unsigned long long) config.groups[s.group].slot_bytes, il[l], KIND_NAMES[k], t);
                    }
                }
            }
        }
    }
    char * at_host = on_host > 0 ? map_pools(on_host, config.flags) : nullptr;
    memory = device ? device->alloc(std::max<uint64_t>(on_device, MOE_EDGE_DEVICE_ALIGN)) : at_host;
    if (!memory) {
        check_device();
        if (failed) {
            refuse("store: %s", failure.c_str());
        }
        refuse("store: %s does not have %llu bytes of free memory for slots", device->name().c_str(), (unsigned long long) on_device);
    }
    stats.slot_bytes = total;
    if (device) {
        lay_out_one_by_one(config, at_host);
    } else {
        lay_out_in_turn(config);
    }
    for (auto & of_layer : matrices) {
        for (auto & m : of_layer) {
            for (int32_t t = 0; t < n_tiers; t++) {
                const auto & pool = pools[slices[m.layer][m.kind][t].group];
                m.base.push_back(device && has_kind(m.layer, m.kind) && !pool.on_host ? pool.data(0) : nullptr);
            }
        }
    }
}

// Lays out the pools one after another. Each pool is one piece of device memory, or of host memory for pools on the
// host.
void moe_edge_store::lay_out_one_by_one(const moe_edge_config & config, char * at_host) {
    char * at_device = static_cast<char *>(memory);
    for (int32_t g = 0; g < config.n_groups; g++) {
        const auto & group = config.groups[g];
        char *& at = pools[g].on_host ? at_host : at_device;
        std::vector<char *> places(group.n_slots);
        for (int32_t i = 0; i < group.n_slots; i++) {
            places[i] = at + i * group.slot_bytes;
        }
        pools[g].open(std::move(places), group.slot_bytes, group.n_passing);
        at += pool_bytes(group);
    }
}

// Lays out the slots of all groups alternately in one piece of memory. If the memory is cut off at any address, all
// groups keep about the same fraction of their slots.
void moe_edge_store::lay_out_in_turn(const moe_edge_config & config) {
    char * at = static_cast<char *>(memory);
    std::vector<std::pair<double, int32_t>> order;  // of each slot: its position in its group (0 to 1), and the group
    for (int32_t g = 0; g < config.n_groups; g++) {
        for (int32_t i = 0; i < config.groups[g].n_slots; i++) {
            order.emplace_back((double) i / config.groups[g].n_slots, g);
        }
    }
    std::sort(order.begin(), order.end());
    std::vector<std::vector<char *>> places(config.n_groups);
    for (const auto & [share, g] : order) {
        group_of_slot.push_back(g);
        places[g].push_back(at);
        at += config.groups[g].slot_bytes;
    }
    for (int32_t g = 0; g < config.n_groups; g++) {
        pools[g].open(std::move(places[g]), config.groups[g].slot_bytes, config.groups[g].n_passing);
    }
}

// Returns the size of a group's slots in bytes, including the padding before the next group on a device.
uint64_t moe_edge_store::pool_bytes(const moe_edge_group & group) const {
    const uint64_t bytes = group.slot_bytes * group.n_slots;
    return device ? (bytes + MOE_EDGE_DEVICE_ALIGN - 1) / MOE_EDGE_DEVICE_ALIGN * MOE_EDGE_DEVICE_ALIGN : bytes;
}

char * moe_edge_store::map_pools(uint64_t total, int32_t flags) {
    // Map one region for all pools, with huge pages if the system has them. A direct read then pins few pages instead
    // of hundreds, and no pool must be rounded up to whole pages.
    mapped_bytes = total + HUGE_PAGE;
    const int access = flags & MOE_EDGE_SIMULATED ? PROT_NONE : PROT_READ | PROT_WRITE;
    mapped = mmap(nullptr, mapped_bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        mapped = nullptr;
        refuse("store: %llu bytes of memory for slots cannot be allocated: %s", (unsigned long long) total, strerror(errno));
    }
    madvise(mapped, mapped_bytes, MADV_HUGEPAGE);
    madvise(mapped, mapped_bytes, MADV_DONTFORK);  // direct reads and copy-on-write do not work together
    return huge_page_ceil(static_cast<char *>(mapped));
}

