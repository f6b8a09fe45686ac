// Random requests by several threads to a store over a file with known bytes. Checks that every
// byte that an op gets is the byte on disk, that the budget and all other invariants hold at any
// time, and that read errors are reported.
//
//   store_stress DIR SECONDS SEED [DELAY]
//
// With DELAY the slots are on a device whose copies take up to that many microseconds and poison
// their destinations first.
//
// Prints one line of counts. At the first violation it prints a message and exits with 1.

#include "moe-edge-host-device.h"
#include "moe-edge-reads.h"
#include "moe-edge-util.h"
#include "moe-edge.h"
#include "stress.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

namespace {

// Reads that begin between these offsets do not end while `held` is set.
std::atomic<off_t> held_first { 0 }, held_last { 0 };
std::atomic<bool>  held { false };
std::atomic<int>   n_held { 0 };
std::atomic<int64_t> held_bytes { 0 };  // bytes of completed held reads

// Reads that begin between these offsets are parts of one slice. The read with this number fails.
std::atomic<off_t> broken_first { 0 }, broken_last { 0 };
std::atomic<int>   broken_part { 0 };
std::atomic<int>   n_parts { 0 }, n_broken { 0 };  // parts that began; parts that failed
std::atomic<int>   n_beside { 0 };  // parts that failed while another part was being read
std::atomic<int>   n_under_way { 0 };

ssize_t read_or_break(int fd, void * to, size_t bytes, off_t at) {
    const bool others = n_under_way++ > 0;
    ssize_t n = -1;
    if (n_parts++ == broken_part) {
        n_beside += others;
        n_broken++;
        errno = EIO;
    } else {
        usleep(300);  // so that several parts are read at the same time
        n = next_pread(fd, to, bytes, at);
    }
    n_under_way--;
    return n;
}

}  // namespace

// Replaces pread for the store, because a program's own functions take precedence over those of
// libraries.
extern "C" ssize_t pread(int fd, void * to, size_t bytes, off_t at) {
    if (at >= broken_first && at < broken_last) {
        return read_or_break(fd, to, bytes, at);
    }
    if (at < held_first || at >= held_last) {
        return next_pread(fd, to, bytes, at);
    }
    n_held++;
    while (held) {
        usleep(200);
    }
    const ssize_t n = next_pread(fd, to, bytes, at);
    held_bytes += n;
    return n;
}

namespace {

constexpr int32_t LAYERS  = 4;
constexpr int32_t EXPERTS = 12;
constexpr int32_t USED    = 3;
constexpr int32_t TIERS   = 2;
constexpr uint64_t BYTES[TIERS] = { 20000, 9000 };
constexpr int32_t TYPE_Q4_K = 12;
constexpr int32_t TYPE_Q2_K = 10;
std::unique_ptr<moe_edge_host_device> device;  // null: slots in host memory
const int32_t KINDS[] = { MOE_EDGE_UP, MOE_EDGE_GATE, MOE_EDGE_DOWN };

// Returns the byte on disk. Neighbouring slices differ at nearly every position.
unsigned char byte_at(int32_t layer, int32_t kind, int32_t tier, int32_t expert, uint64_t i) {
    uint64_t x = ((((uint64_t) layer * 4 + kind) * 4 + tier) * 64 + expert) * 1000003 + i * 2654435761u;
    return (x >> 7) ^ (x >> 23) ^ x;
}

struct model_file {
    std::string path;
    std::vector<moe_edge_layer> layers;
    std::deque<std::array<uint32_t, EXPERTS>> checksums;
    bool mixed;  // one group per kind, for both tiers

    explicit model_file(const std::string & dir, int32_t n_groups_per_kind, bool mixed = false)
        : path(dir + "/experts.bin"), layers(LAYERS), mixed(mixed) {
        FILE * f = fopen(path.c_str(), "wb");
        if (!f) {
            die("cannot write " + path);
        }
        for (int i = 0; i < 32; i++) {
            fputc(0, f);  // slices do not start at a block
        }
        for (int32_t l = 0; l < LAYERS; l++) {
            layers[l] = {};
            layers[l].il = l;
            for (const int32_t k : KINDS) {
                for (int32_t t = 0; t < TIERS; t++) {
                    const int32_t group = mixed ? k : n_groups_per_kind == 1 ? k * TIERS + t : (l * MOE_EDGE_N_KINDS + k) * TIERS + t;
                    layers[l].slices[k][t] = { (uint64_t) ftell(f), BYTES[t], 0, t == 0 ? TYPE_Q4_K : TYPE_Q2_K, group, 0,
                        checksums.emplace_back().data(), 0.0 };
                    for (int32_t e = 0; e < EXPERTS; e++) {
                        for (uint64_t i = 0; i < BYTES[t]; i++) {
                            const unsigned char byte = byte_at(l, k, t, e, i);
                            checksums.back()[e] = moe_edge_crc32(checksums.back()[e], &byte, 1);
                            fputc(byte, f);
                        }
                    }
                }
            }
        }
        fclose(f);
    }
};

moe_edge_store * open_store(const model_file & file, bool quotas, int32_t slots_hi, int32_t slots_lo, int32_t flags) {
    std::vector<moe_edge_group> groups((quotas ? LAYERS : 1) * MOE_EDGE_N_KINDS * (file.mixed ? 1 : TIERS));
    uint64_t total = 0;
    for (size_t g = 0; g < groups.size(); g++) {
        const int32_t t = file.mixed ? 0 : g % TIERS;
        groups[g] = { moe_edge_slot_bytes(4095, BYTES[t]), t == 0 ? slots_hi : slots_lo, 0, MOE_EDGE_MISS_COPY, 0 };
        if (file.mixed) {
            groups[g].n_slots += slots_lo;
        }
        if (device) {
            groups[g].slot_bytes = moe_edge_device_slot_bytes(t == 0 ? TYPE_Q4_K : TYPE_Q2_K, BYTES[t], 256);
        }
        total += groups[g].slot_bytes * groups[g].n_slots;
    }
    const char * path = file.path.c_str();
    moe_edge_config config = {};
    config.files         = &path;
    config.layers        = file.layers.data();
    config.groups        = groups.data();
    config.budget_bytes  = total;
    config.n_files       = 1;
    config.n_layers      = LAYERS;
    config.n_groups      = groups.size();
    config.n_tiers       = TIERS;
    config.n_expert      = EXPERTS;
    config.n_expert_used = USED;
    config.max_tokens    = 8;
    config.n_ahead       = 1;
    config.n_io_threads  = 3;
    config.flags         = flags;
    config.device        = device.get();
    config.host_bytes    = device ? moe_edge_host_least_bytes(&config) + slots_lo * 100000 : 0;
    char err[512];
    moe_edge_store * store = moe_edge_store_create(&config, err, sizeof(err));
    if (!store) {
        die(err);
    }
    return store;
}

struct visit_state {
    int32_t layer;
    int32_t kind;
    const uint8_t * asked;  // [n_expert]
    int64_t seen = 0;
    int64_t skipped = 0;
};

void visit(int32_t expert, int32_t tier, int32_t type, const void * data, uint64_t bytes, void * user) {
    auto & v = *static_cast<visit_state *>(user);
    v.seen++;
    if (v.asked[expert] == MOE_EDGE_SKIP) {
        if (data) {
            die("a skipped expert has data");
        }
        v.skipped++;
        return;
    }
    if (!data || tier > v.asked[expert] || bytes != BYTES[tier] || type != (tier == 0 ? TYPE_Q4_K : TYPE_Q2_K)) {
        die("an expert came in a worse tier than requested");
    }
    for (uint64_t i = 0; i < bytes; i++) {
        if (static_cast<const unsigned char *>(data)[i] != byte_at(v.layer, v.kind, tier, expert, i)) {
            die("wrong byte " + std::to_string(i) + " of expert " + std::to_string(expert));
        }
    }
}

// Limits on the bytes of slots, which change while layers are computed.
struct limits {
    moe_edge_store * store;
    uint64_t         least = 0, most;
    std::mt19937     random;
    std::atomic<int> n { 0 }, n_late { 0 };  // limits set; limits that had to wait for slots

    limits(moe_edge_store * of, unsigned seed) : store(of), random(seed) {
        moe_edge_stats s;
        moe_edge_get_stats(store, &s);
        most = s.budget_bytes;
        char err[512];
        if (moe_edge_store_limit(store, 0, err, sizeof(err)) != -1 || (!device && sscanf(strstr(err, "minimum is"), "minimum is %lu", &least) != 1)) {
            die("a limit of 0 bytes was accepted");
        }
    }

    int64_t set(uint64_t bytes) {
        char err[512];
        const int64_t to_come = moe_edge_store_limit(store, bytes, err, sizeof(err));
        if ((to_come < 0) != (device != nullptr)) {
            die(std::string("a limit: ") + (to_come < 0 ? err : "set on a device"));
        }
        return to_come;
    }

    void change() {
        n_late += set(random() % 4 ? least + random() % (most - least + 1) : random() % 2 ? least : UINT64_MAX) > 0;
        n++;
    }

    // Checks the smallest limit after all requests have ended.
    void end() {
        patience more;
        while (set(least) > 0) {
            more.wait("a limit without waiting slots");
        }
        moe_edge_stats s;
        moe_edge_get_stats(store, &s);
        char err[512];
        if (s.slot_bytes != least || s.slot_bytes_in_use > least || moe_edge_check(store, err, sizeof(err)) != 0) {
            die("more slots are in use than the limit");
        }
    }
};

void run(const model_file & file, bool quotas, int32_t slots_hi, int32_t slots_lo, double seconds, unsigned seed) {
    moe_edge_store * store = open_store(file, quotas, slots_hi, slots_lo, seed % 2 ? MOE_EDGE_DIRECT_IO : 0);
    std::atomic<bool> stop { false };
    std::atomic<int64_t> rounds { 0 };
    std::atomic<int64_t> skipped { 0 };
    moe_edge_begin_step(store, MOE_EDGE_DECODE);

    std::vector<std::thread> threads;
    for (int32_t l = 0; l < LAYERS; l++) {
        threads.emplace_back([&, l] {
            std::mt19937 random(seed * 100 + l);
            while (!stop) {
                std::vector<int32_t> ids;
                std::vector<uint8_t> tiers, passing;
                uint8_t asked[EXPERTS];
                for (int32_t e = 0; e < EXPERTS; e++) {
                    if (random() % 3 == 0) {
                        const uint8_t choice[] = { 0, 0, 1, MOE_EDGE_SKIP };
                        asked[e] = choice[random() % 4];
                        ids.push_back(e);
                        tiers.push_back(asked[e]);
                        passing.push_back(random() % 3 == 0);
                    }
                }
                if (random() % 4 == 0) {
                    // often more than there are slots, partly for experts that this layer is about
                    // to request
                    std::vector<moe_edge_prefetch_item> items(1 + random() % 8);
                    for (auto & item : items) {
                        const bool here = !ids.empty() && random() % 2;
                        item = { (int16_t) (here ? l : random() % LAYERS), (int16_t) (here ? ids[random() % ids.size()] : random() % EXPERTS),
                            (uint8_t) (random() % TIERS), (uint8_t) (random() % 3 ? 0 : 1 << KINDS[random() % 3]), (int16_t) (random() % 2) };
                    }
                    moe_edge_prefetch(store, items.data(), items.size());
                }
                if (moe_edge_apply(store, l, ids.data(), tiers.data(), passing.data(), ids.size()) != 0) {
                    die(moe_edge_error(store));
                }
                for (const int32_t k : KINDS) {
                    visit_state v = { l, k, asked };
                    if (moe_edge_use(store, l, k, ids.data(), ids.size(), visit, &v) != 0) {
                        die(moe_edge_error(store));
                    }
                    if (v.seen != (int64_t) ids.size()) {
                        die("an expert was not visited exactly once");
                    }
                    skipped += v.skipped;
                }
                rounds++;
            }
        });
    }
    threads.emplace_back([&] {
        char err[512];
        while (!stop) {
            if (moe_edge_check(store, err, sizeof(err)) != 0) {
                die(err);
            }
            usleep(200);
        }
    });
    usleep(seconds * 5e5);
    limits limit(store, seed);
    const bool room = slots_hi > 1;  // so that a lower limit exists
    if (!device) {  // limits change in the second half
        threads.emplace_back([&] {
            while (!stop) {
                limit.change();
                usleep(limit.random() % 300);
            }
        });
    }
    usleep(seconds * 5e5);
    moe_edge_stats s;
    const auto missing = [&]() -> const char * {
        moe_edge_get_stats(store, &s);
        return rounds == 0 ? "a computed layer" : skipped == 0 ? "a skipped expert" : s.evictions == 0 ? "an eviction"
            : s.prefetch_used == 0 ? "a used prefetch" : s.prefetch_cancelled == 0 ? "a cancelled prefetch"
            : device && s.copy_bytes[1] == 0 ? "a copy to the device" : !device && limit.n < 1000 ? "a thousand limits"
            : !device && room && limit.n_late == 0 ? "a limit that waits for slots" : nullptr;
    };
    patience more;
    while (const char * what = missing()) {
        more.wait(what);
    }
    stop = true;
    for (auto & t : threads) {
        t.join();
    }
    if (!device) {
        limit.end();
    }
    moe_edge_get_stats(store, &s);
    if (s.slot_bytes_peak > s.budget_bytes || s.hits[1] > s.requests[1] || (device != nullptr) != (s.copy_bytes[1] > 0 && s.host_bytes > 0)) {
        die("the statistics are inconsistent");
    }
    printf("%s hi %d lo %d: %lld rounds, %d limits, %d late, %llu host hits, %llu requests, %llu hits, %llu promotions, %llu evictions, prefetch %llu used %llu wasted %llu cancelled\n",
        file.mixed ? "mixed" : quotas ? "quotas" : "global", slots_hi, slots_lo, (long long) rounds, limit.n.load(), limit.n_late.load(), (unsigned long long) s.host_hits[1], (unsigned long long) s.requests[1],
        (unsigned long long) s.hits[1], (unsigned long long) s.promotions, (unsigned long long) s.evictions,
        (unsigned long long) s.prefetch_used, (unsigned long long) s.prefetch_wasted, (unsigned long long) s.prefetch_cancelled);
    moe_edge_store_free(store);
}

// A promotion that arrives while an op reads the low bytes must not free them, although another
// cache entry waits for that slot. The promotion's read is held until the op has begun, and the op
// continues after the read.
void run_promotion_during_use(const std::string & dir) {
    constexpr int32_t x = 3, y = 5;
    constexpr int ENOUGH = 6;
    model_file file(dir, 1);
    moe_edge_store * store = open_store(file, false, 4, 1, MOE_EDGE_DIRECT_IO);
    const int32_t ids[] = { x, y };
    const uint8_t low[] = { 1, 1 };
    uint8_t asked[EXPERTS];
    memset(asked, 1, sizeof(asked));
    struct slow_visit : visit_state {
        bool meets;  // this kind's promotion
    };
    const auto slow = [](int32_t expert, int32_t tier, int32_t type, const void * data, uint64_t bytes, void * user) {
        auto & v = *static_cast<slow_visit *>(user);
        if (v.meets && expert == x) {
            held = false;
            // on a device, the host cache may have the bytes, so they are not read
            for (int i = 0; i < 10000 && held_bytes < (int64_t) BYTES[0] && !(device && n_held == 0); i++) {
                usleep(1000);
            }
            usleep(3000);  // until the store has processed it
        }
        visit(expert, tier, type, data, bytes, &v);
    };
    int met[MOE_EDGE_N_KINDS] = {};
    patience more;
    for (int i = 0; met[MOE_EDGE_UP] < ENOUGH || met[MOE_EDGE_GATE] < ENOUGH || met[MOE_EDGE_DOWN] < ENOUGH; i++) {
        if (i >= 3 * ENOUGH) {
            more.wait("a promotion that arrives while an op reads the old copy");
        }
        // only x is resident, in low
        moe_edge_begin_step(store, MOE_EDGE_DECODE);
        moe_edge_apply(store, 0, ids, low, nullptr, 1);
        for (const int32_t k : KINDS) {
            visit_state v = { 0, k, asked };
            moe_edge_use(store, 0, k, ids, 1, visit, &v);
        }
        const int32_t kind = KINDS[i % 3];
        held_first   = file.layers[0].slices[kind][0].offset + x * BYTES[0] - 4095;  // direct reads begin at a block
        held_last    = held_first + 4095 + BYTES[0];
        n_held       = 0;
        held_bytes   = 0;
        held = true;
        const moe_edge_prefetch_item promote = { 0, (int16_t) x, 0, (uint8_t) (1 << kind), 0 };
        moe_edge_begin_step(store, MOE_EDGE_DECODE);
        moe_edge_prefetch(store, &promote, 1);
        moe_edge_apply(store, 0, ids, low, nullptr, 2);
        for (int32_t j = 0; j < 3; j++) {  // this kind first, because its read blocks all I/O threads
            const int32_t k = KINDS[(i + j) % 3];
            slow_visit v;
            static_cast<visit_state &>(v) = { 0, k, asked };
            v.meets = k == kind;
            moe_edge_stats before, after;
            moe_edge_get_stats(store, &before);
            if (moe_edge_use(store, 0, k, ids, 2, slow, &v) != 0 || v.seen != 2) {
                die("promotion during use: the op failed");
            }
            moe_edge_get_stats(store, &after);
            met[k] += v.meets && after.promotions > before.promotions;  // if the op read the low bytes
        }
        held = false;
        // start over with x in low: evict the high copies by requests for other experts
        for (int32_t e = 6; e < 10; e++) {
            moe_edge_begin_step(store, MOE_EDGE_DECODE);
            uint8_t high[EXPERTS] = {};
            moe_edge_apply(store, 0, &e, nullptr, nullptr, 1);
            for (const int32_t k : KINDS) {
                visit_state v = { 0, k, high };
                moe_edge_use(store, 0, k, &e, 1, visit, &v);
            }
        }
        char err[512];
        if (moe_edge_check(store, err, sizeof(err)) != 0) {
            die(err);
        }
    }
    held_first = held_last = 0;
    moe_edge_store_free(store);
    printf("promotion during use: %d times, bytes stayed\n", met[MOE_EDGE_UP] + met[MOE_EDGE_GATE] + met[MOE_EDGE_DOWN]);
}

// Every expert is resident in one tier, and another thread moves them between tiers. No op waits,
// and all matrices of an expert that a step sees have the same tier.
void run_transitions(const std::string & dir, double seconds, unsigned seed, bool mixed) {
    model_file file(dir, 1, mixed);
    moe_edge_store * store = open_store(file, false, 9, LAYERS * EXPERTS + 2, seed % 2 ? MOE_EDGE_DIRECT_IO : 0);
    moe_edge_set_callback(store, nullptr, nullptr, 1, 0);
    std::vector<moe_edge_prefetch_item> all;
    for (int16_t l = 0; l < LAYERS; l++) {
        for (int16_t e = 0; e < EXPERTS; e++) {
            all.push_back({ l, e, 1, 0, 0 });
        }
    }
    if (moe_edge_warm(store, all.data(), all.size(), nullptr, nullptr) != (int32_t) all.size()) {
        die("transitions: the warm start failed");
    }
    moe_edge_reset_stats(store);
    std::atomic<bool> stop { false };
    std::vector<std::thread> others;
    others.emplace_back([&] {
        std::mt19937 random(seed);
        while (!stop) {
            moe_edge_prefetch_item some[8];
            for (auto & item : some) {
                item = all[random() % all.size()];
                item.tier = random() % TIERS;
            }
            moe_edge_transition(store, some, 8);
            if (random() % 16 == 0) {
                moe_edge_set_transition_rate(store, random() % 2 ? 0 : 20 << 20);
            }
            usleep(random() % 300);
        }
    });
    others.emplace_back([&] {
        char err[512];
        uint8_t resident[LAYERS * EXPERTS], target[LAYERS * EXPERTS];
        uint32_t counts[LAYERS * EXPERTS];
        while (!stop) {
            moe_edge_get_states(store, resident, target);
            moe_edge_take_counts(store, counts);
            if (std::count(resident, resident + LAYERS * EXPERTS, MOE_EDGE_ABSENT) != 0 || moe_edge_check(store, err, sizeof(err)) != 0) {
                die(std::string("transitions: ") + err);
            }
            usleep(200);
        }
    });
    std::vector<int32_t> ids(EXPERTS);
    std::iota(ids.begin(), ids.end(), 0);
    uint8_t asked[EXPERTS];
    memset(asked, 1, sizeof(asked));
    int64_t steps = 0;
    moe_edge_stats s = {};
    patience more;
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);; steps++) {
        if (std::chrono::steady_clock::now() >= end) {
            moe_edge_get_stats(store, &s);
            if (steps > 0 && s.experts_promoted > 0 && s.experts_demoted > 0) {
                break;
            }
            more.wait(steps == 0 ? "a step" : s.experts_promoted == 0 ? "a promotion" : "a demotion");
        }
        moe_edge_begin_step(store, MOE_EDGE_DECODE);
        std::vector<std::thread> layers;
        for (int32_t l = 0; l < LAYERS; l++) {
            layers.emplace_back([&, l] {
                struct version_visit : visit_state {
                    int32_t tier[EXPERTS];
                };
                version_visit v;
                std::fill_n(v.tier, EXPERTS, -1);
                moe_edge_apply(store, l, ids.data(), nullptr, nullptr, EXPERTS);
                for (const int32_t k : KINDS) {
                    static_cast<visit_state &>(v) = { l, k, asked };
                    const auto one_version = [](int32_t expert, int32_t tier, int32_t type, const void * data, uint64_t bytes, void * user) {
                        auto & seen = static_cast<version_visit *>(user)->tier[expert];
                        if (seen >= 0 && seen != tier) {
                            die("transitions: two tiers of an expert in one step");
                        }
                        seen = tier;
                        visit(expert, tier, type, data, bytes, static_cast<visit_state *>(static_cast<version_visit *>(user)));
                    };
                    if (moe_edge_use(store, l, k, ids.data(), EXPERTS, one_version, &v) != 0) {
                        die(moe_edge_error(store));
                    }
                }
            });
        }
        for (auto & t : layers) {
            t.join();
        }
    }
    stop = true;
    for (auto & t : others) {
        t.join();
    }
    moe_edge_get_stats(store, &s);
    if (s.transitions_failed != 0 || s.demand_bytes[1] != 0 ||
        s.wait_us[1] != 0 || s.hits[1] != s.requests[1] || s.evictions != 0 || s.slot_bytes_peak > s.budget_bytes) {
        die("transitions: the statistics contradict the requests");
    }
    moe_edge_store_free(store);
    printf("%stransitions: %lld steps, %llu promoted, %llu demoted, nothing waited\n", mixed ? "mixed " : "", (long long) steps,
        (unsigned long long) s.experts_promoted, (unsigned long long) s.experts_demoted);
}

// Without a hook the ops request experts themselves, in the order of the graph: gate, up, down.
// There is one slot per kind for all layers.
void run_without_hook(const std::string & dir) {
    model_file file(dir, 1);
    moe_edge_store * store = open_store(file, false, 1, 1, 0);
    const int32_t ids[] = { 1, 4, 7 };
    const uint8_t asked[EXPERTS] = {};
    for (int step = 0; step < 3; step++) {
        moe_edge_begin_step(store, MOE_EDGE_DECODE);
        for (int32_t l = 0; l < LAYERS; l++) {
            for (const int32_t k : { MOE_EDGE_GATE, MOE_EDGE_UP, MOE_EDGE_DOWN }) {
                visit_state v = { l, k, asked };
                if (moe_edge_use(store, l, k, ids, 3, visit, &v) != 0 || v.seen != 3) {
                    die("without a hook: the op failed");
                }
            }
        }
    }
    moe_edge_stats s;
    moe_edge_get_stats(store, &s);
    if (s.requests[1] != 3 * LAYERS * 9 || s.routed[1][0] != 3 * LAYERS * 3) {
        die("without a hook: requests are counted twice");
    }
    moe_edge_store_free(store);
    printf("without a hook: done\n");
}

// One part of a prefetch cannot be read. A step that did not request the expert gets no error. A
// waiting op gets the error once, and the next request gets the bytes.
void run_broken_prefetches(const std::string & dir, unsigned seed) {
    model_file file(dir, 1);
    moe_edge_store * store = open_store(file, false, 2, 2, seed % 2 ? MOE_EDGE_DIRECT_IO : 0);
    std::atomic<bool> stop { false };
    std::thread checker([&] {
        char err[512];
        while (!stop) {
            if (moe_edge_check(store, err, sizeof(err)) != 0) {
                die(std::string("broken prefetches: ") + err);
            }
            usleep(100);
        }
    });
    std::mt19937 random(seed);
    const uint8_t asked[EXPERTS] = {};
    int told = 0, untold = 0, cut = 0, last_parts = 0;
    const auto missing = [&]() -> const char * {
        return told == 0 ? "a broken prefetch that an op waits for" : untold == 0 ? "a broken prefetch without a request"
            : n_beside == 0 ? "a part that fails while another is being read" : cut == 0 ? "a part that is not read after a failure"
            : last_parts == 0 ? "a last part that fails" : nullptr;
    };
    patience more;
    for (int round = 0; round < 100 || missing(); round++) {
        if (round >= 100) {
            more.wait(missing());
        }
        const int32_t l = random() % LAYERS, k = KINDS[random() % 3], e = random() % EXPERTS;
        const bool waits = random() % 2;
        const auto & s = file.layers[l].slices[k][0];
        const uint64_t first = s.offset + e * BYTES[0], last = first + BYTES[0];
        const int32_t blocks = block_ceil(last) / MOE_EDGE_BLOCK - block_floor(first) / MOE_EDGE_BLOCK;
        const int32_t blocks_of_part = (blocks + moe_edge_parts_of(s) - 1) / moe_edge_parts_of(s);
        const int32_t parts = (blocks + blocks_of_part - 1) / blocks_of_part;
        n_parts = n_broken = 0;
        broken_part  = random() % parts;
        broken_last  = last;
        broken_first = block_floor(first);  // direct reads begin at a block
        const moe_edge_prefetch_item item = { (int16_t) l, (int16_t) e, 0, (uint8_t) (1 << k), 0 };
        moe_edge_begin_step(store, MOE_EDGE_DECODE);
        moe_edge_prefetch(store, &item, 1);
        for (int i = 0; !waits && i < 10 && n_broken == 0; i++) {  // slices in a slot or in the host cache are not read
            usleep(1000);
        }
        if (!waits && moe_edge_error(store)) {
            die("a step gets an error of a prefetch that it did not request");
        }
        const int told_before = told;
        for (bool done = false; !done;) {
            moe_edge_apply(store, l, &e, nullptr, nullptr, 1);
            done = true;
            for (const int32_t kind : { MOE_EDGE_GATE, MOE_EDGE_UP, MOE_EDGE_DOWN }) {
                visit_state v = { l, kind, asked };
                done = done && moe_edge_use(store, l, kind, &e, 1, visit, &v) == 0 && v.seen == 1;
            }
            if (!done) {
                const char * error = moe_edge_error(store);
                if (!error || !strstr(error, file.path.c_str()) || !strstr(error, strerror(EIO)) || ++told > told_before + n_broken) {
                    die(std::string("broken prefetches: an op failed: ") + (error ? error : "without an error"));
                }
                moe_edge_begin_step(store, MOE_EDGE_DECODE);
            }
        }
        broken_first = broken_last = 0;
        untold     += n_broken > 0 && told == told_before;
        cut        += n_broken > 0 && n_parts < 2 * parts;  // the slice was read again completely
        last_parts += n_broken > 0 && broken_part == parts - 1;
    }
    stop = true;
    checker.join();
    moe_edge_store_free(store);
    printf("broken prefetches: %d reported, %d not reported, %d cut short, %d concurrent\n", told, untold, cut, n_beside.load());
}

// A file that is truncated while the store is open gives an error with its name, and never wrong
// bytes.
void run_truncated(const std::string & dir) {
    model_file file(dir, 1);
    moe_edge_store * store = open_store(file, false, 4, 2, 0);
    if (truncate(file.path.c_str(), 100000) != 0) {
        die("truncate");
    }
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    const int32_t ids[] = { EXPERTS - 1 };
    const uint8_t asked[EXPERTS] = {};
    visit_state v = { LAYERS - 1, MOE_EDGE_DOWN, asked };
    moe_edge_apply(store, LAYERS - 1, ids, nullptr, nullptr, 1);
    if (moe_edge_use(store, LAYERS - 1, MOE_EDGE_DOWN, ids, 1, visit, &v) != -1 || v.seen != 0) {
        die("a truncated file was not detected");
    }
    const char * error = moe_edge_error(store);
    if (!error || !strstr(error, file.path.c_str()) || !strstr(error, "truncated")) {
        die(std::string("the error does not name the file: ") + (error ? error : "none"));
    }
    char err[512];
    moe_edge_begin_step(store, MOE_EDGE_DECODE);  // the store continues to work
    if (moe_edge_error(store) || moe_edge_check(store, err, sizeof(err)) != 0) {
        die("the store did not recover");
    }
    moe_edge_store_free(store);
    printf("truncated file: %s\n", "error raised, store recovered");
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 4 && argc != 5) {
        die("usage: store_stress DIR SECONDS SEED [DELAY]");
    }
    if (argc == 5) {
        device = std::make_unique<moe_edge_host_device>(atoi(argv[4]));
    }
    const double   seconds = atof(argv[2]);
    const unsigned seed    = atoi(argv[3]);
    {
        model_file shared(argv[1], 1);
        run(shared, false, 20, 6, seconds, seed);
        run(shared, false, 1, 1, seconds, seed + 1);
        if (!device) {
            run(shared, false, LAYERS * EXPERTS, LAYERS * EXPERTS, seconds, seed + 2);  // whole huge pages are freed
        }
    }
    {
        model_file quotas(argv[1], LAYERS);
        run(quotas, true, 5, 2, seconds, seed + 2);
        run(quotas, true, 1, 1, seconds, seed + 3);
    }
    if (!device) {
        model_file mixed(argv[1], 1, true);
        run(mixed, false, 20, 6, seconds, seed);
        run(mixed, false, 1, 1, seconds, seed + 1);
        run_transitions(argv[1], seconds, seed, true);
    }
    run_promotion_during_use(argv[1]);
    run_transitions(argv[1], seconds, seed, false);
    run_without_hook(argv[1]);
    run_broken_prefetches(argv[1], seed);
    run_truncated(argv[1]);
    return 0;
}
