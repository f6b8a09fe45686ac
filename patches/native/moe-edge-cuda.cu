#include "moe-edge-cuda.h"
#include "moe-edge-cuda-device.h"
#include "moe-edge-launch.h"
#include "moe-edge-placeholder.h"
#include "moe-edge-util.h"

#include "../ggml/src/ggml-cuda/common.cuh"
#include "../ggml/src/ggml-cuda/convert.cuh"
#include "../ggml/src/ggml-cuda/mmid.cuh"
#include "../ggml/src/ggml-cuda/mmq.cuh"
#include "../ggml/src/ggml-cuda/mmvq.cuh"
#include "../ggml/src/ggml-cuda/quantize.cuh"

#include "ggml-cuda.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int      REMAP_THREADS = 128;
constexpr int64_t  VEC_TOKENS    = 8;         // float types: the most tokens for the kernel float_vec
constexpr uint64_t WAVE_BYTES    = 16 << 20;  // size of the portions in which experts are computed as they arrive
constexpr size_t   PLACEHOLDER   = 128;       // size in bytes of a placeholder (an expert tensor without data)

// ---- kernels

struct routed_ids {
    const int32_t * ids;     // [n_slots, n_tokens]
    int64_t         stride;  // distance between tokens
    int             n_slots;
    int             n_tokens;
};

struct result_rows {
    float * rows;
    int64_t n;     // values in a row
    int64_t slot_stride;
    int64_t token_stride;
};

// Writes an id for each kernel launch, for the row that this block handles. A row is one selected expert of one token.
// A class is the experts of one launch. own: the class that gets the id `value`. skipped_in: the class that gets the id
// MOE_EDGE_CUDA_SKIPPED. Both may be -1, for no class. All other classes get the id -1.
static __device__ __forceinline__ void write_ids(const routed_ids routed, const int n_classes, const int own, const int32_t value,
                          int32_t * out, const int skipped_in = -1) {
    for (int c = threadIdx.x; c < n_classes; c += blockDim.x) {
        out[(int64_t) c*routed.n_slots*routed.n_tokens + blockIdx.x] = c == own ? value : c == skipped_in ? MOE_EDGE_CUDA_SKIPPED : -1;
    }
}

// Fills the result row of a skipped expert with zeros.
static __device__ __forceinline__ void clear_row(const routed_ids routed, const result_rows dst) {
    float * row = dst.rows + blockIdx.x % routed.n_slots*dst.slot_stride + blockIdx.x / routed.n_slots*dst.token_stride;
    for (int64_t i = threadIdx.x; i < dst.n; i += blockDim.x) {
        row[i] = 0.0f;
    }
}

// The distance of each expert's gate matrix from the base address of the gate matrices, in blocks. The experts have the
// order of a moe_edge_launch_list. A kernel receives the list and this struct by value. Both together must fit into 4
// KiB, because every driver accepts arguments of this size.
struct gate_units {
    int32_t unit[MOE_EDGE_LAUNCH_EXPERTS];
};

static_assert(sizeof(moe_edge_launch_list) + sizeof(gate_units) < 4000, "the arguments of a kernel have 4 KiB");

// Writes ids for the kernel launches of a list to `out`: an id for each launch and each row. A row is one selected
// expert of one token. A class is the experts of one launch. The id is the distance of the row's expert from the base
// address of the class, in blocks. It is -1 if the expert is not in the class. If the bit of the class in list.indexed
// is set, the id is the index of the expert in the class instead of the distance.
//
// gate_out: null, or receives the ids for the gate matrices. units: receives the distance of every expert in the list,
// for kernels that use indices. dst: the result, in which the rows of skipped experts are set to zero. counts: null, or
// the number of rows of each expert [n_expert], which this kernel increases.
__global__ void remap_list(const moe_edge_launch_list list, const gate_units gate, const routed_ids routed, int32_t * out,
                           int32_t * gate_out, int32_t * units, const result_rows dst, uint32_t * counts) {
    __shared__ int found;
    if (threadIdx.x == 0) {
        found = -1;
    }
    __syncthreads();
    const int32_t id = routed.ids[(blockIdx.x / routed.n_slots)*routed.stride + blockIdx.x % routed.n_slots];
    for (int i = threadIdx.x; i < list.n; i += blockDim.x) {
        if (list.expert[i] == id) {
            found = i;
        }
        if (blockIdx.x == 0) {
            units[i] = list.unit[i];
        }
    }
    __syncthreads();
    const int at = found;
    int own = 0;
    while (own < list.n_classes && at >= list.first[own + 1]) {
        own++;
    }
    const bool indexed = list.indexed >> own & 1;
    write_ids(routed, list.n_classes, at < 0 ? -1 : own, at < 0 ? -1 : indexed ? at - list.first[own] : list.unit[at], out);
    if (gate_out) {
        write_ids(routed, list.n_classes, at < 0 ? -1 : own, at < 0 ? -1 : indexed ? at - list.first[own] : gate.unit[at], gate_out);
    }
    if (at >= list.first[list.n_classes]) {
        clear_row(routed, dst);
    }
    if (counts && at >= 0 && threadIdx.x == 0) {
        atomicAdd(counts + id, 1u);
    }
}

// The arguments for the ids of the layer's down product. The up or gate product launches remap_table, which then writes
// the ids of both products.
struct down_ids {
    const int32_t * table;    // null: the down product writes its own ids
    int             n_tiers;
    int             first;    // the tier of the first kernel launch, which sets the results of skipped experts to zero
    int32_t *       out;
    uint32_t *      counts;
};

// Writes ids for the kernel launches of a product to `out`, with its expert table in device memory
// (moe_edge_plan_table). There is one launch for each tier (stored precision), and one id for each launch and row. A
// row is one selected expert of one token. The id is the distance of the row's expert from the base address of the
// tier, in blocks. It is -1 if the expert has another tier. If the bit of the tier in `indexed` is set, the id is the
// number of the expert instead of the distance. gate_table: null, or the table of the gate matrices, in which each
// expert must have the same tier.
__global__ void remap_table(const int32_t * table, const int32_t * gate_table, const down_ids down, const int n_expert, const int n_tiers,
                            const uint32_t indexed, const routed_ids routed, int32_t * out, int32_t * gate_out,
                            const result_rows dst, uint32_t * counts) {
    const int32_t id   = routed.ids[(blockIdx.x / routed.n_slots)*routed.stride + blockIdx.x % routed.n_slots];
    const int32_t tier = table[id];
    const bool by_index = tier >= 0 && (indexed >> tier & 1);
    write_ids(routed, n_tiers, tier, by_index ? id : table[n_expert + id], out);
    if (gate_table) {
        write_ids(routed, n_tiers, tier, by_index ? id : gate_table[n_expert + id], gate_out);
    }
    if (down.table) {
        const int32_t of_down = down.table[id];
        write_ids(routed, down.n_tiers, of_down, down.table[n_expert + id], down.out, of_down < 0 ? down.first : -1);
        counts = down.counts;
    }
    if (tier < 0) {
        clear_row(routed, dst);
    }
    if (counts && threadIdx.x == 0) {
        atomicAdd(counts + id, 1u);
    }
}

// Copies result rows that the host computed to dst. Runs with one block per row. where: the place of each row in dst,
// as slot + token*n_slots.
__global__ void place_rows(const float * rows, const int32_t * where, const int n_slots, const result_rows dst) {
    const int at = where[blockIdx.x];
    const float * from = rows + blockIdx.x*dst.n;
    float * to = dst.rows + at % n_slots*dst.slot_stride + at / n_slots*dst.token_stride;
    for (int64_t i = threadIdx.x; i < dst.n; i += blockDim.x) {
        to[i] = from[i];
    }
}

struct float_product {
    const char *  base;  // distances between experts are multiples of moe_edge_unit_bytes
    const float * x;
    float *       dst;
    int64_t       n_cols;  // values in a row of weights
    int64_t       n_rows;
    int64_t       x_slot;  // strides, in values
    int64_t       x_token;
    int           x_slots;
    int64_t       dst_slot;
    int64_t       dst_token;
};

// Multiplies float weights with few tokens. Each warp computes one value of the result: one (weight row, selected
// expert, token).
template <typename T>
__global__ void float_vec(const float_product p, const int32_t * ids) {
    const int64_t row   = (int64_t) blockIdx.x*blockDim.y + threadIdx.y;
    const int     slot  = blockIdx.y;
    const int     token = blockIdx.z;
    const int32_t unit  = ids[token*gridDim.y + slot];
    if (unit < 0 || row >= p.n_rows) {
        if (unit == MOE_EDGE_CUDA_SKIPPED && row < p.n_rows && threadIdx.x == 0) {
            p.dst[slot*p.dst_slot + token*p.dst_token + row] = 0.0f;
        }
        return;
    }
    const T * w = (const T *) (p.base + (int64_t) unit*MOE_EDGE_DEVICE_ALIGN) + row*p.n_cols;
    const float * x = p.x + slot % p.x_slots*p.x_slot + token*p.x_token;
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < p.n_cols; i += WARP_SIZE) {
        sum += ggml_cuda_cast<float>(w[i])*x[i];
    }
    sum = warp_reduce_sum<WARP_SIZE>(sum);
    if (threadIdx.x == 0) {
        p.dst[slot*p.dst_slot + token*p.dst_token + row] = sum;
    }
}

constexpr int TILE_ROWS    = 64;
constexpr int TILE_COLS    = 32;  // activations
constexpr int TILE_DEPTH   = 32;
constexpr int TILE_THREADS = 256;
constexpr int TILE_SIDE    = 16;  // threads along each side of a tile

// Multiplies float weights with many tokens. Each block computes one tile: some weight rows times some activations of
// one expert. x_rows, dst_rows and bounds come from upstream's mm_ids_helper.
template <typename T>
__global__ void float_tiles(const float_product p, const int32_t * units, const int32_t * x_rows,
                            const int32_t * dst_rows, const int32_t * bounds) {
    const int first = bounds[blockIdx.z] + blockIdx.y*TILE_COLS;
    const int last  = min(bounds[blockIdx.z + 1], first + TILE_COLS);
    if (first >= last) {
        return;
    }
    __shared__ float w_tile[TILE_DEPTH][TILE_ROWS + 1];
    __shared__ float x_tile[TILE_DEPTH][TILE_COLS + 1];

    constexpr int per_row = TILE_ROWS / TILE_SIDE;
    constexpr int per_col = TILE_COLS / TILE_SIDE;
    const int64_t row0 = (int64_t) blockIdx.x*TILE_ROWS;
    const int     r0   = threadIdx.x % TILE_SIDE;
    const int     c0   = threadIdx.x / TILE_SIDE;
    const T * w = (const T *) (p.base + (int64_t) units[blockIdx.z]*MOE_EDGE_DEVICE_ALIGN);

    float sum[per_row][per_col] = {};
    for (int64_t depth = 0; depth < p.n_cols; depth += TILE_DEPTH) {
        for (int i = threadIdx.x; i < TILE_ROWS*TILE_DEPTH; i += TILE_THREADS) {
            const int64_t row = row0 + i / TILE_DEPTH;
            const int64_t col = depth + i % TILE_DEPTH;
            w_tile[i % TILE_DEPTH][i / TILE_DEPTH] =
                row < p.n_rows && col < p.n_cols ? ggml_cuda_cast<float>(w[row*p.n_cols + col]) : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE_COLS*TILE_DEPTH; i += TILE_THREADS) {
            const int     at  = first + i / TILE_DEPTH;
            const int64_t col = depth + i % TILE_DEPTH;
            x_tile[i % TILE_DEPTH][i / TILE_DEPTH] =
                at < last && col < p.n_cols ? p.x[x_rows[at]*p.x_slot + col] : 0.0f;
        }
        __syncthreads();
        for (int d = 0; d < TILE_DEPTH; d++) {
            for (int r = 0; r < per_row; r++) {
                for (int c = 0; c < per_col; c++) {
                    sum[r][c] += w_tile[d][r0 + r*TILE_SIDE]*x_tile[d][c0 + c*TILE_SIDE];
                }
            }
        }
        __syncthreads();
    }
    for (int r = 0; r < per_row; r++) {
        for (int c = 0; c < per_col; c++) {
            const int64_t row = row0 + r0 + r*TILE_SIDE;
            const int     at  = first + c0 + c*TILE_SIDE;
            if (row < p.n_rows && at < last) {
                p.dst[dst_rows[at]*p.dst_slot + row] = sum[r][c];
            }
        }
    }
}

// ---- one product

enum class path { vec_q, mat_q, floats };

// Measures how long this thread takes to launch the kernels of an op, without the time in which the thread waits. Only
// one measurement at a time may run on a thread.
class launch_time {
  public:
    explicit launch_time(moe_edge_matrix * m) : m(m), began(now_ns()) { waited = 0; }
    ~launch_time() { m->ops->waited(m, MOE_EDGE_WAIT_LAUNCH, now_ns() - began - waited); }

    // Does `work`, whose time is not counted as launching kernels. Returns how long it took, in nanoseconds.
    template <typename F> static uint64_t leave_out(F && work) {
        const uint64_t t0 = now_ns();
        work();
        const uint64_t took = now_ns() - t0;
        waited += took;
        return took;
    }

  private:
    static inline thread_local uint64_t waited = 0;
    moe_edge_matrix * const m;
    const uint64_t          began;
};

// The arguments of one kernel launch. It computes a class: experts of one type whose distance from `base`, in blocks,
// fits into 32 bits.
struct class_launch {
    path            how;
    int32_t         type;
    const char *    base;
    int64_t         n_experts;   // number of experts that the ids of mat_q and floats index
    const int32_t * ids;         // [n_slots, n_tokens]
    const int32_t * units;       // [n_experts]: distance of each expert from base, in blocks
    const char *    gate = nullptr;      // base of the fused gates
    const int32_t * gate_ids = nullptr;
};

class product {
  public:
    product(ggml_backend_cuda_context & ctx, ggml_tensor * op)
        : ctx(ctx), w(op->src[0]), x(op->src[1]), ids(op->src[2]), dst(op),
          m(static_cast<moe_edge_matrix *>(w->extra)), stream(ctx.stream()),
          cc(ggml_cuda_info().devices[ctx.device].cc), n_slots(ids->ne[0]), n_tokens(ids->ne[1]), y(ctx.pool()) {
        if (!m) {
            GGML_ABORT("moe-edge: %s is computed without an expert store", w->name);
        }
        device = moe_edge_cuda_device::get(ctx.device);
        if (m->device != device) {
            GGML_ABORT("moe-edge: %s is computed on another device than its store's", w->name);
        }
        device->fill_pool(ctx);
        GGML_ASSERT(x->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32);
        GGML_ASSERT(ids->nb[0] == sizeof(int32_t) && x->nb[0] == sizeof(float) && x->ne[3] == 1);
        GGML_ASSERT(x->nb[2] % x->nb[1] == 0 && dst->nb[2] == n_slots*dst->nb[1]);
    }

    path path_of(int32_t t) const {
        const auto type = static_cast<ggml_type>(t);
        if (!ggml_is_quantized(type)) {
            return path::floats;
        }
        if (n_tokens <= get_mmvq_mmid_max_batch(type, cc)) {
            return path::vec_q;
        }
        // Ask upstream whether MMQ is suitable as if there were only one token. For many tokens, upstream may prefer
        // cuBLAS. The host would have to know the ids to call cuBLAS.
        return ggml_cuda_should_use_mmq(type, cc, 1, w->ne[2]) ? path::mat_q : path::vec_q;
    }

    // Whether upstream's kernel MMVQ can compute this product and the gate product together. Both matrices must have
    // the same type in every tier, and the kernel must support each type for this number of tokens.
    bool fuses_with(const product & gate) const {
        return cc > GGML_CUDA_CC_PASCAL && m->types == gate.m->types &&
            std::all_of(m->types.begin(), m->types.end(), [&](int32_t t) {
                return ggml_is_quantized((ggml_type) t) && n_tokens <= get_mmvq_mmid_max_batch((ggml_type) t, cc);
            });
    }

    const moe_edge_cuda_table * table() const { return usable_table(*m); }

    moe_edge_matrix * matrix() const { return m; }

    static const moe_edge_cuda_table * usable_table(const moe_edge_matrix & m) {
        const moe_edge_cuda_table * t = moe_edge_cuda_table_of(m);
        return t && t->usable && m.ops->fixed(const_cast<moe_edge_matrix *>(&m)) ? t : nullptr;
    }

    // Computes the product with the expert table on the device. The host need not know which experts are selected.
    void run_table(const moe_edge_cuda_table & t) { run_table(t, nullptr); }

    // Like run_table(), but also computes the gate product and the activation (GLU) of both. This product is the up
    // product. The tables of both products must have the same tier (stored precision) for each expert.
    void run_table_fused(const moe_edge_cuda_table & t, const product & gate, ggml_tensor * glu) {
        dst = glu;
        run_table(t, &gate);
    }

    // Returns the planned kernel launches of this product (see moe_edge_cuda_plan). Returns null if there is no plan,
    // or if the product is computed already.
    moe_edge_cuda_plan::product * planned() const {
        moe_edge_cuda_plan & plan = device->backend_of(ctx).plan;
        moe_edge_cuda_plan::product & own = plan.products[m->kind];
        return plan.ids && plan.ids == ids->data && own.matrix == m ? &own : nullptr;
    }

    // Computes the product with its planned kernel launches.
    void run_planned(moe_edge_cuda_plan::product & plan) {
        run_launches(plan, false);
        if (plan.ready.empty()) {  // planned with a fixed table: no expert must be released
            plan.matrix = nullptr;
        } else {
            finish_planned(plan, device->record(stream));
        }
    }

    // Computes the up product, the gate product and their activation (GLU) together, with the kernel launches of the
    // layer's moe_edge_cuda_plan. Returns false, and does nothing, if the layer has no plan. Also returns false if the
    // plan has separate launches for up and gate.
    static bool run_planned_fused(product & up, product & gate, ggml_tensor * glu) {
        moe_edge_cuda_plan::product * plan = up.planned(), * of_gate = gate.planned();
        if (!plan || !of_gate || !std::all_of(plan->launches.begin(), plan->launches.end(), [](const auto & l) { return l.gate; })) {
            return false;
        }
        up.dst = glu;
        up.run_launches(*plan, true);
        const moe_edge_ticket after = up.device->record(up.stream);
        up.finish_planned(*plan, after);
        gate.finish_planned(*of_gate, after);
        return true;
    }

    // Requests the selected experts from the store. Afterwards, next() returns their addresses as they become
    // available.
    void begin() {
        std::vector<int32_t> experts(w->ne[2]);
        const int32_t n = m->ops->routed(m, experts.data());
        experts.resize(std::max(n, 0));
        if (n < 0) {
            experts = read_ids();
        }
        remaining = experts.size();
        m->ops->begin(m, experts.data(), remaining);
    }

    // Waits until the store has at least one more of the requested experts, and adds it to `ready`. Returns false if
    // the step failed.
    bool next() {
        const size_t had = ready.size();
        ready.resize(had + remaining);
        int32_t n = 0;
        launch_time::leave_out([&] { n = m->ops->next(m, ready.data() + had); });
        ready.resize(had + std::max(n, 0));
        remaining -= std::max(n, 0);
        return n >= 0;
    }

    bool complete() const { return remaining == 0; }

    // Computes all experts that begin() has requested. Experts that are available are computed first, and the others as
    // they arrive. All products must have the same activations and the same selected experts.
    static void run_waves(const std::vector<product *> & products) {
        for (product * p : products) {
            p->quantize();
        }
        run_ready(products);
        for (product * p : products) {
            while (!p->complete() && p->next()) {
                run_ready({ p });
            }
        }
    }

    // Computes this product, the gate product and their activation (GLU) together. All experts of both products must be
    // available. Returns false without any effect if the two matrices of an expert have different types, or if the host
    // computes one of the experts.
    bool run_fused(product & gate, ggml_tensor * glu) {
        std::sort(ready.begin(), ready.end(), by_expert);
        std::sort(gate.ready.begin(), gate.ready.end(), by_expert);
        for (size_t i = 0; i < ready.size(); i++) {
            const moe_edge_ready & a = ready[i];
            const moe_edge_ready & b = gate.ready[i];
            if (!a.data != !b.data || (a.data && a.type != b.type) || is_hosted(a) || is_hosted(b)) {
                return false;
            }
        }
        dst = glu;
        quantize();
        for (const bool there : { true, false }) {  // experts whose copies are complete go first
            std::vector<moe_edge_launch_item> items;
            std::vector<moe_edge_ready> ups, gates;
            for (size_t i = 0; i < ready.size(); i++) {
                const moe_edge_ready & a = ready[i];
                const moe_edge_ready & b = gate.ready[i];
                if (there ? device->passed(a.ticket) && device->passed(b.ticket) : a.expert >= 0) {
                    items.push_back({ a.expert, a.type, static_cast<const char *>(a.data), static_cast<const char *>(b.data) });
                    ups.push_back(a);
                    gates.push_back(b);
                    ready[i].expert = -1;
                }
            }
            if (items.empty()) {
                continue;
            }
            order(ups);
            order(gates);
            launch(std::move(items), true);
            const moe_edge_ticket after = device->record(stream);
            release(ups, after);
            gate.release(gates, after);
        }
        return true;
    }

    // Returns the distinct selected experts by reading the ids from the device. Needed for graphs without the route
    // hook, because the host then does not know the ids. The ids are read only once for all products of a layer.
    const std::vector<int32_t> & read_ids() const {
        struct reading {
            const void * store = nullptr;
            const void * ids   = nullptr;
            int32_t      layer = -1;
            uint32_t     kinds = 0;
            std::vector<int32_t> experts;
        };
        static thread_local reading last;
        const uint32_t kind = 1u << m->kind;
        const uint32_t down = 1u << MOE_EDGE_DOWN;
        if (last.store != m->store || last.ids != ids->data || last.layer != m->layer || last.kinds & (kind | down)) {
            last.experts.resize(n_slots*n_tokens);
            CUDA_CHECK(cudaMemcpy2DAsync(last.experts.data(), n_slots*sizeof(int32_t), ids->data, ids->nb[1],
                                         n_slots*sizeof(int32_t), n_tokens, cudaMemcpyDeviceToHost, stream));
            const uint64_t took = launch_time::leave_out([&] { CUDA_CHECK(cudaStreamSynchronize(stream)); });
            m->ops->waited(m, MOE_EDGE_WAIT_COPY, took);
            std::sort(last.experts.begin(), last.experts.end());
            last.experts.erase(std::unique(last.experts.begin(), last.experts.end()), last.experts.end());
            last.kinds = 0;
        }
        last.store = m->store;
        last.ids   = ids->data;
        last.layer = m->layer;
        last.kinds |= kind;
        return last.experts;
    }

  private:
    void run_launches(const moe_edge_cuda_plan::product & plan, bool fused) {
        quantize();
        for (const moe_edge_cuda_plan::launch & l : plan.launches) {
            for (const moe_edge_ticket ticket : l.after) {
                device->order(stream, ticket);
            }
            run_class({ path_of(l.type), l.type, l.base, w->ne[2], l.ids, nullptr, fused ? l.gate : nullptr, l.gate_ids });
        }
        if (plan.launches.empty()) {  // all experts are skipped
            CUDA_CHECK(cudaMemsetAsync(dst->data, 0, ggml_nbytes(dst), stream));
        }
    }

    void finish_planned(moe_edge_cuda_plan::product & plan, moe_edge_ticket after) {
        release(plan.ready, after);
        plan.matrix = nullptr;
    }

    static bool is_hosted(const moe_edge_ready & r) { return r.place == MOE_EDGE_MISS_COMPUTE; }

    static bool by_expert(const moe_edge_ready & a, const moe_edge_ready & b) { return a.expert < b.expert; }

    void run_table(const moe_edge_cuda_table & t, const product * gate) {
        quantize();
        const int32_t n_tiers = m->types.size();
        uint32_t indexed = 0;
        for (int32_t tier = 0; tier < n_tiers; tier++) {
            indexed |= (uint32_t) by_index(path_of(m->types[tier])) << tier;
        }
        const int64_t n_ids = n_slots*n_tokens;
        ggml_cuda_pool_alloc<int32_t> remapped(ctx.pool(), n_tiers*n_ids);
        ggml_cuda_pool_alloc<int32_t> gate_remapped(ctx.pool(), gate ? n_tiers*n_ids : 1);
        remap_table<<<n_ids, REMAP_THREADS, 0, stream>>>(
            t.entries, gate ? gate->table()->entries : nullptr, plan_down(t), w->ne[2], n_tiers, indexed, routed(), remapped.get(),
            gate_remapped.get(), result(), t.counts);
        CUDA_CHECK(cudaGetLastError());
        for (int32_t tier = 0; tier < n_tiers; tier++) {
            if (m->base[tier]) {
                class_launch c = { path_of(m->types[tier]), m->types[tier], m->base[tier], w->ne[2], remapped.get() + tier*n_ids,
                                   t.entries + w->ne[2] };
                if (gate) {
                    c.gate     = gate->m->base[tier];
                    c.gate_ids = gate_remapped.get() + tier*n_ids;
                }
                run_class(c);
            }
        }
    }

    // Plans the kernel launches of the layer's down product, and returns the arguments with which remap_table writes
    // the ids for these launches. Returns empty arguments if the down product already has a plan. Also returns empty
    // arguments if a plan is not possible; the down product then writes its ids when it runs.
    down_ids plan_down(const moe_edge_cuda_table & t) const {
        moe_edge_cuda_backend & backend = device->backend_of(ctx);
        moe_edge_matrix * down = t.down;
        const moe_edge_cuda_table * of_down = down && down != m ? usable_table(*down) : nullptr;
        const bool few = n_tokens <= MOE_EDGE_PLAN_TOKENS && n_slots*n_tokens <= MOE_EDGE_PLAN_ROWS;
        auto & plan = backend.plan.products[MOE_EDGE_DOWN];
        if (!of_down || !few || (backend.plan.ids == ids->data && plan.matrix == down) ||
            !std::all_of(down->types.begin(), down->types.end(), [&](int32_t type) { return path_of(type) != path::mat_q; })) {
            return {};
        }
        if (!backend.asked_for_ids) {  // once, because nothing may be allocated later, while a graph is captured
            backend.asked_for_ids = true;
            backend.table_ids = static_cast<int32_t *>(device->alloc(MOE_EDGE_MAX_TIERS*MOE_EDGE_PLAN_ROWS*sizeof(int32_t)));
        }
        if (!backend.table_ids) {
            return {};
        }
        const int32_t n_tiers = down->types.size();
        int32_t first = -1;
        plan = { down, {}, {} };
        for (int32_t tier = n_tiers - 1; tier >= 0; tier--) {
            if (down->base[tier]) {
                first = tier;
                plan.launches.push_back({ down->types[tier], down->base[tier], backend.table_ids + tier*n_slots*n_tokens, nullptr, nullptr, {} });
            }
        }
        backend.plan.ids = ids->data;
        return { of_down->entries, n_tiers, first, backend.table_ids, of_down->counts };
    }

    bool by_index(path p) const { return p == path::mat_q || (p == path::floats && n_tokens > VEC_TOKENS); }

    routed_ids routed() const {
        return { static_cast<const int32_t *>(ids->data), (int64_t) (ids->nb[1] / sizeof(int32_t)), (int) n_slots, (int) n_tokens };
    }

    result_rows result() const {
        return { static_cast<float *>(dst->data), dst->ne[0], (int64_t) (dst->nb[1] / sizeof(float)),
                 (int64_t) (dst->nb[2] / sizeof(float)) };
    }

    // Returns the device's counters [n_expert] of the tokens that are routed to each expert. Returns null if this
    // matrix has none, or if expert tables may change in this step: the store then counts the tokens itself.
    uint32_t * counts() const {
        const moe_edge_cuda_table * t = moe_edge_cuda_table_of(*m);
        return t && m->ops->fixed(m) ? t->counts : nullptr;
    }

    void order(const std::vector<moe_edge_ready> & list) {
        for (const moe_edge_ready & r : list) {
            device->order(stream, r.ticket);
        }
    }

    void release(const std::vector<moe_edge_ready> & list, moe_edge_ticket after) {
        m->ops->release(m, list.data(), list.size(), after);
    }

    // Computes the experts in `ready`, some of them on host threads. The activations of those experts are copied to the
    // host before the kernels are launched, and their results are copied back afterwards.
    static void run_ready(const std::vector<product *> & products) {
        std::vector<std::vector<moe_edge_ready>> hosted;
        for (product * p : products) {
            const auto first = std::stable_partition(p->ready.begin(), p->ready.end(), [](const moe_edge_ready & r) { return !is_hosted(r); });
            hosted.emplace_back(first, p->ready.end());
            p->ready.erase(first, p->ready.end());
        }
        const bool any = std::any_of(hosted.begin(), hosted.end(), [](const auto & list) { return !list.empty(); });
        const auto run_kernels = [&] {
            for (product * p : products) {
                p->run_kernels();
            }
        };
        if (!any) {
            run_kernels();
            return;
        }
        moe_edge_cuda_device & device = *products[0]->device;
        std::lock_guard<std::mutex> lock(device.exchange.mutex);
        const uint64_t began_us = moe_edge::now_us();
        const exchanged at(products);
        const moe_edge_ticket there = products[0]->fetch(at);
        run_kernels();
        moe_edge_matrix * m = products[0]->m;
        m->ops->waited(m, MOE_EDGE_WAIT_COPY, launch_time::leave_out([&] { device.wait_awake(there); }));
        products[0]->compute_hosted(products, hosted, at, began_us);
    }

    // The layout of the host memory through which products and host threads exchange activations and results.
    struct exchanged {
        char *  memory;
        float * x;         // [x slots * tokens, columns]
        int32_t * ids;     // [slots * tokens]
        std::vector<float *>   rows;   // for each product: [slots * tokens, rows of weights]
        std::vector<int32_t *> where;  // for each product: the places of these rows

        explicit exchanged(const std::vector<product *> & products) {
            const product & p = *products[0];
            const size_t n_ids = p.n_slots*p.n_tokens;
            uint64_t bytes = ggml_nelements(p.x)*sizeof(float) + n_ids*sizeof(int32_t);
            for (const product * each : products) {
                bytes += n_ids*(each->dst->ne[0]*sizeof(float) + sizeof(int32_t));
            }
            memory = p.device->exchange_of(bytes).memory;
            if (!memory) {
                GGML_ABORT("moe-edge: no host memory for %llu bytes of rows", (unsigned long long) bytes);
            }
            x   = reinterpret_cast<float *>(memory);
            ids = reinterpret_cast<int32_t *>(x + ggml_nelements(p.x));
            auto * next = reinterpret_cast<float *>(ids + n_ids);
            for (const product * each : products) {
                rows.push_back(next);
                next += n_ids*each->dst->ne[0];
                where.push_back(reinterpret_cast<int32_t *>(next));
                next += n_ids;
            }
        }
    };

    // Enqueues the copies of the activations and the ids to host memory, for the experts that the host computes. Must
    // be called before the kernels are launched. Returns the ticket (a point in the device's work) after which they are
    // complete.
    moe_edge_ticket fetch(const exchanged & at) {
        const size_t row = x->ne[0]*sizeof(float);
        device->order(stream, device->exchange.last);
        // One copy is enough if all rows have the same distance from each other.
        const bool    even    = x->ne[1] == 1 || x->nb[2] == x->ne[1]*x->nb[1];
        const size_t  pitch   = x->ne[1] == 1 ? x->nb[2] : x->nb[1];
        const int64_t at_once = even ? n_tokens : 1;
        for (int64_t t = 0; t < n_tokens; t += at_once) {
            CUDA_CHECK(cudaMemcpy2DAsync(at.x + t*x->ne[1]*x->ne[0], row, static_cast<const char *>(x->data) + t*x->nb[2], pitch,
                                         row, x->ne[1]*at_once, cudaMemcpyDeviceToHost, stream));
        }
        CUDA_CHECK(cudaMemcpy2DAsync(at.ids, n_slots*sizeof(int32_t), ids->data, ids->nb[1], n_slots*sizeof(int32_t), n_tokens,
                                     cudaMemcpyDeviceToHost, stream));
        return device->record(stream);
    }

    void compute_hosted(const std::vector<product *> & products, const std::vector<std::vector<moe_edge_ready>> & hosted,
                        const exchanged & at, uint64_t began_us) {
        std::vector<moe_edge_product> work;
        std::vector<int32_t> n_rows(products.size());
        for (size_t i = 0; i < products.size(); i++) {
            const product & p = *products[i];
            for (const moe_edge_ready & r : hosted[i]) {
                moe_edge_product & each = work.emplace_back();
                each = { r.data, r.type, w->ne[0], p.dst->ne[0], {}, {} };
                for (int32_t place = 0; place < n_slots*n_tokens; place++) {
                    if (at.ids[place] == r.expert) {
                        each.x.push_back(at.x + (place / n_slots*x->ne[1] + place % n_slots % x->ne[1])*x->ne[0]);
                        each.out.push_back(at.rows[i] + n_rows[i]*p.dst->ne[0]);
                        at.where[i][n_rows[i]++] = place;
                    }
                }
            }
        }
        launch_time::leave_out([&] { m->ops->multiply(m, work, began_us); });
        for (size_t i = 0; i < products.size(); i++) {
            products[i]->place(at, i, n_rows[i]);
            products[i]->release(hosted[i], 0);
        }
        device->exchange.last = device->record(stream);
    }

    void place(const exchanged & at, size_t i, int32_t n_rows) {
        if (n_rows == 0) {
            return;
        }
        const float *   rows  = at.rows[i];
        const int32_t * where = at.where[i];
        const size_t n = n_rows*dst->ne[0];
        ggml_cuda_pool_alloc<float>   copied_rows(ctx.pool());
        ggml_cuda_pool_alloc<int32_t> copied_where(ctx.pool());
        if (!device->exchange.pinned || !device->same_address()) {
            CUDA_CHECK(cudaMemcpyAsync(copied_rows.alloc(n), rows, n*sizeof(float), cudaMemcpyHostToDevice, stream));
            CUDA_CHECK(cudaMemcpyAsync(copied_where.alloc(n_rows), where, n_rows*sizeof(int32_t), cudaMemcpyHostToDevice, stream));
            rows  = copied_rows.get();
            where = copied_where.get();
        }
        place_rows<<<n_rows, REMAP_THREADS, 0, stream>>>(rows, where, n_slots, result());
        CUDA_CHECK(cudaGetLastError());
    }

    // Launches the kernels for the experts in `ready`. Experts whose bytes have arrived on the device come first. The
    // others follow in portions, in the order of their copies.
    void run_kernels() {
        std::vector<moe_edge_ready> list;
        list.swap(ready);
        const auto there = std::stable_partition(list.begin(), list.end(), [&](const moe_edge_ready & r) {
            return device->passed(r.ticket);
        });
        std::stable_sort(there, list.end(), [](const moe_edge_ready & a, const moe_edge_ready & b) {
            return a.ticket < b.ticket;
        });
        run_wave({ list.begin(), there });
        // With few tokens, a kernel takes far less time than the copies that it waits for. One launch for all experts
        // is then best.
        const uint64_t most = n_tokens <= VEC_TOKENS ? UINT64_MAX : WAVE_BYTES;
        std::vector<moe_edge_ready> wave;
        uint64_t bytes = 0;
        for (auto r = there; r != list.end(); ++r) {
            wave.push_back(*r);
            bytes += w->ne[1]*ggml_row_size((ggml_type) r->type, w->ne[0]);
            if (bytes >= most || r + 1 == list.end()) {
                run_wave(wave);
                wave.clear();
                bytes = 0;
            }
        }
    }

    void run_wave(const std::vector<moe_edge_ready> & wave) {
        if (wave.empty()) {
            return;
        }
        order(wave);
        std::vector<moe_edge_launch_item> items;
        for (const moe_edge_ready & r : wave) {
            items.push_back({ r.expert, r.type, static_cast<const char *>(r.data) });
        }
        launch(std::move(items), false);
        release(wave, device->record(stream));
    }

    void launch(std::vector<moe_edge_launch_item> items, bool fused) {
        for (moe_edge_launch & l : moe_edge_plan_launches(std::move(items))) {
            const int32_t n_classes = l.list.n_classes;
            for (int32_t c = 0; c < n_classes; c++) {
                l.list.indexed |= (uint32_t) by_index(path_of(l.classes[c].type)) << c;
            }
            const int64_t n_ids = n_slots*n_tokens;
            ggml_cuda_pool_alloc<int32_t> remapped(ctx.pool(), std::max<int64_t>(n_classes*n_ids, 1));
            ggml_cuda_pool_alloc<int32_t> units(ctx.pool(), MOE_EDGE_LAUNCH_EXPERTS);
            ggml_cuda_pool_alloc<int32_t> gate_remapped(ctx.pool(), fused ? std::max<int64_t>(n_classes*n_ids, 1) : 1);
            gate_units gates;
            std::copy_n(l.gate.unit, MOE_EDGE_LAUNCH_EXPERTS, gates.unit);
            remap_list<<<n_ids, REMAP_THREADS, 0, stream>>>(l.list, gates, routed(), remapped.get(),
                fused ? gate_remapped.get() : nullptr, units.get(), result(), counts());
            CUDA_CHECK(cudaGetLastError());
            for (int32_t i = 0; i < n_classes; i++) {
                const moe_edge_launch_class & k = l.classes[i];
                class_launch c = { path_of(k.type), k.type, k.base, k.n, remapped.get() + i*n_ids, units.get() + k.first };
                if (fused) {
                    c.gate     = k.gate;
                    c.gate_ids = gate_remapped.get() + i*n_ids;
                }
                run_class(c);
            }
        }
    }

    // Returns a tensor that describes the weights of one kernel launch to upstream's host functions. Upstream
    // multiplies an expert's id with the stride nb[2] to find the expert. Here, nb[2] is only one block. The id of an
    // expert can thus be its distance from `base` in blocks.
    ggml_tensor weights_of(const class_launch & c, const char * base) const {
        ggml_tensor t = *w;
        t.type  = static_cast<ggml_type>(c.type);
        t.data  = const_cast<char *>(base);
        t.extra = nullptr;
        t.ne[2] = c.n_experts;
        t.nb[0] = ggml_type_size(t.type);
        t.nb[1] = ggml_row_size(t.type, t.ne[0]);
        t.nb[2] = t.nb[0];
        t.nb[3] = t.nb[0];
        return t;
    }

    ggml_tensor ids_of(const int32_t * data, const moe_edge_cuda_ids & extra) const {
        ggml_tensor t = *ids;
        t.data  = const_cast<int32_t *>(data);
        t.extra = const_cast<moe_edge_cuda_ids *>(&extra);
        t.nb[1] = n_slots*sizeof(int32_t);
        t.nb[2] = t.nb[1]*n_tokens;
        t.nb[3] = t.nb[2];
        return t;
    }

    void run_class(const class_launch & c) {
        switch (c.how) {
            case path::vec_q:  run_vec_q(c);  break;
            case path::mat_q:  run_mat_q(c);  break;
            case path::floats: run_floats(c); break;
        }
    }

    size_t padded_row() const { return GGML_PAD(x->ne[0], MATRIX_ROW_PADDING); }

    size_t quantized_token() const { return x->ne[1]*padded_row()*sizeof(block_q8_1)/QK8_1; }

    // Converts the activations to q8_1, the format that upstream's kernel MMVQ (path vec_q) needs for all types. Must
    // run before any other allocation from the pool, because the pool frees memory in reverse order.
    void quantize() {
        const bool wanted = std::any_of(m->types.begin(), m->types.end(), [&](int32_t t) {
            return path_of(t) == path::vec_q;
        });
        if (!wanted) {
            return;
        }
        y.alloc(n_tokens*quantized_token());
        quantize_row_q8_1_cuda(static_cast<const float *>(x->data), nullptr, y.get(), static_cast<ggml_type>(m->types[0]),
            x->ne[0], x->nb[1]/sizeof(float), x->nb[2]/sizeof(float), x->nb[3]/sizeof(float), padded_row(),
            x->ne[1], x->ne[2], 1, stream);
    }

    // Computes one class of experts with upstream's vector kernel. The kernel supports only few tokens, so the tokens
    // are divided into portions.
    void run_vec_q(const class_launch & c) {
        const int64_t step = get_mmvq_mmid_max_batch(static_cast<ggml_type>(c.type), cc);
        for (int64_t t = 0; t < n_tokens; t += step) {
            const int64_t n = std::min(step, n_tokens - t);
            moe_edge_cuda_ids extra;
            extra.y    = y.get() + t*quantized_token();
            extra.gate = c.gate_ids ? c.gate_ids + t*n_slots : nullptr;
            const ggml_tensor weights = weights_of(c, c.base);
            ggml_tensor part_ids = ids_of(c.ids + t*n_slots, extra);
            ggml_tensor part_x   = *x;
            ggml_tensor part_dst = *dst;
            part_x.data   = static_cast<char *>(x->data) + t*x->nb[2];
            part_dst.data = static_cast<char *>(dst->data) + t*dst->nb[2];
            part_ids.ne[1] = part_x.ne[2] = part_dst.ne[2] = n;
            if (!c.gate) {
                ggml_cuda_mul_mat_vec_q(ctx, &weights, &part_x, &part_ids, &part_dst);
                continue;
            }
            const ggml_tensor gate = weights_of(c, c.gate);
            ggml_cuda_mm_fusion_args_host fusion{};
            fusion.gate      = &gate;
            fusion.glu_op    = ggml_get_glu_op(dst);
            fusion.glu_limit = ggml_get_op_params_f32(dst, 3);
            ggml_cuda_mul_mat_vec_q(ctx, &weights, &part_x, &part_ids, &part_dst, &fusion);
        }
    }

    void run_mat_q(const class_launch & c) {
        moe_edge_cuda_ids extra;
        extra.offsets = c.units;
        const ggml_tensor weights = weights_of(c, c.base);
        const ggml_tensor new_ids = ids_of(c.ids, extra);
        ggml_cuda_mul_mat_q(ctx, &weights, x, &new_ids, dst);
    }

    void run_floats(const class_launch & c) {
        switch (c.type) {
            case GGML_TYPE_F32:  return run_floats_as<float>(c);
            case GGML_TYPE_F16:  return run_floats_as<half>(c);
            case GGML_TYPE_BF16: return run_floats_as<nv_bfloat16>(c);
            default: GGML_ABORT("moe-edge: %s has a tier of a type that CUDA does not compute", w->name);
        }
    }

    template <typename T> void run_floats_as(const class_launch & c) {
        const float_product p = {
            c.base, static_cast<const float *>(x->data), static_cast<float *>(dst->data), w->ne[0], w->ne[1],
            (int64_t) (x->nb[1]/sizeof(float)), (int64_t) (x->nb[2]/sizeof(float)), (int) x->ne[1],
            (int64_t) (dst->nb[1]/sizeof(float)), (int64_t) (dst->nb[2]/sizeof(float)),
        };
        if (n_tokens <= VEC_TOKENS) {
            constexpr int rows = 4;
            const dim3 blocks((w->ne[1] + rows - 1)/rows, n_slots, n_tokens);
            float_vec<T><<<blocks, dim3(WARP_SIZE, rows), 0, stream>>>(p, c.ids);
            CUDA_CHECK(cudaGetLastError());
            return;
        }
        const int64_t n_ids = n_slots*n_tokens;
        ggml_cuda_pool_alloc<int32_t> x_rows(ctx.pool(), n_ids);
        ggml_cuda_pool_alloc<int32_t> dst_rows(ctx.pool(), n_ids);
        ggml_cuda_pool_alloc<int32_t> bounds(ctx.pool(), c.n_experts + 1);
        ggml_cuda_launch_mm_ids_helper(c.ids, x_rows.get(), dst_rows.get(), bounds.get(), c.n_experts, n_tokens, n_slots,
                                       x->ne[1], n_slots, x->nb[2]/x->nb[1], false, stream);
        const dim3 blocks((w->ne[1] + TILE_ROWS - 1)/TILE_ROWS, (n_tokens + TILE_COLS - 1)/TILE_COLS, c.n_experts);
        float_tiles<T><<<blocks, TILE_THREADS, 0, stream>>>(p, c.units, x_rows.get(), dst_rows.get(), bounds.get());
        CUDA_CHECK(cudaGetLastError());
    }

    ggml_backend_cuda_context & ctx;
    const ggml_tensor *    w;
    const ggml_tensor *    x;
    const ggml_tensor *    ids;
    ggml_tensor *          dst;
    moe_edge_matrix *      m;
    moe_edge_cuda_device * device;
    cudaStream_t           stream;
    const int              cc;
    const int64_t          n_slots;
    const int64_t          n_tokens;

    ggml_cuda_pool_alloc<char>  y;  // x as q8_1, once a class needs it
    std::vector<moe_edge_ready> ready;      // not computed yet
    int32_t                     remaining = 0;  // experts that are not ready yet
};

// ---- placeholders

ggml_backend_buffer_type buffer_types[GGML_CUDA_MAX_DEVICES];

// Must have the same layout as upstream's ggml_backend_cuda_buffer_type_context. Our buffer type has its own context,
// because the model loader identifies buffer types by the name in it.
struct type_context {
    int         device;
    std::string name;
};

// Allocates a buffer for placeholders (expert tensors without data). The buffer is one of upstream's CUDA buffers, so
// that upstream's checks accept it.
static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return moe_edge_alloc_placeholders(ggml_backend_cuda_buffer_type(buft - buffer_types), buft, size);
}

static size_t placeholder_size(ggml_backend_buffer_type_t, const ggml_tensor *) { return PLACEHOLDER; }

static ggml_backend_buffer_type_t buffer_type(int index) {
    static std::mutex guard;
    std::lock_guard<std::mutex> lock(guard);
    if (index < 0 || index >= ggml_cuda_info().device_count) {
        return nullptr;
    }
    ggml_backend_buffer_type & buft = buffer_types[index];
    if (!buft.device) {
        // Keep upstream's get_name function, because upstream recognizes its CUDA buffer types by this function.
        buft = *ggml_backend_cuda_buffer_type(index);
        buft.context = new type_context { index, std::string(buft.iface.get_name(&buft)) + "_MoE" };
        buft.iface.alloc_buffer   = alloc_buffer;
        buft.iface.get_alloc_size = placeholder_size;
    }
    return &buft;
}

static moe_edge_device * device_of(int index) { return moe_edge_cuda_device::get(index); }

}  // namespace

bool moe_edge_cuda_is_managed(const ggml_tensor * weights) {
    return weights && weights->buffer && weights->buffer->buft >= buffer_types &&
        weights->buffer->buft < buffer_types + GGML_CUDA_MAX_DEVICES;
}

bool moe_edge_cuda_needs_sync(const ggml_tensor * dst) {
    const auto * m = static_cast<const moe_edge_matrix *>(dst->src[0]->extra);
    return !m || !product::usable_table(*m);
}

void moe_edge_cuda_mul_mat_id(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    product p(ctx, dst);
    const moe_edge_cuda_table * table = p.table();
    if (table && !p.planned()) {
        p.run_table(*table);
        return;
    }
    const launch_time time(p.matrix());
    if (moe_edge_cuda_plan::product * plan = p.planned()) {
        p.run_planned(*plan);
        return;
    }
    p.begin();
    product::run_waves({ &p });
}

int moe_edge_cuda_gate_up(ggml_backend_cuda_context & ctx, ggml_tensor * gate, ggml_tensor * up, ggml_tensor * glu) {
    if (!moe_edge_cuda_is_managed(gate->src[0]) || !moe_edge_cuda_is_managed(up->src[0])) {
        return 0;
    }
    product gates(ctx, gate);
    product ups(ctx, up);
    if (!ups.fuses_with(gates)) {
        return 0;
    }
    if (ups.table() && gates.table()) {
        ups.run_table_fused(*ups.table(), gates, glu);
        return 3;
    }
    const launch_time time(ups.matrix());
    if (product::run_planned_fused(ups, gates, glu)) {
        return 3;
    }
    if (ups.planned() || gates.planned()) {
        return 0;
    }
    gates.begin();
    ups.begin();
    if (gates.next() && gates.complete() && ups.next() && ups.complete() && ups.run_fused(gates, glu)) {
        return 3;
    }
    product::run_waves({ &gates, &ups });
    return 2;
}

void moe_edge_cuda_pool_freed(int device) {
    moe_edge_cuda_device::get(device)->pool_frees++;
}

bool moe_edge_cuda_begin_graph(const ggml_backend_cuda_context & ctx) {
    return moe_edge_cuda_device::get(ctx.device)->begin_graph(ctx);
}

void moe_edge_cuda_forget(const ggml_backend_cuda_context & ctx) {
    moe_edge_cuda_device::get(ctx.device)->forget(ctx);
}

void * moe_edge_cuda_proc_address(const char * name) {
    if (strcmp(name, "moe_edge_device") == 0) {
        return reinterpret_cast<void *>(device_of);
    }
    if (strcmp(name, "moe_edge_buffer_type") == 0) {
        return reinterpret_cast<void *>(buffer_type);
    }
    return nullptr;
}
