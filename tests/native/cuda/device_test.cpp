// Tests of the CUDA device's memory, copies and tickets.
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

// Reads back device memory through a tensor.
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
    constexpr int64_t SIZE = 64 << 20;  // smaller allocations may come from the driver's free memory
    constexpr int64_t STEP = 2 << 20;  // drivers allocate in steps of this size
    auto * memory = static_cast<char *>(g.device->alloc(SIZE));
    expect(memory && (uintptr_t) memory % 256 == 0, "no memory, or not aligned");
    g.device->memory(&less, &total);
    expect(less <= free - SIZE + STEP, "free memory did not shrink");
    for (const char c : window(g, 1 << 20).read(memory + SIZE - (1 << 20))) {
        expect(c == 0, "memory is not zeroed");
    }
    g.device->release(memory);
    expect(g.device->alloc(total * 2) == nullptr, "more memory than there is");
    expect(g.device->error().empty(), "a refused allocation is not a lost device: " + g.device->error());
    bool pinned = false;
    char * host = g.device->alloc_host(5000, &pinned);
    expect(host && (uintptr_t) host % 4096 == 0, "no host memory, or not aligned");
    g.device->release_host(host);
}

// Every copy waits for the previous one on the other lane, so the last copy's bytes stay. There are
// more copies than events for tickets.
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
        expect(g.device->passed(t), "a ticket has not passed, but a later one has");
    }
    for (const char c : window(g, SIZE).read(memory)) {
        expect(c == (COPIES - 1) % 64, "a copy did not wait for the one before it");
    }
    expect(g.device->passed(0), "ticket 0 must always have passed");
    g.device->release(memory);
    g.device->release_host(own);
}

// Threads copy to separate memory. Each must see its own bytes after its ticket has passed.
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
                expect(std::equal(got.begin(), got.end(), from), "the bytes of another copy");
            }
            g.device->release(memory);
            g.device->release_host(own);
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
}

// Copies from pageable memory must not block the caller.
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
    expect(ahead, "every copy blocked the caller");
    g.device->wait(last);
    expect(g.device->passed(last), "the wait for a ticket ended before it had passed");
    g.device->release(memory);
}

void test_refused_pin(const gpu & g) {
    if (!g.limit_pinned) {
        return;
    }
    g.limit_pinned(0);
    bool pinned = true;
    char * host = g.device->alloc_host(1 << 16, &pinned);
    expect(host && !pinned, "a refused pin must be reported, and pageable memory used");
    g.limit_pinned(UINT64_MAX);
    auto * memory = static_cast<char *>(g.device->alloc(1 << 16));
    memset(host, 3, 1 << 16);
    g.device->wait(g.device->copy(MOE_EDGE_LANE_PREFETCH, memory, host, 1 << 16, 0));
    for (const char c : window(g, 1 << 16).read(memory)) {
        expect(c == 3, "a copy from pageable memory is wrong");
    }
    g.device->release(memory);
    g.device->release_host(host);
    expect(g.device->error().empty(), "a refused pin is not a lost device: " + g.device->error());
}

// Host memory is pinned in pieces. If the driver refuses the second piece, the first one stays
// pinned. Copies from either piece and across their boundary must be correct.
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
        expect(host && pinned == !refused, "wrong result for two pieces; refused:  " + std::to_string(refused));
        for (const uint64_t at : { PIECE - 2 * SIZE, PIECE - SIZE / 2, PIECE + SIZE }) {
            for (uint64_t i = 0; i < SIZE; i++) {
                host[at + i] = (char) (i * 7 + at / SIZE);
            }
            g.device->wait(g.device->copy(MOE_EDGE_LANE_DEMAND, memory, host + at, SIZE, 0));
            const auto got = window(g, SIZE).read(memory);
            expect(std::equal(got.begin(), got.end(), host + at), "wrong bytes at the boundary of two pinned pieces");
        }
        g.device->release_host(host);
    }
    g.device->release(memory);
}

// A device that copies four times has the bytes of one copy, and has moved four times as many.
void test_copy_times(const gpu & g) {
    constexpr uint64_t SIZE = 1 << 16, TIMES = 4;
    auto * memory = static_cast<char *>(g.device->alloc(SIZE));
    bool pinned = false;
    char * own = g.device->alloc_host(SIZE, &pinned);
    const std::vector<char> plain(SIZE, 9);
    memset(own, 5, SIZE);
    g.device->copy_times = TIMES;
    for (const char * from : { static_cast<const char *>(own), plain.data() }) {
        const uint64_t before = g.bytes_in();
        g.device->wait(g.device->copy(MOE_EDGE_LANE_DEMAND, memory, from, SIZE, 0));
        expect(!g.counts() || g.bytes_in() - before == TIMES * SIZE, "a copy was not repeated");
        const auto got = window(g, SIZE).read(memory);
        expect(std::equal(got.begin(), got.end(), from), "a repeated copy has other bytes");
    }
    g.device->copy_times = 1;
    g.device->release(memory);
    g.device->release_host(own);
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
    test_copy_times(g);
    expect(g.device->error().empty(), g.device->error());
    printf("fine\n");
    return 0;
}
