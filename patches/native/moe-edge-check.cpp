// Checks the store's invariants, for tests. A check may run while other threads use the store.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include <map>

// Returns whether the table, in which ops find experts, points to the slot of the cache entry's resident tier.
bool moe_edge_store::lies_in_slot(int32_t cell, const moe_edge_entry & entry) {
    const auto & c    = cells[cell];
    const auto & pool = pool_of(cell, c.tier());
    return entry.data == pool.data(c.slot()) + (staged(cell, c.tier()) ? 0 : offset_in_block(cell, c.tier()));
}

std::string moe_edge_store::check() {
    std::lock_guard<std::mutex> lock(mutex);
    uint64_t in_use = 0;
    for (size_t g = 0; g < pools.size(); g++) {
        const auto & pool = pools[g];
        if (const std::string broken = pool.check(); !broken.empty()) {
            return format("group %zu: %s", g, broken.c_str());
        }
        for (int32_t i = 0; i < pool.size(); i++) {
            const auto & s = pool[i];
            if (s.cell < 0) {
                continue;
            }
            const auto & c = cells[s.cell];
            const auto * load   = c.load();
            const bool complete = c.resident() && c.slot() == i && slice_of(s.cell, c.tier()).group == (int32_t) g;
            const bool loading  = load && load->slot() == i && slice_of(s.cell, load->tier()).group == (int32_t) g;
            if (complete == loading || complete != (s.is == moe_edge_pool::state::COMPLETE)) {
                return format("group %zu, slot %d: its cell does not own it", g, i);
            }
            // The last copy to the slot (ticket `after`) had to wait for earlier work on the slot (ticket `behind`).
            // Report an error if the copy is done and the earlier work is not. Test `after` first. Otherwise both
            // tickets could pass between the two tests, and this function would report an error for a correct copy.
            if (host && loading && load->copied() && device->passed(s.after) && !device->passed(s.behind)) {
                return format("group %zu, slot %d: a copy overtook the copy that it had to wait for", g, i);
            }
        }
        in_use += pool.in_use() * pool.slot_bytes;
    }
    if (in_use != stats.slot_bytes_in_use || stats.slot_bytes_peak > stats.budget_bytes) {
        return format("%llu slot bytes in use, %llu counted, peak %llu, budget %llu", (unsigned long long) in_use,
            (unsigned long long) stats.slot_bytes_in_use, (unsigned long long) stats.slot_bytes_peak,
            (unsigned long long) stats.budget_bytes);
    }
    if (const std::string broken = check_limit(); !broken.empty()) {
        return broken;
    }
    std::map<int32_t, int32_t> lent;  // slots of the host tier by size class
    int64_t decided = 0;
    size_t  to_read = 0, to_copy = 0;
    for (int32_t i = 0; i < (int32_t) cells.size(); i++) {
        const auto & c = cells[i];
        const auto wrong = [&](const std::string & what) {
            return format("layer %d, %s, expert %d: %s", layer_of(i), KIND_NAMES[kind_of(i)], expert_of(i), what.c_str());
        };
        decided += c.decided();
        const auto & entry = matrices[layer_of(i)][kind_of(i)].table[expert_of(i)];
        const bool valid = !c.resident() ? entry.data == nullptr
            : lies_in_slot(i, entry) && entry.type == slice_of(i, c.tier()).type && pool_of(i, c.tier())[c.slot()].cell == i;
        if (!valid) {
            return wrong("the table does not match");
        }
        if (!c.resident() && in_transition(i) && has_kind(layer_of(i), kind_of(i))) {
            return wrong("in transition from nothing");
        }
        const auto * load = c.load();
        if (const std::string broken = c.check(load && staged(i, load->tier())); !broken.empty()) {
            return wrong(broken);
        }
        if (!load) {
            continue;
        }
        if (load->has_slot() && pool_of(i, load->tier())[load->slot()].cell != i) {
            return wrong("its load's slot belongs to another cache entry");
        }
        if (load->copied() && pool_of(i, load->tier())[load->slot()].after == 0) {
            return wrong("its copy has no ticket");
        }
        if (load->in_place()) {
            lent[host_class(i, load->tier())]++;
        }
        if (load->queued() != (reads.queue.has(read_key(i)) || copies.has(read_key(i))) || (load->queued() && !queue_of(*load).has(read_key(i)))) {
            return wrong("the queue of its load does not match");
        }
        (load->in_host_tier() ? to_copy : to_read) += load->queued();
    }
    if (decided != n_decided) {
        return format("%lld cells are decided, %lld counted", (long long) decided, (long long) n_decided);
    }
    if (to_read != reads.queue.size() || to_copy != copies.size()) {
        return format("%zu loads to read and %zu to copy, %zu and %zu queued", to_read, to_copy, reads.queue.size(), copies.size());
    }
    for (const int32_t size_class : size_classes) {
        if (host->lent(size_class) != lent[size_class]) {
            return format("host slots of size %d: %d lent, %d used in place", size_class, host->lent(size_class), lent[size_class]);
        }
    }
    return host ? host->check() : std::string();
}
