// The route node on a device: its inputs in host memory, the weights that come back, and one kernel of ours for the ids
// of all products of the layer.
//
//   route_test LIBRARY pinned|refused TIERS...     refused: the driver does not pin host memory

#include "feed_forward.h"

namespace {

void run_case(const gpu & g, const std::vector<const expert_weights *> & w, std::mt19937 & random, int64_t tokens, const std::string & how,
              const std::string & where) {
    layer l(g, w, false);
    const batch b(w[0]->s, tokens, 1, random);
    std::vector<int32_t> tier_of = decide(*w[0], random);
    if (how == "skipped") {
        std::fill(tier_of.begin(), tier_of.end(), SKIP);
    }
    l.set(tier_of);
    if (how == "other types") {
        int32_t & other = tier_of[b.ids[0]];
        other = other == 0 && w[0]->types.size() > 1 ? 1 : other == SKIP ? SKIP : 0;
        l.m[1]->set(tier_of);
    }
    test_route route(g.device, l.m);
    for (resident * r : l.m) {
        r->hooked  = b.distinct();
        r->missing = how == "missing" && r == l.m[2];
    }
    if (how == "late") {
        route.loads = [&] {
            for (resident * r : l.m) {
                r->copy_again(random);
            }
        };
    }
    feed_forward f(g, l.m, w, tokens, &route, how == "apart");
    for (int step = 0; step < 2; step++) {
        const uint64_t planned = g.launches("write_plan"), remapped = g.launches("remap_list"), glus = g.launches("unary_gated_op_kernel");
        f.run(b);
        check(f, w, l.m, b, where);
        expect(route.selected == b.ids, "wrong selection: " + where);
        std::vector<float> values(route.ahead.size());
        std::iota(values.begin(), values.end(), 1.0f);
        expect(route.ahead == values, "wrong logits of the look-ahead: " + where);
        values.resize(b.ids.size());
        expect(route.weights == values, "wrong weights: " + where);
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = l.m[0]->tier_of[b.ids[i]] == SKIP ? 0 : values[i];
        }
        expect(feed_forward::read(f.routed) == values, "the decision's weights did not return: " + where);
        const bool plans = tokens <= MOE_EDGE_PLAN_TOKENS && how != "missing";
        expect((l.m[0]->begun == 0) == plans, (plans ? "an op asks the store: " : "no op asks the store: ") + where);
        if (g.counts()) {
            expect(g.launches("write_plan") - planned == plans, "plans: " + where);
            expect((g.launches("remap_list") == remapped) == plans, "ids are remapped again: " + where);
            const bool floats = !ggml_is_quantized(w[0]->types[0]) || !ggml_is_quantized(w[0]->types.back());
            const bool fuses = plans && how != "apart" && how != "other types" && !floats;
            expect((g.launches("unary_gated_op_kernel") == glus) == fuses || !plans || how == "other types",
                   (fuses ? "not fused: " : "fused: ") + where);
        }
    }
}

// After a step that fails between the route node and its products, the next step does not use the old plan.
void test_failed(const gpu & g, const std::vector<const expert_weights *> & w, std::mt19937 & random) {
    layer l(g, w, false);
    l.set(std::vector<int32_t>(w[0]->s.experts, 0));
    const batch b(w[0]->s, 2, 1, random);
    test_route route(g.device, l.m);
    for (resident * r : l.m) {
        r->hooked = b.distinct();
    }
    feed_forward f(g, l.m, w, 2, &route);
    route.fails = true;
    f.run(b);
    expect(l.m[0]->begun == 1 && l.m[2]->begun == 1, "a plan without a decision");
    route.fails = false;
    f.run(b);
    check(f, w, l.m, b, "after a failed step");
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 4) {
        die("usage: route_test LIBRARY pinned|refused TIERS...");
    }
    const gpu g(argv[1]);
    if (std::string(argv[2]) == "refused") {
        g.limit_pinned(0);
    }
    std::mt19937 random(1);
    for (int i = 3; i < argc; i++) {
        const std::vector<ggml_type> types = parse_tiers(argv[i]);
        const shape in{ 512, 256, 6, 2 }, out{ 256, 96, 6, 2 };
        const expert_weights gate(in, types, random), up(in, types, random), down(out, types, random);
        const std::vector<const expert_weights *> w = { &gate, &up, &down };
        for (const int64_t tokens : { 1, 3, 7, 40 }) {
            for (const std::string how : { "present", "late", "apart", "other types", "missing", "skipped" }) {
                run_case(g, w, random, tokens, how, argv[i] + (", " + std::to_string(tokens)) + " tokens, " + how);
            }
        }
        test_failed(g, w, random);
        expect(downs.error <= 2 * NMSE_LIMIT * downs.power, "down: NMSE " + std::to_string(downs.error / downs.power));
        printf("%s: NMSE %.2e\n", argv[i], downs.error / downs.power);
        downs = {};
    }
    ggml_backend_free(g.backend);
    return 0;
}
