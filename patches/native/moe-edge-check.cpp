// Verifies the store's invariants. For tests, while others work.

#include "moe-edge-util.h"

#include <map>

std::string moe_edge_store::check() {
    std::lock_guard<std::mutex> lock(mutex);
    uint64_t in_use = 0;
    for (size_t g = 0; g < pools.size(); g++) {
        const auto & pool = pools[g];
        size_t listed = 0;
        int32_t before = -1;
        for (int32_t i = pool.newest; i >= 0; i = pool.slots[i].older) {
            if (!pool.slots[i].listed || pool.slots[i].newer != before || ++listed > pool.slots.size()) {
                return format("group %zu: the LRU list is broken at slot %d", g, i);
            }
            before = i;
        }
        if (pool.oldest != before) {
            return format("group %zu: the LRU list does not end at its oldest slot", g);
        }
        size_t owned = 0;
        int32_t n_passing = 0;
        for (size_t i = 0; i < pool.slots.size(); i++) {
            const auto & s = pool.slots[i];
            n_passing += s.passing;
            if (s.cell < 0) {
                continue;
            }
            owned++;
            const auto & c = cells[s.cell];
            const bool complete = c.tier != NO_TIER && c.slot == (int32_t) i && slice_of(s.cell, c.tier).group == (int32_t) g;
            const bool loading  = c.loading != NO_TIER && c.loading_slot == (int32_t) i && slice_of(s.cell, c.loading).group == (int32_t) g;
            if (complete == loading || complete != s.listed) {
                return format("group %zu, slot %zu: its cell does not own it", g, i);
            }
            // in this order: both only ever turn true
            if (host && loading && c.copied && device->passed(c.ticket) && !device->passed(s.behind)) {
                return format("group %zu, slot %zu: a copy overtook what it comes behind", g, i);
            }
        }
        if (owned + pool.free.size() != pool.slots.size()) {
            return format("group %zu: %zu owned and %zu free of %zu slots", g, owned, pool.free.size(), pool.slots.size());
        }
        if (!pool.waiting.empty() && !pool.free.empty()) {
            return format("group %zu: a cell waits for a slot while one is free", g);
        }
        if (n_passing != pool.n_passing) {
            return format("group %zu: %d passing slots, %d counted", g, n_passing, pool.n_passing);
        }
        in_use += owned * pool.slot_bytes;
    }
    if (in_use != stats.slot_bytes_in_use || stats.slot_bytes_peak > stats.budget_bytes) {
        return format("%llu slot bytes in use, %llu counted, peak %llu, budget %llu", (unsigned long long) in_use,
            (unsigned long long) stats.slot_bytes_in_use, (unsigned long long) stats.slot_bytes_peak,
            (unsigned long long) stats.budget_bytes);
    }
    std::map<int32_t, int32_t> lent;  // host slots by size
    for (int32_t i = 0; i < (int32_t) cells.size(); i++) {
        const auto & c = cells[i];
        const auto & entry = matrices[layer_of(i)][kind_of(i)].table[expert_of(i)];
        const bool valid = c.tier == NO_TIER ? entry.data == nullptr
            : entry.data != nullptr && entry.type == slice_of(i, c.tier).type && pool_of(i, c.tier).slots[c.slot].cell == i;
        if (!valid) {
            return format("layer %d, %s, expert %d: the table does not match", layer_of(i), KIND_NAMES[kind_of(i)], expert_of(i));
        }
        if (host && c.loading != NO_TIER && (c.copied ? c.host_slot >= 0 || c.ticket == 0 : c.cached && c.host_slot < 0)) {
            return format("layer %d, %s, expert %d: its load and its host slot do not match", layer_of(i), KIND_NAMES[kind_of(i)], expert_of(i));
        }
        if (c.in_place()) {
            const bool right = host && c.loading != NO_TIER && c.loading_slot < 0 && !c.ahead && !c.background && !c.copied &&
                (!c.arrived() || (c.host_slot >= 0 && c.serves()));
            if (!right) {
                return format("layer %d, %s, expert %d: used in place, but it cannot be", layer_of(i), KIND_NAMES[kind_of(i)], expert_of(i));
            }
            lent[host_class(i, c.loading)]++;
        }
        // In host memory a slot is taken before the first part starts; on a device before the copy.
        if (c.slotless() && (c.background || c.copied || c.arrived() || (!host && (!c.ahead || c.started > 0)))) {
            return format("layer %d, %s, expert %d: its load has no slot", layer_of(i), KIND_NAMES[kind_of(i)], expert_of(i));
        }
        const bool absent = c.tier == NO_TIER && has_kind(layer_of(i), kind_of(i));
        if ((c.background && c.loading == NO_TIER) || (absent && in_transition(i))) {
            return format("layer %d, %s, expert %d: in transition from nothing or to nothing", layer_of(i), KIND_NAMES[kind_of(i)], expert_of(i));
        }
        if (c.queued() != (c.loading != NO_TIER && queue_of(c).count(read_key(i)) > 0)) {
            return format("layer %d, %s, expert %d: the read queue does not match", layer_of(i), KIND_NAMES[kind_of(i)], expert_of(i));
        }
    }
    for (const int32_t size_class : size_classes) {
        if (host->lent(size_class) != lent[size_class]) {
            return format("host slots of size %d: %d lent, %d used in place", size_class, host->lent(size_class), lent[size_class]);
        }
    }
    return host ? host->check() : std::string();
}
