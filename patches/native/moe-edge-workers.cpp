#include "moe-edge-workers.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t UNIT_ROWS = 32;  // rows of weights per unit of work

// ggml's matrix product is used for at least MATRIX_ROWS rows of activations, because it is then faster than single dot
// products. The results differ by rounding. A thread takes at most MATRIX_PART rows at a time.
constexpr size_t MATRIX_ROWS = 16, MATRIX_PART = 128;

bool by_matrix(const moe_edge_product & p) { return p.x.size() >= MATRIX_ROWS; }

// Multiplies n rows of activations of a product, starting with row `first`, on the calling thread.
void multiply_matrix(const moe_edge_product & p, size_t first, size_t n) {
    constexpr size_t ALIGN = 64;
    thread_local std::vector<float> x, out;
    thread_local std::vector<char> tensors(ggml_tensor_overhead() * 4 + ggml_graph_overhead_custom(4, false)), scratch;
    x.resize(n * p.n_in);
    out.resize(n * p.n_out);
    for (size_t i = 0; i < n; i++) {
        std::copy_n(p.x[first + i], p.n_in, &x[i * p.n_in]);
    }
    ggml_context * ctx = ggml_init({ tensors.size(), tensors.data(), true });
    ggml_tensor * weights = ggml_new_tensor_2d(ctx, static_cast<ggml_type>(p.type), p.n_in, p.n_out);
    ggml_tensor * rows    = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, p.n_in, n);
    ggml_tensor * op      = ggml_mul_mat(ctx, weights, rows);
    weights->data = const_cast<void *>(p.weights);
    rows->data    = x.data();
    op->data      = out.data();
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 4, false);
    ggml_build_forward_expand(graph, op);
    ggml_cplan plan = ggml_graph_plan(graph, 1, nullptr);
    scratch.resize(plan.work_size + ALIGN);
    plan.work_data = reinterpret_cast<uint8_t *>(GGML_PAD(reinterpret_cast<uintptr_t>(scratch.data()), ALIGN));
    ggml_graph_compute(graph, &plan);
    ggml_free(ctx);
    for (size_t i = 0; i < n; i++) {
        std::copy_n(&out[i * p.n_out], p.n_out, p.out[first + i]);
    }
}

}  // namespace

moe_edge_workers::moe_edge_workers(int32_t n_threads) {
    ggml_cpu_init();  // initializes the tables of the dot products
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

// Returns a row of n activations converted to type `to`. Each row is converted only once during a call of multiply().
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
    size_t n_rows = 0;
    for (const auto & p : products) {
        n_rows += by_matrix(p) ? p.x.size() : 0;
    }
    // Make at least two parts for each thread, so that no thread works alone for long at the end.
    matrix_part = std::clamp(n_rows / (2 * (threads.size() + 1)), MATRIX_ROWS, MATRIX_PART);
    for (const auto & p : products) {
        const auto * traits = ggml_get_type_traits_cpu(static_cast<ggml_type>(p.type));
        work.push_back({ &p, n_units, {} });
        if (by_matrix(p)) {
            n_units += (p.x.size() + matrix_part - 1) / matrix_part;
            continue;
        }
        for (const float * x : p.x) {
            work.back().x.push_back(convert(x, p.n_in, traits->vec_dot_type));
        }
        n_units += (p.n_out + UNIT_ROWS - 1) / UNIT_ROWS;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        next_unit.store(0, std::memory_order_relaxed);
        open = true;
        round++;
    }
    changed.notify_all();
    compute_units();
    std::unique_lock<std::mutex> lock(mutex);
    open = false;  // threads that wake up later find no work
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
        if (by_matrix(p)) {
            const size_t first = (unit - w.first) * matrix_part;
            multiply_matrix(p, first, std::min(matrix_part, p.x.size() - first));
            continue;
        }
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
        changed.wait(lock, [&] { return stopping || (open && round != seen); });
        if (stopping) {
            return;
        }
        seen = round;
        at_work++;
        lock.unlock();
        compute_units();
        lock.lock();
        if (--at_work == 0) {
            finished.notify_one();
        }
    }
}
