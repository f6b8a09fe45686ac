// Defines the interface between the store and the executors, which are the backends that compute experts. Each expert
// tensor of the model has a moe_edge_matrix, to which ggml_tensor.extra points. It has a table of the resident experts,
// and functions that wait for the others.

#pragma once

#include "moe-edge-device.h"
#include "moe-edge-layout.h"
#include "moe-edge.h"

#include <atomic>
#include <cstdint>
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
    // Releases experts. Their bytes must not be read after the ticket `after` has passed. 0: no work on a device reads
    // them.
    void (*release)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after);
    // Blocks until the tickets of these experts have passed. Needed by executors that read experts on the host.
    void (*wait)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n);
    // Returns whether the table is complete and does not change before the next step boundary.
    bool (*fixed)(moe_edge_matrix * m);
    // Writes all experts of an op to `out` and returns true, if the table does not change during the step. The op then
    // need not call begin, next and release. Otherwise returns false. Only for experts in host memory. first: expert e
    // has the rows first[e] to first[e + 1] of the op.
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
