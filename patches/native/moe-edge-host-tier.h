// The host tier of a device store: slices in host memory, on their way to the device and kept
// for the next time, within a budget of its own.
//
// Slices of one size share fixed slots. A slot is being filled by one load, or it is complete;
// it may be taken for another slice when nobody holds it and every copy from it has passed.
// Guarded by the store's mutex.

#pragma once

#include "moe-edge-device.h"

#include <cstdint>
#include <string>
#include <vector>

class moe_edge_host_tier {
  public:
    // Slices that take slots of one size. least: slots without which reads and copies would
    // wait for each other; no more than there are slices.
    struct size_class {
        uint64_t slot_bytes;
        int32_t  n_slices;
        int32_t  least;
    };

    // The smallest budget that works.
    static uint64_t least_bytes(const std::vector<size_class> & classes);

    // Raises std::runtime_error where the budget is too small or there is no memory.
    moe_edge_host_tier(moe_edge_device & device, uint64_t budget_bytes, const std::vector<size_class> & classes,
                       int32_t n_slices);
    ~moe_edge_host_tier();
    moe_edge_host_tier(const moe_edge_host_tier &) = delete;
    moe_edge_host_tier & operator=(const moe_edge_host_tier &) = delete;

    bool     is_pinned() const { return pinned; }
    uint64_t bytes() const { return total_bytes; }
    char *   data(int32_t slot) const { return slots[slot].data; }

    // Each of these three gives a slot that is held until drop().
    // The slot that holds this slice, complete; -1: none. A slice that only passes through
    // keeps its place in the order of eviction.
    int32_t find(int32_t slice, bool passing);
    // A slot to read this slice into: a free one, else the one used least recently. -1: all are busy.
    int32_t reserve(int32_t slice, int32_t size_class);
    // A ticket after which reserve() may find one; 0: not by waiting for copies.
    moe_edge_ticket blocked_by(int32_t size_class) const;

    // All of the slice's bytes are there. passing: the next to go.
    void    complete(int32_t slot, bool passing);
    void    feeds(int32_t slot, int32_t lane, moe_edge_ticket ticket);  // a copy from it is under way
    void    drop(int32_t slot);                                         // no longer held; incomplete, it is free
    // The device's copy of this slice goes: the one here, if there is one, is worth more now.
    void    touch(int32_t slice);

    // A slot that will be held until an op has used what is in it. Those of one op may wait for
    // those of a later one: false where that would leave too few for loads that end by themselves.
    bool    lend(int32_t size_class);
    void    take_back(int32_t size_class) { lists[size_class].lent--; }
    int32_t lent(int32_t size_class) const { return lists[size_class].lent; }
    bool    has(int32_t slice) const { return slot_of[slice] >= 0; }

    std::string check() const;  // empty, or the invariant that does not hold

  private:
    struct host_slot {
        char *  data     = nullptr;
        int32_t of_class = 0;
        int32_t slice    = -1;     // -1: free
        int32_t holds    = 0;
        bool    complete = false;  // and in the class's list
        int32_t newer    = -1;
        int32_t older    = -1;
        moe_edge_ticket copies[MOE_EDGE_N_LANES] = {};  // the latest copy from this slot, by lane
    };
    struct list {
        std::vector<int32_t> free;
        int32_t newest = -1;
        int32_t oldest = -1;
        int32_t n_slots = 0;
        int32_t least   = 0;
        int32_t lent    = 0;
    };

    static std::vector<int32_t> divide(uint64_t budget_bytes, const std::vector<size_class> & classes);
    moe_edge_ticket feeding(const host_slot & s) const;  // a copy from it that has not passed, or 0
    void    remove(int32_t slot);
    void    insert(int32_t slot, bool as_oldest);

    moe_edge_device &      device;
    char *                 memory = nullptr;
    uint64_t               total_bytes = 0;
    bool                   pinned = false;
    std::vector<host_slot> slots;
    std::vector<list>      lists;       // by size class
    std::vector<int32_t>   slot_of;     // by slice, complete ones; -1
};
