// A simulated transport: reads that move no bytes and take virtual time. Who picks the
// next read and what becomes of it is the store's code, the same as for reads from disk.
//
// The disk answers every call after a fixed latency, and calls overlap in it; then the
// bytes of one call after the other pass through a channel of a fixed bandwidth:
//
//     done = max(start + latency, when the channel is free) + bytes / bandwidth
//
// So calls complete in the order in which they start. n threads make at most n calls at
// once. Integer nanoseconds: the same input gives the same times on every machine.

#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

struct moe_edge_slices;

// One part of a slice on its way into its slot: what a store hands to an I/O thread.
struct moe_edge_read {
    int32_t  cell;
    int32_t  tier;
    const moe_edge_slices * slices;  // of the tier, over all experts
    int32_t  expert;
    int32_t  part;
    int32_t  parts;
    bool     background;  // of a transition
    char *   slot;
    bool     checks;      // its bytes count for the checksum of its slice
};

class moe_edge_simulation {
  public:
    explicit moe_edge_simulation(int32_t n_threads) : n_threads(n_threads) {}

    // bandwidth in bytes per second, 0: the bytes take no time.
    void set_speed(uint64_t bandwidth, uint64_t latency_us) {
        bytes_per_s = bandwidth;
        latency_ns  = latency_us * 1000;
    }

    uint64_t now() const { return now_ns; }
    bool     has_idle_thread() const { return running.size() < n_threads; }
    bool     busy() const { return !running.empty(); }
    // When the first of the running reads is done.
    uint64_t next_done() const { return running.front().done; }

    void start(const moe_edge_read & read, uint64_t bytes) {
        const uint64_t transfer = bytes_per_s == 0 ? 0 : (bytes * 1000000000ull + bytes_per_s - 1) / bytes_per_s;
        channel_free = std::max(now_ns + latency_ns, channel_free) + transfer;
        running.push_back({ read, now_ns, channel_free });
    }

    // Ends the first of the running reads; the clock goes on to its completion. took_ns:
    // since it started.
    moe_edge_read finish(uint64_t & took_ns) {
        const job done = running.front();
        running.pop_front();
        now_ns  = std::max(now_ns, done.done);
        took_ns = done.done - done.started;
        return done.read;
    }

    // After every read that is done by then was finished.
    void set_now(uint64_t ns) { now_ns = std::max(now_ns, ns); }

  private:
    struct job {
        moe_edge_read read;
        uint64_t      started;
        uint64_t      done;
    };

    size_t          n_threads;
    uint64_t        bytes_per_s  = 0;
    uint64_t        latency_ns   = 0;
    uint64_t        now_ns       = 0;
    uint64_t        channel_free = 0;
    std::deque<job> running;  // in the order of completion
};
