// Memory of one CUDA device for experts, copies to it, and the tickets that order both with what
// the executor launches. Inside libggml-cuda only; the store sees a moe_edge_device.

#pragma once

#include "moe-edge-table.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct ggml_backend_cuda_context;

class moe_edge_cuda_device;

// The tables of a store on the device, and as they were sent there: host memory from which one
// copy brings all that changed.
struct moe_edge_cuda_tables {
    moe_edge_cuda_device & device;
    int32_t *              memory = nullptr;
    int32_t *              host   = nullptr;

    explicit moe_edge_cuda_tables(moe_edge_cuda_device & device) : device(device) {}
    ~moe_edge_cuda_tables();
    moe_edge_cuda_tables(const moe_edge_cuda_tables &) = delete;
    moe_edge_cuda_tables & operator=(const moe_edge_cuda_tables &) = delete;
};

// What stays on the device of a matrix whose table is fixed for a step (moe_edge_matrix.executor).
struct moe_edge_cuda_table {
    std::shared_ptr<moe_edge_cuda_tables> all;
    int32_t *             entries = nullptr;  // on the device, see moe_edge_plan_table
    uint32_t *            counts  = nullptr;  // on the device, [n_expert]; the down matrix only
    std::vector<int32_t>  host;               // entries as they were copied
    uint64_t              version = 0;
    bool                  reached = false;    // entries could say where all of them are
    bool                  usable  = false;    // in this step; else its ops ask the store
};

moe_edge_cuda_table * moe_edge_cuda_table_of(const moe_edge_matrix & m);  // null without one

// Host memory that an op passes rows to the host's threads through, and back.
struct moe_edge_cuda_exchange {
    std::mutex      mutex;  // held by the op that uses it
    char *          memory = nullptr;
    uint64_t        bytes  = 0;
    bool            pinned = false;
    moe_edge_ticket last   = 0;  // of what the device still reads there
};

class moe_edge_cuda_device : public moe_edge_device {
  public:
    // Null where there is no such device; the same object each time, never destroyed.
    static moe_edge_cuda_device * get(int index);

    std::string name() const override;
    void memory(uint64_t * free, uint64_t * total) const override;
    void * alloc(uint64_t bytes) override;
    void   release(void * memory) override;
    char * alloc_host(uint64_t bytes, bool * pinned) override;
    void   release_host(char * memory) override;
    moe_edge_ticket copy(int32_t lane, void * to, const void * from, uint64_t bytes, moe_edge_ticket after) override;
    bool passed(moe_edge_ticket ticket) override;
    void wait(moe_edge_ticket ticket) override;
    std::string error() override;
    void step_boundary(moe_edge_matrix * const * matrices, int32_t n, bool fixed) override;
    bool counts_routing() const override { return true; }
    bool computes(int32_t type) const override;
    bool counts(moe_edge_matrix * const * matrices, int32_t n, uint32_t * out) override;
    void expect_scratch(uint64_t bytes, int32_t pieces) override;

    // Lets the pool of a backend hold what expect_scratch said.
    void fill_pool(ggml_backend_cuda_context & ctx);
    // Whether the pools have given memory back since this was last asked for this backend: what it
    // captured before may point there.
    bool pool_shrank(const ggml_backend_cuda_context & ctx);
    // The backend is about to be destroyed.
    void forget(const ggml_backend_cuda_context & ctx);
    std::atomic<uint64_t> pool_frees { 0 };

    // As wait, but without the time that it takes to wake a thread: for who computes a token.
    void wait_awake(moe_edge_ticket ticket);

    // A ticket for all that was launched on this stream so far. 0 once the device is lost.
    moe_edge_ticket record(cudaStream_t stream);
    // What is launched on this stream from now on runs after the ticket has passed.
    void order(cudaStream_t stream, moe_edge_ticket ticket);

    // Whether kernels can read pinned memory of alloc_host at the host's own address.
    bool same_address() const { return reads_host; }

    // With at least so many bytes; the caller holds its mutex. Null memory: there is none.
    moe_edge_cuda_exchange & exchange_of(uint64_t bytes);
    moe_edge_cuda_exchange   exchange;

  private:
    struct job {
        void *          to;
        const void *    from;
        uint64_t        bytes;
        moe_edge_ticket after;
    };

    // Work in the order of one stream. Tickets 1, 2, ... of a lane share a ring of events: the
    // event of a ticket is used again only when the ticket has passed.
    struct lane {
        std::mutex               mutex;
        std::condition_variable  changed;
        cudaStream_t             stream   = nullptr;
        std::vector<cudaEvent_t> events;
        uint64_t                 issued   = 0;
        uint64_t                 recorded = 0;
        uint64_t                 passed   = 0;
        std::deque<job>          jobs;     // of the thread below
        std::thread              pageable; // the driver blocks who copies from memory that is not pinned,
                                           // and order() who waits for a copy that is still with such a thread
    };

    explicit moe_edge_cuda_device(int index);
    bool start();  // on first use: streams; false if the device is lost
    bool make_current();
    bool check(cudaError_t status, const char * what);
    lane & lane_of(moe_edge_ticket ticket) { return lanes[(ticket >> 56) - 1]; }
    moe_edge_ticket ticket_of(const lane & l, uint64_t number) const {
        return ((uint64_t) (&l - lanes.data()) + 1) << 56 | number;
    }
    // with the lane's mutex held
    bool record_on(lane & l, uint64_t number);
    bool has_passed(lane & l, uint64_t number);

    bool is_recorded(moe_edge_ticket ticket);
    void run_jobs(lane & l);
    bool is_pinned(const void * memory, uint64_t bytes);
    // In parts of which each lies in one piece of pinned memory, or in none: no copy may leave one.
    bool copy_pieces(cudaStream_t stream, void * to, const void * from, uint64_t bytes);
    bool make_tables(moe_edge_matrix * const * matrices, int32_t n);

    const int index;
    const int physical;

    std::mutex               mutex;  // of what follows
    bool                     started = false;
    std::string              failure;
    // By a backend: what its pool was asked for of what is expected, and pool_frees as it saw it.
    struct of_backend {
        uint64_t filled = 0;
        uint64_t frees  = 0;
    };

    std::map<const char *, uint64_t> mapped;  // all of alloc_host, by address
    std::map<const char *, uint64_t> pinned;  // pieces of that
    uint64_t                 pinned_bytes = 0;
    std::map<const ggml_backend_cuda_context *, of_backend> backends;
    std::atomic<bool>        lost { false };
    std::atomic<bool>        reads_host { false };  // kernels find what was pinned at the host's own address
    std::atomic<uint64_t>    expected { 0 };
    std::atomic<int32_t>     expected_pieces { 1 };

    std::array<lane, 16>     lanes;  // of copies, then one for each stream that an executor records on
};
