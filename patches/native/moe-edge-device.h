// A device that experts may live on: memory of its own, copies that run beside the host, and
// tickets that order them. The store moves bytes through it and never waits where the device
// can wait by itself; an executor for the same device adds its own streams to that order.

#pragma once

#include <cstdint>
#include <string>

// A point in the work of a device, on one of its lanes or on an executor's stream. 0 has always
// passed; larger ones of one lane pass in order, and tickets are never used twice.
using moe_edge_ticket = uint64_t;

struct moe_edge_matrix;

// Copies of one lane run in order. Demand copies never queue behind prefetch copies.
enum moe_edge_lane {
    MOE_EDGE_LANE_DEMAND   = 0,
    MOE_EDGE_LANE_PREFETCH = 1,
    MOE_EDGE_N_LANES       = 2,
};

// Any thread may call; the store calls copy with its lock held. What fails after it was accepted (a lost device) shows in error().
struct moe_edge_device {
    virtual ~moe_edge_device() = default;

    virtual std::string name() const = 0;
    virtual void memory(uint64_t * free, uint64_t * total) const = 0;

    // Memory of the device, zeroed, aligned to 256 bytes; null where it does not fit.
    virtual void * alloc(uint64_t bytes) = 0;
    virtual void   release(void * memory) = 0;

    // Host memory that copies may start from, aligned to 4096 bytes; pageable where pinning is
    // refused, and *pinned says which. Null where there is none.
    virtual char * alloc_host(uint64_t bytes, bool * pinned) = 0;
    virtual void   release_host(char * memory) = 0;

    // From host to device memory, after `after` has passed; returns at once. The source must
    // not change until the ticket has passed. 0 on failure.
    virtual moe_edge_ticket copy(int32_t lane, void * to, const void * from, uint64_t bytes, moe_edge_ticket after) = 0;

    virtual bool passed(moe_edge_ticket ticket) = 0;
    virtual void wait(moe_edge_ticket ticket) = 0;  // blocks this thread

    // Empty, or why the device is lost; every ticket counts as passed then.
    virtual std::string error() = 0;

    // A step of a store on this device begins; no op of it is called now. matrices: all of the
    // store's, whose tables change for nobody until this returns. fixed: nor will they before the
    // next boundary, every entry's ticket has passed, and ops may run without begin, next and
    // release. An executor that keeps tables on the device then brings those of another version up
    // to date; before it returns, what the step before still runs on the device without having
    // said so to release must be done, since slots that it reads may be free now. Must not call the store.
    virtual void step_boundary(moe_edge_matrix * const * matrices, int32_t n, bool fixed) {
        (void) matrices;
        (void) n;
        (void) fixed;
    }

    // Whether the executor counts what is routed while the tables are fixed, so that nothing has to
    // come back from the device in the middle of a step.
    virtual bool counts_routing() const { return false; }

    // The most memory that an op of the graphs that come asks for beside its operands, in so many
    // pieces of this length. An executor that keeps what ops asked for takes them at once, before
    // smaller ones pile up. 0: unknown, a new model.
    virtual void expect_scratch(uint64_t bytes, int32_t pieces = 1) {
        (void) bytes;
        (void) pieces;
    }

    // Whether the executor has kernels for weights of this enum ggml_type.
    virtual bool computes(int32_t type) const {
        (void) type;
        return true;
    }

    // Adds to out [n, n_expert] the tokens that were routed to the experts of these matrices since
    // the last call, and forgets them. False where nobody counts on the device. Must not call the store.
    virtual bool counts(moe_edge_matrix * const * matrices, int32_t n, uint32_t * out) {
        (void) matrices;
        (void) n;
        (void) out;
        return false;
    }
};
