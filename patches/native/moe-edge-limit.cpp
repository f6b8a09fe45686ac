// Implements moe_edge_store_limit: the limit on slot memory, in bytes, which the application may change between steps.
//
// A group is a set of slots of one size. The slots of the groups alternate in one range of memory, so each prefix of
// the range has about the same fraction of every group. The limit is the length of the prefix that may be used. Slots
// above the limit are emptied: their most recently used experts move to slots below it, and their memory returns to the
// system.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include <algorithm>
#include <cstring>

#include <sys/mman.h>

uint64_t moe_edge_store::limit(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    if (device) {
        refuse("store: slots on a device cannot be limited");
    }
    if (running) {
        refuse("store: slots cannot be limited while a step or a warm start is running");
    }
    uint64_t least = 0, total = 0;
    for (const auto & pool : pools) {
        least += pool.slot_bytes;
    }
    if (bytes < least) {
        refuse("store: %llu bytes are too few for slots: the minimum is %llu bytes, one slot of each group",
            (unsigned long long) bytes, (unsigned long long) least);
    }
    std::vector<int32_t> n_slots(pools.size());
    for (const int32_t g : group_of_slot) {
        if (pools[g].slot_bytes > bytes - total) {
            break;
        }
        total += pools[g].slot_bytes;
        n_slots[g]++;
    }
    collect_counts();  // before the tables can change
    if (n_decided == 0) {
        // End the transitions (background changes of tier) whose loads are complete. This releases the slots of the old
        // tiers.
        conclude_transitions();
    }
    tables_fixed = false;
    stats.slot_bytes = total;
    for (size_t g = 0; g < pools.size(); g++) {
        pools[g].limit(n_slots[g]);
    }
    fit();
    for (auto & pool : pools) {
        serve_waiting(pool);  // the limit may have increased
    }
    wake();
    return owed_bytes;
}

// Returns the number of loads of expert matrices that are in progress.
int32_t moe_edge_store::loading() {
    std::lock_guard<std::mutex> lock(mutex);
    return std::count_if(cells.begin(), cells.end(), [](const moe_edge_cell & c) { return c.load() != nullptr; });
}

// Empties the slots above the limit, which is a size in bytes from the start of slot memory, and returns their memory
// to the system. The most recently used experts of these slots move to slots below the limit and evict older experts.
// Slots that an op or a load still needs are emptied later.
void moe_edge_store::fit() {
    for (auto & pool : pools) {
        for (int32_t i = pool.usable(); i < pool.size() && pool.n_beyond() > 0; i++) {
            if (pool[i].is != moe_edge_pool::state::COMPLETE || !may_go(pool[i].cell)) {
                continue;
            }
            while (!pool.has_free() && pool[i].is == moe_edge_pool::state::COMPLETE) {
                evict(pool[least_useful(pool, { 0, MOE_EDGE_NO_LIST, false })].cell);
            }
            if (pool[i].is == moe_edge_pool::state::COMPLETE) {
                move_slot(pool, i);
            }
        }
    }
    owed_bytes = bytes_beyond();
    for (const auto & [first, last] : unused_pieces()) {
        madvise(first, last - first, MADV_DONTNEED);
    }
}

void moe_edge_store::move_slot(moe_edge_pool & pool, int32_t slot) {
    const int32_t cell = pool[slot].cell;
    const int32_t to   = pool.move(slot);
    if (!reads.simulated()) {
        memcpy(pool.data(to), pool.data(slot), pool.slot_bytes);
    }
    cells[cell].move(to);
    point_to_slot(cell);
}

// Returns how many bytes of the slots above the limit on slot memory are still in use.
uint64_t moe_edge_store::bytes_beyond() const {
    uint64_t bytes = 0;
    for (const auto & pool : pools) {
        bytes += pool.n_beyond() * pool.slot_bytes;
    }
    return bytes;
}

// Returns the ranges of slot memory above the store's limit that contain no used slot, rounded to whole huge pages.
std::vector<std::pair<char *, char *>> moe_edge_store::unused_pieces() const {
    std::vector<std::pair<char *, char *>> used, unused;
    for (const auto & pool : pools) {
        int32_t left = pool.n_beyond();
        for (int32_t i = pool.usable(); left > 0; i++) {
            if (pool[i].is != moe_edge_pool::state::FREE) {
                used.emplace_back(pool.data(i), pool.data(i) + pool.slot_bytes);
                left--;
            }
        }
    }
    std::sort(used.begin(), used.end());
    char * end = static_cast<char *>(mapped) + mapped_bytes;  // no huge page extends past it
    char * at  = static_cast<char *>(memory) + stats.slot_bytes;
    used.emplace_back(end, end);
    for (const auto & [first, last] : used) {
        char * from = huge_page_ceil(at);
        char * to   = first == end ? end : huge_page_floor(first);
        if (from < to) {
            unused.emplace_back(from, to);
        }
        at = last;
    }
    return unused;
}

// Checks the invariants of the limit on slot memory. Returns an empty string, or the description of a violated
// invariant.
std::string moe_edge_store::check_limit() const {
    uint64_t usable = 0;
    for (const auto & pool : pools) {
        usable += pool.usable() * pool.slot_bytes;
    }
    if (usable != stats.slot_bytes || usable > stats.budget_bytes || stats.slot_bytes_in_use > usable + bytes_beyond() ||
        (bytes_beyond() > 0 && owed_bytes == 0)) {
        return format("slots of %llu bytes may be used, %llu counted, %llu in use, %llu of them beyond the limit",
            (unsigned long long) usable, (unsigned long long) stats.slot_bytes, (unsigned long long) stats.slot_bytes_in_use,
            (unsigned long long) bytes_beyond());
    }
    if (device || owed_bytes > 0) {
        return {};  // a slot that was still in use may have been freed since, while its memory is still mapped
    }
    for (const auto & [first, last] : unused_pieces()) {
        std::vector<unsigned char> resident((last - first) / MOE_EDGE_BLOCK);
        if (mincore(first, last - first, resident.data()) != 0 ||
            std::any_of(resident.begin(), resident.end(), [](unsigned char page) { return (page & 1) != 0; })) {
            return "memory beyond the limit is still allocated";
        }
    }
    return {};
}
