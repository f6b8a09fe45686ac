// The interface of a device that holds experts: its memory, asynchronous copies to it, and tickets that order them. The
// store moves bytes through this interface and does not block the host if the device itself can wait. An executor for
// the same device adds its own streams to that order.

#pragma once

#include <cstdint>
#include <string>

// A point in the work of a device, on one of its lanes or on an executor's stream. Ticket 0 has always passed. The
// tickets of one lane pass in ascending order, and no ticket is used twice.
using moe_edge_ticket = uint64_t;

struct moe_edge_matrix;

// Copies of one lane run in order. Demand copies never wait for prefetch copies.
enum moe_edge_lane {
    MOE_EDGE_LANE_DEMAND   = 0,
    MOE_EDGE_LANE_PREFETCH = 1,
    MOE_EDGE_N_LANES       = 2,
};

// All functions may be called from any thread. The store calls copy() with its mutex held. If accepted work fails later
// because the device is lost, error() reports it.
struct moe_edge_device {
    virtual ~moe_edge_device() = default;

    virtual std::string name() const = 0;
    virtual void memory(uint64_t * free, uint64_t * total) const = 0;

    // Allocates zeroed device memory, aligned to 256 bytes. Returns null if it does not fit.
    virtual void * alloc(uint64_t bytes) = 0;
    virtual void   release(void * memory) = 0;

    // Allocates host memory for the sources of copies, aligned to 4096 bytes. *pinned tells whether it is page-locked;
    // if pinning is refused, the memory is pageable. Returns null if there is no memory.
    virtual char * alloc_host(uint64_t bytes, bool * pinned) = 0;
    virtual void   release_host(char * memory) = 0;

    // Enqueues a copy from host to device memory that starts after `after` has passed, and returns immediately. The
    // source must not change until the returned ticket has passed. Returns 0 on failure.
    virtual moe_edge_ticket copy(int32_t lane, void * to, const void * from, uint64_t bytes, moe_edge_ticket after) = 0;

    virtual bool passed(moe_edge_ticket ticket) = 0;
    virtual void wait(moe_edge_ticket ticket) = 0;  // blocks the calling thread

    // Returns an empty string, or the reason for which the device is lost. All tickets of a lost device count as
    // passed.
    virtual std::string error() = 0;

    // Begins a step of a store on this device. No op is running now. matrices: all matrices of the store, whose tables
    // do not change until this function returns. fixed: the tables are static until the next step boundary, the ticket
    // of every entry has passed, and ops may run without begin, next and release. An executor that keeps tables on the
    // device updates them here. Before this function returns, all work of the previous step that was not reported to
    // release must have ended, because the slots that it reads may be reused. Must not call the store.
    virtual void step_boundary(moe_edge_matrix * const * matrices, int32_t n, bool fixed) {
        (void) matrices;
        (void) n;
        (void) fixed;
    }

    // Whether the executor counts routed tokens on the device while the tables are static. Nothing then has to be
    // transferred from the device during a step.
    virtual bool counts_routing() const { return false; }

    // Announces the largest scratch memory that an op of the next graphs will request: `pieces` pieces of `bytes` each.
    // An executor with a memory pool allocates them immediately, before smaller pieces fragment the pool. 0: unknown,
    // for a new model.
    virtual void expect_scratch(uint64_t bytes, int32_t pieces = 1) {
        (void) bytes;
        (void) pieces;
    }

    // Whether the executor has kernels for weights of this enum ggml_type.
    virtual bool computes(int32_t type) const {
        (void) type;
        return true;
    }

    // Adds to out [n, n_expert] the tokens that were routed to the experts of these matrices since the last call, and
    // resets the counts. Returns false if the device does not count. Must not call the store.
    virtual bool counts(moe_edge_matrix * const * matrices, int32_t n, uint32_t * out) {
        (void) matrices;
        (void) n;
        (void) out;
        return false;
    }
};
