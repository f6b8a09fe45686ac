// The CUDA device's memory, copies and tickets.
//
//   device_test LIBRARY

#include "gpu.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

namespace {

void expect(bool true_one, const std::string & sentence) {
    if (!true_one) {
        die(sentence);
    }
}

// Bytes on a device are read back through a tensor that lies there.
class window {
  public:
    window(const gpu & g, int64_t bytes) : g(g) {
        ggml_init_params params = { ggml_tensor_overhead(), nullptr, true };
        ctx    = ggml_init(params);
        tensor = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, bytes);
        buffer = ggml_backend_alloc_ctx_tensors(ctx, g.backend);
    }

    std::vector<char> read(const void * memory) {
        std::vector<char> bytes(ggml_nbytes(tensor));
        void * own = tensor->data;
        tensor->data = const_cast<void *>(memory);
        ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
        tensor->data = own;
        return bytes;
    }

    ~window() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

  private:
    const gpu & g;
    ggml_context * ctx;
    ggml_tensor * tensor;
    ggml_backend_buffer_t buffer;
};

void test_memory(const gpu & g) {
    uint64_t free = 0, total = 0, less = 0;
    g.device->memory(&free, &total);
    expect(total >= free && free > 0, "no memory");
    expect(!g.device->name().empty(), "no name");
    constexpr int64_t SIZE = 64 << 20;  // smaller pieces come from what the driver already has
    constexpr int64_t STEP = 2 << 20;   // in which drivers give memory
    auto * memory = static_cast<char *>(g.device->alloc(SIZE));
    expect(memory && (uintptr_t) memory % 256 == 0, "no memory, or not aligned");
    g.device->memory(&less, &total);
    expect(less <= free - SIZE + STEP, "free memory did not shrink");
    for (const char c : window(g, 1 << 20).read(memory + SIZE - (1 << 20))) {
        expect(c == 0, "memory is not zeroed");
    }
    g.device->release(memory);
    expect(g.device->alloc(total * 2) == nullptr, "more memory than there is");
    expect(g.device->error().empty(), "what does not fit is no loss: " + g.device->error());
    bool pinned = false;
    char * host = g.device->alloc_host(5000, &pinned);
    expect(host && (uintptr_t) host % 4096 == 0, "no host memory, or not aligned");
    g.device->release_host(host);
}

// Every copy waits for the one before it, on the other lane: the last one's bytes stay. Copies
// outnumber the events behind tickets.
void test_order(const gpu & g, bool pinned) {
    constexpr int64_t SIZE = 4096;
    constexpr int COPIES = 1200;
    auto * memory = static_cast<char *>(g.device->alloc(SIZE));
    bool is_pinned = false;
    char * own = g.device->alloc_host(SIZE * 64, &is_pinned);
    std::vector<char> plain(SIZE * 64);
    char * from = pinned ? own : plain.data();
    for (int i = 0; i < 64; i++) {
        memset(from + i * SIZE, i, SIZE);
    }
    std::mt19937 random(1);
    moe_edge_ticket last[MOE_EDGE_N_LANES] = {}, latest = 0;
    std::vector<moe_edge_ticket> all;
    for (int i = 0; i < COPIES; i++) {
        const int lane = random() % MOE_EDGE_N_LANES;
        const moe_edge_ticket t = g.device->copy(lane, memory, from + i % 64 * SIZE, SIZE, latest);
        expect(t > last[lane], "tickets of a lane must grow");
        last[lane] = latest = t;
        all.push_back(t);
        if (i % 100 == 99) {
            g.device->wait(all[random() % all.size()]);
        }
    }
    g.device->wait(latest);
    for (const moe_edge_ticket t : all) {
        expect(g.device->passed(t), "a ticket before one that has passed");
    }
    for (const char c : window(g, SIZE).read(memory)) {
        expect(c == (COPIES - 1) % 64, "a copy did not wait for the one before it");
    }
    expect(g.device->passed(0), "0 has always passed");
    g.device->release(memory);
    g.device->release_host(own);
}

// Threads copy to places of their own, and each sees its own bytes behind its ticket.
void test_threads(const gpu & g) {
    constexpr int64_t SIZE = 1024;
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; n++) {
        threads.emplace_back([&g, n] {
            auto * memory = static_cast<char *>(g.device->alloc(SIZE));
            bool pinned = false;
            char * own = g.device->alloc_host(SIZE, &pinned);
            std::vector<char> plain(SIZE);
            window w(g, SIZE);
            moe_edge_ticket before = 0;
            for (int i = 0; i < 60; i++) {
                char * from = i % 3 ? own : plain.data();
                memset(from, n * 60 + i, SIZE);
                before = g.device->copy(i % MOE_EDGE_N_LANES, memory, from, SIZE, before);
                g.device->wait(before);
                const auto got = w.read(memory);
                expect(std::equal(got.begin(), got.end(), from), "bytes of another copy");
            }
            g.device->release(memory);
            g.device->release_host(own);
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
}

// Copies from memory that is not pinned must not hold up who asks for them.
void test_pageable_returns(const gpu & g) {
    constexpr int64_t SIZE = 1 << 20;
    auto * memory = static_cast<char *>(g.device->alloc(SIZE));
    std::vector<char> plain(SIZE, 7);
    moe_edge_ticket last = 0;
    bool ahead = false;
    for (int i = 0; i < 50; i++) {
        last  = g.device->copy(MOE_EDGE_LANE_DEMAND, memory, plain.data(), SIZE, 0);
        ahead = ahead || !g.device->passed(last);
    }
    expect(ahead, "every copy had ended when it was asked for");
    g.device->wait(last);
    expect(g.device->passed(last), "waiting for a ticket ends before it has passed");
    g.device->release(memory);
}

void test_refused_pin(const gpu & g) {
    if (!g.limit_pinned) {
        return;
    }
    g.limit_pinned(0);
    bool pinned = true;
    char * host = g.device->alloc_host(1 << 16, &pinned);
    expect(host && !pinned, "a refused pin must be told, and pageable memory taken");
    g.limit_pinned(UINT64_MAX);
    auto * memory = static_cast<char *>(g.device->alloc(1 << 16));
    memset(host, 3, 1 << 16);
    g.device->wait(g.device->copy(MOE_EDGE_LANE_PREFETCH, memory, host, 1 << 16, 0));
    for (const char c : window(g, 1 << 16).read(memory)) {
        expect(c == 3, "a copy from pageable memory");
    }
    g.device->release(memory);
    g.device->release_host(host);
    expect(g.device->error().empty(), "a refused pin is no loss: " + g.device->error());
}

// Host memory is pinned piece by piece: where the second one is refused the first stays pinned, and
// copies from either, and from where they meet, bring their bytes.
void test_pinned_in_pieces(const gpu & g) {
    constexpr uint64_t PIECE = 1ull << 30, SIZE = 1 << 20;
    auto * memory = static_cast<char *>(g.device->alloc(SIZE));
    for (const bool refused : { false, true }) {
        if (refused && !g.refuse_pin) {
            continue;
        }
        if (refused) {
            g.refuse_pin(2);
        }
        bool pinned = !refused;
        char * host = g.device->alloc_host(2 * PIECE, &pinned);
        expect(host && pinned == !refused, "two pieces, of which the driver refused " + std::to_string(refused));
        for (const uint64_t at : { PIECE - 2 * SIZE, PIECE - SIZE / 2, PIECE + SIZE }) {
            for (uint64_t i = 0; i < SIZE; i++) {
                host[at + i] = (char) (i * 7 + at / SIZE);
            }
            g.device->wait(g.device->copy(MOE_EDGE_LANE_DEMAND, memory, host + at, SIZE, 0));
            const auto got = window(g, SIZE).read(memory);
            expect(std::equal(got.begin(), got.end(), host + at), "bytes from where pieces of pinned memory meet");
        }
        g.device->release_host(host);
    }
    g.device->release(memory);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        die("usage: device_test LIBRARY");
    }
    const gpu g(argv[1]);
    test_memory(g);
    test_order(g, true);
    test_order(g, false);
    test_threads(g);
    test_pageable_returns(g);
    test_refused_pin(g);
    test_pinned_in_pieces(g);
    expect(g.device->error().empty(), g.device->error());
    printf("fine\n");
    return 0;
}
