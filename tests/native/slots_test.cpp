// Compares a pool of slots with a simple list of its expected contents, under random calls.
//
// Prints one line. At the first violation it prints a message and exits with 1.

#include "moe-edge-slots.h"
#include "stress.h"

#include <algorithm>
#include <random>
#include <vector>

namespace {

struct held {
    int32_t  slot, cell;
    uint64_t used_at;
    bool     complete, prefetched, passing;
};

// Returns the slot that is evicted first among those of streaming requests, or among the others.
int32_t oldest_of(const std::vector<held> & all, bool passing, int32_t not_cell) {
    const held * found = nullptr;
    for (const auto & h : all) {
        if (h.complete && h.passing == passing && h.cell != not_cell && (!found || h.used_at < found->used_at)) {
            found = &h;
        }
    }
    return found ? found->slot : -1;
}

void compare(const moe_edge_pool & pool, const std::vector<held> & all, int32_t usable, int32_t not_cell) {
    if (const std::string wrong = pool.check(); !wrong.empty()) {
        die(wrong);
    }
    int32_t n_passing = 0, beyond = 0;
    for (const auto & h : all) {
        const auto & s = pool[h.slot];
        n_passing += h.passing;
        beyond    += h.slot >= usable;
        if (s.cell != h.cell || s.used_at != h.used_at || s.passing != h.passing || s.prefetched != h.prefetched ||
            s.is != (h.complete ? moe_edge_pool::state::COMPLETE : moe_edge_pool::state::FILLING)) {
            die("a slot has the wrong state");
        }
    }
    for (const bool passing : { false, true }) {
        const int32_t oldest = pool.oldest([&](const moe_edge_pool::slot & s) { return s.passing == passing && s.cell != not_cell; });
        if (oldest != oldest_of(all, passing, not_cell)) {
            die("the oldest slot is not the least recently used one");
        }
    }
    const int32_t within = all.size() - beyond;
    if (pool.in_use() != (int32_t) all.size() || pool.n_beyond() != beyond || pool.has_free() != (within < usable) || pool.has_passing() != (n_passing > 0) ||
        pool.may_pass() != (n_passing < 2)) {
        die("the counts of slots are wrong");
    }
}

void run_random(unsigned seed) {
    constexpr int32_t N = 6;
    moe_edge_pool pool;
    char memory[N * 64];
    std::vector<char *> places;
    for (int32_t i = 0; i < N; i++) {
        places.push_back(memory + i * 5 % N * 64);
    }
    pool.open(places, 64, 2);
    std::mt19937 random(seed);
    std::vector<held> all;
    uint64_t clock = 0;
    int32_t usable = N;
    for (int32_t i = 0; i < 20000; i++) {
        const size_t which = all.empty() ? 0 : random() % all.size();
        switch (random() % 7) {
            case 0:
            case 1:
                if (pool.has_free()) {
                    // reads arrive in any order, so an earlier request may complete later
                    const moe_edge_claim claim = { ++clock * 2 - random() % 2 * 3, MOE_EDGE_NO_LIST, random() % 3 == 0 };
                    const int32_t slot = pool.take(i, claim);
                    all.push_back({ slot, i, claim.asked_at, false, false, claim.passing });
                    if (pool.data(slot) != places[slot] || slot >= usable) {
                        die("a slot has the wrong address");
                    }
                } else if (!refuses([&] { pool.take(i, {}); })) {
                    die("a full pool gave a slot");
                }
                break;
            case 2:
                if (!all.empty() && !all[which].complete) {
                    all[which].complete   = true;
                    all[which].prefetched = random() % 2;
                    pool.complete(all[which].slot, all[which].prefetched);
                } else if (!all.empty() && (!refuses([&] { pool.complete(all[which].slot, false); }) || !refuses([&] { pool.copied(all[which].slot, 1); }))) {
                    die("a complete slot was filled again");
                }
                break;
            case 3:
                if (!all.empty()) {
                    all[which].used_at = ++clock * 2;
                    all[which].passing = false;
                    pool.use(all[which].slot, all[which].used_at);
                    if (all[which].complete && pool.used_as_foreseen(all[which].slot) != all[which].prefetched) {
                        die("the first use of a prefetch is not reported");
                    }
                    all[which].prefetched = false;
                }
                break;
            case 4:
                usable = 1 + random() % N;
                pool.limit(usable);
                break;
            case 5:
                if (!all.empty() && all[which].complete && all[which].slot >= usable && pool.has_free()) {
                    all[which].slot = pool.move(all[which].slot);
                } else if (!all.empty() && !refuses([&] { pool.move(all[which].slot); })) {
                    die("a slot was moved although it may stay or has no target");
                }
                break;
            default:
                if (!all.empty()) {
                    const int32_t slot = all[which].slot;
                    pool.give(slot);
                    all.erase(all.begin() + which);
                    if (!refuses([&] { pool.give(slot); }) || !refuses([&] { pool.use(slot, 1); })) {
                        die("a free slot was freed or used");
                    }
                }
        }
        compare(pool, all, usable, all.empty() ? -1 : all[random() % all.size()].cell);
    }
}

// A slot keeps the tickets of its last copy and reader when it is filled again.
void run_tickets() {
    moe_edge_pool pool;
    pool.open({ nullptr }, 64, 1);
    int32_t slot = pool.take(7, { 1, MOE_EDGE_NO_LIST, false });
    pool.copied(slot, 10);
    pool.complete(slot, false);
    pool.read_until(slot, 12);
    pool.give(slot);
    slot = pool.take(8, { 2, MOE_EDGE_NO_LIST, false });
    const bool known = pool[slot].after == 12;
    pool.copied(slot, 14);
    if (!known || pool[slot].after != 14 || pool[slot].behind != 12) {
        die("a slot forgot its last reader");
    }
}

void run_line() {
    moe_edge_pool pool;
    pool.open({ nullptr }, 64, 1);
    pool.take(7, { 1, MOE_EDGE_NO_LIST, false });
    pool.wait(3);
    pool.wait(1);
    const bool line = pool.awaited() && pool.first_waiting() == 3 && pool.check().empty();
    pool.served();
    const bool next = pool.first_waiting() == 1;
    pool.give(0);
    const bool idle = pool.check().empty();
    pool.forget_waiting();
    if (!line || !next || idle || pool.awaited() || !pool.check().empty()) {
        die("the first waiting request is not served first");
    }
}

}  // namespace

int main() {
    for (const int32_t bad : { 0, 7 }) {
        moe_edge_pool pool;
        pool.open(std::vector<char *>(6), 64, 1);
        if (!refuses([&] { pool.limit(bad); })) {
            die("an invalid limit was set");
        }
    }
    run_random(11);
    run_random(12);
    run_tickets();
    run_line();
    printf("slots: equal to the list\n");
    return 0;
}
