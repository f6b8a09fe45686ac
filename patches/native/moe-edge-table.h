// The seam between the store and a backend that computes experts: what one merged
// expert tensor ("matrix") is made of right now, and how to wait for the rest of it.
// A managed tensor points here with ggml_tensor.extra.

#pragma once

#include "moe-edge.h"

#include <atomic>
#include <cstdint>
#include <vector>

// The stable handle: data is null until complete bytes of this tier are in memory.
struct moe_edge_entry {
    const void * data = nullptr;
    int32_t      type = -1;  // enum ggml_type of data
};

// One expert that may be computed now.
struct moe_edge_ready {
    const void * data;    // null: skip, the expert's rows are zero
    int32_t      expert;
    int32_t      type;
};

struct moe_edge_matrix;

// Called by one thread of an op, in this order: begin once, then next and release in
// turn until every expert given to begin was released.
struct moe_edge_ops {
    // experts: distinct. Asks for whatever is not resident and keeps the rest resident.
    void (*begin)(moe_edge_matrix * m, const int32_t * experts, int32_t n);
    // Blocks until at least one more expert is complete; returns how many were written
    // to out (all that are ready), or -1 when the step failed.
    int32_t (*next)(moe_edge_matrix * m, moe_edge_ready * out);
    // The bytes of these experts are no longer read by any thread.
    void (*release)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n);
};

struct moe_edge_matrix {
    moe_edge_store *            store = nullptr;
    const moe_edge_ops *        ops   = nullptr;
    int32_t                     layer = 0;
    int32_t                     kind  = 0;
    std::vector<int32_t>        types;   // enum ggml_type of each tier
    std::vector<moe_edge_entry> table;   // [n_expert]
};
