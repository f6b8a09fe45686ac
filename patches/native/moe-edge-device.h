// Defines the interface of a device that holds experts: its memory, asynchronous copies to it, and tickets. A ticket
// marks a point in the device's work, so that copies and kernels can wait for each other without blocking the host.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>

// A point in the work of a device. A ticket has passed when all work before this point is done. The tickets of a lane
// (a sequence of copies or kernels) pass in ascending order. Ticket 0 has always passed.
using moe_edge_ticket = uint64_t;

struct moe_edge_matrix;

// The lanes of a device's copies. Copies of the same lane run one after another. A demand copy never waits for copies
// of the prefetch lane.
enum moe_edge_lane {
    MOE_EDGE_LANE_DEMAND   = 0,
    MOE_EDGE_LANE_PREFETCH = 1,
    MOE_EDGE_N_LANES       = 2,
};

// A device that holds experts. All functions may be called from any thread. If enqueued work fails later because the
// device is lost, error() reports it.
struct moe_edge_device {
    virtual ~moe_edge_device() = default;

    // How often copy() copies its bytes. A number above 1 imitates a slower link, see moe_edge_device_copy_times().
    std::atomic<int32_t> copy_times { 1 };

    virtual std::string name() const = 0;
    virtual void memory(uint64_t * free, uint64_t * total) const = 0;

    // Allocates zeroed device memory, aligned to 256 bytes. Returns null if the device has not enough free memory.
    virtual void * alloc(uint64_t bytes) = 0;
    virtual void   release(void * memory) = 0;

    // Allocates host memory for the sources of copies, aligned to 4096 bytes. *pinned receives whether the memory is
    // page-locked, which a driver may refuse. Returns null if the allocation fails.
    virtual char * alloc_host(uint64_t bytes, bool * pinned) = 0;
    virtual void   release_host(char * memory) = 0;

    // Enqueues a copy from host memory to device memory, and returns immediately. lane: enum moe_edge_lane. after: a
    // ticket that must pass before the copy starts. The source must not change until the returned ticket has passed.
    // Returns 0 on failure.
    virtual moe_edge_ticket copy(int32_t lane, void * to, const void * from, uint64_t bytes, moe_edge_ticket after) = 0;

    virtual bool passed(moe_edge_ticket ticket) = 0;
    virtual void wait(moe_edge_ticket ticket) = 0;  // blocks the calling thread

    // Returns the reason for which the device is lost, or an empty string if it works. All tickets of a lost device
    // count as passed.
    virtual std::string error() = 0;

    // Called at the start of each step of a store on this device, while the host runs no op. Must not call the store.
    // An executor that keeps copies of the expert tables (moe_edge_matrix::table) on the device updates the copies
    // here.
    //
    // matrices: all expert matrices of the store. fixed: the tables do not change before the next step. The ops of this
    // step may then read the copies without calling the store.
    //
    // The store does not know when an op that reads the copies has ended. If a table has changed or `fixed` is not set,
    // this function must therefore wait for such ops of the previous step. Otherwise the store could overwrite experts
    // that they still read.
    virtual void step_boundary(moe_edge_matrix * const * matrices, int32_t n, bool fixed) {
        (void) matrices;
        (void) n;
        (void) fixed;
    }

    // Whether the executor counts on the device how many tokens are routed to each expert.
    virtual bool counts_routing() const { return false; }

    // Whether the executor runs the route node (moe_edge_route). Otherwise, the CPU does.
    virtual bool runs_route_node() const { return false; }

    // Announces the largest scratch memory that an op of the next graphs will need: `pieces` pieces of `bytes` bytes
    // each. An executor with a memory pool reserves them immediately. 0 bytes: forget earlier announcements, because
    // the model changes.
    virtual void expect_scratch(uint64_t bytes, int32_t pieces = 1) {
        (void) bytes;
        (void) pieces;
    }

    // Returns whether the executor has kernels for weights of this type (enum ggml_type).
    virtual bool computes(int32_t type) const {
        (void) type;
        return true;
    }

    // Adds to out [n, n_expert] how many tokens were routed to each expert of these matrices since the last call, and
    // resets the counts. Returns false if the device does not count them. Must not call the store.
    virtual bool counts(moe_edge_matrix * const * matrices, int32_t n, uint32_t * out) {
        (void) matrices;
        (void) n;
        (void) out;
        return false;
    }
};
