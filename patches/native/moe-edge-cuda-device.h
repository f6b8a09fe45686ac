// Declares the CUDA implementation of moe_edge_device: memory for experts, copies to the device, and tickets. A ticket
// is a point in the device's work, for which copies and kernels can wait.

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

// The expert tables of a store in device memory, and a copy of them in host memory. A table contains the tier and the
// location of each expert of a matrix. Changed entries are written to the copy and then transferred together.
struct moe_edge_cuda_tables {
    moe_edge_cuda_device & device;
    int32_t *              memory = nullptr;
    int32_t *              host   = nullptr;

    explicit moe_edge_cuda_tables(moe_edge_cuda_device & device) : device(device) {}
    ~moe_edge_cuda_tables();
    moe_edge_cuda_tables(const moe_edge_cuda_tables &) = delete;
    moe_edge_cuda_tables & operator=(const moe_edge_cuda_tables &) = delete;
};

// The expert table of one matrix in device memory, to which moe_edge_matrix.executor points. Ops use it in steps in
// which the store's tables do not change.
struct moe_edge_cuda_table {
    std::shared_ptr<moe_edge_cuda_tables> all;
    int32_t *             entries = nullptr;  // on the device, see moe_edge_plan_table
    uint32_t *            counts  = nullptr;  // on the device, [n_expert]; down matrix only
    std::vector<int32_t>  host;               // the entries as last copied
    uint64_t              version = 0;
    bool                  reached = false;    // every expert is close enough to its base address for a 32-bit distance
    bool                  usable  = false;    // ops may use it in this step; otherwise they call the store
    moe_edge_matrix *     down    = nullptr;  // the down matrix of the same layer
};

moe_edge_cuda_table * moe_edge_cuda_table_of(const moe_edge_matrix & m);  // null if the matrix has none

// Host memory through which an op passes activation rows to the host threads and receives their results.
struct moe_edge_cuda_exchange {
    std::mutex      mutex;  // held by the op that uses it
    char *          memory = nullptr;
    uint64_t        bytes  = 0;
    bool            pinned = false;
    moe_edge_ticket last   = 0;  // the device's last operation that reads this memory
};

// The planned kernel launches for the expert products (up, gate, down) of one layer, in a step with few tokens. The
// layer's route node, which follows the router, makes the plan. There is no route node in a step in which the expert
// tables do not change. In such a step, the layer's first product plans the down product, and the other products have
// no plan.
struct moe_edge_cuda_plan {
    struct launch {
        int32_t         type;
        const char *    base;      // the base address of the experts
        const int32_t * ids;       // [n_slots, n_tokens]: each expert's distance from base in blocks, or negative
        const char *    gate;      // the same for the gate matrices; null if up and gate have different types
        const int32_t * gate_ids;
        std::vector<moe_edge_ticket> after;  // the launch waits for these copies
    };
    struct product {
        moe_edge_matrix *           matrix = nullptr;  // null: not planned, or computed already
        std::vector<launch>         launches;
        std::vector<moe_edge_ready> ready;  // its experts, which are released after the last launch
    };
    const void * ids = nullptr;  // the data of the router's selection; null: there is no plan
    std::array<product, MOE_EDGE_N_KINDS> products;
};

// The executor's state for one backend. Only the backend's thread uses it.
struct moe_edge_cuda_backend {
    uint64_t filled = 0;  // scratch bytes that its pool has reserved
    uint64_t frees  = 0;  // value of pool_frees at its last graph
    moe_edge_cuda_plan plan;
    int32_t * table_ids = nullptr;  // on the device: the ids of a down product whose table does not change
    bool      asked_for_ids = false;  // the memory of table_ids has been requested, perhaps without success

    // Host memory for the inputs of a route node (the graph node after a layer's router). The device copies the inputs
    // there, because the store decides about the experts on the host.
    char *   routed        = nullptr;
    uint64_t routed_bytes  = 0;
    bool     routed_pinned = false;
};

class moe_edge_cuda_device : public moe_edge_device {
  public:
    // Returns the CUDA device with this index, or null if there is none. Always returns the same object, which is never
    // destroyed.
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
    bool runs_route_node() const override { return true; }
    bool computes(int32_t type) const override;
    bool counts(moe_edge_matrix * const * matrices, int32_t n, uint32_t * out) override;
    void expect_scratch(uint64_t bytes, int32_t pieces) override;

    // Makes the memory pool of a backend reserve the scratch memory that expect_scratch announced.
    void fill_pool(ggml_backend_cuda_context & ctx);
    // Called before each graph of a backend. Discards the plan that was made for the backend's last graph. Returns
    // whether the backend's captured CUDA graphs must also be discarded. They must if a memory pool of this device has
    // freed memory since the last call for this backend, because they may use that memory.
    bool begin_graph(const ggml_backend_cuda_context & ctx);
    // Returns the executor's state for a backend, and creates it if needed. The reference stays valid until forget().
    moe_edge_cuda_backend & backend_of(const ggml_backend_cuda_context & ctx);
    // Returns the backend's host memory for the inputs of its route nodes, enlarged to at least `bytes` bytes. Null if
    // the allocation failed.
    char * routed_memory(ggml_backend_cuda_context & ctx, uint64_t bytes);
    // Frees everything that is stored for a backend. Must be called before the backend is destroyed.
    void forget(const ggml_backend_cuda_context & ctx);
    std::atomic<uint64_t> pool_frees { 0 };

    // Waits by polling, without sleeping, until the ticket (a point in the device's work) has passed. Used in steps
    // with few tokens, in which waking a sleeping thread would take too long.
    void wait_awake(moe_edge_ticket ticket);

    // Returns a ticket for everything launched on this stream so far, or 0 if the device is lost.
    moe_edge_ticket record(cudaStream_t stream);
    // Makes all later work of this stream wait until the ticket (a point in the device's work) has passed.
    void order(cudaStream_t stream, moe_edge_ticket ticket);
    // Adds a ticket (a point in the device's work) to the list of tickets that a launch waits for. The list keeps only
    // the latest ticket of each lane (one CUDA stream), because the tickets of a lane pass in order.
    static void add_ticket(std::vector<moe_edge_ticket> & list, moe_edge_ticket ticket);

    // Whether kernels can read pinned memory from alloc_host() with the same address as the host.
    bool same_address() const { return reads_host; }

    // Returns the host memory through which ops and host threads exchange activations and results, enlarged to at least
    // `bytes` bytes. The caller must hold its `mutex`. Its `memory` is null if the allocation failed.
    moe_edge_cuda_exchange & exchange_of(uint64_t bytes);
    moe_edge_cuda_exchange   exchange;

  private:
    struct job {
        void *          to;
        const void *    from;
        uint64_t        bytes;
        moe_edge_ticket after;
    };

    // A CUDA stream whose work is marked by tickets 1, 2, and so on. The tickets share a ring of CUDA events. An event
    // is reused for a later ticket after the earlier ticket has passed.
    struct lane {
        std::mutex               mutex;
        std::condition_variable  changed;
        cudaStream_t             stream   = nullptr;
        std::vector<cudaEvent_t> events;
        uint64_t                 issued   = 0;
        uint64_t                 recorded = 0;
        uint64_t                 passed   = 0;
        std::deque<job>          jobs;     // copies for the thread below
        // The thread that makes copies from memory that is not pinned, because CUDA blocks the calling thread for such
        // copies.
        std::thread              pageable;
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
    // Copies host memory to the device in several parts. CUDA requires that each part is inside one piece of pinned
    // memory, or outside all of them.
    bool copy_pieces(cudaStream_t stream, void * to, const void * from, uint64_t bytes);
    bool make_tables(moe_edge_matrix * const * matrices, int32_t n);

    const int index;
    const int physical;

    std::mutex               mutex;  // guards the members that follow
    bool                     started = false;
    std::string              failure;
    std::map<const char *, uint64_t> mapped;  // all allocations of alloc_host, by address
    std::map<const char *, uint64_t> pinned;  // their pinned pieces
    uint64_t                 pinned_bytes = 0;
    std::map<const ggml_backend_cuda_context *, moe_edge_cuda_backend> backends;
    std::atomic<bool>        lost { false };
    std::atomic<bool>        reads_host { false };  // kernels can use the host's address of pinned memory
    std::atomic<uint64_t>    expected { 0 };
    std::atomic<int32_t>     expected_pieces { 1 };

    std::array<lane, 16>     lanes;  // the copy lanes, then one lane for each stream on which an executor records
};
