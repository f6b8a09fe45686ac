// What experts put out in answers: the mean squares of their outputs, added up by the threads that compute them. What it
// costs to skip an expert begins with that.
//
// Each thread adds to a block of its own, which no other thread writes, so that no cache line goes from core to core and
// an addition is a plain load and store. It squares what it has just written, which is in its first-level cache: one
// multiplication for each number of an output, where computing that number took a row of weights from memory.

#pragma once

#include "ggml.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

class moe_edge_outputs {
  public:
    class sum {
      public:
        // Of n tokens the mean square, or a part of it. By one thread at a time.
        void add(double mean_squares, uint64_t n) {
            squares.store(squares.load(std::memory_order_relaxed) + mean_squares, std::memory_order_relaxed);
            tokens.store(tokens.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
        }

      private:
        friend moe_edge_outputs;
        std::atomic<double>   squares { 0 };
        std::atomic<uint64_t> tokens { 0 };
    };

    explicit moe_edge_outputs(size_t n) : n(n) {}  // experts of all layers
    moe_edge_outputs(const moe_edge_outputs &) = delete;
    ~moe_edge_outputs() {
        for (const auto & block : blocks) {
            delete[] block.load();
        }
    }

    // [n] of a compute thread, which alone calls this with its number.
    sum * of_thread(int thread) {
        sum * block = blocks[thread].load(std::memory_order_relaxed);
        if (!block) {
            block = new sum[n];
            blocks[thread].store(block, std::memory_order_release);
        }
        return block;
    }

    // Both [n], since ever, from any thread.
    void get(uint64_t * tokens, double * squares) const {
        for (size_t i = 0; i < n; i++) {
            tokens[i]  = 0;
            squares[i] = 0;
        }
        for (const auto & block : blocks) {
            const sum * sums = block.load(std::memory_order_acquire);
            for (size_t i = 0; sums && i < n; i++) {
                tokens[i]  += sums[i].tokens.load(std::memory_order_relaxed);
                squares[i] += sums[i].squares.load(std::memory_order_relaxed);
            }
        }
    }

    bool on = false;  // in this step; changes at a step boundary alone

  private:
    const size_t n;
    std::array<std::atomic<sum *>, GGML_MAX_N_THREADS> blocks = {};
};
