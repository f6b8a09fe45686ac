// Slots: fixed places in the memory of a group, and in which order they are given away.
//
// A slot is free, or it is being filled for one cell, or it is complete. Complete slots are in a list by the time of
// their last use, those that only passing requests asked for among them. Nothing here knows what a cell is but its
// number. Guarded by the store's mutex.
//
// While a limit holds, slots behind the first so many are not given to anybody: those that are free are nobody's, and
// those in use become so when they are given back or moved.

#pragma once

#include "moe-edge-device.h"

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

// Not the number of a prefetch list: a request takes the slot of whatever its step does not need.
constexpr uint64_t MOE_EDGE_NO_LIST = UINT64_MAX;

// What a load that has no slot yet will ask of its pool.
struct moe_edge_claim {
    uint64_t asked_at;  // its slot's place in the order
    uint64_t list;      // of a prefetch: what stands in this list or in a later one keeps its slot
    bool     passing;   // for passing requests alone
};

class moe_edge_pool {
  public:
    enum class state : uint8_t { FREE, FILLING, COMPLETE };

    struct slot {
        state    is         = state::FREE;
        bool     prefetched = false;  // read ahead and not used yet
        bool     passing    = false;  // filled for passing requests alone
        int32_t  cell       = -1;     // the number of the cell that owns it, -1: free
        int32_t  newer      = -1;     // in the list of complete slots
        int32_t  older      = -1;
        uint64_t used_at    = 0;      // when its bytes were last asked for; orders the list
        moe_edge_ticket after  = 0;   // of the last copy to here, or of the last reader since then
        moe_edge_ticket behind = 0;   // what that copy had to wait for
    };

    // What it holds; fixed when the store has been made.
    uint64_t slot_bytes  = 0;
    int32_t  kind        = -1;
    int32_t  tier        = -1;     // of its slices; the last one of several
    bool     mixed       = false;  // there are several, in host memory
    bool     on_host     = false;  // in the host's memory behind a device, where its threads compute
    int32_t  type        = -1;     // on a device: of all its slices
    uint64_t slice_bytes = 0;      // and their size

    // places: where each slot lies. most_passing: more slots for passing requests only take each other's.
    void open(std::vector<char *> places, uint64_t bytes_of_each, int32_t most_passing);
    void limit(int32_t n);  // only the first n slots are given away from now on

    const slot & operator[](int32_t i) const { return slots[i]; }
    int32_t size() const { return slots.size(); }
    int32_t usable() const { return n_usable; }      // slots within the limit
    int32_t n_beyond() const { return beyond; }      // slots in use behind it
    char *  data(int32_t i) const { return places[i]; }
    bool    has_free() const { return !free.empty(); }
    bool    has_passing() const { return n_passing > 0; }
    bool    may_pass() const { return n_passing < max_passing; }

    // A free slot, to be filled for this cell. There has to be one.
    int32_t take(int32_t cell, const moe_edge_claim & claim);
    void    complete(int32_t i, bool prefetched);  // it was filled
    void    give(int32_t i);                       // it is free, whatever it was
    // A complete one from behind the limit takes a free slot's place in everything but its bytes; returns which.
    int32_t move(int32_t i);
    // Its bytes are asked for at this time, by a request that does not only pass.
    void    use(int32_t i, uint64_t at);
    bool    used_as_foreseen(int32_t i);  // whether it was read ahead, and this is the first use

    void copied(int32_t i, moe_edge_ticket ticket);  // a copy to here was enqueued, behind `after`
    void read_until(int32_t i, moe_edge_ticket ticket) { slots[i].after = ticket; }

    // The complete slot used longest ago of those that may go; -1.
    template <typename F> int32_t oldest(F && may_go) const {
        int32_t i = last;
        while (i >= 0 && !may_go(slots[i])) {
            i = slots[i].newer;
        }
        return i;
    }

    // Cells that wait for a slot, first come first served.
    bool    awaited() const { return !waiting.empty(); }
    int32_t first_waiting() const { return waiting.front(); }
    void    wait(int32_t cell) { waiting.push_back(cell); }
    void    served() { waiting.pop_front(); }
    void    forget_waiting() { waiting.clear(); }

    std::string check() const;  // empty, or the invariant that does not hold
    int32_t     in_use() const { return n_usable - free.size() + beyond; }

  private:
    void insert(int32_t i);
    void remove(int32_t i);
    void set_passing(int32_t i, bool passing);

    std::vector<slot>    slots;
    std::vector<char *>  places;  // of each
    std::vector<int32_t> free;    // those within the limit
    std::deque<int32_t>  waiting;
    int32_t newest      = -1;
    int32_t last        = -1;  // the oldest
    int32_t n_usable    = 0;
    int32_t beyond      = 0;
    int32_t n_passing   = 0;   // slots that are filled or complete for passing requests
    int32_t max_passing = 1;
};
