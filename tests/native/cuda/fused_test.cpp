// gate, up and their GLU on the CUDA executor: fused into one launch if gate and up of every expert
// have the same type and are resident. Also tables that stay on the device for a step.
//
//   fused_test LIBRARY TIERS...     TIERS is for example q4_K+q2_K

#include "feed_forward.h"

namespace {

// Checks the calls of the store, and that a launch is fused whenever it can be.
void test_asked(const gpu & g, const std::vector<const expert_weights *> & w, std::mt19937 & random, const std::string & tiers) {
    const std::vector<int32_t> high(w[0]->s.experts, 0);
    std::vector<int32_t> one_differs = high;
    for (const int64_t tokens : { 1, 3, 8, 9, 40 }) {
        for (const std::string how : { "same", "hooked", "other", "late", "hosted", "one hosted" }) {
            if (tokens > MOE_EDGE_IN_PLACE_TOKENS && (how == "hosted" || how == "one hosted")) {
                continue;
            }
            std::vector<std::unique_ptr<resident>> own;
            std::vector<resident *> m;
            for (size_t i = 0; i < 3; i++) {
                own.push_back(std::make_unique<resident>(g.device, *w[i], i == 0 ? MOE_EDGE_GATE : i == 1 ? MOE_EDGE_UP : MOE_EDGE_DOWN));
                m.push_back(own.back().get());
            }
            const batch b(w[0]->s, tokens, 1, random);
            std::vector<int32_t> tier_of = decide(*w[0], random);
            m[0]->set(tier_of);
            m[2]->set(tier_of);
            int32_t & other = tier_of[b.ids[0]];
            if (how == "other") {
                other = other == SKIP ? 0 : other == 0 && w[0]->types.size() > 1 ? 1 : SKIP;
            }
            m[1]->set(tier_of);
            m[1]->late = how == "late";
            m[0]->odd = m[2]->odd = how == "hosted" ? MOE_EDGE_MISS_COMPUTE : MOE_EDGE_MISS_COPY;
            m[1]->odd = how == "one hosted" ? MOE_EDGE_MISS_COMPUTE : m[0]->odd;
            const auto routed = b.distinct();
            const bool hosted = m[1]->odd == MOE_EDGE_MISS_COMPUTE && std::any_of(routed.begin(), routed.end(),
                [&](int32_t e) { return e % 2 && tier_of[e] != SKIP; });
            for (resident * r : m) {
                r->hooked = how == "hooked" ? b.distinct() : std::vector<int32_t>();
            }
            const std::string where = tiers + ", " + std::to_string(tokens) + " tokens, " + how;
            feed_forward f(g, m, w, tokens);
            const counted before(g);
            f.run(b);
            check(f, w, m, b, where);
            expect(!g.counts() || (counted(g).reads == before.reads) == (how == "hooked"), "ids read back: " + where);
            expect(m[0]->begun == 1 && m[1]->begun == 1 && m[2]->begun == 1, "every product must call the store once: " + where);
            if (g.counts()) {
                const bool can = tokens <= 8 && how != "other" && how != "late" && !hosted && ggml_is_quantized(w[0]->types[0]) && ggml_is_quantized(w[0]->types.back());
                const bool was = counted(g).glus == before.glus;
                // with one expert, a late one makes no difference
                expect(was == can || (how == "late" && b.distinct().size() == 1), (can ? "not fused: " : "fused: ") + where);
            }
        }
    }
}

// Static tables on the device: the store is called at step boundaries only. Also with CUDA graphs.
void test_fixed(const gpu & g, const std::vector<const expert_weights *> & w, std::mt19937 & random, const std::string & tiers) {
    for (const int64_t tokens : { 1, 2, 8, 40 }) {
        std::vector<std::unique_ptr<resident>> own;
        std::vector<resident *> m;
        std::vector<moe_edge_matrix *> all;
        for (size_t i = 0; i < 3; i++) {
            own.push_back(std::make_unique<resident>(g.device, *w[i], i == 0 ? MOE_EDGE_GATE : i == 1 ? MOE_EDGE_UP : MOE_EDGE_DOWN));
            m.push_back(own.back().get());
            m[i]->fixed = true;
            all.push_back(&m[i]->matrix);
        }
        feed_forward f(g, m, w, tokens);
        std::vector<uint32_t> routed(w[0]->s.experts), counts(w[0]->s.experts);
        moe_edge_matrix * down = all[2];
        expect(!g.device->counts(&down, 1, counts.data()), "counts without a table");
        const counted before(g);
        for (int step = 0; step < 6; step++) {
            if (step % 2 == 0) {
                const auto tier_of = decide(*w[0], random);
                for (resident * r : m) {
                    r->set(tier_of);
                }
            }
            g.device->step_boundary(all.data(), all.size(), true);
            const batch b(w[0]->s, tokens, 1, random);
            f.run(b);
            const std::string where = tiers + ", " + std::to_string(tokens) + " tokens, step " + std::to_string(step) + " of tables on the device";
            check(f, w, m, b, where);
            for (const int32_t e : b.ids) {
                routed[e]++;
            }
        }
        for (resident * r : m) {
            expect(r->begun == 0, "an op calls the store although its table is on the device");
        }
        expect(g.device->counts(&down, 1, counts.data()), "no counts");
        expect(counts == routed, "counts of routed tokens differ");
        std::fill(counts.begin(), counts.end(), 0);
        g.device->counts(&down, 1, counts.data());
        expect(counts == std::vector<uint32_t>(counts.size()), "counts are not reset after they were read");
        if (g.counts()) {
            expect(counted(g).graphs > before.graphs, "no CUDA graph ran");
        }

        // if a table has no base addresses, ops call the store, and still count
        std::vector<const char *> base;
        base.swap(m[2]->matrix.base);
        m[2]->matrix.base.resize(base.size());
        m[2]->matrix.version++;
        g.device->step_boundary(all.data(), all.size(), true);
        const batch more(w[0]->s, tokens, 1, random);
        f.run(more);
        check(f, w, m, more, tiers + ", no base");
        expect(m[2]->begun == 1, "down must call the store");
        std::fill(routed.begin(), routed.end(), 0);
        for (const int32_t e : more.ids) {
            routed[e]++;
        }
        std::fill(counts.begin(), counts.end(), 0);
        g.device->counts(&down, 1, counts.data());
        expect(counts == routed, "counts of ops that called the store differ");
        base.swap(m[2]->matrix.base);
        m[2]->matrix.version++;
        m[2]->begun = 0;

        // with different tables and no longer static, gate and up call the store
        auto tier_of = m[0]->tier_of;
        tier_of[0] = tier_of[0] == SKIP ? 0 : SKIP;
        m[1]->set(tier_of);
        g.device->step_boundary(all.data(), all.size(), true);
        batch b(w[0]->s, tokens, 1, random);
        f.run(b);
        check(f, w, m, b, tiers + ", different tiers of gate and up");
        expect(m[0]->begun == 1 && m[1]->begun == 1 && m[2]->begun == 0, "gate and up must call the store, down must not");
        for (resident * r : m) {
            r->fixed = false;
        }
        g.device->step_boundary(all.data(), all.size(), false);
        f.run(b);
        check(f, w, m, b, tiers + ", no longer static");
        expect(m[2]->begun == 1, "down must call the store");
    }
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 3) {
        die("usage: fused_test LIBRARY TIERS...");
    }
    const gpu g(argv[1]);
    std::mt19937 random(1);
    for (int i = 2; i < argc; i++) {
        const std::vector<ggml_type> types = parse_tiers(argv[i]);
        const shape in{ 512, 256, 6, 2 }, out{ 256, 96, 6, 2 };
        const expert_weights gate(in, types, random), up(in, types, random), down(out, types, random);
        const std::vector<const expert_weights *> w = { &gate, &up, &down };
        test_asked(g, w, random, argv[i]);
        test_fixed(g, w, random, argv[i]);
        // GLUs have more outliers than other test data
        expect(downs.error <= 2 * NMSE_LIMIT * downs.power, "down: NMSE " + std::to_string(downs.error / downs.power));
        printf("%s: NMSE %.2e\n", argv[i], downs.error / downs.power);
        downs = {};
    }
    ggml_backend_free(g.backend);
    return 0;
}
