// Defines a pool: the slots of one group and their LRU order. A slot is free, being filled for one cache entry, or
// complete. The store's mutex guards the pools.
//
// A limit makes the last slots of a pool unavailable. They are not handed out. A slot that is in use when the limit is
// set becomes unavailable when it is released.

#pragma once

#include "moe-edge-device.h"

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

// The value of moe_edge_claim::list for a request that is not a prefetch. Such a request may evict the experts of every
// prefetch list.
constexpr uint64_t MOE_EDGE_NO_LIST = UINT64_MAX;

// A load's request for a slot of a pool (moe_edge_pool).
struct moe_edge_claim {
    uint64_t asked_at;  // time of the request: position of the slot in the LRU order
    uint64_t list;      // number of the load's prefetch list: experts of this or a later list are not evicted
    bool     passing;   // only streaming requests (of long prompts) need the load
};

class moe_edge_pool {
  public:
    enum class state : uint8_t { FREE, FILLING, COMPLETE };

    struct slot {
        state    is         = state::FREE;
        bool     prefetched = false;  // prefetched and not used yet
        bool     passing    = false;  // filled for streaming requests only
        int32_t  cell       = -1;     // number of the cache entry that owns it; -1: free
        int32_t  newer      = -1;     // neighbours in the list of complete slots
        int32_t  older      = -1;
        uint64_t used_at    = 0;      // time of the last request for its bytes; orders the list
        moe_edge_ticket after  = 0;   // ticket of the last copy to this slot, or of its last reader since then
        moe_edge_ticket behind = 0;   // ticket for which the last copy to this slot had to wait
    };

    // Properties that all slots of the pool have in common. They are constant after the store is created.
    uint64_t slot_bytes  = 0;
    int32_t  kind        = -1;
    int32_t  tier        = -1;     // tier of its slices; if there are several, the last one added
    bool     mixed       = false;  // it holds several tiers, which is possible only in host memory
    bool     on_host     = false;  // for a store on a device: slots in host memory, computed by host threads
    int32_t  type        = -1;     // on a device: type of all its slices
    uint64_t slice_bytes = 0;      // on a device: size of all its slices

    // Creates the slots. places: the address of each slot. most_passing: the most slots that streaming requests (of
    // long prompts) may hold. When they hold this many, they can evict only each other.
    void open(std::vector<char *> places, uint64_t bytes_of_each, int32_t most_passing);
    void limit(int32_t n);  // from now on, hands out only the first n slots

    const slot & operator[](int32_t i) const { return slots[i]; }
    int32_t size() const { return slots.size(); }
    int32_t usable() const { return n_usable; }      // slots within the limit
    int32_t n_beyond() const { return beyond; }      // slots above the limit that are in use
    char *  data(int32_t i) const { return places[i]; }
    bool    has_free() const { return !free.empty(); }
    bool    has_passing() const { return n_passing > 0; }
    bool    may_pass() const { return n_passing < max_passing; }

    // Marks a free slot as being filled for this cache entry and returns its index. There must be a free slot.
    int32_t take(int32_t cell, const moe_edge_claim & claim);
    void    complete(int32_t i, bool prefetched);  // the slot was filled
    void    give(int32_t i);                       // frees the slot, whatever its state
    // Moves the record of slot i to a free slot, and returns the index of that slot. The caller must then copy the
    // bytes. Slot i must be complete and one of those that limit() has made unavailable.
    int32_t move(int32_t i);
    // Records that the slot is used at this time. The time is the slot's position in the LRU order. Must not be called
    // for streaming requests (of long prompts).
    void    use(int32_t i, uint64_t at);
    bool    used_as_foreseen(int32_t i);  // whether it was prefetched and this is its first use

    // Records that a copy to the slot was enqueued on the device. ticket: passes when the copy has ended.
    void copied(int32_t i, moe_edge_ticket ticket);
    void read_until(int32_t i, moe_edge_ticket ticket) { slots[i].after = ticket; }

    // Returns the least recently used complete slot for which may_go returns true, or -1 if there is none.
    template <typename F> int32_t oldest(F && may_go) const {
        int32_t i = last;
        while (i >= 0 && !may_go(slots[i])) {
            i = slots[i].newer;
        }
        return i;
    }

    // The next functions manage the queue of cache entries that wait for a slot: first come, first served.
    bool    awaited() const { return !waiting.empty(); }
    int32_t first_waiting() const { return waiting.front(); }
    void    wait(int32_t cell) { waiting.push_back(cell); }
    void    served() { waiting.pop_front(); }
    void    forget_waiting() { waiting.clear(); }

    std::string check() const;  // an empty string, or the violated invariant
    int32_t     in_use() const { return n_usable - free.size() + beyond; }

  private:
    void insert(int32_t i);
    void remove(int32_t i);
    void set_passing(int32_t i, bool passing);

    std::vector<slot>    slots;
    std::vector<char *>  places;  // address of each slot
    std::vector<int32_t> free;    // free slots within the limit
    std::deque<int32_t>  waiting;
    int32_t newest      = -1;
    int32_t last        = -1;  // the least recently used one
    int32_t n_usable    = 0;
    int32_t beyond      = 0;
    int32_t n_passing   = 0;   // slots that are being filled or complete for streaming requests
    int32_t max_passing = 1;
};
