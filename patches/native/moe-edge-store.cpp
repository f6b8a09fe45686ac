#include "moe-edge-store.h"
#include "moe-edge-crc32.h"
#include "moe-edge-util.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

constexpr uint64_t HUGE_PAGE = 2 << 20;

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
void ops_multiply(moe_edge_matrix * m, const std::vector<moe_edge_product> & products) { m->store->multiply(products); }

// The order in which a layer computes its kinds: the activation's first operand is gate.
constexpr int32_t KIND_RANK[MOE_EDGE_N_KINDS] = { /* up */ 1, /* gate */ 0, /* gate_up */ 0, /* down */ 2 };
constexpr int32_t KINDS_BY_RANK[MOE_EDGE_N_KINDS] = { MOE_EDGE_GATE, MOE_EDGE_GATE_UP, MOE_EDGE_UP, MOE_EDGE_DOWN };

const moe_edge_ops STORE_OPS = { ops_begin, ops_next, ops_release, ops_wait, ops_fixed, ops_unwatched, ops_routed, ops_multiply };

// First field of moe_edge_read_key.
constexpr int32_t DEMAND = 0, AHEAD = 1, TRANSITION = 2;

// Where a slice lies in its file, and which blocks of it a part of its read takes: direct reads take
// whole ones, which the slot has room for. The slot begins with block0.
struct slice_span {
    uint64_t first, last, block0, begin, end;

    slice_span(const moe_edge_slices & s, int32_t expert, int32_t part, int32_t parts)
        : first(s.offset + expert * s.expert_bytes), last(first + s.expert_bytes), block0(block_floor(first)) {
        const uint64_t step = block_ceil((block_ceil(last) - block0 + parts - 1) / parts);
        begin = block0 + part * step;
        end   = std::min(begin + step, block_ceil(last));
    }
};

// Numbers in a row of an expert whose layout changes.
int64_t row_length(const moe_edge_slices & s) {
    const auto type = (ggml_type) s.type;
    return s.expert_bytes / s.interleaved_rows / ggml_type_size(type) * ggml_blck_size(type);
}

// Those that its slots are laid out for, null for none.
const moe_edge_kernels * kernels_of(const moe_edge_slices & s) {
    if (s.interleaved_rows == 0 || s.expert_bytes == 0) {
        return nullptr;
    }
    const bool known = s.type >= 0 && s.type < GGML_TYPE_COUNT && ggml_blck_size((ggml_type) s.type) > 0 && s.interleaved_rows > 0;
    const auto * kernels = known ? moe_edge_kernels_of(s.type, row_length(s), s.interleaved_rows) : nullptr;
    if (!kernels || ggml_row_size((ggml_type) s.type, row_length(s)) * s.interleaved_rows != s.expert_bytes) {
        refuse("store: this CPU has no layout of its own for a matrix that was to have one");
    }
    return kernels;
}

// Whether this file can be read with O_DIRECT at block granularity, to `block`.
bool direct_works(int fd, void * block) { return block && pread(fd, block, MOE_EDGE_BLOCK, 0) > 0; }

}  // namespace

// ---- construction

moe_edge_store::moe_edge_store(const moe_edge_config & config)
    : n_layers(config.n_layers), n_expert(config.n_expert), n_expert_used(config.n_expert_used),
      n_tiers(config.n_tiers), max_tokens(config.max_tokens), n_ahead(config.n_ahead),
      importance_window(config.importance_window), exact_tiers((config.flags & MOE_EDGE_EXACT_TIERS) != 0),
      whole_experts((config.flags & MOE_EDGE_WHOLE_EXPERTS) != 0), rigid((config.flags & MOE_EDGE_RIGID) != 0) {
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
                    refuse("store: on a device experts are as in the file");
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
            probe_host_reads();
        }
        if (config.flags & MOE_EDGE_SIMULATED) {
            simulation = std::make_unique<moe_edge_simulation>(config.n_io_threads);
        }
        for (int i = 0; !simulation && i < config.n_io_threads; i++) {
            threads.emplace_back([this] { io_loop(); });
        }
    } catch (...) {
        close_all();
        throw;
    }
}

moe_edge_store::~moe_edge_store() { close_all(); }

void moe_edge_store::close_all() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    work_cv.notify_all();
    copy_cv.notify_all();
    for (auto & t : threads) {
        t.join();
    }
    if (copy_thread.joinable()) {
        copy_thread.join();
    }
    for (const auto & pool : pools) {
        for (const auto & slot : pool.slots) {
            if (slot.after != 0) {
                device->wait(slot.after);
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
    for (auto & file : files) {
        if (file.fd >= 0) {
            close(file.fd);
        }
    }
}

void moe_edge_store::open_files(const moe_edge_config & config) {
    std::vector<uint64_t> sizes;
    const std::unique_ptr<void, decltype(&free)> block(aligned_alloc(MOE_EDGE_BLOCK, MOE_EDGE_BLOCK), free);
    stats.direct_io = (config.flags & MOE_EDGE_DIRECT_IO) != 0;
    for (int32_t i = 0; i < config.n_files; i++) {
        auto & file = files.emplace_back();
        file.path = config.files[i];
        if (config.flags & MOE_EDGE_SIMULATED) {
            sizes.push_back(UINT64_MAX);
            continue;
        }
        if (config.flags & MOE_EDGE_DIRECT_IO) {
            file.fd = open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
            file.direct = file.fd >= 0 && direct_works(file.fd, block.get());
            if (file.fd >= 0 && !file.direct) {
                close(file.fd);
                file.fd = -1;
            }
        }
        if (file.fd < 0) {
            file.fd = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
        }
        struct stat st;
        if (file.fd < 0 || fstat(file.fd, &st) != 0) {
            refuse("%s: cannot be opened: %s", file.path.c_str(), strerror(errno));
        }
        stats.direct_io &= file.direct;
        sizes.push_back(st.st_size);
    }
    for (int32_t l = 0; l < n_layers; l++) {
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            for (int32_t t = 0; has_kind(l, k) && t < n_tiers; t++) {
                const auto & s = slices[l][k][t];
                if (s.file < 0 || s.file >= config.n_files || s.type < 0 || s.type >= GGML_TYPE_COUNT ||
                    ggml_blck_size((ggml_type) s.type) == 0 || s.expert_bytes == 0) {
                    refuse("store: layer %d, %s, tier %d: bad file number, type or size", il[l], KIND_NAMES[k], t);
                }
                const uint64_t size = sizes[s.file];
                if (s.expert_bytes > size / n_expert || s.offset > size - s.expert_bytes * n_expert) {
                    refuse("%s: experts of layer %d (%s, tier %d) end at %llu, past the end of the file at %llu: the file is truncated",
                        files[s.file].path.c_str(), il[l], KIND_NAMES[k], t,
                        (unsigned long long) (s.offset + s.expert_bytes * n_expert), (unsigned long long) size);
                }
            }
        }
    }
}

// Memory that a driver has pinned is not what every system reads into directly: such files are read as others are.
void moe_edge_store::probe_host_reads() {
    for (auto & file : files) {
        if (!file.direct || host->bytes() < MOE_EDGE_BLOCK || direct_works(file.fd, host->data(0))) {
            continue;
        }
        close(file.fd);
        file.fd     = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
        file.direct = false;
        stats.direct_io = 0;
        if (file.fd < 0) {
            refuse("%s: cannot be opened: %s", file.path.c_str(), strerror(errno));
        }
    }
}

// The configuration and what it points to may go when the store has been made.
void moe_edge_store::keep_checksums() {
    for (int32_t cell = 0; cell < (int32_t) cells.size(); cell++) {
        for (int32_t t = 0; t < n_tiers; t++) {
            const auto & s = slice_of(cell, t);
            if (!s.checksums || s.expert_bytes == 0) {
                continue;
            }
            checksums.resize(cells.size() * n_tiers);
            unchecked.resize(cells.size() * n_tiers);
            checksums[slice_id(cell, t)] = s.checksums[expert_of(cell)];
            unchecked[slice_id(cell, t)] = 1;
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
            refuse("store: group %d: slots beside a device's are for the host's threads to compute", g);
        }
        if (group.n_slots < 1 || group.slot_bytes == 0 || (direct && group.slot_bytes % MOE_EDGE_BLOCK != 0) ||
            group.slot_bytes > (UINT64_MAX - MOE_EDGE_DEVICE_ALIGN - total) / group.n_slots) {
            refuse("store: group %d: needs at least one slot, of a multiple of %d bytes", g, (int) MOE_EDGE_BLOCK);
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
                    refuse("store: group %d holds two kinds", s.group);
                }
                pool.mixed |= pool.kind >= 0 && pool.tier != t;
                const bool there = device && !pool.on_host;
                if (there && pool.mixed) {
                    refuse("store: group %d holds two tiers, which it cannot on a device", s.group);
                }
                pool.kind = k;
                pool.tier = t;
                if (there) {
                    // the padding behind a slice is never written: no longer slice may have lain there
                    if (pool.type < 0) {
                        pool.type        = s.type;
                        pool.slice_bytes = s.expert_bytes;
                    }
                    const uint64_t slot_bytes = config.groups[s.group].slot_bytes;
                    if (pool.type != s.type || pool.slice_bytes != s.expert_bytes || slot_bytes < s.expert_bytes ||
                        slot_bytes % ggml_type_size((ggml_type) s.type) != 0) {
                        refuse("store: group %d: on a device all slices have one type and size, and slots whole blocks (layer %d, %s, tier %d)",
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
        refuse("store: %s has no memory for slots of %llu bytes", device->name().c_str(), (unsigned long long) on_device);
    }
    char * at_device = static_cast<char *>(memory);
    for (int32_t g = 0; g < config.n_groups; g++) {
        auto & pool = pools[g];
        const auto & group = config.groups[g];
        char *& at = device && !pool.on_host ? at_device : at_host;
        pool.memory     = at;
        pool.slot_bytes = group.slot_bytes;
        pool.max_passing = std::max(1, group.n_passing);
        pool.slots.resize(group.n_slots);
        for (int32_t i = group.n_slots; i-- > 0;) {
            pool.free.push_back(i);
        }
        at += pool_bytes(group);
    }
    for (auto & of_layer : matrices) {
        for (auto & m : of_layer) {
            for (int32_t t = 0; t < n_tiers; t++) {
                const auto & pool = pools[slices[m.layer][m.kind][t].group];
                m.base.push_back(has_kind(m.layer, m.kind) && !pool.on_host ? pool.memory : nullptr);
            }
        }
    }
}

// What a group takes, up to where the next one starts.
uint64_t moe_edge_store::pool_bytes(const moe_edge_group & group) const {
    const uint64_t bytes = group.slot_bytes * group.n_slots;
    return device ? (bytes + MOE_EDGE_DEVICE_ALIGN - 1) / MOE_EDGE_DEVICE_ALIGN * MOE_EDGE_DEVICE_ALIGN : bytes;
}

char * moe_edge_store::map_pools(uint64_t total, int32_t flags) {
    // One region for all pools, in huge pages where the system has them: direct reads then
    // pin a few pages each instead of hundreds, and no pool is rounded up by itself.
    mapped_bytes = total + HUGE_PAGE;
    const int access = flags & MOE_EDGE_SIMULATED ? PROT_NONE : PROT_READ | PROT_WRITE;
    mapped = mmap(nullptr, mapped_bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        mapped = nullptr;
        refuse("store: no memory for slots of %llu bytes: %s", (unsigned long long) total, strerror(errno));
    }
    madvise(mapped, mapped_bytes, MADV_HUGEPAGE);
    madvise(mapped, mapped_bytes, MADV_DONTFORK);  // direct reads and copy-on-write do not go together
    return reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(mapped) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
}

// ---- slots

void moe_edge_store::list_remove(moe_edge_pool & pool, int32_t slot) {
    auto & s = pool.slots[slot];
    (s.newer >= 0 ? pool.slots[s.newer].older : pool.newest) = s.older;
    (s.older >= 0 ? pool.slots[s.older].newer : pool.oldest) = s.newer;
    s.newer  = -1;
    s.older  = -1;
    s.listed = false;
}

// Reads complete in any order; the list is in the order of the requests, so that what is
// evicted does not depend on the disk's timing.
void moe_edge_store::list_insert(moe_edge_pool & pool, int32_t slot) {
    auto & s = pool.slots[slot];
    s.newer = -1;
    s.older = pool.newest;
    while (s.older >= 0 && pool.slots[s.older].used_at > s.used_at) {
        s.newer = s.older;
        s.older = pool.slots[s.older].older;
    }
    s.listed = true;
    (s.older >= 0 ? pool.slots[s.older].newer : pool.oldest) = slot;
    (s.newer >= 0 ? pool.slots[s.newer].older : pool.newest) = slot;
}

void moe_edge_store::touch(int32_t cell) {
    auto & c = cells[cell];
    if (c.loading_slot >= 0) {
        // as if it had arrived: what is evicted next does not depend on the disk
        auto & pool = pool_of(cell, c.loading);
        set_passing(pool, c.loading_slot, false);
        pool.slots[c.loading_slot].used_at = ++clock;
    } else if (c.slotless()) {
        c.passes   = false;
        c.asked_at = ++clock;
    }
    if (c.tier != NO_TIER) {
        auto & pool = pool_of(cell, c.tier);
        set_passing(pool, c.slot, false);
        list_remove(pool, c.slot);
        pool.slots[c.slot].used_at = ++clock;
        list_insert(pool, c.slot);
    }
}

// A free slot; else one that no op of this step and no transition needs: what passing
// requests loaded before the rest, of either the one used least recently. Where a pool holds several
// tiers, a request at last takes the slot of what this step needs in a better tier: that one waits
// for a slot of the same pool, and its old tier serves nobody. list: the list of a prefetch, which
// takes no slot of what stands in that one or in a later one; null for a request. -1 if there is none.
int32_t moe_edge_store::take_slot(moe_edge_pool & pool, bool passing, const uint64_t * list) {
    const auto first = [&](auto && may_go) {
        int32_t slot = pool.oldest;
        while (slot >= 0 && !may_go(pool.slots[slot], cells[pool.slots[slot].cell])) {
            slot = pool.slots[slot].newer;
        }
        return slot;
    };
    const auto oldest = [&](bool of_passing) {
        return first([&](const moe_edge_slot & s, const moe_edge_cell & c) {
            return s.passing == of_passing && !c.pinned() && !(list && c.predicted >= *list) && !in_transition(s.cell);
        });
    };
    int32_t slot = -1;
    if (!pool.free.empty()) {
        slot = pool.free.back();
        pool.free.pop_back();
    } else {
        if (pool.n_passing > 0) {
            slot = oldest(true);
        }
        if (slot < 0 && (!passing || pool.n_passing < pool.max_passing)) {
            slot = oldest(false);
        }
        if (slot < 0 && !list && revoke(pool)) {
            return take_slot(pool, passing, list);
        }
        if (slot < 0 && !list && pool.mixed) {
            slot = first([&](const moe_edge_slot & s, const moe_edge_cell & c) { return c.pinned() && !c.satisfied() && !in_transition(s.cell); });
        }
        if (slot < 0) {
            return -1;
        }
        evict(pool.slots[slot].cell);
        pool.free.pop_back();
    }
    set_passing(pool, slot, passing);
    stats.slot_bytes_in_use += pool.slot_bytes;
    stats.slot_bytes_peak = std::max(stats.slot_bytes_peak, stats.slot_bytes_in_use);
    return slot;
}

void moe_edge_store::set_passing(moe_edge_pool & pool, int32_t slot, bool passing) {
    pool.n_passing += passing - pool.slots[slot].passing;
    pool.slots[slot].passing = passing;
}

void moe_edge_store::give_slot(moe_edge_pool & pool, int32_t slot) {
    set_passing(pool, slot, false);
    moe_edge_slot fresh;
    fresh.after  = pool.slots[slot].after;
    fresh.behind = pool.slots[slot].behind;
    pool.slots[slot] = fresh;
    pool.free.push_back(slot);
    stats.slot_bytes_in_use -= pool.slot_bytes;
}

// The cell's complete tier leaves memory.
void moe_edge_store::drop_tier(int32_t cell) {
    auto & c    = cells[cell];
    auto & pool = pool_of(cell, c.tier);
    stats.prefetch_wasted += pool.slots[c.slot].prefetched;
    if (host && !pool.slots[c.slot].passing) {
        host->touch(slice_id(cell, c.tier));
    }
    set_entry(cell, {});
    list_remove(pool, c.slot);
    give_slot(pool, c.slot);
    c.tier = NO_TIER;
    c.slot = -1;
}

void moe_edge_store::set_entry(int32_t cell, const moe_edge_entry & entry) {
    auto & m = matrices[layer_of(cell)][kind_of(cell)];
    m.table[expert_of(cell)] = entry;
    m.version++;
    table_changes++;
}

void moe_edge_store::evict(int32_t cell) {
    drop_tier(cell);
    update_resident(cell);
    stats.evictions++;
}

void moe_edge_store::serve_waiting(moe_edge_pool & pool) {
    while (!pool.waiting.empty()) {
        const int32_t cell = pool.waiting.front();
        auto & c = cells[cell];
        if (c.pinned() && !c.satisfied() && c.loading == NO_TIER && !try_load(cell, c.want, c.passing)) {
            return;
        }
        c.waiting = false;
        pool.waiting.pop_front();
    }
}

void moe_edge_store::serve_waiting(const moe_edge_matrix & m) {
    for (int32_t t = 0; t < n_tiers; t++) {
        serve_waiting(pools[slices[m.layer][m.kind][t].group]);
    }
}

void moe_edge_store::update_resident(int32_t cell) {
    const int32_t layer  = layer_of(cell);
    const int32_t expert = expert_of(cell);
    uint8_t worst = 0, none = 0;
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        if (has_kind(layer, k)) {
            const int8_t tier = cells[cell_index(layer, k, expert)].tier;
            worst = std::max<uint8_t>(worst, tier == NO_TIER ? MOE_EDGE_ABSENT : tier);
            none |= (tier == NO_TIER) << k;
        }
    }
    resident[(size_t) layer * n_expert + expert] = worst;
    missing[(size_t) layer * n_expert + expert]  = none;
}

// ---- reads

moe_edge_read_key moe_edge_store::read_key(int32_t cell) const {
    const auto & c = cells[cell];
    const auto & s = slice_of(cell, c.loading);
    return c.background ? moe_edge_read_key(TRANSITION, c.ahead_seq, 0, cell)
         : rigid        ? moe_edge_read_key(DEMAND, c.ahead_seq, 0, cell)
         : c.ahead      ? moe_edge_read_key(AHEAD, c.ahead_seq, 0, cell)
                        : moe_edge_read_key(DEMAND, KIND_RANK[kind_of(cell)], s.offset + expert_of(cell) * s.expert_bytes, cell);
}

bool moe_edge_store::try_load(int32_t cell, int32_t tier, bool passing) {
    auto & pool = pool_of(cell, tier);
    const int32_t slot = take_slot(pool, passing, nullptr);
    if (slot < 0) {
        return false;
    }
    pool.slots[slot].cell    = cell;
    pool.slots[slot].used_at = ++clock;
    start_load(cell, tier, slot, false, passing);
    queue_of(cells[cell]).insert(read_key(cell));
    return true;
}

// Its slot comes later: nothing is evicted for a read that may never start.
void moe_edge_store::queue_ahead(int32_t cell, int32_t tier, bool passing) {
    auto & c = cells[cell];
    start_load(cell, tier, -1, true, passing);
    c.asked_at = ++clock;
    c.list     = n_lists;
    queue_of(c).insert(read_key(cell));
}

// A slot for a load that has none; false if there is none, or if others wait for it already.
bool moe_edge_store::claim_slot(int32_t cell) {
    auto & c    = cells[cell];
    auto & pool = pool_of(cell, c.loading);
    const int32_t slot = !c.ahead && !pool.waiting.empty() ? -1 : take_slot(pool, c.passes, c.ahead ? &c.list : nullptr);
    if (slot < 0) {
        return false;
    }
    pool.slots[slot].cell    = cell;
    pool.slots[slot].used_at = c.asked_at;
    c.loading_slot = slot;
    return true;
}

// Before a read starts: whether it has where to go. On a device that is the host tier.
bool moe_edge_store::claim_or_drop(int32_t cell) {
    if (staged(cell, cells[cell].loading) || !cells[cell].slotless() || claim_slot(cell)) {
        return true;
    }
    cancel_read(cell);
    return false;
}

// slot: -1 for one that ends in the host tier, or that takes its slot later.
void moe_edge_store::start_load(int32_t cell, int32_t tier, int32_t slot, bool ahead, bool passing) {
    auto & c = cells[cell];
    c.loading      = tier;
    c.loading_slot = slot;
    c.ahead        = ahead;
    c.ahead_seq    = c.background ? transition_seq++ : ahead || rigid ? ahead_seq++ : 0;
    c.broken       = false;
    c.abandoned    = false;
    c.cut          = false;
    c.copied       = false;
    c.after_use    = false;
    c.passes       = passing;
    c.ticket       = 0;
    c.host_slot    = staged(cell, tier) ? host->find(slice_id(cell, tier), passing) : -1;
    c.cached       = c.host_slot >= 0;
    c.was_read     = false;
    c.checks       = !c.cached && !simulation && !unchecked.empty() && unchecked[slice_id(cell, tier)];
    c.crc          = 0;
    c.parts        = c.cached ? 1 : std::max<uint64_t>(1, (slice_of(cell, tier).expert_bytes + MOE_EDGE_PART / 2) / MOE_EDGE_PART);
    c.started      = 0;
    c.finished     = 0;
}

// A read that has not started is taken back.
void moe_edge_store::cancel_read(int32_t cell) {
    auto & c = cells[cell];
    queue_of(c).erase(read_key(cell));
    stats.prefetch_cancelled += c.ahead && !c.after_use;
    discard_load(cell);
}

// Gives the slot of a read that comes to nothing back, if it has one.
void moe_edge_store::free_load(int32_t cell) {
    auto & c    = cells[cell];
    auto & pool = pool_of(cell, c.loading);
    const int32_t slot = c.loading_slot;
    drop_host(cell);
    if (c.in_place()) {
        host->take_back(host_class(cell, c.loading));
        c.place = MOE_EDGE_MISS_COPY;
    } else if (slot >= 0) {
        give_slot(pool, slot);
    }
    c.loading      = NO_TIER;
    c.loading_slot = -1;
    c.background   = false;
}

// The same, and it goes to whoever waits for one.
void moe_edge_store::discard_load(int32_t cell) {
    auto & pool = pool_of(cell, cells[cell].loading);
    free_load(cell);
    serve_waiting(pool);
}

void moe_edge_store::load_or_wait(int32_t cell) {
    auto & c    = cells[cell];
    auto & pool = pool_of(cell, c.want);
    if (!c.waiting && (!pool.waiting.empty() || !try_load(cell, c.want, c.passing))) {
        c.waiting = true;
        pool.waiting.push_back(cell);
    }
}

// Acts on a read whose parts are all done. An op may be reading the bytes that a promotion
// replaces; the promotion then waits for release(), and a transition for the next step.
void moe_edge_store::settle(int32_t cell) {
    auto & c = cells[cell];
    if (staged(cell, c.loading) && !c.copied && !c.broken && !c.abandoned && !c.in_place()) {
        const bool nobody_waits = c.ahead || c.background;
        if (nobody_waits && !c.cached && ahead_before(slice_of(cell, c.loading).expert_bytes) != 0) {
            // as one that the host tier had: the copy thread takes it in its turn
            c.cached = c.was_read = true;
            c.parts   = 1;
            c.started = c.finished = 0;
            copies.insert(read_key(cell));
            copy_cv.notify_one();
            return;
        }
        if (!c.slotless() || claim_slot(cell)) {
            transfer(cell);
        } else {
            c.abandoned = true;  // but the host tier keeps the bytes
            stats.prefetch_cancelled += c.ahead && !c.after_use;
        }
    }
    if (c.background || c.serves()) {
        return;
    }
    if (!c.broken && !c.abandoned && !c.in_place()) {
        if (!c.pinned() || !c.satisfied()) {
            publish(cell);
        }
        return;
    }
    discard_load(cell);
    if (c.pinned() && !c.satisfied()) {
        if (c.broken) {
            fail_locked(failed_read.empty() ? "an expert could not be read" : failed_read);
        } else {
            load_or_wait(cell);
        }
    }
}

// The bytes of c.loading are complete: the table may point at them from here on.
void moe_edge_store::publish(int32_t cell) {
    auto & c = cells[cell];
    moe_edge_pool * freed = nullptr;
    if (c.tier != NO_TIER) {
        stats.promotions += c.loading < c.tier;
        freed = &pool_of(cell, c.tier);
        drop_tier(cell);
    }
    auto & pool = pool_of(cell, c.loading);
    const auto & s = slice_of(cell, c.loading);
    const uint64_t offset = s.offset + expert_of(cell) * s.expert_bytes;

    c.tier         = c.loading;
    c.slot         = c.loading_slot;
    c.loading      = NO_TIER;
    c.loading_slot = -1;
    c.background   = false;
    pool.slots[c.slot].prefetched = c.ahead && !c.after_use && !c.pinned();
    list_insert(pool, c.slot);
    set_entry(cell, { pool.memory + c.slot * pool.slot_bytes + (staged(cell, c.tier) ? 0 : offset % MOE_EDGE_BLOCK), s.type, c.ticket });
    update_resident(cell);

    if (c.pinned() && !c.satisfied()) {
        load_or_wait(cell);  // a worse tier was already under way when this one was asked for
    }
    if (freed) {
        serve_waiting(*freed);
    }
    if (!c.pinned()) {
        serve_waiting(pool);  // it may be evicted for one that waits
    }
}

std::string moe_edge_store::name_of(int32_t cell, int32_t tier) const {
    return format("%s: expert %d of layer %d (%s, %s)", files[slice_of(cell, tier).file].path.c_str(), expert_of(cell),
        il[layer_of(cell)], KIND_NAMES[kind_of(cell)], ggml_type_name((ggml_type) slice_of(cell, tier).type));
}

std::string moe_edge_store::read_part(const moe_edge_slices & s, int32_t expert, char * slot, int32_t part, int32_t parts) const {
    const auto & file = files[s.file];
    const auto [first, last, block0, begin, end] = slice_span(s, expert, part, parts);
    const uint64_t needed = std::min(end, last);

    uint64_t at = file.direct ? begin : std::max(begin, first);
    while (at < needed) {
        const ssize_t n = pread(file.fd, slot + (at - block0), (file.direct ? end : needed) - at, at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return format("read of %llu bytes at offset %llu failed: %s", (unsigned long long) s.expert_bytes,
                (unsigned long long) first, strerror(errno));
        }
        // a direct read stops short of a block only at the end of the file
        if (n == 0 || (file.direct && n % MOE_EDGE_BLOCK != 0 && at + n < needed)) {
            return format("the file ends at offset %llu, before the expert's end at %llu: it was truncated",
                (unsigned long long) (at + n), (unsigned long long) last);
        }
        at += n;
    }
    return {};
}

// What a part that was read brings to the CRC-32 of its slice. Without the mutex.
uint32_t moe_edge_store::part_crc(const moe_edge_slices & s, int32_t expert, const char * slot, int32_t part, int32_t parts) const {
    const slice_span span(s, expert, part, parts);
    const uint64_t begin = std::max(span.begin, span.first), end = std::min(span.end, span.last);
    return begin >= end ? 0 : moe_edge_crc32_before(moe_edge_crc32(0, slot + (begin - span.block0), end - begin), span.last - end);
}

// A slice whose last part was read, into the layout of its slots. Without the mutex.
void moe_edge_store::lay_out(const moe_edge_read & read, const moe_edge_kernels & kernels) const {
    const auto & s = slice_of(read.cell, read.tier);
    const uint64_t offset = s.offset + expert_of(read.cell) * s.expert_bytes;
    moe_edge_interleave(kernels, row_length(s), s.interleaved_rows, read.slot + offset % MOE_EDGE_BLOCK);
}

// Takes the next part of a read off the queue.
moe_edge_read moe_edge_store::start_read(int32_t cell) {
    auto & c = cells[cell];
    auto & pool = pool_of(cell, c.loading);
    char * to = c.host_slot >= 0 ? host->data(c.host_slot) : pool.memory + c.loading_slot * pool.slot_bytes;
    const moe_edge_read read = { cell, c.loading, c.started++, c.parts, c.background, to, c.checks };
    const uint64_t bytes = slice_of(cell, read.tier).expert_bytes;
    if (read.part == 0) {
        (c.background ? stats.transition_bytes : c.ahead ? stats.prefetch_bytes[phase] : stats.demand_bytes[phase]) += bytes;
    }
    if (read.background) {
        transiting = true;
        hold_transitions(bytes / read.parts);
    }
    if (!c.queued()) {
        reads.erase(read_key(cell));
    }
    return read;
}

// A part of a load failed: the rest is not worth reading.
void moe_edge_store::break_load(const moe_edge_read & read, const std::string & sentence) {
    auto & c = cells[read.cell];
    if (!c.broken) {
        c.broken    = true;
        failed_read = sentence;
        drop_rest(read.cell);
    }
}

// A slice that was read as a whole, against its checksum. Each one is compared until it fits, once in a
// process: what was written wrong is found then, and what is read again costs nothing more.
void moe_edge_store::compare(const moe_edge_read & read) {
    const int32_t id = slice_id(read.cell, read.tier);
    if (cells[read.cell].crc == checksums[id]) {
        unchecked[id] = 0;
        return;
    }
    const auto & s = slice_of(read.cell, read.tier);
    const int32_t expert = expert_of(read.cell);
    break_load(read, format("%s: tensor blk.%d.ffn_%s_exps.weight (%s): offset %llu: expert %d is damaged: its checksum differs",
        files[s.file].path.c_str(), il[layer_of(read.cell)], KIND_NAMES[kind_of(read.cell)], ggml_type_name((ggml_type) s.type),
        (unsigned long long) (s.offset + expert * s.expert_bytes), expert));
}

void moe_edge_store::finish_read(const moe_edge_read & read, const std::string & why, uint64_t took_us, uint32_t crc) {
    auto & c = cells[read.cell];
    transiting &= !read.background;
    stats.read_us += took_us;
    c.finished++;
    c.crc ^= crc;
    if (!why.empty()) {
        break_load(read, name_of(read.cell, read.tier) + ": " + why);
    }
    if (c.arrived()) {
        if (c.checks && !c.broken && !c.cut) {
            compare(read);
        }
        if (staged(read.cell, c.loading) && !c.broken && !c.cut) {
            const bool passes = c.in_place() ? c.passing : c.slotless() ? c.passes
                : pool_of(read.cell, c.loading).slots[c.loading_slot].passing;
            host->complete(c.host_slot, passes);
        }
        settle(read.cell);
        done_cv.notify_all();
    }
}

void moe_edge_store::io_loop() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        work_cv.wait(lock, [this] { return stopping || urgent() || (!reads.empty() && !transiting); });
        if (stopping) {
            return;
        }
        if (!urgent()) {
            const uint64_t now = clock_us();
            if (now < transition_at) {
                transiting = true;  // this thread is the one that waits
                work_cv.wait_for(lock, std::chrono::microseconds(transition_at - now));
                transiting = false;
                continue;
            }
        }
        const int32_t cell = host ? reserve_host(lock) : most_urgent();
        if (cell < 0 || !claim_or_drop(cell)) {
            continue;
        }
        const moe_edge_read read = start_read(cell);

        lock.unlock();
        const uint64_t t0 = now_us();
        const std::string why = read_part(slice_of(read.cell, read.tier), expert_of(read.cell), read.slot, read.part, read.parts);
        const uint64_t t1 = now_us();
        const uint32_t crc = read.checks && why.empty()
            ? part_crc(slice_of(read.cell, read.tier), expert_of(read.cell), read.slot, read.part, read.parts) : 0;
        lock.lock();

        const auto & c = cells[read.cell];
        const auto * kernels = matrices[layer_of(read.cell)][kind_of(read.cell)].kernels[read.tier];
        if (kernels && why.empty() && c.finished + 1 == c.parts && !c.broken && !c.cut) {
            lock.unlock();
            lay_out(read, *kernels);
            lock.lock();
        }
        finish_read(read, why, t1 - t0, crc);
        wake();
    }
}

bool moe_edge_store::urgent() const { return !reads.empty() && std::get<0>(*reads.begin()) != TRANSITION; }

// Transitions are read one part at a time, so that the other threads are there for what is urgent.
bool moe_edge_store::may_transit() const { return !reads.empty() && !transiting && clock_us() >= transition_at; }

// So many bytes of a transition move now, from wherever they are: when may the next ones?
void moe_edge_store::hold_transitions(uint64_t bytes) {
    transition_at = transition_rate == 0 ? 0 : clock_us() + bytes * 1000000 / transition_rate;
}

uint64_t moe_edge_store::clock_us() const { return simulation ? simulation->now() / 1000 : now_us(); }

// Not for transitions: the thread that is on them goes on by itself, and waking the others
// for each op would cost compute time.
void moe_edge_store::wake() {
    while (!unserved.empty()) {
        moe_edge_pool & pool = *unserved.back();
        unserved.pop_back();
        serve_waiting(pool);
    }
    while (!copies.empty() && std::get<0>(*copies.begin()) == DEMAND) {
        start_copy();
    }
    if (!copies.empty()) {
        copy_cv.notify_one();
    }
    if (!simulation) {
        if (urgent()) {
            work_cv.notify_all();
        }
        return;
    }
    while (simulation->has_idle_thread() && (urgent() || may_transit())) {
        if (!claim_or_drop(most_urgent())) {
            continue;
        }
        const moe_edge_read read = start_read(most_urgent());
        const uint64_t bytes = slice_of(read.cell, read.tier).expert_bytes;
        // the parts of a slice are equal up to a byte, and together as long as it is
        simulation->start(read, bytes * (read.part + 1) / read.parts - bytes * read.part / read.parts);
    }
}

uint64_t moe_edge_store::wait_done(std::unique_lock<std::mutex> & lock, int ms) {
    if (!simulation) {
        const uint64_t t0 = now_us();
        done_cv.wait_for(lock, std::chrono::milliseconds(ms));
        return now_us() - t0;
    }
    if (!simulation->busy()) {
        fail_locked("the simulation waits for an expert that nobody reads");
        return 0;
    }
    const uint64_t t0 = simulation->now() / 1000;
    simulate_until(simulation->next_done());
    return simulation->now() / 1000 - t0;
}

// The parts of a read that have not started are not worth reading.
void moe_edge_store::drop_rest(int32_t cell) {
    auto & c = cells[cell];
    if (c.queued()) {
        queue_of(c).erase(read_key(cell));
        c.parts = c.started;
        c.cut   = true;
    }
}

// What is read goes on to the end of a part, and is thrown away.
void moe_edge_store::abandon(int32_t cell) {
    auto & c = cells[cell];
    drop_rest(cell);
    c.abandoned = true;
    if (c.arrived()) {
        settle(cell);  // no thread is on it any more
    }
}

// ---- decisions

bool moe_edge_store::route() {
    const bool asked = asks(phase);
    std::fill(tier_out.begin(), tier_out.end(), asked ? 0 : default_tier);
    std::fill(passing_out.begin(), passing_out.end(), 0);
    decision.n_prefetch  = 0;
    decision.renormalize = 0;
    if (asked) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            resident_view = resident;
            missing_view  = missing;
        }
        const uint64_t t0 = now_us();
        const int rc = callback(callback_user);
        const uint64_t t1 = now_us();
        std::lock_guard<std::mutex> lock(mutex);
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
    std::lock_guard<std::mutex> lock(mutex);
    const size_t first = (size_t) event.layer * n_expert;
    for (size_t i = 0; i < (size_t) event.n_tokens * n_expert_used && !device_counts(); i++) {
        counts[first + ids[i]]++;
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

// False, and the step fails, for indices that the model does not have.
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
    std::lock_guard<std::mutex> lock(mutex);
    return kind != MOE_EDGE_N_KINDS && check_layer(layer, kind, experts, n);
}

void moe_edge_store::apply(int32_t layer, const int32_t * experts, const uint8_t * tiers, const uint8_t * passing, int32_t n) {
    std::lock_guard<std::mutex> lock(mutex);
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
            fail_locked(format("the policy asked for tier %d of expert %d, layer %d: the model has %d", tiers[i],
                experts[i], layer, n_tiers));
            return;
        }
        if (kind >= MOE_EDGE_DOWN && !device_counts()) {  // every layer has a down: once for each expert
            stats.routed[phase][tiers[i] == MOE_EDGE_SKIP ? MOE_EDGE_MAX_TIERS : tiers[i]]++;
        }
    }
    // pin what this step needs before anything may be evicted for it
    each_cell([&](int32_t cell, int32_t i) {
        auto & c = cells[cell];
        n_decided += !c.decided;
        c.decided = true;
        c.want    = tiers[i];
        c.passing = passing && passing[i];
        if (exact_tiers && c.pinned() && c.tier != NO_TIER && c.tier < c.want) {
            evict(cell);
        }
        if (c.pinned() && !c.passing) {
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
    std::lock_guard<std::mutex> lock(mutex);
    prefetch_locked(-1, list, n);
}

// One request of the current step, by the three rules of DyMoE 4.4.2.
void moe_edge_store::ask(int32_t cell) {
    auto & c = cells[cell];
    const bool watched = !device_counts();
    stats.requests[phase] += watched;
    if (c.satisfied()) {
        stats.hits[phase] += watched;
        auto & slot = pool_of(cell, c.tier).slots[c.slot];
        stats.prefetch_used += slot.prefetched;
        slot.prefetched = false;
        return;
    }
    if (c.loading != NO_TIER) {
        const bool good_enough = c.loading <= c.want && !c.abandoned;
        const bool was_ahead   = c.ahead && !c.after_use;
        if (!good_enough && c.started == 0 && !rigid) {
            cancel_read(cell);
        } else if (!good_enough && c.started > 0 && c.slotless()) {
            stats.prefetch_cancelled += was_ahead && !c.abandoned;
            abandon(cell);
            return;  // settle() goes on from there
        } else {
            const bool queued = c.queued();
            if (queued) {
                queue_of(c).erase(read_key(cell));
            }
            c.ahead = c.background = false;
            if (c.slotless() && !claim_slot(cell) && c.started == 0) {
                stats.prefetch_cancelled += was_ahead;
                discard_load(cell);
            } else {
                stats.prefetch_used += good_enough && was_ahead;
                if (queued) {
                    queue_of(c).insert(read_key(cell));
                } else if (c.arrived()) {  // a transition that waited for the next step
                    settle(cell);
                    return;
                }
            }
        }
        if (c.loading != NO_TIER) {
            return;  // publish() goes on from there if this tier is not good enough
        }
    }
    if (try_in_place(cell)) {
        return;
    }
    load_or_wait(cell);
}

// layer: the one that is computed now, for which it is too late.
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
        return;  // all of it is there
    }
    // what is predicted and resident must not make room for what is predicted and absent
    n_lists++;
    for (int32_t i = n; i-- > 0;) {
        each_cell(list[i], [&](int32_t cell) {
            cells[cell].predicted = n_lists;
            if (!list[i].passing) {
                touch(cell);
            }
        });
    }
    for (int32_t i = 0; i < n; i++) {
        const auto & p = list[i];
        each_cell(p, [&](int32_t cell) {
            const auto & c = cells[cell];
            if (!c.decided && c.loading == NO_TIER && (c.tier == NO_TIER || c.tier > p.tier)) {
                queue_ahead(cell, p.tier, p.passing != 0);
            }
        });
    }
    wake();
}

// Reads ahead for a layer that has now chosen otherwise.
void moe_edge_store::cancel_stale(int32_t layer) {
    std::vector<int32_t> stale;
    for (const auto * queue : { &reads, &copies }) {
        for (auto it = queue->lower_bound({ AHEAD, 0, 0, 0 }); it != queue->end() && std::get<0>(*it) == AHEAD; ++it) {
            const int32_t cell = std::get<3>(*it);
            if (layer_of(cell) == layer && !cells[cell].pinned()) {
                stale.push_back(cell);
            }
        }
    }
    for (const int32_t cell : stale) {
        auto & c = cells[cell];
        if (c.started == 0) {
            cancel_read(cell);
        } else {
            stats.prefetch_cancelled += !c.after_use;
            abandon(cell);
        }
    }
}

// ---- executor

void moe_edge_store::begin(moe_edge_matrix & m, const int32_t * experts, int32_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    auto & op = ops[m.layer * MOE_EDGE_N_KINDS + m.kind];
    op = {};
    std::vector<int32_t> undecided;  // the graph has no hook, or it was bypassed
    for (int32_t i = 0; i < n; i++) {
        const int32_t cell = cell_index(m.layer, m.kind, experts[i]);
        op.remaining.push_back(cell);
        if (!cells[cell].decided) {
            undecided.push_back(experts[i]);
        }
    }
    if (!undecided.empty()) {
        // this kind alone: which one is computed next is the graph's business
        const std::vector<uint8_t> tiers(undecided.size(), default_tier);
        apply_locked(m.layer, m.kind, undecided.data(), tiers.data(), nullptr, undecided.size(), INT32_MAX);
    }
}

// No op holds what it reads here, so there is no lock to take: the tables change at a step boundary alone, and those are
// passed by the thread that calls.
bool moe_edge_store::serve_unwatched(const moe_edge_matrix & m, const int32_t * experts, const int32_t * first, int32_t n,
                                     moe_edge_ready * out) {
    if (device || !tables_fixed) {
        return false;
    }
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

// Decided and not yet released, so that this is about the op that comes next, and no earlier one.
int32_t moe_edge_store::routed_to(const moe_edge_matrix & m, int32_t * out) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto & experts = routed_of[m.layer];
    const bool current = !experts.empty() && std::all_of(experts.begin(), experts.end(),
        [&](int32_t e) { return cells[cell_index(m.layer, m.kind, e)].decided; });
    if (!current) {
        return -1;
    }
    std::copy(experts.begin(), experts.end(), out);
    return experts.size();
}

// Whether every matrix of an expert that the step still has to compute is there.
bool moe_edge_store::whole(int32_t cell) const {
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        const auto & c = cells[cell_index(layer_of(cell), k, expert_of(cell))];
        if (c.pinned() && !c.satisfied() && !c.serves()) {
            return false;
        }
    }
    return true;
}

// Whether one that is not there is on its way.
bool moe_edge_store::whole_comes(int32_t cell) const {
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        const auto & c = cells[cell_index(layer_of(cell), k, expert_of(cell))];
        if (c.pinned() && !c.satisfied() && !c.serves() && c.loading != NO_TIER) {
            return true;
        }
    }
    return false;
}

int32_t moe_edge_store::next(moe_edge_matrix & m, moe_edge_ready * out) {
    std::unique_lock<std::mutex> lock(mutex);
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
        // what holds slots that others wait for is computed, whole or not
        const bool hold = whole_experts && std::any_of(op.remaining.begin(), op.remaining.end(),
            [this](int32_t cell) { return whole(cell) || whole_comes(cell); });
        for (const int32_t cell : op.remaining) {
            const auto & c = cells[cell];
            if (c.want == MOE_EDGE_SKIP) {
                out[n++] = { nullptr, expert_of(cell), -1, 0 };
            } else if (hold && !whole(cell)) {
                op.remaining[keep++] = cell;
            } else if (c.satisfied()) {
                const auto & entry = m.table[expert_of(cell)];
                const bool here = pool_of(cell, c.tier).on_host;
                out[n++] = { entry.data, expert_of(cell), entry.type, entry.ticket, here ? MOE_EDGE_MISS_COMPUTE : MOE_EDGE_MISS_COPY };
                stats.computed[phase][c.tier] += !device_counts();
                if (here) {
                    count_in_place(slice_of(cell, c.tier), MOE_EDGE_MISS_COMPUTE);
                }
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
            continue;  // the host tier had something
        }
        stats.wait_us[phase] += wait_done(lock, 50);  // cancel() cannot take the lock to notify
    }
}

void moe_edge_store::wait(const moe_edge_ready * ready, int32_t n) {
    if (!device || std::all_of(ready, ready + n, [this](const moe_edge_ready & r) { return device->passed(r.ticket); })) {
        return;
    }
    const uint64_t t0 = now_us();
    for (int32_t i = 0; i < n; i++) {
        device->wait(ready[i].ticket);
    }
    std::lock_guard<std::mutex> lock(mutex);
    stats.copy_wait_us[phase] += now_us() - t0;
}

void moe_edge_store::release(moe_edge_matrix & m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after) {
    std::lock_guard<std::mutex> lock(mutex);
    n_decided -= n;
    for (int32_t i = 0; i < n; i++) {
        const int32_t cell = cell_index(m.layer, m.kind, ready[i].expert);
        auto & c = cells[cell];
        c.decided = false;
        if (device && ready[i].data && after != 0) {
            // as next() gave it: a load in place that a cut step has left behind may be under way beside the slot
            if (c.satisfied()) {
                if (staged(cell, c.tier)) {  // else the host has read it
                    pool_of(cell, c.tier).slots[c.slot].after = after;
                }
            } else if (c.in_place()) {
                host->feeds(c.host_slot, moe_edge_host_tier::READERS, after);
            }
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

// ---- simulation: the caller plays the graph, and says what computing takes

void moe_edge_store::simulate_speed(uint64_t bandwidth, uint64_t latency_us) {
    std::lock_guard<std::mutex> lock(mutex);
    if (simulation) {
        simulation->set_speed(bandwidth, latency_us);
    }
}

// With the mutex held.
void moe_edge_store::simulate_until(uint64_t ns) {
    for (;;) {
        wake();
        // what is held back by the rate starts on time, unless something urgent comes first
        const bool held = !reads.empty() && !urgent() && !transiting && simulation->has_idle_thread();
        const uint64_t next = held ? transition_at * 1000 : UINT64_MAX;
        if (simulation->busy() && simulation->next_done() <= std::min(next, ns)) {
            uint64_t took_ns = 0;
            const moe_edge_read read = simulation->finish(took_ns);
            finish_read(read, {}, took_ns / 1000);
        } else if (next <= ns) {
            simulation->set_now(next);
        } else {
            break;
        }
    }
    simulation->set_now(ns);
}

uint64_t moe_edge_store::simulate_compute(uint64_t ns) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!simulation) {
        return 0;
    }
    simulate_until(simulation->now() + ns);
    return simulation->now();
}

bool moe_edge_store::simulate_route(int32_t layer, int32_t n_tokens, int32_t n_ahead_present, bool has_importance) {
    const size_t n = n_tokens < 0 ? 0 : (size_t) n_tokens * n_expert_used;
    const bool counts = simulation && n_tokens >= 0 && n_tokens <= max_tokens && n_ahead_present >= 0 &&
        n_ahead_present <= n_ahead && n_ahead_present < n_layers - layer;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!check_layer(layer, MOE_EDGE_N_KINDS, ids.data(), counts ? n : 0)) {
            return false;
        }
        if (!counts) {
            fail_locked("a route event comes from a graph, or to a simulated store made for its tokens and look-ahead");
            return false;
        }
    }
    event.layer    = layer;
    event.n_tokens = n_tokens;
    event.n_ahead  = n_ahead_present;
    event.has_importance = has_importance;
    return route();
}

// ---- the rest

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
            if (has_kind(p.layer, k) && cells[cell].tier == NO_TIER && cells[cell].loading == NO_TIER &&
                !pool_of(cell, p.tier).free.empty() && try_load(cell, p.tier, false)) {
                asked.push_back(cell);
                any = true;
            }
        }
        loaded += any;
    }
    wake();
    const int32_t total = asked.size();
    for (;;) {
        const int32_t open = std::count_if(asked.begin(), asked.end(), [&](int32_t cell) { return cells[cell].loading != NO_TIER; });
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
    const bool complete = std::all_of(asked.begin(), asked.end(), [&](int32_t cell) { return cells[cell].tier != NO_TIER; });
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
    fresh.slot_bytes_in_use = stats.slot_bytes_in_use;
    fresh.slot_bytes_peak   = stats.slot_bytes_in_use;
    fresh.direct_io         = stats.direct_io;
    fresh.host_bytes        = stats.host_bytes;
    fresh.host_pinned       = stats.host_pinned;
    fresh.misses            = stats.misses;
    stats = fresh;
}
