// Implements the route node on a CUDA device. A route node is the graph node between a layer's router and its experts.
// One kernel copies the node's inputs to host memory. There, the store chooses a precision for each selected expert, or
// skips the expert. Another kernel then writes the routing weights, and the ids for all matrix kernels of the layer.
// The products of the layer (up, gate, down) can then launch upstream's matrix kernels immediately.

#include "moe-edge-cuda.h"
#include "moe-edge-cuda-device.h"
#include "moe-edge-launch.h"

#include "../ggml/src/ggml-cuda/common.cuh"
#include "../ggml/src/ggml-cuda/mmvq.cuh"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace {

constexpr int THREADS = 128;
constexpr int PRODUCTS = 3;  // up or gate_up, gate, down

// A tensor of 32-bit values whose rows may have gaps between them.
struct packed_input {
    const int32_t * from;
    int64_t row;     // values in a row
    int64_t stride;  // distance between rows
    int64_t n;       // values in all rows
    int64_t at;      // index of the first value in the destination
};

struct packed_inputs {
    int          n = 0;
    packed_input list[GGML_MAX_SRC];
};

// Writes all inputs to `to`, without gaps. Also writes the first one, the routing weights, to `weights`. Runs with one
// row of blocks per input.
__global__ void pack_inputs(const packed_inputs inputs, int32_t * to, int32_t * weights) {
    const packed_input in = inputs.list[blockIdx.y];
    for (int64_t i = (int64_t) blockIdx.x*blockDim.x + threadIdx.x; i < in.n; i += (int64_t) gridDim.x*blockDim.x) {
        const int32_t value = in.from[i / in.row * in.stride + i % in.row];
        to[in.at + i] = value;
        if (blockIdx.y == 0) {
            weights[i] = value;
        }
    }
}

// The plan of one layer. A row is one selected expert of one token. Each row has a routing weight, and for each product
// (up, gate, down) the kernel launch that computes the row.
struct planned_rows {
    int32_t n = 0;
    int32_t n_launches[PRODUCTS] = {};
    float   weight[MOE_EDGE_PLAN_ROWS];
    int32_t unit[PRODUCTS][MOE_EDGE_PLAN_ROWS];    // distance of the row's expert from the launch's base, in blocks
    int8_t  launch[PRODUCTS][MOE_EDGE_PLAN_ROWS];  // SKIPPED, or the index of the launch
};

constexpr int8_t SKIPPED = -1;

static_assert(sizeof(planned_rows) < 4000, "the arguments of a kernel have 4 KiB");

// Returns the index of the first id of a kernel launch in the array of all ids of a layer, [PRODUCTS,
// MOE_EDGE_PLAN_LAUNCHES, n_rows].
__host__ __device__ inline int64_t ids_at(int product, int launch, int64_t n_rows) {
    return (product*MOE_EDGE_PLAN_LAUNCHES + launch)*n_rows;
}

// Writes the routing weight of each row (one selected expert of one token). Also writes an id for each kernel launch
// and row: the distance of the row's expert from the base address of the launch, in blocks. The id is -1 if another
// launch computes the row. If the expert is skipped, the id for the first launch is MOE_EDGE_CUDA_SKIPPED.
__global__ void write_plan(const planned_rows rows, float * weights, int32_t * ids) {
    for (int row = threadIdx.x; row < rows.n; row += blockDim.x) {
        weights[row] = rows.weight[row];
        for (int p = 0; p < PRODUCTS; p++) {
            const int own = rows.launch[p][row];
            for (int l = 0; l < rows.n_launches[p]; l++) {
                const bool skipped = own == SKIPPED && l == 0;
                ids[ids_at(p, l, rows.n) + row] = own == l ? rows.unit[p][row] : skipped ? MOE_EDGE_CUDA_SKIPPED : -1;
            }
        }
    }
}

// Plans the kernel launches for the expert products of one layer.
class planner {
  public:
    planner(moe_edge_cuda_device & device, moe_edge_cuda_plan & plan, const int32_t * selected, int64_t n_rows, const int32_t * ids)
        : device(device), plan(plan), selected(selected), ids(ids) {
        rows.n = n_rows;
    }

    // Plans the kernel launches of product p (0 up or gate_up, 1 gate, 2 down) for the experts in `ready`. gate, gates:
    // null, or the gate matrix and its experts. They are planned in the same launches, so that a kernel can fuse both
    // products. Returns false if the product needs more than MOE_EDGE_PLAN_LAUNCHES launches.
    bool add(int p, moe_edge_matrix * m, std::vector<moe_edge_ready> ready, moe_edge_matrix * gate = nullptr,
             std::vector<moe_edge_ready> gates = {}) {
        std::vector<moe_edge_launch_item> items;
        std::unordered_map<int32_t, std::array<moe_edge_ticket, 2>> tickets;
        for (size_t i = 0; i < ready.size(); i++) {
            const moe_edge_ready & r = ready[i];
            const moe_edge_ready * g = gate ? &gates[i] : nullptr;
            const bool late = !device.passed(r.ticket) || (g && !device.passed(g->ticket));
            items.push_back({ r.expert, r.type, static_cast<const char *>(r.data), g ? static_cast<const char *>(g->data) : nullptr, late });
            tickets[r.expert] = { r.ticket, g ? g->ticket : 0 };
        }
        struct place {
            int8_t  launch = SKIPPED;
            int32_t unit = 0, gate = 0;
        };
        std::unordered_map<int32_t, place> places;
        std::vector<moe_edge_cuda_plan::launch> launches;
        for (const moe_edge_launch & l : moe_edge_plan_few(items)) {
            for (int32_t c = 0; c < l.list.n_classes; c++) {
                const moe_edge_launch_class & k = l.classes[c];
                const int own = launches.size();
                if (own == MOE_EDGE_PLAN_LAUNCHES) {
                    return false;
                }
                launches.push_back({ k.type, k.base, ids + ids_at(p, own, rows.n), nullptr, nullptr, {} });
                if (gate) {
                    launches.back().gate     = k.gate;
                    launches.back().gate_ids = ids + ids_at(p + 1, own, rows.n);
                }
                for (int32_t i = k.first; i < k.first + k.n; i++) {
                    places[l.list.expert[i]] = { (int8_t) own, l.list.unit[i], l.gate.unit[i] };
                    for (const moe_edge_ticket t : tickets[l.list.expert[i]]) {
                        moe_edge_cuda_device::add_ticket(launches.back().after, t);
                    }
                }
            }
        }
        rows.n_launches[p] = launches.size();
        for (int64_t row = 0; row < rows.n; row++) {
            const place & at = places[selected[row]];
            rows.launch[p][row] = at.launch;
            rows.unit[p][row]   = at.unit;
            if (gate) {
                rows.launch[p + 1][row] = at.launch;
                rows.unit[p + 1][row]   = at.gate;
            }
        }
        if (gate) {
            rows.n_launches[p + 1] = launches.size();
            auto & of_gate = plan.products[gate->kind];
            of_gate = { gate, launches, std::move(gates) };
            for (moe_edge_cuda_plan::launch & l : of_gate.launches) {
                l.base = l.gate;
                l.ids  = l.gate_ids;
                l.gate = nullptr;
            }
        }
        plan.products[m->kind] = { m, std::move(launches), std::move(ready) };
        return true;
    }

    planned_rows rows;

  private:
    moe_edge_cuda_device & device;
    moe_edge_cuda_plan &   plan;
    const int32_t *        selected;  // [n_rows] in host memory
    const int32_t *        ids;       // on the device
};

// Whether the vector kernels compute all tiers of this matrix in a step with n_tokens tokens.
static bool has_vector_kernels(const moe_edge_matrix & m, int64_t n_tokens, int cc) {
    return std::all_of(m.types.begin(), m.types.end(), [&](int32_t t) {
        return !ggml_is_quantized((ggml_type) t) || n_tokens <= get_mmvq_mmid_max_batch((ggml_type) t, cc);
    });
}

// Whether gate and up of every expert are both skipped, or have the same type.
static bool same_types(const std::vector<moe_edge_ready> & a, const std::vector<moe_edge_ready> & b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const moe_edge_ready & x, const moe_edge_ready & y) {
        return !x.data == !y.data && (!x.data || x.type == y.type);
    });
}

// Requests the experts of all products of the layer from the store, and plans the kernel launches of these products.
// Returns false if no plan is possible, for example because a selected expert is neither on the device nor being copied
// to it. Without a plan, each product requests its experts itself when it runs. selected, weights: the route node's
// inputs in host memory.
static bool plan_layer(ggml_backend_cuda_context & ctx, const moe_edge_route & route, ggml_tensor * node, const int32_t * selected,
                       const float * weights) {
    auto & device = *moe_edge_cuda_device::get(ctx.device);
    const int     cc       = ggml_cuda_info().devices[ctx.device].cc;
    const int64_t n_rows   = ggml_nelements(node->src[0]);
    const int64_t n_tokens = node->src[1]->ne[1];
    const int64_t n_words  = moe_edge_plan_words(node->src[1]->ne[0], n_tokens);
    if (n_words == 0 || ggml_nelements(node) != n_rows + n_words) {
        return false;
    }
    std::vector<moe_edge_matrix *> matrices;
    for (moe_edge_matrix * m : route.matrices) {
        if (m && !has_vector_kernels(*m, n_tokens, cc)) {
            return false;
        }
        if (m) {
            matrices.push_back(m);
        }
    }
    std::vector<std::vector<moe_edge_ready>> ready(matrices.size());
    if (matrices.empty() || !matrices[0]->ops->begin_layer(matrices.data(), matrices.size(), ready.data())) {
        return false;
    }
    moe_edge_cuda_plan & plan = device.backend_of(ctx).plan;
    auto * ids = static_cast<int32_t *>(node->data) + n_rows;
    planner planned(device, plan, selected, n_rows, ids);
    const auto of_kind = [&](int32_t kind) {
        return std::find_if(matrices.begin(), matrices.end(), [&](const moe_edge_matrix * m) { return m->kind == kind; }) - matrices.begin();
    };
    const size_t up = of_kind(MOE_EDGE_UP), gate = of_kind(MOE_EDGE_GATE), n = matrices.size();
    const bool together = up < n && gate < n && same_types(ready[up], ready[gate]);
    bool fits = true;
    for (size_t i = 0; i < n && fits; i++) {
        if (together && i == up) {
            fits = planned.add(0, matrices[up], ready[up], matrices[gate], ready[gate]);
        } else if (!together || i != gate) {
            fits = planned.add(i == gate ? 1 : matrices[i]->kind == MOE_EDGE_DOWN ? 2 : 0, matrices[i], ready[i]);
        }
    }
    if (!fits) {
        return false;
    }
    std::copy_n(weights, n_rows, planned.rows.weight);
    write_plan<<<1, THREADS, 0, ctx.stream()>>>(planned.rows, static_cast<float *>(node->data), ids);
    CUDA_CHECK(cudaGetLastError());
    plan.ids = node->src[1]->data;
    return true;
}

// Divides a graph into parts. Returns the end of the part that begins at node `first`. A part with a wait reaches from
// a route node to the last expert product of its layer: the host must wait for the device in it. The nodes between two
// such parts are a part without a wait, which a CUDA graph can contain.
static int part_end(const ggml_cgraph & graph, int first) {
    int end = graph.n_nodes;
    bool seen = false;
    for (int i = first; i < graph.n_nodes; i++) {
        const bool next = moe_edge_route_of(graph.nodes[i]) != nullptr;
        if (next && i > first) {
            return seen ? end : i;
        }
        if (graph.nodes[i]->op == GGML_OP_MUL_MAT_ID && moe_edge_cuda_is_managed(graph.nodes[i]->src[0])) {
            seen = true;
            end  = i + 1;
        }
    }
    return end;
}

}  // namespace

bool moe_edge_cuda_run_parts(ggml_backend_t backend, ggml_cgraph * graph, ggml_status (*compute)(ggml_backend_t, ggml_cgraph *)) {
    const auto * nodes = graph->nodes;
    const auto route = std::find_if(nodes, nodes + graph->n_nodes, [](const ggml_tensor * node) { return moe_edge_route_of(node); });
    if (route == nodes + graph->n_nodes || (*route)->src[1]->ne[1] > MOE_EDGE_PLAN_TOKENS || part_end(*graph, 0) == graph->n_nodes) {
        return false;
    }
    for (int first = 0, end = 0; first < graph->n_nodes; first = end) {
        end = part_end(*graph, first);
        ggml_cgraph part = ggml_graph_view(graph, first, end);
        part.uid = graph->uid;
        compute(backend, &part);
    }
    return true;
}

bool moe_edge_cuda_routes(int device, const ggml_tensor * node) {
    const moe_edge_route * route = moe_edge_route_of(node);
    return route && route->device && route->device == moe_edge_cuda_device::get(device);
}

bool moe_edge_cuda_route(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    moe_edge_route * route = moe_edge_route_of(node);
    if (!route) {
        return false;
    }
    auto & device = *moe_edge_cuda_device::get(ctx.device);
    const cudaStream_t stream = ctx.stream();
    moe_edge_cuda_backend & backend = device.backend_of(ctx);
    backend.plan = {};

    packed_inputs inputs;
    int64_t n_words = 0, longest = 0;
    for (int i = 0; i < GGML_MAX_SRC && node->src[i]; i++, inputs.n++) {
        const ggml_tensor * src = node->src[i];
        GGML_ASSERT(ggml_type_size(src->type) == sizeof(int32_t) && src->nb[0] == sizeof(int32_t));
        const bool even = ggml_is_contiguous(src);
        GGML_ASSERT(even || src->ne[2]*src->ne[3] == 1);
        const int64_t n = ggml_nelements(src);
        inputs.list[i] = { static_cast<const int32_t *>(src->data), even ? n : src->ne[0], even ? n : (int64_t) (src->nb[1]/sizeof(int32_t)), n, n_words };
        n_words += n;
        longest = std::max(longest, n);
    }
    auto * host = reinterpret_cast<int32_t *>(device.routed_memory(ctx, n_words*sizeof(int32_t)));
    if (!host) {
        GGML_ABORT("moe-edge: no host memory for %lld values of a router", (long long) n_words);
    }
    const bool direct = backend.routed_pinned && device.same_address();
    if (direct) {
        const dim3 blocks(std::min<int64_t>((longest + THREADS - 1)/THREADS, 64), inputs.n);
        pack_inputs<<<blocks, THREADS, 0, stream>>>(inputs, host, static_cast<int32_t *>(node->data));
        CUDA_CHECK(cudaGetLastError());
    }
    moe_edge_routed routed;
    for (int i = 0; i < inputs.n; i++) {
        const packed_input & in = inputs.list[i];
        const size_t row = in.row*sizeof(int32_t);
        if (!direct) {
            CUDA_CHECK(cudaMemcpy2DAsync(host + in.at, row, in.from, in.stride*sizeof(int32_t), row, in.n/in.row, cudaMemcpyDeviceToHost, stream));
        }
        routed.inputs[i] = host + in.at;
    }
    const moe_edge_ticket there = device.record(stream);
    if (node->src[1]->ne[1] <= MOE_EDGE_PLAN_TOKENS) {
        device.wait_awake(there);
    } else {
        device.wait(there);
    }
    if (!device.error().empty()) {
        return true;  // the inputs did not arrive; the store makes the step fail
    }

    routed.selected_stride = node->src[1]->ne[0]*sizeof(int32_t);
    routed.weights         = reinterpret_cast<float *>(host);
    const int changed = route->decide(route, node, routed);
    if (changed >= 0 && plan_layer(ctx, *route, node, static_cast<const int32_t *>(routed.inputs[1]), routed.weights)) {
        return true;
    }
    if (changed != 0 || !direct) {
        CUDA_CHECK(cudaMemcpyAsync(node->data, routed.weights, ggml_nbytes(node->src[0]), cudaMemcpyHostToDevice, stream));
    }
    return true;
}
