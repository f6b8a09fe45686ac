#pragma once

#include "moe-edge-device.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// A device in main memory, for tests without a GPU. Each copy lane has a thread that copies. Another thread runs the
// work that a test submits instead of kernels.
//
// With max_delay_us > 0, some copies are delayed by up to this time, and each copy first fills its destination with
// poison values. A reader that does not wait for the copy's ticket then finds poison.
struct moe_edge_host_device : moe_edge_device {
    explicit moe_edge_host_device(int32_t max_delay_us = 0);
    ~moe_edge_host_device() override;
    moe_edge_host_device(const moe_edge_host_device &) = delete;
    moe_edge_host_device & operator=(const moe_edge_host_device &) = delete;

    std::string name() const override { return "host"; }
    void memory(uint64_t * free, uint64_t * total) const override;
    void * alloc(uint64_t bytes) override;
    void   release(void * memory) override;
    char * alloc_host(uint64_t bytes, bool * pinned) override;
    void   release_host(char * memory) override;
    moe_edge_ticket copy(int32_t lane, void * to, const void * from, uint64_t bytes, moe_edge_ticket after) override;
    bool passed(moe_edge_ticket ticket) override;
    void wait(moe_edge_ticket ticket) override;
    std::string error() override;

    // Enqueues work, and returns its ticket. A ticket is a point in the device's work, here the end of this work. The
    // work starts after all earlier submitted work has ended, and after all tickets in `after` have passed.
    moe_edge_ticket submit(std::function<void()> work, std::vector<moe_edge_ticket> after);
    // Simulates that the device is lost from now on. error() then returns this reason.
    void lose(const std::string & why);

  private:
    static constexpr int32_t COMPUTE = MOE_EDGE_N_LANES;
    static constexpr int32_t N_LANES = MOE_EDGE_N_LANES + 1;

    struct job {
        std::function<void()>        work;
        std::vector<moe_edge_ticket> after;
    };
    struct lane {
        std::deque<job> jobs;
        uint64_t        given = 0;  // tickets issued; they count from 1
        uint64_t        done  = 0;
        std::thread     thread;
    };

    moe_edge_ticket add(int32_t lane, job && work);
    void run(int32_t lane);
    bool passed_locked(moe_edge_ticket ticket) const;
    void * map(uint64_t bytes);
    void   unmap(void * memory);

    const int32_t           max_delay_us;
    std::mutex              mutex;
    std::condition_variable changed;
    lane                    lanes[N_LANES];
    std::map<void *, uint64_t> mapped;
    std::string             lost;
    int32_t                 running  = 0;  // lanes that are running a job
    bool                    losing   = false;  // no new job may start
    bool                    stopping = false;
};
