#include "moe-edge-host-device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr int POISON = 0xA5;  // as an F16 scale, a small and wrong value

}  // namespace

moe_edge_host_device::moe_edge_host_device(int32_t max_delay_us) : max_delay_us(max_delay_us) {
    for (int32_t l = 0; l < N_LANES; l++) {
        lanes[l].thread = std::thread([this, l] { run(l); });
    }
}

moe_edge_host_device::~moe_edge_host_device() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    changed.notify_all();
    for (auto & l : lanes) {
        l.thread.join();
    }
    while (!mapped.empty()) {
        unmap(mapped.begin()->first);
    }
}

void moe_edge_host_device::memory(uint64_t * free, uint64_t * total) const {
    const uint64_t page = sysconf(_SC_PAGESIZE);
    *free  = sysconf(_SC_AVPHYS_PAGES) * page;
    *total = sysconf(_SC_PHYS_PAGES) * page;
}

void * moe_edge_host_device::map(uint64_t bytes) {
    void * memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    madvise(memory, bytes, MADV_DONTFORK);  // direct reads and copy-on-write do not work together
    std::lock_guard<std::mutex> lock(mutex);
    mapped[memory] = bytes;
    return memory;
}

void moe_edge_host_device::unmap(void * memory) {
    std::unique_lock<std::mutex> lock(mutex);
    // Wait until no job is running, because a running job may still use the memory.
    changed.wait(lock, [this] { return running == 0; });
    const auto it = mapped.find(memory);
    if (it != mapped.end()) {
        munmap(memory, it->second);
        mapped.erase(it);
    }
}

void * moe_edge_host_device::alloc(uint64_t bytes) { return map(bytes); }

void moe_edge_host_device::release(void * memory) { unmap(memory); }

char * moe_edge_host_device::alloc_host(uint64_t bytes, bool * pinned) {
    *pinned = false;
    return static_cast<char *>(map(bytes));
}

void moe_edge_host_device::release_host(char * memory) { unmap(memory); }

bool moe_edge_host_device::passed_locked(moe_edge_ticket ticket) const {
    return ticket == 0 || !lost.empty() || ticket / N_LANES <= lanes[ticket % N_LANES].done;
}

moe_edge_ticket moe_edge_host_device::add(int32_t l, job && work) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!lost.empty()) {
        return 0;
    }
    lanes[l].jobs.push_back(std::move(work));
    changed.notify_all();
    return ++lanes[l].given * N_LANES + l;
}

moe_edge_ticket moe_edge_host_device::copy(int32_t lane, void * to, const void * from, uint64_t bytes, moe_edge_ticket after) {
    const auto work = [this, lane, to, from, bytes] {
        if (max_delay_us > 0) {
            thread_local std::minstd_rand random(lane + 1);
            memset(to, POISON, bytes);
            if (random() % 4 == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % max_delay_us));
            }
        }
        for (int32_t times = copy_times; times > 0; times--) {
            memcpy(to, from, bytes);
        }
    };
    return add(lane, { work, { after } });
}

moe_edge_ticket moe_edge_host_device::submit(std::function<void()> work, std::vector<moe_edge_ticket> after) {
    return add(COMPUTE, { std::move(work), std::move(after) });
}

void moe_edge_host_device::run(int32_t l) {
    auto & mine = lanes[l];
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [&] { return stopping || !mine.jobs.empty(); });
        if (mine.jobs.empty()) {
            return;
        }
        const job next = std::move(mine.jobs.front());
        mine.jobs.pop_front();
        changed.wait(lock, [&] {
            return !losing && std::all_of(next.after.begin(), next.after.end(), [this](moe_edge_ticket t) { return passed_locked(t); });
        });
        if (lost.empty()) {
            running++;
            lock.unlock();
            next.work();
            lock.lock();
            running--;
        }
        mine.done++;
        changed.notify_all();
    }
}

bool moe_edge_host_device::passed(moe_edge_ticket ticket) {
    std::lock_guard<std::mutex> lock(mutex);
    return passed_locked(ticket);
}

void moe_edge_host_device::wait(moe_edge_ticket ticket) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return passed_locked(ticket); });
}

std::string moe_edge_host_device::error() {
    std::lock_guard<std::mutex> lock(mutex);
    return lost;
}

// Simulates the loss of the device, after all running jobs have ended. Then all tickets (points in the device's work)
// count as passed, so that no thread waits for the lost device.
void moe_edge_host_device::lose(const std::string & why) {
    std::unique_lock<std::mutex> lock(mutex);
    losing = true;
    changed.wait(lock, [this] { return running == 0; });
    losing = false;
    lost = why;
    changed.notify_all();
}
