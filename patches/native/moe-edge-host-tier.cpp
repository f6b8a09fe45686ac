#include "moe-edge-host-tier.h"
#include "moe-edge-util.h"

#include <algorithm>

uint64_t moe_edge_host_tier::least_bytes(const std::vector<size_class> & classes) {
    uint64_t bytes = 0;
    for (const auto & c : classes) {
        bytes += c.slot_bytes * c.least;
    }
    return bytes;
}

// Divides the budget into slots. Returns the number of slots of each size class. Each size class gets slots for the
// same fraction of its slices (expert matrices). If that is less than size_class::least, it gets `least` slots.
std::vector<int32_t> moe_edge_host_tier::divide(uint64_t budget_bytes, const std::vector<size_class> & classes) {
    const auto slots_at = [&](double share) {
        std::vector<int32_t> n;
        for (const auto & c : classes) {
            n.push_back(std::max(c.least, (int32_t) (share * c.n_slices)));
        }
        return n;
    };
    const auto bytes_of = [&](const std::vector<int32_t> & n) {
        uint64_t bytes = 0;
        for (size_t i = 0; i < n.size(); i++) {
            bytes += classes[i].slot_bytes * n[i];
        }
        return bytes;
    };
    if (bytes_of(slots_at(1.0)) <= budget_bytes) {
        return slots_at(1.0);
    }
    double fits = 0.0, too_much = 1.0;
    for (int i = 0; i < 50; i++) {
        const double share = (fits + too_much) / 2;
        (bytes_of(slots_at(share)) <= budget_bytes ? fits : too_much) = share;
    }
    return slots_at(fits);
}

moe_edge_host_tier::moe_edge_host_tier(moe_edge_device & device, uint64_t budget_bytes,
                                       const std::vector<size_class> & classes, int32_t n_slices)
    : device(device), lists(classes.size()), slot_of(n_slices, -1) {
    const uint64_t least = least_bytes(classes);
    if (budget_bytes < least) {
        refuse("store: %llu bytes of host memory are too few for the host tier (between the disk and the device): the minimum is %llu",
            (unsigned long long) budget_bytes, (unsigned long long) least);
    }
    const std::vector<int32_t> n = divide(budget_bytes, classes);
    for (size_t i = 0; i < classes.size(); i++) {
        total_bytes += classes[i].slot_bytes * n[i];
    }
    memory = device.alloc_host(total_bytes, &pinned);
    if (!memory) {
        refuse("store: %llu bytes of host memory cannot be allocated for the host tier (between the disk and the device)", (unsigned long long) total_bytes);
    }
    char * at = memory;
    for (size_t i = 0; i < classes.size(); i++) {
        lists[i].n_slots = n[i];
        lists[i].least   = classes[i].least;
        for (int32_t k = 0; k < n[i]; k++) {
            lists[i].free.push_back(slots.size());
            auto & s = slots.emplace_back();
            s.data     = at;
            s.of_class = i;
            at += classes[i].slot_bytes;
        }
        std::reverse(lists[i].free.begin(), lists[i].free.end());
    }
}

moe_edge_host_tier::~moe_edge_host_tier() {
    for (const auto & s : slots) {
        for (const moe_edge_ticket t : s.copies) {
            device.wait(t);
        }
    }
    device.release_host(memory);
}

void moe_edge_host_tier::remove(int32_t slot) {
    auto & s = slots[slot];
    auto & l = lists[s.of_class];
    (s.newer >= 0 ? slots[s.newer].older : l.newest) = s.older;
    (s.older >= 0 ? slots[s.older].newer : l.oldest) = s.newer;
    s.newer = s.older = -1;
}

void moe_edge_host_tier::insert(int32_t slot, bool as_oldest) {
    auto & s = slots[slot];
    auto & l = lists[s.of_class];
    s.newer = as_oldest ? l.oldest : -1;
    s.older = as_oldest ? -1 : l.newest;
    (s.newer >= 0 ? slots[s.newer].older : l.newest) = slot;
    (s.older >= 0 ? slots[s.older].newer : l.oldest) = slot;
}

int32_t moe_edge_host_tier::find(int32_t slice, bool passing) {
    const int32_t slot = slot_of[slice];
    if (slot >= 0) {
        slots[slot].holds++;
        if (!passing) {
            touch(slice);
        }
    }
    return slot;
}

void moe_edge_host_tier::touch(int32_t slice) {
    const int32_t slot = slot_of[slice];
    if (slot >= 0) {
        remove(slot);
        insert(slot, false);
    }
}

moe_edge_ticket moe_edge_host_tier::feeding(const host_slot & s) const {
    for (const moe_edge_ticket t : s.copies) {
        if (!device.passed(t)) {
            return t;
        }
    }
    return 0;
}

int32_t moe_edge_host_tier::reserve(int32_t slice, int32_t size_class) {
    auto & l = lists[size_class];
    int32_t slot = -1;
    if (!l.free.empty()) {
        slot = l.free.back();
        l.free.pop_back();
    } else {
        for (slot = l.oldest; slot >= 0; slot = slots[slot].newer) {
            if (slots[slot].holds == 0 && feeding(slots[slot]) == 0) {
                break;
            }
        }
        if (slot < 0) {
            return -1;
        }
        remove(slot);
        slot_of[slots[slot].slice] = -1;
    }
    auto & s = slots[slot];
    s.slice    = slice;
    s.holds    = 1;
    s.complete = false;
    return slot;
}

moe_edge_ticket moe_edge_host_tier::blocked_by(int32_t size_class) const {
    for (int32_t slot = lists[size_class].oldest; slot >= 0; slot = slots[slot].newer) {
        const auto & s = slots[slot];
        if (s.holds == 0) {
            const moe_edge_ticket t = feeding(s);  // it may have passed in the meantime
            return t != 0 ? t : *std::max_element(std::begin(s.copies), std::end(s.copies));
        }
    }
    return 0;
}

void moe_edge_host_tier::complete(int32_t slot, bool passing) {
    auto & s = slots[slot];
    s.complete = true;
    slot_of[s.slice] = slot;
    insert(slot, passing);
}

void moe_edge_host_tier::feeds(int32_t slot, int32_t lane, moe_edge_ticket ticket) { slots[slot].copies[lane] = ticket; }

bool moe_edge_host_tier::lend(int32_t size_class) {
    auto & l = lists[size_class];
    const bool enough = l.lent + l.least < l.n_slots;
    l.lent += enough;
    return enough;
}

void moe_edge_host_tier::drop(int32_t slot) {
    auto & s = slots[slot];
    s.holds--;
    if (!s.complete) {
        s.slice = -1;
        lists[s.of_class].free.push_back(slot);
    }
}

std::string moe_edge_host_tier::check() const {
    size_t owned = 0, unused = 0, listed = 0, mapped = 0;
    for (size_t i = 0; i < slots.size(); i++) {
        const auto & s = slots[i];
        owned  += s.slice >= 0;
        listed += s.complete && s.slice >= 0;
        if (s.holds < 0 || (s.slice >= 0 && !s.complete && s.holds != 1)) {
            return format("host slot %zu: held %d times", i, s.holds);
        }
        if (s.slice >= 0 && s.complete != (slot_of[s.slice] == (int32_t) i)) {
            return format("host slot %zu: its slice lies elsewhere", i);
        }
        if ((s.slice < 0 || !s.complete) && feeding(s) != 0) {
            return format("host slot %zu: is filled again while a copy reads it", i);
        }
    }
    for (const auto & l : lists) {
        unused += l.free.size();
        int32_t before = -1;
        for (int32_t i = l.newest; i >= 0; i = slots[i].older) {
            if (slots[i].newer != before || !slots[i].complete || listed-- == 0) {
                return format("the host tier's list is broken at slot %d", i);
            }
            before = i;
        }
        if (l.oldest != before) {
            return "the host tier's list does not end at its oldest slot";
        }
        if (l.lent < 0 || l.lent + l.least > std::max(l.n_slots, l.least)) {
            return format("host tier: %d of %d slots are lent", l.lent, l.n_slots);
        }
    }
    for (const int32_t slot : slot_of) {
        mapped += slot >= 0;
    }
    if (listed != 0 || owned + unused != slots.size() || mapped > owned) {
        return format("host tier: %zu slots owned, %zu free, of %zu", owned, unused, slots.size());
    }
    return {};
}
