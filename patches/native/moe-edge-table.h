// Defines the interface between the store and the executors, which are the backends that compute experts. Each expert
// tensor of the model has a moe_edge_matrix, to which ggml_tensor.extra points. It has a table of the resident experts,
// and functions that wait for the others.

#pragma once

#include "moe-edge-device.h"
#include "moe-edge-layout.h"
#include "moe-edge.h"

#include "ggml.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

// The location of an expert in the table of its matrix. data: null until the bytes are in memory. ticket: the copy to
// the device after which the bytes are complete.
struct moe_edge_entry {
    const void *    data   = nullptr;
    int32_t         type   = -1;  // enum ggml_type of data
    moe_edge_ticket ticket = 0;   // the copy that fills the slot
};

// An expert that can be computed now.
struct moe_edge_ready {
    const void *    data;    // null: the expert is skipped and its rows are zero
    int32_t         expert;
    int32_t         type;
    moe_edge_ticket ticket;  // must pass before data is read
    // MOE_EDGE_MISS_COPY: data is in a slot. MOE_EDGE_MISS_COMPUTE: data is in host memory, and the host computes the
    // expert there.
    int32_t         place = MOE_EDGE_MISS_COPY;
};

// The most tokens of a step for which the host may compute a missing expert of a store on a device. With more tokens,
// the expert is copied to the device.
constexpr int32_t MOE_EDGE_IN_PLACE_TOKENS = 8;

// A product that the host threads should compute: one expert times some rows of activations.
struct moe_edge_product {
    const void *               weights;
    int32_t                    type;
    int64_t                    n_in;   // values in a row of weights
    int64_t                    n_out;  // rows of weights
    std::vector<const float *> x;      // rows of activations, [n_in] each
    std::vector<float *>       out;    // one result of [n_out] for each x
};

struct moe_edge_matrix;

// The functions of the store that an op calls, all from the same thread. The op calls begin once with its experts. It
// then calls next and release in turn until all experts are released. It must release experts between two calls of
// next.
struct moe_edge_ops {
    // Pins the resident experts of the list and requests the others. The list must not contain duplicates.
    void (*begin)(moe_edge_matrix * m, const int32_t * experts, int32_t n);
    // Blocks until at least one more of the op's experts is complete. Writes all complete experts that were not
    // returned before, and returns their number. Returns -1 if the step failed.
    int32_t (*next)(moe_edge_matrix * m, moe_edge_ready * out);
    // Releases experts. after: a ticket that passes when the device has finished reading them; 0 if no device reads
    // them.
    void (*release)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after);
    // Blocks until the tickets of these experts have passed. Needed by executors that read experts on the host.
    void (*wait)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n);
    // Returns whether every expert of the matrix is in memory and the matrix's table of experts does not change before
    // the next step boundary.
    bool (*fixed)(moe_edge_matrix * m);
    // Replaces begin, next and release if the matrix's table does not change during the step. Writes all experts of an
    // op to `out` and returns true. Returns false if the table may change, or if the store is on a device. first:
    // expert e gets the op's rows from first[e] to first[e + 1] - 1. The store counts them as tokens of the expert.
    bool (*unwatched)(moe_edge_matrix * m, const int32_t * experts, const int32_t * first, int32_t n, moe_edge_ready * out);
    // Writes to out [n_expert] the distinct experts that the router has selected for the next op, and returns their
    // number. Returns -1 if the store does not know them; the executor must then read the ids from the device.
    int32_t (*routed)(moe_edge_matrix * m, int32_t * out);
    // Computes products on the host threads and on the calling thread, and returns when all are done. Used for experts
    // that next() has assigned to the host. began_us: when the op began to copy the activations, from
    // moe_edge::now_us().
    void (*multiply)(moe_edge_matrix * m, const std::vector<moe_edge_product> & products, uint64_t began_us);
    // Adds the duration of a wait in the executor to the store's statistics. cause: enum moe_edge_wait.
    void (*waited)(moe_edge_matrix * m, int32_t cause, uint64_t ns);
    // Does the work of begin and next for several matrices of one layer, with the experts that its router has selected.
    // Writes these experts to out[i] for matrices[i], in the same order for all matrices. The executor then only calls
    // release. Returns false, and does nothing, if next would have to wait for an expert, or if the host computes one.
    bool (*begin_layer)(moe_edge_matrix * const * matrices, int32_t n, std::vector<moe_edge_ready> * out) = nullptr;
};

struct moe_edge_matrix {
    moe_edge_store *            store = nullptr;
    const moe_edge_ops *        ops   = nullptr;
    int32_t                     layer = 0;
    int32_t                     kind  = 0;
    std::vector<int32_t>        types;   // enum ggml_type of each tier
    // The kernels of each tier for slots in the CPU's own layout (interleaved rows), [n_tiers]; null if slots hold the
    // file's bytes.
    std::vector<const moe_edge_kernels *> kernels;
    std::vector<moe_edge_entry> table;   // [n_expert]
    uint64_t                    version = 0;        // increases with every change of the table
    moe_edge_device *           device  = nullptr;  // the device whose memory the table points to; null for host memory
    // The start of the device memory that holds the slots of each tier, [n_tiers]; null for slots in host memory. An
    // expert's distance from this address is a multiple of the type's block size.
    std::vector<const char *>   base;
    std::shared_ptr<void>       executor;  // state that an executor keeps for this matrix; destroyed with the store
};

// A route node on a device can plan the expert products of its layer: it assigns the experts of each product to kernel
// launches. A plan has these limits: rows (tokens times selected experts) and tokens of the step, and kernel launches
// of each product.
constexpr int32_t MOE_EDGE_PLAN_ROWS = 128, MOE_EDGE_PLAN_TOKENS = 8, MOE_EDGE_PLAN_LAUNCHES = 6;

// Returns the size of a plan in 32-bit words, or 0 if the step is too large for a plan. A route node on a device writes
// its plan after the routing weights: [3 products, MOE_EDGE_PLAN_LAUNCHES, n_used * n_tokens]. Each word says which
// expert, if any, a kernel launch multiplies with a row.
inline int64_t moe_edge_plan_words(int64_t n_used, int64_t n_tokens) {
    const bool few = n_tokens <= MOE_EDGE_PLAN_TOKENS && n_used * n_tokens <= MOE_EDGE_PLAN_ROWS;
    return few ? 3 * MOE_EDGE_PLAN_LAUNCHES * n_used * n_tokens : 0;
}

// The inputs of a route node, copied to host memory. A route node is a node of the graph that reports the experts that
// a router has selected (moe_edge_route).
struct moe_edge_routed {
    const void * inputs[GGML_MAX_SRC] = {};  // the data of the node's sources, without gaps between their rows
    size_t       selected_stride = 0;        // bytes between the tokens of the selected experts, inputs[1]
    float *      weights = nullptr;          // [k, T]: the routing weights, which decide() may change
};

// A layer's route node: a node of the graph between the router and the experts, which reports the selected experts to
// the store. An executor may run it on a device. moe_edge_route_of() returns this object for a node.
struct moe_edge_route {
    moe_edge_device * device = nullptr;  // null: the CPU runs the node
    moe_edge_matrix * matrices[MOE_EDGE_N_KINDS] = {};  // null for kinds that the layer does not have
    // Reports the selected experts to the store, which then decides in which tier (precision) each expert is computed.
    // Returns 0, 1 if the routing weights were changed, or -1 if the step failed.
    int (*decide)(moe_edge_route * route, const ggml_tensor * node, const moe_edge_routed & routed) = nullptr;
};

// The indices of the op parameters in which a route node stores MOE_EDGE_ROUTE_MARK, which identifies route nodes, and
// the address of its moe_edge_route. ggml's custom op uses the first parameters.
constexpr int     MOE_EDGE_ROUTE_MARK_AT = GGML_MAX_OP_PARAMS / sizeof(int32_t) - 2;
constexpr int     MOE_EDGE_ROUTE_AT      = MOE_EDGE_ROUTE_MARK_AT - 2;
constexpr int32_t MOE_EDGE_ROUTE_MARK    = 0x6d6f6572;

inline void moe_edge_mark_route(ggml_tensor * node, const moe_edge_route * route) {
    node->op_params[MOE_EDGE_ROUTE_MARK_AT] = MOE_EDGE_ROUTE_MARK;
    memcpy(&node->op_params[MOE_EDGE_ROUTE_AT], &route, sizeof(route));
}

// Returns null for other nodes.
inline moe_edge_route * moe_edge_route_of(const ggml_tensor * node) {
    moe_edge_route * route = nullptr;
    if (node->op == GGML_OP_CUSTOM && node->op_params[MOE_EDGE_ROUTE_MARK_AT] == MOE_EDGE_ROUTE_MARK) {
        memcpy(&route, &node->op_params[MOE_EDGE_ROUTE_AT], sizeof(route));
    }
    return route;
}
