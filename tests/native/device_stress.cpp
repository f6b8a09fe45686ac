// A store on a device with an executor that never waits on the host. Like kernels on a stream, its
// computations run later, ordered only by the device. Copies are late, overtake each other, and
// poison their destinations first. Every row must still be computed from the bytes on disk.
//
//   device_stress DIR STEPS SEED
//
// Prints a line for each part. At the first violation it prints a message and exits with 1.

#include "moe-edge-host-device.h"
#include "moe-edge-store.h"
#include "moe-edge-util.h"
#include "stress.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <random>

#include <fcntl.h>
#include <unistd.h>

namespace {

// Reads that begin between these offsets do not end.
std::atomic<off_t> held_first { 0 }, held_last { 0 };
std::atomic<int>   n_held { 0 };

// Memory that refuses direct reads, or null.
const char * undirected = nullptr;
uint64_t undirected_bytes = 0;

}  // namespace

// Replaces pread for the store, because a program's own functions take precedence over those of
// libraries.
extern "C" ssize_t pread(int fd, void * to, size_t bytes, off_t at) {
    for (bool first = true; at >= held_first && at < held_last; first = false) {
        n_held += first;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto * first = static_cast<const char *>(to);
    if (undirected && first >= undirected && first < undirected + undirected_bytes && (fcntl(fd, F_GETFL) & O_DIRECT)) {
        errno = EFAULT;
        return -1;
    }
    return next_pread(fd, to, bytes, at);
}

namespace {

constexpr int32_t  LAYERS = 3, EXPERTS = 8, USED = 3, TIERS = 2;
constexpr uint64_t BYTES[TIERS] = { 14400, 8400 };  // whole blocks, like slices of a model
constexpr int32_t  TYPES[TIERS] = { 12, 10 };  // Q4_K and Q2_K as numbers only, because nothing is computed
const int32_t      KINDS[] = { MOE_EDGE_GATE, MOE_EDGE_UP, MOE_EDGE_DOWN };  // in the order of the graph

uint64_t slice_seed(int32_t layer, int32_t kind, int32_t tier, int32_t expert) {
    return ((((uint64_t) layer * 4 + kind) * 4 + tier) * 64 + expert) * 1000003;
}

unsigned char byte_at(uint64_t seed, uint64_t i) {
    const uint64_t x = seed + i * 2654435761u;
    return (x >> 7) ^ (x >> 23) ^ x;
}

// A stand-in for a row: every byte of the weights affects it.
uint64_t row_of(const unsigned char * weights, uint64_t bytes) {
    uint64_t row = 0;
    for (uint64_t i = 0; i < bytes; i++) {
        row = row * 31 + weights[i];
    }
    return row;
}

struct expert_file {
    std::string path;
    moe_edge_layer layers[LAYERS] = {};
    uint64_t rows[LAYERS][MOE_EDGE_N_KINDS][TIERS][EXPERTS];
    uint32_t checksums[LAYERS][MOE_EDGE_N_KINDS][TIERS][EXPERTS];

    explicit expert_file(const std::string & dir) : path(dir + "/device.bin") {
        FILE * f = fopen(path.c_str(), "wb");
        if (!f) {
            die("cannot write " + path);
        }
        std::vector<unsigned char> bytes(100);
        fwrite(bytes.data(), 1, bytes.size(), f);  // slices do not start at a block
        for (int32_t l = 0; l < LAYERS; l++) {
            layers[l].il = l;
            for (const int32_t k : KINDS) {
                for (int32_t t = 0; t < TIERS; t++) {
                    layers[l].slices[k][t] = { (uint64_t) ftell(f), BYTES[t], 0, TYPES[t], k * TIERS + t, 0, checksums[l][k][t], BYTES[t] / 28e3 };
                    for (int32_t e = 0; e < EXPERTS; e++) {
                        bytes.resize(BYTES[t]);
                        for (uint64_t i = 0; i < BYTES[t]; i++) {
                            bytes[i] = byte_at(slice_seed(l, k, t, e), i);
                        }
                        rows[l][k][t][e] = row_of(bytes.data(), bytes.size());
                        checksums[l][k][t][e] = moe_edge_crc32(0, bytes.data(), bytes.size());
                        fwrite(bytes.data(), 1, bytes.size(), f);
                    }
                }
            }
        }
        fclose(f);
    }

    // Returns a copy for which the host cannot compute one tier. Valid while this object exists.
    expert_file without_compute(int32_t tier) const {
        expert_file out = *this;
        for (auto & layer : out.layers) {
            for (const int32_t k : KINDS) {
                layer.slices[k][tier].compute_us = 0.0;
            }
        }
        return out;
    }
};

// Keeps its own tables, like an executor that runs without calling the store.
struct table_device : moe_edge_host_device {
    using moe_edge_host_device::moe_edge_host_device;

    std::vector<moe_edge_entry> tables[LAYERS][MOE_EDGE_N_KINDS];
    uint64_t version[LAYERS][MOE_EDGE_N_KINDS] = {};
    uint64_t uploads = 0;
    bool     fixed   = false;
    uint32_t uncounted = 0;
    moe_edge_ticket last = 0;  // of the submitted work
    moe_edge_ticket held = 0;  // copies into slots without a reader wait for this
    std::deque<std::pair<moe_edge_ticket, uint64_t>> ahead;  // running prefetch copies
    std::map<const void *, moe_edge_ticket> behind;  // by destination: the ticket that the last copy waited for
    uint64_t most_ahead = 0;  // maximum bytes of running prefetch copies
    std::atomic<int32_t> n_ahead { 0 };  // total number of prefetch copies

    // Called with the store's lock held.
    moe_edge_ticket copy(int32_t lane, void * to, const void * from, uint64_t bytes, moe_edge_ticket after) override {
        while (!ahead.empty() && passed(ahead.front().first)) {
            ahead.pop_front();
        }
        const moe_edge_ticket ticket = moe_edge_host_device::copy(lane, to, from, bytes, after != 0 ? after : held);
        behind[to] = after;
        if (lane == MOE_EDGE_LANE_PREFETCH) {
            ahead.emplace_back(ticket, bytes);
            n_ahead++;
            uint64_t now = 0;
            for (const auto & each : ahead) {
                now += each.second;
            }
            most_ahead = std::max(most_ahead, now);
        }
        return ticket;
    }

    void step_boundary(moe_edge_matrix * const * matrices, int32_t n, bool tables_fixed) override {
        wait(last);
        fixed = tables_fixed;
        uncounted += fixed;
        for (int32_t i = 0; fixed && i < n; i++) {
            const auto & m = *matrices[i];
            if (version[m.layer][m.kind] != m.version) {
                version[m.layer][m.kind] = m.version;
                tables[m.layer][m.kind]  = m.table;
                uploads++;
            }
        }
    }

    bool counts_routing() const override { return true; }

    // Every step with static tables routes one token to expert 1.
    bool counts(moe_edge_matrix * const * matrices, int32_t n, uint32_t * out) override {
        for (int32_t i = 0; i < n; i++) {
            out[(size_t) matrices[i]->layer * EXPERTS + 1] += uncounted;
        }
        uncounted = 0;
        return true;
    }
};

moe_edge_store * open_store(const expert_file & file, moe_edge_device & device, int32_t slots_hi, int32_t slots_lo, uint64_t host_more,
                            int32_t misses = MOE_EDGE_MISS_COPY, double copy_bytes_per_s = 20e9, double round_trip_us = 0.0,
                            bool near = false, uint32_t flags = 0) {
    std::vector<moe_edge_group> groups(MOE_EDGE_N_KINDS * TIERS);
    moe_edge_config config = {};
    for (size_t g = 0; g < groups.size(); g++) {
        const int32_t t = g % TIERS;
        groups[g] = { moe_edge_device_slot_bytes(TYPES[t], BYTES[t], 256), t == 0 ? slots_hi : slots_lo, 0, MOE_EDGE_MISS_COPY, 0 };
        if (near && t > 0) {
            groups[g].slot_bytes = 4 * 4096;
            groups[g].place      = MOE_EDGE_MISS_COMPUTE;
        }
        config.budget_bytes += groups[g].slot_bytes * groups[g].n_slots;
    }
    const char * path = file.path.c_str();
    config.files         = &path;
    config.layers        = file.layers;
    config.groups        = groups.data();
    config.device        = &device;
    config.n_files       = 1;
    config.n_layers      = LAYERS;
    config.n_groups      = groups.size();
    config.n_tiers       = TIERS;
    config.n_expert      = EXPERTS;
    config.n_expert_used = USED;
    config.max_tokens    = 16;
    config.n_io_threads  = 2;
    config.host_bytes    = moe_edge_host_least_bytes(&config) + host_more;
    config.misses        = misses;
    config.copy_bytes_per_s    = copy_bytes_per_s;
    config.flags               = flags;
    config.round_trip_us       = round_trip_us;
    char err[512];
    moe_edge_store * store = moe_edge_store_create(&config, err, sizeof(err));
    if (!store) {
        die(err);
    }
    config.host_bytes = moe_edge_host_least_bytes(&config) - 1;
    if (moe_edge_store_create(&config, err, sizeof(err)) || !strstr(err, std::to_string(config.host_bytes + 1).c_str())) {
        die("a host cache that is too small was not refused with the smallest size");
    }
    return store;
}

void check(moe_edge_store * store) {
    char err[512];
    if (moe_edge_check(store, err, sizeof(err)) != 0) {
        die(err);
    }
}

struct counters {
    std::atomic<int64_t> rows { 0 }, wrong { 0 };
};

// Submits the row of an expert.
moe_edge_ticket compute(moe_edge_host_device & device, const expert_file & file, const moe_edge_matrix & m, const moe_edge_ready & r,
                        counters & count) {
    const int32_t tier = r.type == TYPES[0] ? 0 : 1;
    const uint64_t expected = file.rows[m.layer][m.kind][tier][r.expert];
    const auto * weights = static_cast<const unsigned char *>(r.data);
    if (r.place >= MOE_EDGE_MISS_AUTO) {
        die("an expert has no place");
    }
    if (r.place == MOE_EDGE_MISS_COMPUTE && file.layers[m.layer].slices[m.kind][tier].compute_us <= 0.0) {
        die("the host must compute an unsupported type");
    }
    if (r.place == MOE_EDGE_MISS_COMPUTE) {  // the host has computed it when it releases the expert
        count.rows++;
        count.wrong += row_of(weights, BYTES[tier]) != expected;
        return 0;
    }
    if (r.place == MOE_EDGE_MISS_COPY && (static_cast<const char *>(r.data) - m.base[tier]) % (tier == 0 ? 144 : 84) != 0) {
        die("an expert is not at a block boundary of its pool");
    }
    return device.submit([&count, weights, tier, expected] {
        count.rows++;
        count.wrong += row_of(weights, BYTES[tier]) != expected;
    }, { r.ticket });
}

// Runs one op like a kernel executor: in waves, without a wait on the host. Returns false if the
// step was aborted.
bool run_op(moe_edge_store * store, table_device & device, const expert_file & file, int32_t layer, int32_t kind,
            const std::vector<int32_t> & ids, counters & count) {
    auto & m = store->matrices[layer][kind];
    std::vector<moe_edge_ready> ready(ids.size());
    m.ops->begin(&m, ids.data(), ids.size());
    for (size_t left = ids.size(); left > 0;) {
        const int32_t n = m.ops->next(&m, ready.data());
        if (n < 0) {
            return false;
        }
        for (int32_t i = 0; i < n; i++) {
            if (ready[i].data) {
                device.last = std::max(device.last, compute(device, file, m, ready[i], count));
            }
        }
        m.ops->release(&m, ready.data(), n, device.last);
        left -= n;
    }
    return true;
}

// Starts a transition of every resident expert to its other tier, if it has free slots. Returns
// their number.
int32_t exchange_resident(moe_edge_store * store) {
    std::vector<uint8_t> resident(LAYERS * EXPERTS), target(LAYERS * EXPERTS);
    moe_edge_get_states(store, resident.data(), target.data());
    int32_t n = 0;
    for (int32_t i = 0; i < LAYERS * EXPERTS; i++) {
        const moe_edge_prefetch_item other = { (int16_t) (i / EXPERTS), (int16_t) (i % EXPERTS), (uint8_t) (resident[i] == 0), 0, 0 };
        n += resident[i] < TIERS && moe_edge_transition(store, &other, 1);
    }
    return n;
}

// Random steps with too few slots: swaps by requests, prefetches and transitions, skips, and
// aborted steps. near: the lower tier's slots are in host memory.
void run_steps(const expert_file & file, int32_t steps, unsigned seed, int32_t slots_hi, int32_t slots_lo, uint64_t host_more,
               int32_t misses, bool near = false) {
    table_device device(150);
    moe_edge_store * store = open_store(file, device, slots_hi, slots_lo, host_more, misses, 20e9, 0.0, near);
    std::mt19937 random(seed);
    counters count;
    int64_t asked = 0, skipped = 0, cut = 0, transitions = 0;
    for (int32_t step = 0; step < steps; step++) {
        moe_edge_begin_step(store, random() % 4 == 0 ? MOE_EDGE_PREFILL : MOE_EDGE_DECODE);
        const int32_t layer = random() % LAYERS;
        // In some periods the lower tier is not requested, so its slots become free for
        // transitions.
        const bool upper_only = step / 32 % 4 == 3;
        std::vector<int32_t> ids;
        std::vector<uint8_t> tiers, passing;
        for (int32_t e = 0; e < EXPERTS; e++) {
            if (random() % 3 == 0) {
                const uint8_t low = upper_only ? 0 : 1, choice[] = { 0, low, low, MOE_EDGE_SKIP };
                ids.push_back(e);
                tiers.push_back(choice[random() % 4]);
                passing.push_back(random() % 4 == 0);
                skipped += tiers.back() == MOE_EDGE_SKIP;
            }
        }
        // More prefetches than slots, partly for experts that are about to be requested.
        moe_edge_prefetch_item items[6];
        for (auto & item : items) {
            const bool here = !ids.empty() && random() % 2 == 0;
            item = { (int16_t) (here ? layer : random() % LAYERS), (int16_t) (here ? ids[random() % ids.size()] : random() % EXPERTS),
                (uint8_t) (upper_only ? 0 : random() % TIERS), 0, (int16_t) (random() % 2) };
        }
        if (random() % 2 == 0) {
            moe_edge_prefetch(store, items, 6);
        } else if (upper_only) {
            transitions += exchange_resident(store);
        } else {
            transitions += moe_edge_transition(store, items, 3);
        }
        if (moe_edge_apply(store, layer, ids.data(), tiers.data(), passing.data(), ids.size()) != 0) {
            die(moe_edge_error(store));
        }
        const bool cancel = random() % 16 == 0;
        for (const int32_t k : KINDS) {
            moe_edge_cancel(store, cancel && k == MOE_EDGE_UP);
            if (run_op(store, device, file, layer, k, ids, count)) {
                asked += ids.size();
            } else if (moe_edge_error(store)) {
                die(moe_edge_error(store));
            } else {
                cut++;
                break;
            }
        }
        moe_edge_cancel(store, 0);
        if (step % 8 == 0) {
            check(store);
        }
    }
    moe_edge_stats s;
    moe_edge_get_stats(store, &s);
    device.wait(device.last);
    if (count.wrong != 0) {
        die(std::to_string(count.wrong) + " wrong rows of " + std::to_string(count.rows));
    }
    const uint64_t host_hits = s.host_hits[0] + s.host_hits[1];
    const struct { const char * what; bool came; } situations[] = {
        { "a row", count.rows > 0 }, { "a skip", skipped > 0 }, { "an aborted step", cut > 0 },
        { "a transition", transitions > 0 }, { "an expert from the host cache", host_hits > 0 },
        { "an eviction", s.evictions > 0 }, { "a promotion", s.promotions > 0 }, { "a prefetch that is used", s.prefetch_used > 0 },
        { "a cancelled prefetch", s.prefetch_cancelled > 0 }, { "a wasted prefetch", s.prefetch_wasted > 0 },
    };
    for (const auto & situation : situations) {
        if (!situation.came) {
            die(std::string(situation.what) + " did not occur");
        }
    }
    if (s.waits[0][MOE_EDGE_WAIT_COPY] + s.waits[1][MOE_EDGE_WAIT_COPY] != 0) {
        die("the host waited for a copy");
    }
    if (s.slot_bytes_peak > s.budget_bytes) {
        die("slots took more than their budget");
    }
    const uint64_t host_computed = s.host_computed[0] + s.host_computed[1];
    const bool some  = host_computed > 0 && s.host_computed_bytes[0] + s.host_computed_bytes[1] > host_computed;
    const bool right = misses == MOE_EDGE_MISS_COPY && !near ? host_computed == 0 : some;
    if (near && (s.copy_bytes[0] + s.copy_bytes[1]) % BYTES[0] != 0) {
        die("bytes of the lower tier were copied to the device");
    }
    if (!right || s.misses != misses || s.copy_bytes[0] + s.copy_bytes[1] == 0) {
        die("misses were not served as requested");
    }
    moe_edge_store_free(store);
    printf("steps: %d, %lld rows, none wrong, %llu by the host, %lld skipped, %lld cut off, %llu host hits, %llu evictions, %llu transitions\n",
        steps, (long long) count.rows, (unsigned long long) host_computed, (long long) skipped, (long long) cut, (unsigned long long) host_hits,
        (unsigned long long) s.evictions, (unsigned long long) (s.experts_promoted + s.experts_demoted));
}

// All experts are resident and no policy decides, so ops use the device's own tables without
// calling the store, while tiers change in the background.
void run_fixed(const expert_file & file, int32_t steps, unsigned seed) {
    table_device device(100);
    moe_edge_store * store = open_store(file, device, 5, LAYERS * EXPERTS + 2, 1 << 20);
    moe_edge_set_callback(store, nullptr, nullptr, 1, 0);
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    if (device.fixed) {
        die("empty tables count as static");
    }
    std::vector<moe_edge_prefetch_item> all;
    for (int16_t l = 0; l < LAYERS; l++) {
        for (int16_t e = 0; e < EXPERTS; e++) {
            all.push_back({ l, e, 1, 0, 0 });
        }
    }
    if (moe_edge_warm(store, all.data(), all.size(), nullptr, nullptr) != (int32_t) all.size()) {
        die("the warm start failed");
    }
    std::mt19937 random(seed);
    counters count;
    moe_edge_stats s;
    const auto missing = [&]() -> const char * {
        moe_edge_get_stats(store, &s);
        return s.experts_promoted == 0 ? "a promotion" : s.experts_demoted == 0 ? "a demotion"
            : device.uploads <= (uint64_t) LAYERS * 3 ? "an uploaded table" : nullptr;
    };
    patience more;
    const int32_t least = steps;
    for (steps = 0; steps < least || missing(); steps++) {
        if (steps >= least) {
            more.wait(missing());
        }
        moe_edge_begin_step(store, MOE_EDGE_DECODE);
        const auto & any = store->matrices[0][MOE_EDGE_UP];
        if (!device.fixed || !any.ops->fixed(const_cast<moe_edge_matrix *>(&any))) {
            die("all experts are resident, but the tables are not static");
        }
        moe_edge_prefetch_item items[4];
        for (auto & item : items) {
            item = all[random() % all.size()];
            item.tier = random() % TIERS;
        }
        moe_edge_transition(store, items, 4);
        moe_edge_prefetch(store, items, 4);  // there is nothing to prefetch
        for (int32_t l = 0; l < LAYERS; l++) {
            for (const int32_t k : KINDS) {
                const auto & m = store->matrices[l][k];
                for (int32_t e = 0; e < EXPERTS; e++) {
                    const auto & entry = device.tables[l][k][e];
                    device.last = compute(device, file, m, { entry.data, e, entry.type, entry.ticket }, count);
                }
            }
        }
        check(store);
    }
    device.wait(device.last);
    moe_edge_get_stats(store, &s);
    if (count.wrong != 0) {
        die(std::to_string(count.wrong) + " wrong rows from static tables");
    }
    if (s.evictions != 0 || s.requests[1] != (uint64_t) LAYERS * 3 * steps) {
        die("steps with static tables are not counted correctly");
    }
    std::vector<uint32_t> counts(LAYERS * EXPERTS);
    moe_edge_take_counts(store, counts.data());
    if (counts[1] != (uint32_t) steps || counts[0] != 0 || counts[EXPERTS + 1] != (uint32_t) steps) {
        die("the device's counts did not arrive");
    }
    const uint8_t high = 0;
    const int32_t id = 2;
    moe_edge_apply(store, 0, &id, &high, nullptr, 1);
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    if (device.fixed) {
        die("a front end decides, but the tables count as static");
    }
    moe_edge_store_free(store);
    printf("fixed: %d steps, %llu tables uploaded, %llu promoted, %llu demoted\n", steps, (unsigned long long) device.uploads,
        (unsigned long long) s.experts_promoted, (unsigned long long) s.experts_demoted);
}

// A transition is complete when its copies have completed, not when they are enqueued. Until then,
// step boundaries neither publish it nor wait for it.
void run_held(const expert_file & file) {
    table_device device(0);
    moe_edge_store * store = open_store(file, device, 2, LAYERS * EXPERTS, 1 << 20);
    moe_edge_set_callback(store, nullptr, nullptr, 1, 0);
    std::vector<moe_edge_prefetch_item> all;
    for (int16_t l = 0; l < LAYERS; l++) {
        for (int16_t e = 0; e < EXPERTS; e++) {
            all.push_back({ l, e, 1, 0, 0 });
        }
    }
    moe_edge_warm(store, all.data(), all.size(), nullptr, nullptr);
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    moe_edge_reset_stats(store);
    std::atomic<bool> go { false };
    device.held = device.submit([&go] {
        while (!go) {
            std::this_thread::yield();
        }
    }, {});
    const moe_edge_prefetch_item item = { 1, 3, 0, 0, 0 };
    if (moe_edge_transition(store, &item, 1) != 1) {
        die("held copies: the transition was not admitted");
    }
    moe_edge_stats s = {};
    while (s.copy_bytes[1] < BYTES[0]) {  // only one background copy runs at a time
        std::this_thread::yield();
        moe_edge_get_stats(store, &s);
    }
    const auto state = [&] {
        std::vector<uint8_t> resident(LAYERS * EXPERTS), target(LAYERS * EXPERTS);
        moe_edge_begin_step(store, MOE_EDGE_DECODE);
        moe_edge_get_states(store, resident.data(), target.data());
        check(store);
        return std::make_pair<int, int>(resident[EXPERTS + 3], target[EXPERTS + 3]);
    };
    const auto promoting = std::make_pair(1, 0), high = std::make_pair(0, 0);
    if (state() != promoting || !device.fixed) {
        die("held copies: a version was published before its bytes had arrived");
    }
    go = true;
    for (int i = 0; state() != high; i++) {
        if (i == 10000) {
            die("held copies: a version was never published");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    moe_edge_store_free(store);
    printf("held copies: published when they had completed\n");
}

// Each op of a layer gets the ids that the hook saw, once. Ops of other layers get none.
void run_routed(const expert_file & file) {
    table_device device(50);
    moe_edge_store * store = open_store(file, device, 4, 4, 0);
    counters count;
    const std::vector<int32_t> seen = { 1, 4, 6, 2 };
    const int32_t ids[] = { 1, 4, 6, 4, 2, 1 };
    moe_edge_begin_step(store, MOE_EDGE_PREFILL);
    std::copy(std::begin(ids), std::end(ids), store->ids.begin());
    store->event.layer    = 1;
    store->event.n_tokens = 2;
    if (!store->route()) {
        die(moe_edge_error(store));
    }
    const auto routed = [&](int32_t layer, int32_t kind) {
        auto & m = store->matrices[layer][kind];
        std::vector<int32_t> out(EXPERTS);
        const int32_t n = m.ops->routed(&m, out.data());
        out.resize(std::max(n, 0));
        return out;
    };
    for (const int32_t k : KINDS) {
        const bool before = routed(1, k) == seen && routed(0, k).empty();
        if (!before || !run_op(store, device, file, 1, k, seen, count) || !routed(1, k).empty()) {
            die("an op does not get the ids that its layer's hook saw");
        }
    }
    device.wait(device.last);
    if (count.rows != 12 || count.wrong != 0) {
        die("routed experts were not computed");
    }
    moe_edge_store_free(store);
    printf("routed: reported once\n");
}

// Returns which experts of an empty layer are copied and which are used in place. hosted_s: time
// that earlier host computations took.
std::vector<int32_t> places_of(const expert_file & file, int32_t misses, int32_t n_tokens, double round_trip_us, double copy_bytes_per_s,
                               double hosted_s) {
    table_device device(0);
    moe_edge_store * store = open_store(file, device, EXPERTS, 1, 1 << 20, misses, copy_bytes_per_s, round_trip_us);
    if (hosted_s > 0) {
        store->multiply({}, moe_edge::now_us() - (uint64_t) (hosted_s * 1e6));
    }
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    for (int32_t i = 0; i < n_tokens * USED; i++) {
        store->ids[i] = i % 6;
    }
    store->event.layer    = 0;
    store->event.n_tokens = n_tokens;
    if (!store->route()) {
        die(moe_edge_error(store));
    }
    std::vector<int32_t> places(EXPERTS, -1);
    for (const int32_t k : KINDS) {
        auto & m = store->matrices[0][k];
        std::vector<int32_t> ids(EXPERTS);
        ids.resize(m.ops->routed(&m, ids.data()));
        std::vector<moe_edge_ready> ready(ids.size());
        m.ops->begin(&m, ids.data(), ids.size());
        for (int32_t left = ids.size(); left > 0;) {
            const int32_t n = m.ops->next(&m, ready.data());
            if (n < 0) {
                die(moe_edge_error(store));
            }
            for (int32_t i = 0; i < n; i++) {
                auto & place = places[ready[i].expert];
                if (place >= 0 && place != ready[i].place) {
                    die("an expert is both copied and used in place");
                }
                place = ready[i].place;
            }
            check(store);
            m.ops->release(&m, ready.data(), n, 0);
            left -= n;
        }
    }
    check(store);
    moe_edge_store_free(store);
    return places;
}

void run_places(const expert_file & file) {
    constexpr int32_t COPY = MOE_EDGE_MISS_COPY, COMPUTE = MOE_EDGE_MISS_COMPUTE;
    using places = std::vector<int32_t>;
    const auto of = [&](int32_t misses, int32_t n_tokens, double round_trip_us = 0, double copy = 20e9, double hosted_s = 0) {
        return places_of(file, misses, n_tokens, round_trip_us, copy, hosted_s);
    };
    const bool fixed = of(MOE_EDGE_MISS_COPY, 2) == places({ COPY, COPY, COPY, COPY, COPY, COPY, -1, -1 }) &&
        of(MOE_EDGE_MISS_COMPUTE, 1) == places({ COMPUTE, COMPUTE, COMPUTE, -1, -1, -1, -1, -1 });
    // an expert takes 2.16 us on the link and 1.54 us on the host
    const bool shared = of(MOE_EDGE_MISS_AUTO, 2) == places({ COMPUTE, COPY, COMPUTE, COPY, COMPUTE, COMPUTE, -1, -1 });
    // twice 3 us until the host begins
    const bool late  = of(MOE_EDGE_MISS_AUTO, 2, 3) == places({ COPY, COPY, COPY, COMPUTE, COPY, COMPUTE, -1, -1 });
    const bool never = of(MOE_EDGE_MISS_AUTO, 2, 1000) == of(MOE_EDGE_MISS_COPY, 2);
    // the host takes much longer than measured
    const bool learned = of(MOE_EDGE_MISS_AUTO, 2, 0, 20e9, 1.0) == of(MOE_EDGE_MISS_COPY, 2);
    const bool unknown = of(MOE_EDGE_MISS_AUTO, 1, 0, 0) == of(MOE_EDGE_MISS_COPY, 1);
    // more tokens than the host computes
    std::vector<int32_t> all(EXPERTS, -1);
    std::fill_n(all.begin(), 6, COPY);
    const bool many = of(MOE_EDGE_MISS_COMPUTE, 8) != all && of(MOE_EDGE_MISS_COMPUTE, 9) == all;
    if (!fixed || !shared || !late || !never || !learned || !unknown || !many) {
        die("misses are not divided by the speeds");
    }
    printf("places: by speed\n");
}

// An aborted step leaves a load in place running. If the next step reads the same expert's slot, a
// later copy into that slot must wait for this reader.
void run_reader_beside_load(const expert_file & file) {
    table_device device(0);
    moe_edge_store * store = open_store(file, device, 1, 1, 1 << 20, MOE_EDGE_MISS_COMPUTE);
    counters count;
    const std::vector<int32_t> id = { 0 };
    const uint8_t high = 0, low = 1;
    const moe_edge_prefetch_item first = { 0, 0, low, 0, 0 }, second = { 0, 1, low, 0, 0 };
    if (moe_edge_warm(store, &first, 1, nullptr, nullptr) != 1) {
        die("the warm start failed");
    }
    const void * slot = store->matrices[0][MOE_EDGE_GATE].table[0].data;

    const auto & s = file.layers[0].slices[MOE_EDGE_GATE][high];
    held_first = s.offset;
    held_last  = s.offset + 1;  // the first part only: another thread continues with the rest and with later reads
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    moe_edge_apply(store, 0, id.data(), &high, nullptr, 1);
    while (n_held == 0) {
        std::this_thread::yield();
    }
    moe_edge_cancel(store, 1);
    if (run_op(store, device, file, 0, MOE_EDGE_GATE, id, count)) {
        die("an aborted step continued");
    }
    moe_edge_cancel(store, 0);

    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    moe_edge_apply(store, 0, id.data(), &low, nullptr, 1);
    check(store);
    if (!run_op(store, device, file, 0, MOE_EDGE_GATE, id, count)) {
        die(moe_edge_error(store));
    }
    const moe_edge_ticket reader = device.last;
    for (const int32_t k : { MOE_EDGE_UP, MOE_EDGE_DOWN }) {
        if (!run_op(store, device, file, 0, k, id, count)) {
            die(moe_edge_error(store));
        }
    }
    moe_edge_stats s1, s2;
    moe_edge_get_stats(store, &s1);
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    moe_edge_prefetch(store, &second, 1);
    do {
        std::this_thread::yield();
        moe_edge_get_stats(store, &s2);
    } while (s2.copy_bytes[MOE_EDGE_DECODE] < s1.copy_bytes[MOE_EDGE_DECODE] + 3 * BYTES[low]);
    const moe_edge_ticket waits_for = device.behind[slot];
    held_last = n_held = 0;
    device.wait(device.last);
    check(store);
    moe_edge_store_free(store);
    if (waits_for != reader || count.rows != 3 || count.wrong != 0) {
        die("a copy into a slot does not wait for its reader during a load in place");
    }
    printf("reader during a load in place: remembered for the slot\n");
}

// A device whose host memory refuses direct reads: files are then read through the page cache.
void run_undirected(const expert_file & file) {
    struct pinning_device : table_device {
        using table_device::table_device;
        char * alloc_host(uint64_t bytes, bool * pinned) override {
            char * memory = table_device::alloc_host(bytes, pinned);
            if (refuses) {
                undirected       = memory;
                undirected_bytes = bytes;
            }
            return memory;
        }
        bool refuses = false;
    };
    bool direct[2];
    for (const bool refuses : { false, true }) {
        pinning_device device(0);
        device.refuses = refuses;
        moe_edge_store * store = open_store(file, device, 1, 1, 1 << 20, MOE_EDGE_MISS_COPY, 20e9, 0.0, false, MOE_EDGE_DIRECT_IO);
        counters count;
        for (int32_t e = 0; e < EXPERTS; e++) {
            const uint8_t tier = e % TIERS;
            moe_edge_begin_step(store, MOE_EDGE_DECODE);
            moe_edge_apply(store, 0, &e, &tier, nullptr, 1);
            for (const int32_t k : KINDS) {
                if (!run_op(store, device, file, 0, k, { e }, count)) {
                    die(moe_edge_error(store));
                }
            }
        }
        device.wait(device.last);
        moe_edge_stats s;
        moe_edge_get_stats(store, &s);
        direct[refuses] = s.direct_io != 0;
        moe_edge_store_free(store);
        undirected = nullptr;
        if (count.wrong != 0 || count.rows != EXPERTS * 3) {
            die("wrong rows from direct reads");
        }
    }
    if (direct[true]) {
        die("direct reads into memory that refuses them");
    }
    printf("direct reads: %s, then refused by the host's memory\n", direct[false] ? "taken" : "none here");
}

// Only one prefetch copy runs at a time, whether its slice was read or found in the host cache.
void run_bounded(const expert_file & file) {
    table_device device(300);
    moe_edge_store * store = open_store(file, device, 2, 2, 2 << 20, MOE_EDGE_MISS_COPY);
    moe_edge_stats s = {};
    patience more;
    for (int32_t round = 0; round < 40 || device.n_ahead < 40 || s.host_hits[MOE_EDGE_DECODE] == 0; round++) {
        if (round >= 40) {
            more.wait(device.n_ahead < 40 ? "forty prefetch copies" : "a slice from the host cache");
        }
        moe_edge_begin_step(store, MOE_EDGE_DECODE);
        std::vector<moe_edge_prefetch_item> items;
        for (int32_t i = 0; i < 6; i++) {
            items.push_back({ (int16_t) (i % LAYERS), (int16_t) ((round + i) % EXPERTS), (uint8_t) (i % TIERS), 0, 0 });
        }
        moe_edge_prefetch(store, items.data(), items.size());
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        check(store);
        moe_edge_get_stats(store, &s);
    }
    moe_edge_store_free(store);
    const uint64_t bound = BYTES[0];
    if (device.most_ahead > bound) {
        die("prefetch copies: " + std::to_string(device.most_ahead) + " bytes at once, " + std::to_string(device.n_ahead.load()) + " in all");
    }
    printf("ahead: %llu bytes of %llu\n", (unsigned long long) device.most_ahead, (unsigned long long) bound);
}

// A device is lost during a step: one message, no hang, and the store can be freed.
void run_lost(const expert_file & file, int32_t misses) {
    table_device device(200);
    moe_edge_store * store = open_store(file, device, 2, 2, 0, misses);
    counters count;
    std::vector<int32_t> ids(EXPERTS);
    std::iota(ids.begin(), ids.end(), 0);
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    std::thread other([&] { device.lose("it fell off the bus"); });
    patience more;
    for (int i = 0;; i++) {
        if (i >= 1000) {
            more.wait("a step that detects the lost device");
        }
        moe_edge_apply(store, i % LAYERS, ids.data(), nullptr, nullptr, ids.size());
        if (!run_op(store, device, file, i % LAYERS, MOE_EDGE_UP, ids, count)) {
            break;
        }
    }
    other.join();
    const char * error = moe_edge_error(store);
    if (!error || !strstr(error, "fell off the bus")) {
        die(std::string("a lost device was not reported: ") + (error ? error : "no error"));
    }
    moe_edge_begin_step(store, MOE_EDGE_DECODE);
    if (!moe_edge_error(store) || run_op(store, device, file, 0, MOE_EDGE_UP, ids, count)) {
        die("a lost device works again");
    }
    moe_edge_store_free(store);
    printf("lost device: reported\n");
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 4) {
        die("usage: device_stress DIR STEPS SEED");
    }
    setvbuf(stdout, nullptr, _IOLBF, 0);  // if a later part hangs, the output shows the completed parts
    const expert_file file(argv[1]);
    const int32_t  steps = atoi(argv[2]);
    const unsigned seed  = atoi(argv[3]);
    run_steps(file, steps / 4, seed, 4, 3, 0, MOE_EDGE_MISS_COPY);
    run_steps(file, steps / 4, seed + 1, 1, 1, 300000, MOE_EDGE_MISS_COPY);
    run_steps(file, steps / 4, seed + 2, 2, 2, 60000, MOE_EDGE_MISS_COMPUTE);
    run_steps(file, steps - steps / 4 * 3, seed + 3, 2, 2, 300000, MOE_EDGE_MISS_COMPUTE);
    run_steps(file, steps / 8, seed + 4, 2, 3, 0, MOE_EDGE_MISS_COPY, true);
    run_steps(file.without_compute(0), steps / 4, seed + 5, 2, 2, 300000, MOE_EDGE_MISS_AUTO);
    run_places(file);
    run_reader_beside_load(file);
    run_undirected(file);
    run_fixed(file, std::max(40, steps / 50), seed);
    run_held(file);
    run_routed(file);
    run_bounded(file);
    run_lost(file, MOE_EDGE_MISS_COPY);
    run_lost(file, MOE_EDGE_MISS_COMPUTE);
    return 0;
}
