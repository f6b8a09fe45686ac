// The seam between the store and a backend that computes experts: what one merged
// expert tensor ("matrix") is made of right now, and how to wait for the rest of it.
// A managed tensor points here with ggml_tensor.extra.

#pragma once

#include "moe-edge-device.h"
#include "moe-edge-layout.h"
#include "moe-edge.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

// The stable handle: data is null until complete bytes of this tier are in memory. On a device
// they are complete in its own order: whoever waits for the ticket there, reads them.
struct moe_edge_entry {
    const void *    data   = nullptr;
    int32_t         type   = -1;  // enum ggml_type of data
    moe_edge_ticket ticket = 0;   // of the copy that brings the bytes
};

// One expert that may be computed now.
struct moe_edge_ready {
    const void *    data;    // null: skip, the expert's rows are zero
    int32_t         expert;
    int32_t         type;
    moe_edge_ticket ticket;  // to be waited for before data is read
    int32_t         place = MOE_EDGE_MISS_COPY;  // data is a slot; MOE_EDGE_MISS_COMPUTE: data is host
                                                 // memory, and threads of the host compute the expert
};

// The most tokens of a layer whose missing experts the host may compute. With so few tokens an expert
// has few rows, and moving its bytes costs more than computing with them.
constexpr int32_t MOE_EDGE_IN_PLACE_TOKENS = 8;

// Some rows of one expert's product, for threads of the host.
struct moe_edge_product {
    const void *               weights;
    int32_t                    type;
    int64_t                    n_in;   // numbers in a row of weights
    int64_t                    n_out;  // rows of weights
    std::vector<const float *> x;      // [n_in] each
    std::vector<float *>       out;    // [n_out] each, one for each x
};

struct moe_edge_matrix;

// Called by one thread of an op, in this order: begin once, then next and release in
// turn until every expert given to begin was released: what an op holds may be the very slots
// that the rest of it waits for.
struct moe_edge_ops {
    // experts: distinct. Asks for whatever is not resident and keeps the rest resident.
    void (*begin)(moe_edge_matrix * m, const int32_t * experts, int32_t n);
    // Blocks until at least one more expert is complete; returns how many were written
    // to out (all that are ready), or -1 when the step failed.
    int32_t (*next)(moe_edge_matrix * m, moe_edge_ready * out);
    // The bytes of these experts are read by nobody once `after` has passed: a ticket that the
    // executor recorded behind its last reader, 0 if it has read them already.
    void (*release)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after);
    // For executors that read on the host: blocks until the tickets of these have passed.
    void (*wait)(moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n);
    // Whether the table can only change at a step boundary, and all of it is there: an op may read
    // it without the calls above. The same from one step boundary to the next.
    bool (*fixed)(moe_edge_matrix * m);
    // For executors that read on the host, in the place of begin and next: where the tables are fixed and nobody decides,
    // all of these experts at once, which are not to be released, and what they are counted by: expert e has the rows from
    // first[e] to first[e + 1] of the op. False, and nothing is done, where begin is needed.
    bool (*unwatched)(moe_edge_matrix * m, const int32_t * experts, const int32_t * first, int32_t n, moe_edge_ready * out);
    // The distinct experts that the route hook saw for the op that is next, into out [n_expert];
    // their number, or -1 where there was no hook or it was bypassed. For executors that cannot
    // read the op's ids without waiting for their device.
    int32_t (*routed)(moe_edge_matrix * m, int32_t * out);
    // Computes what next() gave to the host: on threads of its own and this one, done on return. began_us: when
    // the op began to bring the rows to the host, by moe_edge::now_us().
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
    std::vector<const moe_edge_kernels *> kernels;  // of each tier, for the CPU's own layout; null: its bytes are as in the file
    std::vector<moe_edge_entry> table;   // [n_expert]
    uint64_t                    version = 0;        // changes whenever the table does
    moe_edge_device *           device  = nullptr;  // whose memory it points to; null: the host's
    // [n_tiers], null in the host's memory: the start of the memory that holds this tier's slots: on a device, an expert lies
    // a whole number of the type's blocks behind it.
    std::vector<const char *>   base;
    std::shared_ptr<void>       executor;  // what an executor keeps of it; goes with the store
};
