// The memory of one CUDA device for experts, copies to it, and the tickets that order both relative to the executor's
// kernels. Only used inside libggml-cuda; the store sees a moe_edge_device.

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

// The tables of a store on the device, and their copy in host memory, from which one transfer updates all changed
// entries.
struct moe_edge_cuda_tables {
    moe_edge_cuda_device & device;
    int32_t *              memory = nullptr;
    int32_t *              host   = nullptr;

    explicit moe_edge_cuda_tables(moe_edge_cuda_device & device) : device(device) {}
    ~moe_edge_cuda_tables();
    moe_edge_cuda_tables(const moe_edge_cuda_tables &) = delete;
    moe_edge_cuda_tables & operator=(const moe_edge_cuda_tables &) = delete;
};

// The device's copy of a matrix's table while the tables are static (moe_edge_matrix.executor).
struct moe_edge_cuda_table {
    std::shared_ptr<moe_edge_cuda_tables> all;
    int32_t *             entries = nullptr;  // on the device, see moe_edge_plan_table
    uint32_t *            counts  = nullptr;  // on the device, [n_expert]; down matrix only
    std::vector<int32_t>  host;               // the entries as last copied
    uint64_t              version = 0;
    bool                  reached = false;    // all experts are within reach of the entries
    bool                  usable  = false;    // ops may use it in this step; otherwise they call the store
};

moe_edge_cuda_table * moe_edge_cuda_table_of(const moe_edge_matrix & m);  // null if the matrix has none

// Host memory through which an op passes rows to the host threads and gets results back.
struct moe_edge_cuda_exchange {
    std::mutex      mutex;  // held by the op that uses it
    char *          memory = nullptr;
    uint64_t        bytes  = 0;
    bool            pinned = false;
    moe_edge_ticket last   = 0;  // the device's last operation that reads this memory
};

class moe_edge_cuda_device : public moe_edge_device {
  public:
    // Returns the device, or null if there is none with this index. Always the same object, never destroyed.
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

    // Makes the memory pool of a backend reserve the scratch that expect_scratch announced.
    void fill_pool(ggml_backend_cuda_context & ctx);
    // Returns whether the pools have freed memory since the last call for this backend. Graphs captured before may then
    // point to freed memory.
    bool pool_shrank(const ggml_backend_cuda_context & ctx);
    // Must be called before the backend is destroyed.
    void forget(const ggml_backend_cuda_context & ctx);
    std::atomic<uint64_t> pool_frees { 0 };

    // Waits for a ticket by polling, which saves the time to wake a thread. For ops that compute a token.
    void wait_awake(moe_edge_ticket ticket);

    // Returns a ticket for everything launched on this stream so far, or 0 if the device is lost.
    moe_edge_ticket record(cudaStream_t stream);
    // Makes all later work of this stream wait for the ticket.
    void order(cudaStream_t stream, moe_edge_ticket ticket);

    // Whether kernels can read pinned memory of alloc_host at the host's own address.
    bool same_address() const { return reads_host; }

    // Returns a buffer of at least `bytes` bytes; the caller holds its mutex. Its memory is null if there is none.
    moe_edge_cuda_exchange & exchange_of(uint64_t bytes);
    moe_edge_cuda_exchange   exchange;

  private:
    struct job {
        void *          to;
        const void *    from;
        uint64_t        bytes;
        moe_edge_ticket after;
    };

    // The work of one stream. Tickets 1, 2, ... of a lane share a ring of events: the event of a ticket is reused only
    // after the ticket has passed.
    struct lane {
        std::mutex               mutex;
        std::condition_variable  changed;
        cudaStream_t             stream   = nullptr;
        std::vector<cudaEvent_t> events;
        uint64_t                 issued   = 0;
        uint64_t                 recorded = 0;
        uint64_t                 passed   = 0;
        std::deque<job>          jobs;     // copies for the thread below
        std::thread              pageable; // copies from memory that is not pinned block the calling thread, so this
                                           // thread makes them. order() blocks while a copy is still queued here.
    };

    explicit moe_edge_cuda_device(int index);
    bool start();  // on first use, creates the streams; false if the device is lost
    bool make_current();
    bool check(cudaError_t status, const char * what);
    lane & lane_of(moe_edge_ticket ticket) { return lanes[(ticket >> 56) - 1]; }
    moe_edge_ticket ticket_of(const lane & l, uint64_t number) const {
        return ((uint64_t) (&l - lanes.data()) + 1) << 56 | number;
    }
    // the lane's mutex must be held
    bool record_on(lane & l, uint64_t number);
    bool has_passed(lane & l, uint64_t number);

    bool is_recorded(moe_edge_ticket ticket);
    void run_jobs(lane & l);
    bool is_pinned(const void * memory, uint64_t bytes);
    // Copies in parts, so that each part is inside one piece of pinned memory or outside all of them, as CUDA requires.
    bool copy_pieces(cudaStream_t stream, void * to, const void * from, uint64_t bytes);
    bool make_tables(moe_edge_matrix * const * matrices, int32_t n);

    const int index;
    const int physical;

    std::mutex               mutex;  // guards the members that follow
    bool                     started = false;
    std::string              failure;
    // Per backend: the scratch that its pool has reserved, and the value of pool_frees that it last saw.
    struct of_backend {
        uint64_t filled = 0;
        uint64_t frees  = 0;
    };

    std::map<const char *, uint64_t> mapped;  // all allocations of alloc_host, by address
    std::map<const char *, uint64_t> pinned;  // their pinned pieces
    uint64_t                 pinned_bytes = 0;
    std::map<const ggml_backend_cuda_context *, of_backend> backends;
    std::atomic<bool>        lost { false };
    std::atomic<bool>        reads_host { false };  // kernels can use the host's address of pinned memory
    std::atomic<uint64_t>    expected { 0 };
    std::atomic<int32_t>     expected_pieces { 1 };

    std::array<lane, 16>     lanes;  // the copy lanes, then one lane for each stream on which an executor records
};
