// Threads of the host that compute experts beside a device, with the CPU backend's dot products.

#pragma once

#include "moe-edge-table.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

class moe_edge_workers {
  public:
    // The caller of multiply() is one of them.
    explicit moe_edge_workers(int32_t n_threads);
    ~moe_edge_workers();
    moe_edge_workers(const moe_edge_workers &) = delete;
    moe_edge_workers & operator=(const moe_edge_workers &) = delete;

    // Done on return. One caller at a time computes, others wait.
    void multiply(const std::vector<moe_edge_product> & products);

  private:
    // One product, its activations in the form that its type multiplies with.
    struct prepared {
        const moe_edge_product *  product;
        int64_t                   first;  // of its units
        std::vector<const void *> x;
    };
    const void * convert(const float * x, int64_t n, int32_t to);
    void compute_units();
    void run();

    std::mutex               callers;
    std::mutex               mutex;
    std::condition_variable  changed;   // there is work, or an end to it
    std::condition_variable  finished;  // the last thread has left the work
    uint64_t                 round    = 0;
    int32_t                  at_work  = 0;  // threads that have begun with this round and not left it
    bool                     open     = false;  // there may be work left in it
    bool                     stopping = false;

    // of this round
    std::map<std::pair<const float *, int32_t>, std::vector<char>> activations;  // by row and the type that it takes
    std::vector<prepared>    work;
    int64_t                  n_units = 0;
    size_t                   matrix_part = 0;  // rows of activations that a thread takes at once, where they are many
    std::atomic<int64_t>     next_unit { 0 };

    std::vector<std::thread> threads;
};
