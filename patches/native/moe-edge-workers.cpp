#include "moe-edge-workers.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>

namespace {

constexpr int64_t UNIT_ROWS = 32;  // of weights: what a thread takes at once

}  // namespace

moe_edge_workers::moe_edge_workers(int32_t n_threads) {
    ggml_cpu_init();  // tables of the dot products
    for (int32_t i = 1; i < n_threads; i++) {
        threads.emplace_back([this] { run(); });
    }
}

moe_edge_workers::~moe_edge_workers() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    changed.notify_all();
    for (auto & t : threads) {
        t.join();
    }
}

// gate and up of all experts multiply with the same activations: each is converted once.
const void * moe_edge_workers::convert(const float * x, int64_t n, int32_t to) {
    if (to == GGML_TYPE_F32) {
        return x;
    }
    const auto type = static_cast<ggml_type>(to);
    const auto [known, is_new] = activations.try_emplace({ x, to }, ggml_row_size(type, n));
    if (is_new) {
        ggml_get_type_traits_cpu(type)->from_float(x, known->second.data(), n);
    }
    return known->second.data();
}

void moe_edge_workers::multiply(const std::vector<moe_edge_product> & products) {
    std::lock_guard<std::mutex> caller(callers);
    activations.clear();
    work.clear();
    n_units = 0;
    for (const auto & p : products) {
        const auto * traits = ggml_get_type_traits_cpu(static_cast<ggml_type>(p.type));
        work.push_back({ &p, n_units, {} });
        for (const float * x : p.x) {
            work.back().x.push_back(convert(x, p.n_in, traits->vec_dot_type));
        }
        n_units += (p.n_out + UNIT_ROWS - 1) / UNIT_ROWS;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        next_unit.store(0, std::memory_order_relaxed);
        at_work = threads.size();
        round++;
    }
    changed.notify_all();
    compute_units();
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return at_work == 0; });
}

void moe_edge_workers::compute_units() {
    for (;;) {
        const int64_t unit = next_unit.fetch_add(1, std::memory_order_relaxed);
        if (unit >= n_units) {
            return;
        }
        const auto after = std::upper_bound(work.begin(), work.end(), unit,
            [](int64_t u, const prepared & w) { return u < w.first; });
        const auto & w = *(after - 1);
        const auto & p = *w.product;
        const auto type = static_cast<ggml_type>(p.type);
        const auto * traits = ggml_get_type_traits_cpu(type);
        const size_t row_bytes = ggml_row_size(type, p.n_in);
        const int64_t row0 = (unit - w.first) * UNIT_ROWS;
        const int64_t row1 = std::min(row0 + UNIT_ROWS, p.n_out);
        for (size_t i = 0; i < w.x.size(); i++) {
            for (int64_t row = row0; row < row1; row++) {
                traits->vec_dot(p.n_in, p.out[i] + row, 0, static_cast<const char *>(p.weights) + row * row_bytes, 0, w.x[i], 0, 1);
            }
        }
    }
}

void moe_edge_workers::run() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [&] { return stopping || round != seen; });
        if (stopping) {
            return;
        }
        seen = round;
        lock.unlock();
        compute_units();
        lock.lock();
        if (--at_work == 0) {
            finished.notify_one();
        }
    }
}
