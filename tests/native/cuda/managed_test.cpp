// The CUDA executor on experts of several types, with a store for this test. The store reads from
// host memory, evicts at random, and fills every freed slot with NaN before it loads another
// expert. A kernel that reads too early or too late therefore gives a wrong row.
//
//   managed_test LIBRARY types TIERS...          TIERS is for example q4_K+q2_K; batches of 1 to 512
//   managed_test LIBRARY wide TIERS...           8 of 128 experts, 2,048 columns
//   managed_test LIBRARY far TIERS...            slots more than 4 GiB apart
//   managed_test LIBRARY random STEPS TIERS...   random swaps, computing and skips
//   managed_test LIBRARY random STEPS TIERS --break load|reuse
//     load: the executor does not wait for a copy; reuse: a copy does not wait for readers

#include "gpu.h"

#include "moe-edge-table.h"
#include "moe-edge-workers.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

namespace {

constexpr uint64_t PAGE = 4096;
constexpr uint64_t FAR  = 4400ull << 20;

// A whole number of blocks, including the bytes that kernels may read past the end of the last row.
uint64_t slot_bytes(ggml_type type, uint64_t expert_bytes, int64_t n_in) {
    const uint64_t unit = ggml_is_quantized(type) ? ggml_type_size(type) : 256;
    const uint64_t past = ggml_is_quantized(type) && n_in % 512 ? ggml_row_size(type, 512 - n_in % 512) : 0;
    return (expert_bytes + past + unit - 1) / unit * unit;
}

enum class broken { nothing, load, reuse };

struct settings {
    int32_t slots = 8;  // of each tier
    bool    pageable = false;  // copies from pageable memory
    bool    in_place = false;  // some experts are used in place, in host memory
    bool    all_at_once = false;  // next() returns all experts that fit, not only some
    bool    far = false;  // the second half of a tier's slots is FAR after the first
    broken  how = broken::nothing;
};

// Experts of one matrix on a device.
class fake_store {
  public:
    fake_store(moe_edge_device * device, const expert_weights & w, const settings & set, std::mt19937 & random)
        : device(device), w(w), set(set), random(random) {
        matrix.ops    = &operations;
        matrix.device = device;
        matrix.table.resize(w.s.experts);
        matrix.store = reinterpret_cast<moe_edge_store *>(this);
        uint64_t bytes = 0, host_bytes = 0;
        for (size_t t = 0; t < w.types.size(); t++) {
            matrix.types.push_back(w.types[t]);
            step.push_back(slot_bytes(w.types[t], w.expert_bytes(t), w.s.n_in));
            start.push_back(bytes);
            host_start.push_back(host_bytes);
            gap.push_back(set.far ? FAR / step[t] * step[t] : 0);
            bytes += (step[t] * set.slots + gap[t] + 255) / 256 * 256;
            host_bytes += (step[t] * w.s.experts + PAGE - 1) / PAGE * PAGE;
            most = std::max(most, step[t]);
        }
        host_start.push_back(host_bytes);
        memory = static_cast<char *>(device->alloc(bytes));
        bool pinned = false;
        host = device->alloc_host(host_bytes + most, &pinned);
        if (!memory || !host) {
            die("no memory for the store");
        }
        printf("%s", pinned ? "" : "host memory could not be pinned\n");
        memset(host, 0, host_bytes);
        memset(host + host_bytes, 0xff, most);
        for (size_t t = 0; t < w.types.size(); t++) {
            matrix.base.push_back(memory + start[t]);
            for (int32_t e = 0; e < w.s.experts; e++) {
                memcpy(host + host_start[t] + e * step[t], &w.bytes[t][e * w.expert_bytes(t)], w.expert_bytes(t));
            }
            slots.emplace_back(set.slots);
        }
        if (set.pageable) {
            plain.assign(host, host + host_bytes + most);
        }
        where.assign(w.s.experts * w.types.size(), -1);
    }

    ~fake_store() {
        for (auto & tier : slots) {
            for (slot & s : tier) {
                device->wait(s.loaded);
                device->wait(s.after);
            }
        }
        device->release(memory);
        device->release_host(host);
    }

    moe_edge_matrix matrix;
    std::vector<int32_t> tier_of;  // the decision: a tier, or SKIP
    bool few = true;  // few tokens: with more, no expert is used in place
    uint64_t loads = 0, hits = 0, skips = 0, hosted = 0;

  private:
    struct slot {
        int32_t expert = -1;
        bool    pinned = false;
        moe_edge_ticket loaded = 0, after = 0;
    };

    static fake_store & of(moe_edge_matrix * m) { return *reinterpret_cast<fake_store *>(m->store); }

    int32_t & slot_of(int32_t expert, int32_t tier) { return where[expert * w.types.size() + tier]; }

    const char * source(int32_t expert, int32_t tier) const {
        return (set.pageable ? plain.data() : host) + host_start[tier] + expert * step[tier];
    }

    char * place(int32_t tier, int32_t slot) const {
        return memory + start[tier] + slot * step[tier] + (slot >= set.slots / 2 ? gap[tier] : 0);
    }

    void begin(const int32_t * experts, int32_t n) {
        for (int32_t i = 0; i < n; i++) {
            const int32_t e = experts[i], t = tier_of[e];
            asked.push_back(e);
            if (t != SKIP && slot_of(e, t) >= 0) {
                slots[t][slot_of(e, t)].pinned = true;  // a hit stays in its slot
            }
        }
        std::shuffle(asked.begin(), asked.end(), random);
    }

    // `release` frees pinned slots, so an expert always fits eventually.
    int32_t next(moe_edge_ready * out) {
        int32_t n = 0;
        std::vector<int32_t> later;
        const bool all = set.all_at_once || random() % 2;
        for (const int32_t e : asked) {
            if ((n > 0 && !all && random() % 2) || !ready(e, out[n])) {
                later.push_back(e);
            } else {
                n++;
            }
        }
        asked = later;
        if (n == 0) {
            die("the executor requests more experts without a release");
        }
        return n;
    }

    bool ready(int32_t e, moe_edge_ready & out) {
        const int32_t t = tier_of[e];
        out = { nullptr, e, t == SKIP ? -1 : w.types[t], 0 };
        if (t == SKIP) {
            skips++;
            return true;
        }
        if (set.in_place && few && slot_of(e, t) < 0 && random() % 2) {
            out.data  = source(e, t);
            out.place = MOE_EDGE_MISS_COMPUTE;
            hosted++;
            return true;
        }
        const bool hit = slot_of(e, t) >= 0;
        const int32_t at = hit ? slot_of(e, t) : load(e, t);
        if (at < 0) {
            return false;
        }
        (hit ? hits : loads)++;
        slot & s = slots[t][at];
        s.pinned = true;
        out.data   = place(t, at);
        out.ticket = set.how == broken::load ? 0 : s.loaded;
        return true;
    }

    // Copies NaN and then the expert into an unused slot, on random lanes. Returns the slot, or -1
    // if all are in use.
    int32_t load(int32_t e, int32_t t) {
        std::vector<int32_t> free;
        for (int32_t i = 0; i < set.slots; i++) {
            if (!slots[t][i].pinned) {
                free.push_back(i);
            }
        }
        if (free.empty()) {
            return -1;
        }
        const int32_t at = free[random() % free.size()];
        slot & s = slots[t][at];
        if (s.expert >= 0) {
            slot_of(s.expert, t) = -1;
        }
        s.expert = e;
        slot_of(e, t) = at;
        const char * nans = (set.pageable ? plain.data() : host) + host_start.back();
        char * to = place(t, at);
        const moe_edge_ticket after = set.how == broken::reuse ? 0 : s.after;
        const moe_edge_ticket wiped = device->copy(random() % MOE_EDGE_N_LANES, to, nans, w.expert_bytes(t), after);
        s.loaded = device->copy(random() % MOE_EDGE_N_LANES, to, source(e, t), w.expert_bytes(t), wiped);
        if (s.loaded == 0) {
            die("a copy failed: " + device->error());
        }
        return at;
    }

    void release(const moe_edge_ready * ready, int32_t n, moe_edge_ticket after) {
        for (int32_t i = 0; i < n; i++) {
            const int32_t t = tier_of[ready[i].expert];
            const auto * data = static_cast<const char *>(ready[i].data);
            if (t == SKIP || data < memory + start[t] || data > place(t, set.slots - 1)) {
                continue;
            }
            slot & s = slots[t][slot_of(ready[i].expert, t)];
            s.pinned = false;
            s.after  = std::max(s.after, after);
        }
    }

    moe_edge_device * device;
    const expert_weights & w;
    const settings set;
    std::mt19937 & random;
    std::vector<uint64_t> step, gap, start, host_start;  // by tier, bytes
    uint64_t most = 0;
    char * memory = nullptr;
    char * host = nullptr;
    std::vector<char> plain;
    std::vector<std::vector<slot>> slots;
    std::vector<int32_t> where;  // [experts, tiers] slot, -1: absent
    std::vector<int32_t> asked;  // requested, and not ready yet

    static const moe_edge_ops operations;
};

const moe_edge_ops fake_store::operations = {
    [](moe_edge_matrix * m, const int32_t * experts, int32_t n) { of(m).begin(experts, n); },
    [](moe_edge_matrix * m, moe_edge_ready * out) { return of(m).next(out); },
    [](moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after) { of(m).release(ready, n, after); },
    nullptr,  // wait is for executors on the host
    [](moe_edge_matrix *) { return false; },
    nullptr,  // no hook either
    [](moe_edge_matrix *, int32_t *) { return -1; },  // no hook: the executor reads the ids
    [](moe_edge_matrix *, const std::vector<moe_edge_product> & products, uint64_t) {
        static moe_edge_workers workers(2);
        workers.multiply(products);
    },
    [](moe_edge_matrix *, int32_t, uint64_t) {},
};

// A managed tensor and its ops, cached by their shapes.
class managed {
  public:
    managed(const gpu & g, const expert_weights & w, moe_edge_matrix & matrix) : g(g), w(w) {
        ggml_init_params params = { ggml_tensor_overhead(), nullptr, true };
        ctx     = ggml_init(params);
        weights = ggml_new_tensor_3d(ctx, w.types[0], w.s.n_in, w.s.n_out, w.s.experts);
        buffer  = ggml_backend_alloc_ctx_tensors_from_buft(ctx, g.placeholders);
        if (ggml_backend_buffer_get_size(buffer) > PAGE) {
            die("a placeholder takes memory");
        }
        weights->extra = &matrix;
    }

    ~managed() {
        ops.clear();
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    std::vector<float> run(const batch & b) {
        auto & o = ops[{ b.tokens, b.x_slots }];
        if (!o) {
            o = std::make_unique<op>(g.backend, weights, w.s.used, b.x_slots, b.tokens);
        }
        return o->run(b);
    }

  private:
    const gpu & g;
    const expert_weights & w;
    ggml_context * ctx;
    ggml_tensor * weights;
    ggml_backend_buffer_t buffer;
    std::map<std::pair<int64_t, int64_t>, std::unique_ptr<op>> ops;
};

std::vector<int32_t> decide(const expert_weights & w, std::mt19937 & random) {
    std::vector<int32_t> tier_of(w.s.experts);
    for (int32_t & t : tier_of) {
        const size_t pick = random() % (w.types.size() * 2 + 1);
        t = pick == w.types.size() * 2 ? SKIP : static_cast<int32_t>(pick / 2);
    }
    return tier_of;
}

void test_types(const gpu & g, const std::string & tiers, std::mt19937 & random) {
    struct trial { int64_t tokens, x_slots; };
    int n = 0;
    double worst = 0;
    for (const shape & s : { shape{ 512, 128, 8, 2 }, shape{ 768, 72, 6, 3 } }) {
        const expert_weights w(s, parse_tiers(tiers), random);
        std::vector<trial> trials = { { s.used == 2 ? 512 : 200, s.used == 2 ? 1 : s.used } };
        for (const int64_t tokens : { 1, 2, 3, 5, 8, 9, 40 }) {
            trials.push_back({ tokens, 1 });
            trials.push_back({ tokens, s.used });
        }
        for (const trial & t : trials) {
            settings set;
            set.slots = n % 2 ? 4 : 8;
            fake_store store(g.device, w, set, random);
            managed m(g, w, store.matrix);
            const batch b(s, t.tokens, t.x_slots, random);
            store.tier_of = decide(w, random);
            const std::string where = tiers + ", " + std::to_string(s.n_in) + " columns, " + std::to_string(t.tokens) + " tokens, " + std::to_string(set.slots) + " slots";
            comparison all;
            all.add(w, b, store.tier_of, m.run(b), where);
            worst = std::max(worst, all.nmse(where));
            n++;
        }
    }
    printf("%s: %d cases, worst NMSE %.2e\n", tiers.c_str(), n, worst);
}

// Some batches of one shape, with one tier for each expert.
void test_shape(const gpu & g, const std::string & tiers, const shape & s, bool far, std::mt19937 & random) {
    const expert_weights w(s, parse_tiers(tiers), random);
    uint64_t free = 0, total = 0;
    g.device->memory(&free, &total);
    if (far && free < (w.types.size() + 1) * FAR) {
        printf("%s: this GPU is too small for slots that far apart\n", tiers.c_str());
        return;
    }
    comparison all;
    for (const int64_t tokens : { 1, 8, 24 }) {
        settings set;
        set.slots = s.experts;
        set.far   = far;
        fake_store store(g.device, w, set, random);
        managed m(g, w, store.matrix);
        store.tier_of = decide(w, random);
        const std::string where = tiers + ", " + std::to_string(tokens) + " tokens" + (far ? ", far" : "");
        for (int i = 0; i < 2; i++) {  // the second time, experts are resident
            const batch b(s, tokens, 1, random);
            all.add(w, b, store.tier_of, m.run(b), where);
        }
    }
    printf("%s: worst NMSE %.2e\n", tiers.c_str(), all.nmse(tiers));
}

void test_random(const gpu & g, int steps, const std::string & tiers, broken how, std::mt19937 & random) {
    const shape s{ 256, 32, 8, 2 };
    const expert_weights w(s, parse_tiers(tiers), random);
    comparison all;
    uint64_t loads = 0, hits = 0, skips = 0, hosted = 0;
    int done = 0;
    for (int round = 0; done < steps; round++) {
        settings set;
        set.slots       = 2 + round % 4;
        set.pageable    = round % 3 == 1;
        set.in_place    = round % 3 != 0;
        set.all_at_once = round % 2;
        set.how         = how;
        fake_store store(g.device, w, set, random);
        managed m(g, w, store.matrix);
        store.tier_of = decide(w, random);
        for (int i = 0; i < 250 && done < steps; i++, done++) {
            if (random() % 4 == 0) {
                store.tier_of = decide(w, random);
            }
            const int64_t tokens = random() % 16 ? 1 + random() % 4 : 1 + random() % 40;
            const batch b(s, tokens, random() % 2 ? 1 : s.used, random);
            const std::string where = tiers + ", step " + std::to_string(done) + ", " + std::to_string(tokens) + " tokens, " + std::to_string(set.slots) + " slots";
            store.few = tokens <= MOE_EDGE_IN_PLACE_TOKENS;
            all.add(w, b, store.tier_of, m.run(b), where);
        }
        loads += store.loads;
        hits += store.hits;
        skips += store.skips;
        hosted += store.hosted;
    }
    if (done >= 600 && hosted == 0) {
        die("the host computed nothing");
    }
    printf("%s: %d steps, no wrong row: NMSE %.2e, %llu loads, %llu hits, %llu skips, %llu computed on the host\n",
        tiers.c_str(), done, all.nmse(tiers), (unsigned long long) loads, (unsigned long long) hits, (unsigned long long) skips,
        (unsigned long long) hosted);
}

}  // namespace

int main(int argc, char ** argv) {
    const std::vector<std::string> args(argv, argv + argc);
    if (argc < 4 || (args[2] == "random" && argc < 5)) {
        die("usage: managed_test LIBRARY types|wide|far TIERS... | random STEPS TIERS... [--break load|reuse]");
    }
    const gpu g(argv[1]);
    std::mt19937 random(1);
    broken how = broken::nothing;
    size_t end = args.size();
    if (args[end - 2] == "--break") {
        how = args[end - 1] == "load" ? broken::load : broken::reuse;
        end -= 2;
    }
    for (size_t i = args[2] == "random" ? 4 : 3; i < end; i++) {
        if (args[2] == "types") {
            test_types(g, args[i], random);
        } else if (args[2] == "wide") {
            test_shape(g, args[i], { 2048, 64, 128, 8 }, false, random);
        } else if (args[2] == "far") {
            test_shape(g, args[i], { 512, 64, 8, 2 }, true, random);
        } else {
            test_random(g, std::stoi(args[3]), args[i], how, random);
        }
    }
    ggml_backend_free(g.backend);
    return 0;
}
