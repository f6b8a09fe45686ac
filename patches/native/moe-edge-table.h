// The interface between the store and the executors, the backends that compute experts. For each merged expert tensor
// (a "matrix"), it holds the table of the experts that are resident now and the functions that wait for the others.
// ggml_tensor.extra of a managed tensor points to its matrix.

#pragma once

#include "moe-edge-device.h"
#include "moe-edge-layout.h"
#include "moe-edge.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

// The table entry of an expert. data is null until a complete tier is in memory. On a device, the bytes are complete
// only after the ticket has passed there.
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
    int32_t         place = MOE_EDGE_MISS_COPY;  // MOE_EDGE_MISS_COPY: data is a slot. Otherwise data is host memory
                                                 // that is used in place, and enum moe_edge_miss says who computes it.
};

// The most tokens for which a layer's experts may be used in place. With so few rows per expert, moving its bytes costs
// more than computing with them.
constexpr int32_t MOE_EDGE_IN_PLACE_TOKENS = 8;

// The product of one expert with some rows of activations, for the host threads.
struct moe_edge_product {
    const void *               weights;
    int32_t                    type;
    int64_t                    n_in;   // values in a row of weights
    int64_t                    n_out;  // rows of weights
    std::vector<const float *> x;      // rows of activations, [n_in] each
    std::vector<float *>       out;    // one result of [n_out] for each x
};

struct moe_edge_matrix;

// The functions that an op calls, all from one of its threads. It calls begin once, then next and release in turn until
// it has released every expert that it passed to begin. Experts must be released between calls of next, because the
// remaining experts may wait for the slots of these.
struct moe_edge_ops {
    // Pins the resident experts of the list and requests the others. experts has no duplicates.
    void (*begin)(moe_edge_matrix * m, const int32_t * experts, int32_t n);
    // Blocks until at least one more expert is complete. Writes all complete ones to out and returns their number, or
    // -1 if the step failed.
    int32_t (*next)(moe_edge_matrix * m, moe_edge_ready * out);
    // Releases experts. Their bytes are no longer read after the ticket `after` has passed. The executor records this
    // ticket after its last reader; 0 means that the bytes have already been read.
    void (*release)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after);
    // Blocks until the tickets of these experts have passed. For executors that read on the host.
    void (*wait)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n);
    // Whether the table is complete and static: it changes only at a step boundary, so that an op may read it without
    // calling the functions above. The result is constant between two step boundaries.
    bool (*fixed)(moe_edge_matrix * m);
    // Replaces begin and next for executors that read on the host. If the tables are static and no policy decides,
    // writes all of these experts to out, counts them and returns true; they must not be released. Expert e has the
    // rows first[e] to first[e + 1] of the op. Returns false without any effect if begin is required.
    bool (*unwatched)(moe_edge_matrix * m, const int32_t * experts, const int32_t * first, int32_t n, moe_edge_ready * out);
    // Writes to out [n_expert] the distinct experts that the route hook saw for the next op. Returns their number, or
    // -1 if there was no hook or it was bypassed. For executors that would have to wait for their device to read the
    // op's ids.
    int32_t (*routed)(moe_edge_matrix * m, int32_t * out);
    // Computes the experts that next() assigned to the host, on the host threads and this thread, and returns when they
    // are done. began_us is the time at which the op began to copy the rows to the host, from moe_edge::now_us().
    void (*multiply)(moe_edge_matrix * m, const std::vector<moe_edge_product> & products, uint64_t began_us);
    // Adds a wait of the executor to the store's statistics. cause: enum moe_edge_wait.
    void (*waited)(moe_edge_matrix * m, int32_t cause, uint64_t ns);
};

struct moe_edge_matrix {
    moe_edge_store *            store = nullptr;
    const moe_edge_ops *        ops   = nullptr;
    int32_t                     layer = 0;
    int32_t                     kind  = 0;
    std::vector<int32_t>        types;   // enum ggml_type of each tier
    std::vector<const moe_edge_kernels *> kernels;  // [n_tiers] kernels for the CPU's own layout; null: the
                                                    // layout of the file
    std::vector<moe_edge_entry> table;   // [n_expert]
    uint64_t                    version = 0;        // increases with every change of the table
    moe_edge_device *           device  = nullptr;  // the device whose memory the table points to; null for host memory
    // [n_tiers] start of the memory that holds this tier's slots; null in host memory. On a device, an expert's offset
    // from this address is a multiple of the type's block size.
    std::vector<const char *>   base;
    std::shared_ptr<void>       executor;  // state that an executor keeps for this matrix; destroyed with the store
};
