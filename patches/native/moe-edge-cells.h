// Cells: what of one (layer, kind, expert) is resident, what the running step wants of it, and what is being brought.
//
// A cell has at most one resident version (a tier in a slot), one request, and one load. The members are private: what
// can become of a cell is what the named functions do, and one that is called out of its turn throws std::logic_error.
//
//   A load is          reads of it       its bytes go to                    and then it
//   QUEUED             none yet          a slot; a prefetch has none yet    is read, or taken back
//   READING            some or all       a slot, or the host tier           is published, copied, FETCHED, used in place or thrown away
//   FOUND              none: the host tier had it                           is copied, used in place, or taken back
//   FETCHED            all, for nobody that waits                           is copied in its turn, or taken back
//   COPIED             all, and its copy to the device is enqueued          is published; a revoked transition is thrown away
//
// Where slots are in the host's memory a load is QUEUED or READING alone. A load that is in place has no slot, goes to the
// host tier, and stays until the op that asked for it has used it there. Guarded by the store's mutex.

#pragma once

#include "moe-edge-slots.h"
#include "moe-edge.h"

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

// Why a load is made. Its slot counts as read ahead where it is AHEAD and nobody asked for it on the way.
enum class moe_edge_purpose : uint8_t {
    DEMAND,      // a step asked for it, or a warm start, or it was a transition that was revoked
    AHEAD,       // a prefetch
    AFTER_USE,   // it was used in place, and comes to a slot for the next time
    TRANSITION,  // it is published at a step boundary, with the other matrices of its expert
    COMPUTE,     // in place: threads of the host compute it in the host tier
};

enum class moe_edge_stage : uint8_t { QUEUED, READING, FOUND, FETCHED, COPIED };

// What will be done with the bytes.
enum class moe_edge_fate : uint8_t {
    USED,
    UNWANTED,  // all of them come, for the host tier if there is one, and then the load ends
    CUT,       // some of them are never read: the load ends when no thread is on it any more
    FAILED,    // a part could not be read or copied, or they do not fit their checksum
};

class moe_edge_load {
  public:
    // Into a slot that was taken for it. order: among loads of its urgency.
    static moe_edge_load into_slot(int8_t tier, moe_edge_purpose purpose, int32_t order, int32_t slot);
    // A prefetch, which takes its slot later.
    static moe_edge_load ahead(int8_t tier, moe_edge_purpose purpose, int32_t order, const moe_edge_claim & claim);
    // For the step, without a slot: threads of the host compute it.
    static moe_edge_load in_place_of_slot(int8_t tier);

    // Where its bytes come from, once, before it is queued: from disk in so many parts, or from this slot of the host tier.
    void reads_parts(int32_t parts);
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
    // Neither ahead nor a transition: it is read and copied before those.
    bool awaited() const { return !ahead() && !in_transition(); }
    bool has_slot() const { return std::holds_alternative<int32_t>(to); }
    bool slotless() const { return std::holds_alternative<moe_edge_claim>(to); }  // has no slot yet and needs one; a load in place never does
    const moe_edge_claim & claim() const { return std::get<moe_edge_claim>(to); }

    // In the host tier since before it began, or since it was read: at most a copy is to be made.
    bool in_host_tier() const { return at == moe_edge_stage::FOUND || at == moe_edge_stage::FETCHED; }
    bool copied() const { return at == moe_edge_stage::COPIED; }
    bool good() const { return end == moe_edge_fate::USED; }
    bool given_up() const { return end == moe_edge_fate::UNWANTED || end == moe_edge_fate::CUT; }
    bool has_failed() const { return end == moe_edge_fate::FAILED; }
    // Its bytes are all there, or will be.
    bool entire() const { return end == moe_edge_fate::USED || end == moe_edge_fate::UNWANTED; }
    // In the queue: a part of it is to be read, or all of it to be copied.
    bool queued() const { return left > 0; }
    // In the queue and no thread on it: it can be taken back.
    bool untouched() const { return left > 0 && at != moe_edge_stage::READING; }
    // No part is left and no thread is on it, whatever its fate.
    bool arrived() const { return left == 0 && running == 0; }
    bool in_last_part() const { return left == 0 && running == 1; }

    // ---- transitions
    void take_slot(int32_t slot);
    void touch(uint64_t now);               // slotless: asked for or foreseen, not only in passing
    void ask();                             // the step waits for it from now on, unless it is in place anyway
    void reserve(int32_t in_host_slot);     // where it will be read to
    int32_t let_host_go();                  // the slot of the host tier that it held, -1
    int32_t start_part(int32_t parts);      // the next of so many, by a thread
    void finish_part(uint32_t crc);         // its share of the checksum
    void fetched();                         // its bytes stay in the host tier until its copy's turn
    void leave_copies();                    // its copy's turn has come
    void copy_enqueued();
    void give_up();                         // it gets no slot: parts that were not begun are not read, and complete bytes stay in the host tier
    void revoke();                          // as give_up, and it is a transition no longer
    void fail();                            // the same, for it cannot be used

    // Empty, or what cannot be. staged: this load goes through the host tier; a store that has one has other loads, too.
    std::string check(bool staged) const;

  private:
    moe_edge_load(int8_t tier, moe_edge_purpose purpose, int32_t order) : of_tier(tier), why(purpose), turn(order) {}

    int8_t           of_tier;
    moe_edge_purpose why;
    moe_edge_stage   at      = moe_edge_stage::QUEUED;
    moe_edge_fate    end     = moe_edge_fate::USED;
    uint16_t         left    = 0;   // parts that no thread has begun; 1 where a copy waits for its turn
    uint16_t         running = 0;   // parts that threads are on
    int32_t          turn;
    int32_t          in_host = -1;  // slot of the host tier that it holds
    uint32_t         sum     = 0;   // CRC-32 of the parts that were read so far
    std::variant<std::monostate, int32_t, moe_edge_claim> to;  // nothing (in place), its slot, or what it will ask of its pool
};

class moe_edge_cell {
  public:
    static constexpr int8_t NO_TIER = -1;

    int8_t  tier() const { return of_tier; }  // the resident one, NO_TIER
    bool    resident() const { return of_tier != NO_TIER; }
    int32_t slot() const { return in_slot; }  // of the resident tier, -1

    uint8_t want() const { return asked_tier; }  // asked for by the latest step that did, or MOE_EDGE_SKIP
    bool    decided() const { return asked; }    // by the running one, and its op has not computed it yet
    bool    passing() const { return only_passes; }
    bool    waiting() const { return in_line; }  // for a slot
    bool    better_than(int32_t tier) const { return resident() && of_tier < tier; }
    bool    as_good_as(int32_t tier) const { return resident() && of_tier <= tier; }

    moe_edge_load *       load() { return bringing ? &*bringing : nullptr; }
    const moe_edge_load * load() const { return bringing ? &*bringing : nullptr; }

    // An op of the running step will read it. A version that serves the request is not evicted.
    bool pinned() const { return asked && asked_tier != MOE_EDGE_SKIP; }
    bool satisfied() const { return as_good_as(asked_tier); }
    bool lacks() const { return pinned() && !satisfied(); }
    bool in_transition() const { return bringing && bringing->in_transition(); }
    bool arrived() const { return bringing && bringing->arrived(); }
    // An op may use its load in place, until release().
    bool serves() const {
        return bringing && bringing->in_place() && bringing->arrived() && bringing->good() && pinned() && bringing->tier() <= asked_tier;
    }
    // Whether it stands in this prefetch list or in a later one.
    bool foreseen_since(uint64_t list) const { return in_list >= list; }

    // ---- transitions
    // A step's request; returns whether it is the first one.
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
    void wait();                              // in a pool's line
    void served() { in_line = false; }        // its turn has come, or passed
    void begin(const moe_edge_load & load);   // there must be none
    void end();                               // of its load, which comes to nothing
    void publish();                           // its load is the resident version: there must be no other
    void move(int32_t slot);                  // the resident version lies elsewhere
    void drop();                              // the resident version is gone

    // Empty, or what cannot be.
    std::string check(bool staged) const;

  private:
    std::optional<moe_edge_load> bringing;
    uint64_t in_list     = 0;  // number of the last prefetch list that it stood in
    int32_t  in_slot     = -1;
    int8_t   of_tier     = NO_TIER;
    uint8_t  asked_tier  = 0;
    bool     asked       = false;
    bool     only_passes = false;  // its latest request only passes
    bool     in_line     = false;
};

static_assert(sizeof(moe_edge_cell) <= 88, "a model has tens of thousands of cells, and a step boundary looks at each");
