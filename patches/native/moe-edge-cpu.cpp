#include "moe-edge-cpu.h"
#include "moe-edge-layout.h"
#include "moe-edge-placeholder.h"
#include "moe-edge-table.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "tiled/tiled.h"
#include "traits.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr size_t  ALIGN      = 64;
constexpr int64_t ROW_CHUNK  = 64;  // weight rows per unit of work
constexpr int64_t ROW_BLOCK  = 16;  // weight rows and activation columns kept in L1 at the same time
constexpr int64_t GEMM_ROWS  = 512; // weight rows per unit of work with interleaved activations
constexpr int64_t GEMM_ACTS  = 16;  // activations per unit of work, interleaved
constexpr int64_t GEMM_LEAST = 4;   // number of activations that are interleaved with each other

size_t padded(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

moe_edge_matrix * matrix_of(const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    if (op->op != GGML_OP_MUL_MAT_ID || !w->buffer || w->buffer->buft != moe_edge_cpu_buffer_type()) {
        return nullptr;
    }
    return static_cast<moe_edge_matrix *>(w->extra);
}

// One row of activations of the op: the token, and the position (slot) of the expert among the token's selected
// experts. The header tiled.h requires this layout.
struct routed_row {
    int32_t slot;
    int32_t token;
};

// State that the threads of the op share. It is stored at the start of the work buffer.
struct shared_state {
    std::atomic<int64_t> next_unit;
    std::atomic<int32_t> threads_done;
    int32_t              n_ready;    // experts that are computed together now (a wave); -1 after a failure
    int32_t              last_wave;
    int32_t              unwatched;  // all experts are available and none needs to be released
};

// The offsets of all parts of an op's work buffer, and the buffer's total size in bytes.
struct layout {
    size_t size = 0;

    size_t shared;
    size_t ready;     // moe_edge_ready [n_expert]
    size_t first;     // int32 [n_expert + 1] first row of each expert
    size_t rows;      // routed_row [k*T] grouped by expert
    size_t experts;   // int32 [n_expert] distinct experts
    size_t acts[MOE_EDGE_MAX_TIERS];  // activations converted for each vec_dot type
    ggml_type act_type[MOE_EDGE_MAX_TIERS];
    int    n_acts = 0;
    size_t tiled;
    size_t gemm;      // gemm_size bytes per thread: results, four inputs, GEMM_ACTS activations
    size_t gemm_size = 0;
    size_t tiles;     // tiles_size bytes per thread
    size_t tiles_size = 0;

    layout(const moe_edge_matrix & m, const ggml_tensor * op, int n_threads) {
        const ggml_tensor * w   = op->src[0];
        const ggml_tensor * x   = op->src[1];
        const ggml_tensor * ids = op->src[2];

        const int64_t n_expert = w->ne[2];

        shared  = take(sizeof(shared_state));
        ready   = take(n_expert * sizeof(moe_edge_ready));
        first   = take((n_expert + 1) * sizeof(int32_t));
        rows    = take(ids->ne[0] * ids->ne[1] * sizeof(routed_row));
        experts = take(n_expert * sizeof(int32_t));

        size_t tiled_size = 0;
        for (size_t tier = 0; tier < m.types.size(); tier++) {
            const auto type = static_cast<ggml_type>(m.types[tier]);
            const ggml_type vec_type = ggml_get_type_traits_cpu(type)->vec_dot_type;
            if (vec_type != x->type && act_index(vec_type) < 0) {
                act_type[n_acts] = vec_type;
                acts[n_acts++]   = take(ggml_row_size(vec_type, ggml_nelements(x)));
            }
            if (m.kernels[tier]) {
                // Fewer tokens than GEMM_LEAST can never give an expert enough activations for this kernel.
                if (ids->ne[1] >= GEMM_LEAST) {
                    gemm_size = std::max(gemm_size, padded(interleaved_at(w->ne[0]) + GEMM_ACTS * ggml_row_size(vec_type, w->ne[0])));
                }
                if (ids->ne[1] >= moe_edge_tiles_from(*m.kernels[tier])) {
                    tiles_size = padded(moe_edge_tiles_size());
                }
                continue;
            }
            ggml_tensor w_tier = typed_weight(w, type, nullptr);
            ggml_tensor op_tier = *op;
            op_tier.src[0] = &w_tier;
            tiled_size = std::max(tiled_size, ggml_tiled_wdata_size(n_threads, &op_tier));
        }
        tiled = take(tiled_size);
        gemm  = take(n_threads * gemm_size);
        tiles = take(n_threads * tiles_size);
        size += ALIGN;  // the buffer itself need not be aligned
    }

    int act_index(ggml_type vec_type) const {
        for (int i = 0; i < n_acts; i++) {
            if (act_type[i] == vec_type) {
                return i;
            }
        }
        return -1;
    }

    static constexpr size_t inputs_at = GEMM_ACTS * GEMM_ROWS * sizeof(float);
    static size_t interleaved_at(int64_t n_in) { return padded(inputs_at + GEMM_LEAST * n_in * sizeof(float)); }

    // Returns a tensor that describes one expert's weights as a plain matrix of this type, as upstream's code expects
    // it.
    static ggml_tensor typed_weight(const ggml_tensor * w, ggml_type type, const void * data) {
        ggml_tensor t = *w;
        t.type  = type;
        t.data  = const_cast<void *>(data);
        t.extra = nullptr;
        t.nb[0] = ggml_type_size(type);
        t.nb[1] = ggml_row_size(type, t.ne[0]);
        t.nb[2] = 0;
        t.nb[3] = 0;
        return t;
    }

  private:
    size_t take(size_t n) {
        const size_t at = size;
        size += padded(n);
        return at;
    }
};

class mul_mat_id {
  public:
    mul_mat_id(const ggml_compute_params * params, ggml_tensor * op, moe_edge_matrix * m)
        : params(params), op(op), m(m), w(op->src[0]), x(op->src[1]), ids(op->src[2]), at(*m, op, params->nth) {
        base = reinterpret_cast<char *>(padded(reinterpret_cast<uintptr_t>(params->wdata)));
        GGML_ASSERT(params->wsize >= at.size);
        shared  = ptr<shared_state>(at.shared);
        ready   = ptr<moe_edge_ready>(at.ready);
        first   = ptr<int32_t>(at.first);
        rows    = ptr<routed_row>(at.rows);
        experts = ptr<int32_t>(at.experts);
    }

    void run() {
        if (params->ith == 0) {
            const int32_t n = group_rows();
            shared->unwatched = m->ops->unwatched(m, experts, first, n, ready);
            shared->threads_done.store(0, std::memory_order_relaxed);
            if (shared->unwatched) {
                share_wave(n, true);
            } else {
                remaining = n;
                m->ops->begin(m, experts, n);
            }
        }
        convert_activations();  // while the first reads are in progress
        if (params->ith == 0 && !shared->unwatched) {
            next_wave();
        }
        ggml_barrier(params->threadpool);

        while (shared->n_ready > 0) {
            compute_wave();
            if (shared->unwatched) {
                return;
            }
            if (shared->last_wave) {
                // The last thread to finish releases the experts. The other threads need not wait for it.
                if (shared->threads_done.fetch_add(1) == params->nth - 1) {
                    m->ops->release(m, ready, shared->n_ready, 0);
                }
                return;
            }
            ggml_barrier(params->threadpool);
            if (params->ith == 0) {
                m->ops->release(m, ready, shared->n_ready, 0);
                next_wave();
            }
            ggml_barrier(params->threadpool);
        }
    }

  private:
    template <typename T> T * ptr(size_t offset) const { return reinterpret_cast<T *>(base + offset); }

    // Groups the activation rows of the op by expert, with a counting sort. Fills first, rows and experts. Returns the
    // number of distinct experts.
    int32_t group_rows() {
        const int32_t n_expert = w->ne[2];
        std::fill(first, first + n_expert + 1, 0);
        for (int64_t t = 0; t < ids->ne[1]; t++) {
            for (int64_t k = 0; k < ids->ne[0]; k++) {
                const int32_t e = expert_id(k, t);
                GGML_ASSERT(e >= 0 && e < n_expert);
                first[e + 1]++;
            }
        }
        int32_t n = 0;
        for (int32_t e = 0; e < n_expert; e++) {
            if (first[e + 1] > 0) {
                experts[n++] = e;
            }
            first[e + 1] += first[e];
        }
        // Use first[e] as the position at which the next row of expert e is written. The loop after this one restores
        // first[].
        for (int64_t t = 0; t < ids->ne[1]; t++) {
            for (int64_t k = 0; k < ids->ne[0]; k++) {
                rows[first[expert_id(k, t)]++] = { (int32_t) k, (int32_t) t };
            }
        }
        for (int32_t e = n_expert; e > 0; e--) {
            first[e] = first[e - 1];
        }
        first[0] = 0;
        return n;
    }

    int32_t expert_id(int64_t k, int64_t t) const {
        return *reinterpret_cast<const int32_t *>(static_cast<const char *>(ids->data) + k*ids->nb[0] + t*ids->nb[1]);
    }

    void next_wave() {
        const int32_t n = m->ops->next(m, ready);
        if (m->device && n > 0) {
            m->ops->wait(m, ready, n);
        }
        remaining -= std::max(n, 0);
        share_wave(n, remaining == 0);
    }

    void share_wave(int32_t n, bool last) {
        shared->next_unit.store(0, std::memory_order_relaxed);
        shared->n_ready   = n;
        shared->last_wave = last;
    }

    void convert_activations() const {
        const int64_t n_rows = x->ne[1] * x->ne[2];
        for (int i = 0; i < at.n_acts; i++) {
            const ggml_type type = at.act_type[i];
            const auto from_float = ggml_get_type_traits_cpu(type)->from_float;
            const int64_t block   = ggml_blck_size(type);
            const int64_t n_block = x->ne[0] / block;
            const size_t row_size = ggml_row_size(type, x->ne[0]);
            char * dst = base + at.acts[i];

            // If there are many rows, each thread converts whole rows. If there are few rows, each thread converts a
            // part of every row.
            const bool by_row = n_rows >= 4 * params->nth;
            const int64_t b0 = by_row ? 0       : n_block * params->ith / params->nth;
            const int64_t b1 = by_row ? n_block : n_block * (params->ith + 1) / params->nth;
            if (b0 == b1) {
                continue;
            }
            for (int64_t r = by_row ? params->ith : 0; r < n_rows; r += by_row ? params->nth : 1) {
                const char * src = static_cast<const char *>(x->data)
                    + (r % x->ne[1]) * x->nb[1] + (r / x->ne[1]) * x->nb[2];
                from_float(reinterpret_cast<const float *>(src) + b0*block,
                           dst + r*row_size + b0*ggml_type_size(type), (b1 - b0)*block);
            }
        }
    }

    // Returns the activations converted to this vec_dot type. A token has x->ne[1] rows of activations: one row for all
    // its selected experts, or one row for each of them. slot_stride and token_stride receive the distance in bytes
    // between two rows of a token, and between two tokens.
    const char * activations(ggml_type vec_type, size_t * slot_stride, size_t * token_stride) const {
        const int i = at.act_index(vec_type);
        if (i < 0) {  // no conversion needed
            *slot_stride  = x->nb[1];
            *token_stride = x->nb[2];
            return static_cast<const char *>(x->data);
        }
        *slot_stride  = ggml_row_size(vec_type, x->ne[0]);
        *token_stride = *slot_stride * x->ne[1];
        return base + at.acts[i];
    }

    // The work for one expert. The threads divide it into units: some rows of the weights times some of the
    // activations.
    struct portions {
        const moe_edge_ready *   ready;
        const moe_edge_kernels * kernels;  // null: the weights have the layout of the file
        int64_t first;     // number of its first unit
        int64_t rows;      // weight rows per unit
        int64_t chunks;    // units that cover all weight rows
        int32_t acts;      // activations per unit
        bool    tiles;     // use upstream's microkernel for many activations
        bool    joins;     // adjacent units can be computed as one larger unit
    };

    const moe_edge_kernels * kernels_of(const moe_edge_ready & r) const {
        // The layout depends only on the type and the shape, so tiers of the same type use the same kernels.
        return m->kernels[std::find(m->types.begin(), m->types.end(), r.type) - m->types.begin()];
    }

    bool has_tiles(const moe_edge_kernels & kernels, int64_t n_acts) const {
        return !params->use_ref && at.tiles_size > 0 && n_acts >= moe_edge_tiles_from(kernels);
    }

    void compute_wave() const {
        // The experts that our own kernels compute, in units that the threads take one after another. Upstream's tiled
        // kernel has computed the other experts.
        thread_local std::vector<portions> rest;
        rest.clear();
        int64_t n_units = 0;
        const int64_t tile_rows = moe_edge_tiles_rows(shared->n_ready * w->ne[1], params->nth);
        for (int32_t i = 0; i < shared->n_ready; i++) {
            const auto & r = ready[i];
            if (!r.data) {
                zero_rows(r.expert);
                continue;
            }
            const auto * kernels = kernels_of(r);
            if (!kernels && run_tiled(r)) {
                continue;
            }
            const int32_t n_acts = first[r.expert + 1] - first[r.expert];
            const bool tiles = kernels && has_tiles(*kernels, n_acts);
            const bool gemm = kernels && at.gemm_size > 0 && n_acts >= GEMM_LEAST && !tiles;
            portions p = { &r, kernels, n_units, gemm ? GEMM_ROWS : tiles ? tile_rows : ROW_CHUNK, 0,
                gemm ? (int32_t) GEMM_ACTS : n_acts, tiles, !gemm && !tiles };
            p.chunks = (w->ne[1] + p.rows - 1) / p.rows;
            n_units += p.chunks * ((n_acts + p.acts - 1) / p.acts);
            rest.push_back(p);
        }
        auto p = rest.begin();
        int64_t end = 0;
        for (int64_t unit = 0; ; unit++) {
            if (unit >= end) {
                std::tie(unit, end) = take_units(n_units);
                if (unit == end) {
                    return;
                }
            }
            while (p + 1 != rest.end() && (p + 1)->first <= unit) {
                ++p;
            }
            const int64_t chunk = (unit - p->first) % p->chunks;
            const int64_t n     = p->joins ? std::min(end - unit, p->chunks - chunk) : 1;
            const int64_t row0  = chunk * p->rows;
            const int64_t row1  = std::min(row0 + n * p->rows, w->ne[1]);
            const int32_t act0  = first[p->ready->expert] + (unit - p->first) / p->chunks * p->acts;
            const int32_t act1 = std::min(act0 + p->acts, first[p->ready->expert + 1]);
            if (p->tiles) {
                multiply_tiles(*p->ready, row0, row1);
            } else if (p->kernels) {
                multiply(*p->ready, *p->kernels, row0, row1, act0, act1);
            } else {
                dot_rows(*p->ready, row0, row1);
            }
            unit += n - 1;
        }
    }

    // Returns the next units of work for this thread as a range [first, last). The range is empty if no unit is left.
    // Ranges become shorter towards the end, so that no thread waits long for another.
    std::pair<int64_t, int64_t> take_units(int64_t n_units) const {
        int64_t unit = shared->next_unit.load(std::memory_order_relaxed), end;
        do {
            if (unit >= n_units) {
                return { n_units, n_units };
            }
            end = unit + std::max<int64_t>(1, (n_units - unit) / (2 * params->nth));
        } while (!shared->next_unit.compare_exchange_weak(unit, end, std::memory_order_relaxed));
        return { unit, end };
    }

    // Multiplies rows [row0, row1) of an expert with all activations that are routed to it, with upstream's tiled
    // kernel. The expert must be in the CPU's own layout (groups of eight interleaved rows).
    void multiply_tiles(const moe_edge_ready & r, int64_t row0, int64_t row1) const {
        const auto type = static_cast<ggml_type>(r.type);
        size_t slot_stride;
        size_t token_stride;
        const char * from = activations(ggml_get_type_traits_cpu(type)->vec_dot_type, &slot_stride, &token_stride);
        thread_local std::vector<const void *> acts;
        thread_local std::vector<float *> out;
        acts.clear();
        out.clear();
        for (int32_t i = first[r.expert]; i < first[r.expert + 1]; i++) {
            acts.push_back(from + rows[i].slot % x->ne[1] * slot_stride + rows[i].token * token_stride);
            out.push_back(output(rows[i]));
        }
        moe_edge_tiles(r.type, r.data, w->ne[0], row0, row1, acts.data(), acts.size(), out.data(),
            base + at.tiles + params->ith * at.tiles_size);
    }

    // Multiplies rows [row0, row1) of an expert with the activations [act0, act1). The expert must be in the CPU's own
    // layout (groups of eight interleaved rows).
    void multiply(const moe_edge_ready & r, const moe_edge_kernels & k, int64_t row0, int64_t row1, int32_t act0, int32_t act1) const {
        const int64_t n_in = w->ne[0], n_rows = row1 - row0;
        const auto type = static_cast<ggml_type>(r.type);
        const ggml_type vec_type = ggml_get_type_traits_cpu(type)->vec_dot_type;
        const size_t act_size = ggml_row_size(vec_type, n_in);
        const char * weights = static_cast<const char *>(r.data) + row0 * ggml_row_size(type, n_in);
        const int32_t n_gemm = at.gemm_size > 0 ? (act1 - act0) / GEMM_LEAST * GEMM_LEAST : 0;
        if (n_gemm > 0) {
            char * own   = base + at.gemm + params->ith * at.gemm_size;
            auto * out   = reinterpret_cast<float *>(own);
            auto * input = reinterpret_cast<float *>(own + layout::inputs_at);
            char * acts  = own + layout::interleaved_at(n_in);
            for (int32_t i = 0; i < n_gemm; i += GEMM_LEAST) {
                for (int32_t j = 0; j < GEMM_LEAST; j++) {
                    const auto & row = rows[act0 + i + j];
                    memcpy(input + j*n_in, static_cast<const char *>(x->data) + row.slot % x->ne[1] * x->nb[1] + row.token * x->nb[2],
                           n_in * sizeof(float));
                }
                k.quantize(input, acts + i*act_size, n_in);
            }
            k.gemm(n_in, out, n_rows, weights, acts, n_gemm, n_rows);
            for (int32_t i = 0; i < n_gemm; i++) {
                memcpy(output(rows[act0 + i]) + row0, out + i*n_rows, n_rows * sizeof(float));
            }
        }
        size_t slot_stride;
        size_t token_stride;
        const char * acts = activations(vec_type, &slot_stride, &token_stride);
        for (int32_t i = act0 + n_gemm; i < act1; i++) {
            k.gemv(n_in, output(rows[i]) + row0, w->ne[1], weights,
                   acts + rows[i].slot % x->ne[1] * slot_stride + rows[i].token * token_stride, 1, n_rows);
        }
    }

    float * output(const routed_row & r) const {
        return reinterpret_cast<float *>(static_cast<char *>(op->data) + r.slot*op->nb[1] + r.token*op->nb[2]);
    }

    void zero_rows(int32_t expert) const {
        for (int32_t i = first[expert] + params->ith; i < first[expert + 1]; i += params->nth) {
            memset(output(rows[i]), 0, w->ne[1] * sizeof(float));
        }
    }

    bool run_tiled(const moe_edge_ready & r) const {
        const auto type = static_cast<ggml_type>(r.type);
        ggml_tensor w_tier  = layout::typed_weight(w, type, r.data);
        ggml_tensor op_tier = *op;
        op_tier.src[0] = &w_tier;

        ggml_compute_params p = *params;
        const int i = at.act_index(ggml_get_type_traits_cpu(type)->vec_dot_type);
        if (i >= 0) {
            p.wdata = base + at.acts[i];
        }
        return ggml_compute_forward_mul_mat_id_tiled(&p, &op_tier, 0, first[r.expert + 1] - first[r.expert],
            reinterpret_cast<const int32_t *>(rows + first[r.expert]), base + at.tiled);
    }

    // Multiplies rows [row0, row1) of an expert in the layout of the file with all activations that are routed to it.
    void dot_rows(const moe_edge_ready & r, int64_t row0, int64_t row1) const {
        const auto type = static_cast<ggml_type>(r.type);
        const auto * traits = ggml_get_type_traits_cpu(type);
        const size_t row_size = ggml_row_size(type, w->ne[0]);
        const char * weights = static_cast<const char *>(r.data);

        size_t slot_stride;
        size_t token_stride;
        const char * acts = activations(traits->vec_dot_type, &slot_stride, &token_stride);

        for (int32_t c0 = first[r.expert]; c0 < first[r.expert + 1]; c0 += ROW_BLOCK) {
            const int32_t c1 = std::min<int32_t>(c0 + ROW_BLOCK, first[r.expert + 1]);
            for (int64_t b0 = row0; b0 < row1; b0 += ROW_BLOCK) {
                const int64_t b1 = std::min(b0 + ROW_BLOCK, row1);
                for (int32_t c = c0; c < c1; c++) {
                    const char * act = acts + rows[c].slot % x->ne[1] * slot_stride + rows[c].token * token_stride;
                    float * out = output(rows[c]);
                    for (int64_t row = b0; row < b1; row++) {
                        traits->vec_dot(w->ne[0], out + row, 0, weights + row*row_size, 0, act, 0, 1);
                    }
                }
            }
        }
    }

    const ggml_compute_params * params;
    ggml_tensor *               op;
    moe_edge_matrix *           m;
    const ggml_tensor *         w;
    const ggml_tensor *         x;
    const ggml_tensor *         ids;
    const layout                at;

    char *           base;
    shared_state *   shared;
    moe_edge_ready * ready;
    int32_t *        first;
    routed_row *     rows;
    int32_t *        experts;
    int32_t          remaining = 0;  // experts that were not handed out yet; used by thread 0 only
};

class expert_traits : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        const moe_edge_matrix * m = matrix_of(op);
        if (!m) {
            return false;
        }
        size = layout(*m, op, n_threads).size;
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        moe_edge_matrix * m = matrix_of(op);
        if (!m) {
            GGML_ABORT("moe-edge: %s is computed without an expert store", op->src[0]->name);
        }
        mul_mat_id(params, op, m).run();
        return true;
    }
};

class expert_buffer_type : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        // Do not support tensors without a store, for which matrix_of() returns null. The model loader tries all buffer
        // types of the CPU for each tensor. It would otherwise choose this type by itself.
        return matrix_of(op) && op->src[1]->type == GGML_TYPE_F32 && op->src[2]->type == GGML_TYPE_I32;
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        static expert_traits traits;
        return op->op == GGML_OP_MUL_MAT_ID && op->src[0]->buffer &&
               op->src[0]->buffer->buft == moe_edge_cpu_buffer_type() ? &traits : nullptr;
    }
};

const char * buffer_type_name(ggml_backend_buffer_type_t) { return "MOE_EDGE"; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return moe_edge_alloc_placeholders(ggml_backend_cpu_buffer_type(), buft, size);
}

size_t placeholder_alignment(ggml_backend_buffer_type_t) { return ALIGN; }

size_t placeholder_size(ggml_backend_buffer_type_t, const ggml_tensor *) { return ALIGN; }

}  // namespace

ggml_backend_buffer_type_t moe_edge_cpu_buffer_type() {
    static ggml_backend_buffer_type buft = {
        /* .iface   = */ {
            /* .get_name       = */ buffer_type_name,
            /* .alloc_buffer   = */ alloc_buffer,
            /* .get_alignment  = */ placeholder_alignment,
            /* .get_max_size   = */ nullptr,
            /* .get_alloc_size = */ placeholder_size,
            /* .is_host        = */ nullptr,
        },
        /* .device  = */ ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0),
        /* .context = */ new expert_buffer_type(),
    };
    return &buft;
}

void * moe_edge_buffer_type(void) {
    return moe_edge_cpu_buffer_type();
}
