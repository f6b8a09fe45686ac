#include "moe-edge-slots.h"

#include <algorithm>
#include <stdexcept>

namespace {

void require(bool legal, const char * what) {
    if (!legal) {
        throw std::logic_error(std::string("slots: ") + what);
    }
}

std::string at_slot(size_t i, const char * what) { return "slot " + std::to_string(i) + ": " + what; }

}  // namespace

void moe_edge_pool::open(std::vector<char *> where, uint64_t bytes_of_each, int32_t most_passing) {
    places      = std::move(where);
    slot_bytes  = bytes_of_each;
    max_passing = std::max(1, most_passing);
    slots.resize(places.size());
    limit(size());
}

void moe_edge_pool::limit(int32_t n) {
    require(n > 0 && n <= size(), "a limit of no slots, or of more than there are");
    n_usable = n;
    beyond   = 0;
    free.clear();
    for (int32_t i = size(); i-- > 0;) {
        const bool used = slots[i].is != state::FREE;
        beyond += used && i >= n;
        if (!used && i < n) {
            free.push_back(i);
        }
    }
}

int32_t moe_edge_pool::take(int32_t cell, const moe_edge_claim & claim) {
    require(!free.empty(), "there is no free one");
    const int32_t i = free.back();
    free.pop_back();
    slots[i].is      = state::FILLING;
    slots[i].cell    = cell;
    slots[i].used_at = claim.asked_at;
    set_passing(i, claim.passing);
    return i;
}

void moe_edge_pool::complete(int32_t i, bool prefetched) {
    require(slots[i].is == state::FILLING, "one that was not filled is complete");
    slots[i].is         = state::COMPLETE;
    slots[i].prefetched = prefetched;
    insert(i);
}

void moe_edge_pool::give(int32_t i) {
    require(slots[i].is != state::FREE, "one is free twice");
    if (slots[i].is == state::COMPLETE) {
        remove(i);
    }
    set_passing(i, false);
    slot fresh;
    fresh.after  = slots[i].after;
    fresh.behind = slots[i].behind;
    slots[i] = fresh;
    if (i < n_usable) {
        free.push_back(i);
    } else {
        beyond--;
    }
}

int32_t moe_edge_pool::move(int32_t i) {
    require(slots[i].is == state::COMPLETE && i >= n_usable && !free.empty(), "one is moved that may stay, or has nowhere to go");
    const int32_t to = free.back();
    free.pop_back();
    slots[to] = slots[i];
    (slots[to].newer >= 0 ? slots[slots[to].newer].older : newest) = to;
    (slots[to].older >= 0 ? slots[slots[to].older].newer : last) = to;
    slots[i] = {};
    beyond--;
    return to;
}

void moe_edge_pool::use(int32_t i, uint64_t at) {
    require(slots[i].is != state::FREE, "a free one is used");
    set_passing(i, false);
    if (slots[i].is == state::COMPLETE) {
        remove(i);
        slots[i].used_at = at;
        insert(i);
    } else {
        slots[i].used_at = at;
    }
}

bool moe_edge_pool::used_as_foreseen(int32_t i) {
    const bool foreseen = slots[i].prefetched;
    slots[i].prefetched = false;
    return foreseen;
}

void moe_edge_pool::copied(int32_t i, moe_edge_ticket ticket) {
    require(slots[i].is == state::FILLING, "a copy goes to one that is not filled");
    slots[i].behind = slots[i].after;
    slots[i].after  = ticket;
}

void moe_edge_pool::set_passing(int32_t i, bool passing) {
    n_passing += passing - slots[i].passing;
    slots[i].passing = passing;
}

void moe_edge_pool::remove(int32_t i) {
    slot & s = slots[i];
    (s.newer >= 0 ? slots[s.newer].older : newest) = s.older;
    (s.older >= 0 ? slots[s.older].newer : last) = s.newer;
    s.newer = -1;
    s.older = -1;
}

// Inserts a complete slot into the LRU list. Its position depends on the time of its last request, and not on the time
// at which the disk delivered its bytes.
void moe_edge_pool::insert(int32_t i) {
    slot & s = slots[i];
    s.newer = -1;
    s.older = newest;
    while (s.older >= 0 && slots[s.older].used_at > s.used_at) {
        s.newer = s.older;
        s.older = slots[s.older].older;
    }
    (s.older >= 0 ? slots[s.older].newer : last) = i;
    (s.newer >= 0 ? slots[s.newer].older : newest) = i;
}

std::string moe_edge_pool::check() const {
    int32_t listed = 0, complete = 0, passing = 0, used = 0, used_beyond = 0;
    int32_t before = -1;
    for (int32_t i = newest; i >= 0; i = slots[i].older) {
        if (slots[i].is != state::COMPLETE || slots[i].newer != before || ++listed > size()) {
            return at_slot(i, "the list of complete slots is broken");
        }
        if (before >= 0 && slots[i].used_at > slots[before].used_at) {
            return at_slot(i, "it was used later than the one before it in the list");
        }
        before = i;
    }
    if (last != before) {
        return "the list of complete slots does not end at the oldest one";
    }
    for (int32_t i = 0; i < size(); i++) {
        const slot & s = slots[i];
        complete += s.is == state::COMPLETE;
        passing  += s.passing;
        used     += s.is != state::FREE;
        used_beyond += s.is != state::FREE && i >= n_usable;
        if ((s.is == state::FREE) != (s.cell < 0)) {
            return at_slot(i, "it is free and owned, or neither");
        }
        if (s.is == state::FREE && (s.passing || s.prefetched)) {
            return at_slot(i, "it is free, but marked as prefetched or streamed");
        }
        if (s.is == state::FILLING && s.prefetched) {
            return at_slot(i, "it is not complete and waits for its first use");
        }
    }
    for (const int32_t i : free) {
        if (slots[i].is != state::FREE || i >= n_usable) {
            return at_slot(i, "it is in use or beyond the limit, and among the free ones");
        }
    }
    if (used != in_use() || used_beyond != beyond || complete != listed) {
        return std::to_string(used) + " in use, " + std::to_string(beyond) + " of them beyond the limit, and " +
            std::to_string(free.size()) + " free of " + std::to_string(n_usable) + " slots, " + std::to_string(complete) + " complete and " +
            std::to_string(listed) + " listed";
    }
    if (!waiting.empty() && !free.empty()) {
        return "a cell waits for a slot while one is free";
    }
    if (passing != n_passing) {
        return std::to_string(passing) + " passing slots, " + std::to_string(n_passing) + " counted";
    }
    return {};
}
