// Lifetimes: backends in sequence, graphs and the pool that they point into, and tables that change
// while other work runs.
//
//   lifetime_test LIBRARY TIERS

#include "feed_forward.h"

#include <atomic>
#include <thread>

namespace {

using weights = std::vector<const expert_weights *>;

void run(const gpu & g, const weights & w, layer & l, feed_forward & f, int64_t tokens, std::mt19937 & random, const std::string & where) {
    g.device->step_boundary(l.matrices.data(), l.matrices.size(), true);
    const batch b(w[0]->s, tokens, 1, random);
    f.run(b);
    check(f, w, l.m, b, where);
}

uint64_t free_bytes(const gpu & g) {
    uint64_t free = 0, total = 0;
    g.device->memory(&free, &total);
    return free;
}

// Creates more backends in sequence than a device has lanes. Each has its own pool with the
// expected scratch.
void test_backends_in_sequence(gpu & g, const weights & w, std::mt19937 & random) {
    constexpr int64_t PIECE = 64 << 20;
    layer l(g, w, false);
    l.set(std::vector<int32_t>(w[0]->s.experts, 0));
    g.device->expect_scratch(PIECE);
    for (int i = 0; i < 20; i++) {
        const uint64_t before = free_bytes(g);
        feed_forward f(g, l.m, w, 2);
        const batch b(w[0]->s, 2, 1, random);
        f.run(b);  // exits if a read slot is released without a ticket
        check(f, w, l.m, b, "backend " + std::to_string(i));
        expect(free_bytes(g) + PIECE <= before, "the pool of backend " + std::to_string(i) + " lacks the expected scratch");
        g.renew();
    }
    g.device->expect_scratch(0);
}

// Fills the device, so that the pool frees memory that a captured graph points to.
void test_graphs_go_with_the_pool(const gpu & g, const weights & w, std::mt19937 & random) {
    constexpr int64_t MIB = 1 << 20;
    layer l(g, w, true);
    l.set(std::vector<int32_t>(w[0]->s.experts, 0));
    feed_forward f(g, l.m, w, 1);
    g.device->expect_scratch(64 * MIB);
    for (int i = 0; i < 4; i++) {
        run(g, w, l, f, 1, random, "step " + std::to_string(i) + " before");
    }
    const uint64_t left = 32 * MIB;
    void * hog = g.device->alloc(free_bytes(g) - left);
    expect(hog, "no memory to fill the device with");
    {
        layer other(g, w, false);
        other.set(std::vector<int32_t>(w[0]->s.experts, 0));
        feed_forward eager(g, other.m, w, 3);
        g.device->expect_scratch(72 * MIB);
        const batch b(w[0]->s, 3, 1, random);
        eager.run(b);
    }
    for (int i = 0; i < 4; i++) {
        run(g, w, l, f, 1, random, "step " + std::to_string(i) + " after");
    }
    g.device->release(hog);
    g.device->expect_scratch(0);
}

// Copies run in both lanes all the time, and every expert changes its tier in each step.
void test_replays_under_load(const gpu & g, const weights & w, std::mt19937 & random) {
    constexpr uint64_t BYTES = 1 << 16;
    layer l(g, w, true);
    feed_forward f(g, l.m, w, 1);
    std::atomic<bool> over { false };
    std::thread load([&] {
        void * to = g.device->alloc(BYTES);
        bool pinned = false;
        char * from = g.device->alloc_host(BYTES, &pinned);
        moe_edge_ticket last = 0;
        for (int i = 0; !over; i++) {
            last = g.device->copy(i % MOE_EDGE_N_LANES, to, from, BYTES, last);
            if (i % 8 == 7) {
                g.device->wait(last);
            }
        }
        g.device->wait(last);
        g.device->release(to);
        g.device->release_host(from);
    });
    const uint64_t graphs = g.launches("cudaGraphLaunch");
    for (int i = 0; i < 60; i++) {
        l.set(decide(*w[0], random));
        run(g, w, l, f, 1, random, "replay " + std::to_string(i) + " under load");
    }
    over = true;
    load.join();
    expect(!g.counts() || g.launches("cudaGraphLaunch") > graphs + 40, "graphs were not replayed");
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        die("usage: lifetime_test LIBRARY TIERS");
    }
    gpu g(argv[1]);
    std::mt19937 random(1);
    const std::vector<ggml_type> types = parse_tiers(argv[2]);
    const shape in{ 512, 256, 6, 2 }, out{ 256, 96, 6, 2 };
    const expert_weights gate(in, types, random), up(in, types, random), down(out, types, random);
    const weights w = { &gate, &up, &down };
    test_backends_in_sequence(g, w, random);
    test_graphs_go_with_the_pool(g, w, random);
    test_replays_under_load(g, w, random);
    expect(g.device->error().empty(), g.device->error());
    ggml_backend_free(g.backend);
    printf("fine\n");
    return 0;
}
