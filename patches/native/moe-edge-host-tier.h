// Defines the host tier of a store on a device: a cache in host memory with its own budget. It caches slices; a slice
// is the bytes of one expert matrix in one tier. A slice is read from disk into the host tier, copied to the device
// from there, and kept for later cache misses.
//
// Slices of the same size share a fixed set of slots. The store's mutex guards the host tier.

#pragma once

#include "moe-edge-device.h"

#include <cstdint>
#include <string>
#include <vector>

class moe_edge_host_tier {
  public:
    // The slices (expert matrices) that use slots of one size. least: the smallest number of slots with which reads and
    // copies do not block each other.
    struct size_class {
        uint64_t slot_bytes;
        int32_t  n_slices;
        int32_t  least;
    };

    // Returns the smallest budget that works.
    static uint64_t least_bytes(const std::vector<size_class> & classes);

    // Divides the budget into slots and allocates them. Throws std::runtime_error if the budget is too small or the
    // allocation fails.
    moe_edge_host_tier(moe_edge_device & device, uint64_t budget_bytes, const std::vector<size_class> & classes,
                       int32_t n_slices);
    ~moe_edge_host_tier();
    moe_edge_host_tier(const moe_edge_host_tier &) = delete;
    moe_edge_host_tier & operator=(const moe_edge_host_tier &) = delete;

    bool     is_pinned() const { return pinned; }
    uint64_t bytes() const { return total_bytes; }
    char *   data(int32_t slot) const { return slots[slot].data; }

    // Returns the slot that contains this whole slice (an expert matrix), or -1 if there is none. The slot is not
    // reused before drop(). Makes the slice the most recently used one, unless `passing` is set (a streaming request).
    int32_t find(int32_t slice, bool passing);
    // Returns a slot into which this slice (an expert matrix) can be read. The slot is free or was the least recently
    // used one. It is not reused before drop(). Returns -1 if all slots are in use.
    int32_t reserve(int32_t slice, int32_t size_class);
    // Returns the ticket of a copy after which reserve() may succeed. Returns 0 if no copy blocks it.
    moe_edge_ticket blocked_by(int32_t size_class) const;

    // Marks a slot as complete: all bytes of its slice (one expert matrix) have been read. passing: whether they were
    // read for a streaming request, so that they are evicted first.
    void    complete(int32_t slot, bool passing);
    void    feeds(int32_t slot, int32_t lane, moe_edge_ticket ticket);  // a copy from the slot is in flight
    void    drop(int32_t slot);                                         // ends a hold; an incomplete slot becomes free
    // Makes this slice the most recently used one if it is in the host tier. Called when the device evicts the slice.
    void    touch(int32_t slice);

    // Reserves one slot of a size class for an expert matrix that host threads compute. take_back() ends the
    // reservation when its op has ended. Returns false, and reserves nothing, if fewer than `least` slots would remain
    // for other loads.
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
        bool    complete = false;  // complete, and in the list of its class
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
    moe_edge_ticket feeding(const host_slot & s) const;  // ticket of a copy from it that has not passed, or 0
    void    remove(int32_t slot);
    void    insert(int32_t slot, bool as_oldest);

    moe_edge_device &      device;
    char *                 memory = nullptr;
    uint64_t               total_bytes = 0;
    bool                   pinned = false;
    std::vector<host_slot> slots;
    std::vector<list>      lists;       // one for each size class
    std::vector<int32_t>   slot_of;     // for each slice: its complete slot, or -1
};
