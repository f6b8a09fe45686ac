// Computes experts on host threads, with the CPU backend's dot products, while a device computes other experts.

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
    // n_threads includes the caller of multiply().
    explicit moe_edge_workers(int32_t n_threads);
    ~moe_edge_workers();
    moe_edge_workers(const moe_edge_workers &) = delete;
    moe_edge_workers & operator=(const moe_edge_workers &) = delete;

    // Computes all products, and returns when they are done. If several threads call this, the calls run one after
    // another.
    void multiply(const std::vector<moe_edge_product> & products);

  private:
    // A product whose activations have been converted to the type that the dot product needs.
    struct prepared {
        const moe_edge_product *  product;
        int64_t                   first;  // number of its first unit
        std::vector<const void *> x;
    };
    const void * convert(const float * x, int64_t n, int32_t to);
    void compute_units();
    void run();

    std::mutex               callers;
    std::mutex               mutex;
    std::condition_variable  changed;   // new work, or the end of the threads
    std::condition_variable  finished;  // the last thread has finished its units
    uint64_t                 round    = 0;
    int32_t                  at_work  = 0;  // threads that are working on this round
    bool                     open     = false;  // units of this round may be left
    bool                     stopping = false;

    // Members of the current round.
    std::map<std::pair<const float *, int32_t>, std::vector<char>> activations;  // by row and target type
    std::vector<prepared>    work;
    int64_t                  n_units = 0;
    size_t                   matrix_part = 0;  // rows of activations per unit, for products computed as a matrix
    std::atomic<int64_t>     next_unit { 0 };

    std::vector<std::thread> threads;
};
