// Simulates a disk: reads move no bytes and take virtual time. A read starts to transfer its bytes after a fixed
// latency. Latencies overlap, but bytes pass through a channel of fixed bandwidth, one read at a time. n threads have
// at most n reads in progress. All times are integer nanoseconds, so that the same input gives the same times on every
// machine.

#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

struct moe_edge_slices;

// A part of an expert matrix that an I/O thread should read into a slot.
struct moe_edge_read {
    int32_t  cell;
    int32_t  tier;
    const moe_edge_slices * slices;  // slices of this tier, for all experts
    int32_t  expert;
    int32_t  part;
    int32_t  parts;
    bool     background;  // belongs to a transition
    char *   slot;
    bool     checks;      // its bytes are part of the checksum of the slice
};

class moe_edge_simulation {
  public:
    explicit moe_edge_simulation(int32_t n_threads) : n_threads(n_threads) {}

    // Sets the speed of the disk. bandwidth is in bytes per second; 0 means that transferring bytes takes no time.
    void set_speed(uint64_t bandwidth, uint64_t latency_us) {
        bytes_per_s = bandwidth;
        latency_ns  = latency_us * 1000;
    }

    uint64_t now() const { return now_ns; }
    bool     has_idle_thread() const { return running.size() < n_threads; }
    bool     busy() const { return !running.empty(); }
    // Returns the time at which the next of the running reads completes.
    uint64_t next_done() const { return running.front().done; }

    void start(const moe_edge_read & read, uint64_t bytes) {
        const uint64_t transfer = bytes_per_s == 0 ? 0 : (bytes * 1000000000ull + bytes_per_s - 1) / bytes_per_s;
        channel_free = std::max(now_ns + latency_ns, channel_free) + transfer;
        running.push_back({ read, now_ns, channel_free });
    }

    // Ends the read that completes next, and advances the clock to its completion. took_ns receives its duration.
    // Returns the read.
    moe_edge_read finish(uint64_t & took_ns) {
        const job done = running.front();
        running.pop_front();
        now_ns  = std::max(now_ns, done.done);
        took_ns = done.done - done.started;
        return done.read;
    }

    // Advances the clock to this time. All reads that complete before then must have been ended.
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
