// Defines cache entries and their states. A moe_edge_cell is the cache entry of one weight matrix: one (layer, kind,
// expert). It holds the resident tier (the precision in memory) and its slot, the request of the running step, and the
// load that is in progress.
//
// All changes go through the named functions, which throw std::logic_error if called in the wrong state. The store's
// mutex guards all entries.

#pragma once

#include "moe-edge-slots.h"
#include "moe-edge.h"

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

// The reason for which the load of an expert matrix was started.
enum class moe_edge_purpose : uint8_t {
    DEMAND,      // requested by a step or a warm start, or a revoked transition
    AHEAD,       // a prefetch: its slot counts as prefetched, unless a step requests it before it arrives
    AFTER_USE,   // a copy to a slot, for later steps, after host threads have computed with it in the host tier
    TRANSITION,  // a background change of tier: published at a step boundary, with the expert's other matrices
    COMPUTE,     // in place: host threads compute with its bytes in the host tier
};

// The stages of a load. A load into a slot in host memory is only QUEUED or READING.
enum class moe_edge_stage : uint8_t {
    QUEUED,   // no byte has been read. Next: is read, or cancelled
    READING,  // is being read. Next: is published, copied, FETCHED, used in place, or discarded
    FOUND,    // the host tier already had all bytes. Next: is copied, used in place, or cancelled
    FETCHED,  // all bytes are in the host tier, and no op waits for them. Next: is copied in its turn, or cancelled
    COPIED    // the copy to its slot is enqueued. Next: is published; a revoked transition is discarded
};

// The outcome of a load.
enum class moe_edge_fate : uint8_t {
    USED,
    UNWANTED,  // cancelled: all bytes still arrive, and stay in the host tier if there is one; then the load ends
    CUT,       // cancelled: some bytes are never read; the load ends when no thread is working on it
    FAILED,    // a part could not be read or copied, or the checksum differs
};

class moe_edge_load {
  public:
    // Creates a load into a slot that has already been taken for it. order: the position of this load among loads of
    // the same urgency.
    static moe_edge_load into_slot(int8_t tier, moe_edge_purpose purpose, int32_t order, int32_t slot);
    // Creates a load for a prefetch, which has no slot yet. claim: the arguments with which the load will later ask its
    // pool for a slot.
    static moe_edge_load ahead(int8_t tier, moe_edge_purpose purpose, int32_t order, const moe_edge_claim & claim);
    // Creates a load without a slot, for a request of the running step. Its bytes stay in the host tier until host
    // threads have computed the expert with them.
    static moe_edge_load in_place_of_slot(int8_t tier);

    // Sets the source of the load's bytes: they are read from disk in this many parts.
    void reads_parts(int32_t parts);
    // Sets the source of the load's bytes: this slot of the host tier already contains them.
    void finds(int32_t in_host_slot);

    int8_t           tier() const { return of_tier; }
    moe_edge_purpose purpose() const { return why; }
    moe_edge_stage   stage() const { return at; }
    moe_edge_fate    fate() const { return end; }
    int32_t          order() const { return turn; }
    uint32_t         crc() const { return sum; }
    int32_t          host_slot() const { return in_host; }
    int32_t          slot() const { return has_slot() ? std::get<int32_t>(to) : -1; }

    bool ahead() const { return why == moe_edge_purpose::AHEAD || why == moe_edge_purpose::AFTER_USE; }
    bool in_transition() const { return why == moe_edge_purpose::TRANSITION; }
    bool in_place() const { return why == moe_edge_purpose::COMPUTE; }
    // Whether a step or a warm start waits for this load. It is then read and copied before prefetches and transitions.
    bool awaited() const { return !ahead() && !in_transition(); }
    bool has_slot() const { return std::holds_alternative<int32_t>(to); }
    // Whether this load still needs a slot. False for a load in place, whose bytes an op uses in the host tier.
    bool slotless() const { return std::holds_alternative<moe_edge_claim>(to); }
    const moe_edge_claim & claim() const { return std::get<moe_edge_claim>(to); }

    // Whether all bytes of this load are in the host tier, so that nothing has to be read from disk.
    bool in_host_tier() const { return at == moe_edge_stage::FOUND || at == moe_edge_stage::FETCHED; }
    bool copied() const { return at == moe_edge_stage::COPIED; }
    bool good() const { return end == moe_edge_fate::USED; }
    bool given_up() const { return end == moe_edge_fate::UNWANTED || end == moe_edge_fate::CUT; }
    bool has_failed() const { return end == moe_edge_fate::FAILED; }
    // All bytes are, or will be, read.
    bool entire() const { return end == moe_edge_fate::USED || end == moe_edge_fate::UNWANTED; }
    // Whether this load is in a queue: a part of it has not been started, or its copy to the device has not been
    // enqueued.
    bool queued() const { return left > 0; }
    // Whether this load is in a queue and no thread has started it, so that it can be cancelled.
    bool untouched() const { return left > 0 && at != moe_edge_stage::READING; }
    // Whether every part of this load has ended or will not be read. True for complete, cancelled and failed loads.
    bool arrived() const { return left == 0 && running == 0; }
    bool in_last_part() const { return left == 0 && running == 1; }

    // ---- state changes
    void take_slot(int32_t slot);
    void touch(uint64_t now);  // requires slotless(); a request that is not streaming has used it at `now`
    void ask();                             // a step waits for the load from now on; no effect on a load in place
    void reserve(int32_t in_host_slot);     // sets the slot of the host tier that it is read into
    int32_t let_host_go();                  // gives up its slot of the host tier and returns it, or -1
    int32_t start_part(int32_t parts);      // a thread starts the next of `parts` parts; returns its index
    void finish_part(uint32_t crc);         // adds the part's share of the checksum
    void fetched();                         // the bytes stay in the host tier until the copy's turn
    void leave_copies();                    // removes it from the queue of copies, because its turn has come
    void copy_enqueued();
    // Cancels the load. Parts that no thread has started are not read. If all bytes are complete, they stay in the host
    // tier.
    void give_up();
    void revoke();                          // ends a transition like give_up; it becomes an ordinary load
    void fail();                            // ends the load because a read or copy failed

    // Checks the invariants of this load. Returns an empty string, or the description of a violated invariant. staged:
    // whether the load's bytes go through the host tier.
    std::string check(bool staged) const;

  private:
    moe_edge_load(int8_t tier, moe_edge_purpose purpose, int32_t order) : of_tier(tier), why(purpose), turn(order) {}

    int8_t           of_tier;
    moe_edge_purpose why;
    moe_edge_stage   at      = moe_edge_stage::QUEUED;
    moe_edge_fate    end     = moe_edge_fate::USED;
    uint16_t         left    = 0;   // parts that no thread has started; 1 while a copy waits for its turn
    uint16_t         running = 0;   // parts that threads are working on
    int32_t          turn;
    int32_t          in_host = -1;  // its slot of the host tier
    uint32_t         sum     = 0;   // XOR of the CRC-32 shares of the parts read so far
    // The destination of the bytes: a slot, or the arguments (claim) with which the load will ask its pool for a slot.
    // Empty for a load in place: its bytes stay in the host tier, and host threads compute with them there.
    std::variant<std::monostate, int32_t, moe_edge_claim> to;
};

class moe_edge_cell {
  public:
    static constexpr int8_t NO_TIER = -1;

    int8_t  tier() const { return of_tier; }  // the resident tier, or NO_TIER
    bool    resident() const { return of_tier != NO_TIER; }
    int32_t slot() const { return in_slot; }  // slot of the resident tier, or -1

    uint8_t want() const { return asked_tier; }  // tier of the most recent request, or MOE_EDGE_SKIP
    bool    decided() const { return asked; }    // the running step requested it, and no op has computed it yet
    bool    passing() const { return only_passes; }
    bool    waiting() const { return in_line; }  // it waits for a slot
    bool    better_than(int32_t tier) const { return resident() && of_tier < tier; }
    bool    as_good_as(int32_t tier) const { return resident() && of_tier <= tier; }

    moe_edge_load *       load() { return bringing ? &*bringing : nullptr; }
    const moe_edge_load * load() const { return bringing ? &*bringing : nullptr; }

    // Whether an op of the running step will read this entry. A pinned entry keeps its resident tier if this tier is
    // good enough for the op.
    bool pinned() const { return asked && asked_tier != MOE_EDGE_SKIP; }
    bool satisfied() const { return as_good_as(asked_tier); }
    bool lacks() const { return pinned() && !satisfied(); }
    bool in_transition() const { return bringing && bringing->in_transition(); }
    bool arrived() const { return bringing && bringing->arrived(); }
    // Whether host threads can compute this cache entry now, for the op that reads it. True after all bytes of the
    // expert's matrix have been loaded into the host tier. The bytes stay there until the op calls release().
    bool serves() const {
        return bringing && bringing->in_place() && bringing->arrived() && bringing->good() && pinned() && bringing->tier() <= asked_tier;
    }
    // Whether the prefetch list with this number, or a later list, contains this entry.
    bool foreseen_since(uint64_t list) const { return in_list >= list; }

    // ---- state changes

    // Records that the running step requests this entry in a tier, a stored precision of which 0 is the best. passing:
    // whether the request is a streaming one, for a prompt that needs nearly all experts. Returns whether it is the
    // step's first request for this entry.
    bool decide(uint8_t tier, bool passing) {
        const bool first = !asked;
        asked       = true;
        asked_tier  = tier;
        only_passes = passing;
        return first;
    }
    void release() { asked = false; }         // its op has computed it
    void forget_request() { asked = in_line = false; }
    void foresee(uint64_t list) { in_list = list; }
    void wait();                              // it enters the waiting queue of a pool
    void served() { in_line = false; }        // it left the waiting queue
    void begin(const moe_edge_load & load);   // there must be no load
    void end();                               // ends its load without a result
    void publish();                           // the load becomes the resident version; there must be no other version
    void move(int32_t slot);                  // the resident version moved to another slot
    void drop();                              // the resident version was evicted

    // Checks the invariants of this entry. Returns an empty string, or the description of a violated invariant.
    std::string check(bool staged) const;

  private:
    std::optional<moe_edge_load> bringing;
    uint64_t in_list     = 0;  // number of the last prefetch list that contained it
    int32_t  in_slot     = -1;
    int8_t   of_tier     = NO_TIER;
    uint8_t  asked_tier  = 0;
    bool     asked       = false;
    bool     only_passes = false;  // its most recent request is a streaming one
    bool     in_line     = false;
};

static_assert(sizeof(moe_edge_cell) <= 88, "a model has tens of thousands of cells, and a step boundary looks at each");
