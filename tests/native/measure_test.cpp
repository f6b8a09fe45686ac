// moe_edge_measure_product and moe_edge_device_measure on a simulated clock. The times of products,
// wake-ups, copies and reads are known, and must be measured exactly.
//
//   measure_test     exits with 1 and a message if a time is wrong

#include "moe-edge-workers.h"
#include "moe-edge.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <time.h>

namespace {

[[noreturn]] void die(const char * sentence, double value) {
    fprintf(stderr, "measure_test: %s (%g)\n", sentence, value);
    exit(1);
}

void expect(const char * what, double found, double wanted) {
    if (!(std::fabs(found - wanted) <= 1e-9 * wanted)) {
        fprintf(stderr, "measure_test: %s is %.12g, expected %.12g\n", what, found, wanted);
        exit(1);
    }
}

// Simulated times, in microseconds.
struct played {
    double row_us = 0.0;  // per row of weights from memory; a tenth of it from a cache
    double wake_us = 0.0;  // to wake threads that slept
    double spike_us = 0.0;  // in two of seven tries
    size_t threads_wanted = 0;  // the first row waits until this many threads take part
};

constexpr uint64_t CACHE = 32 << 20;

std::mutex mutex;
std::condition_variable came;
played  play;
double  now_us = 0.0;
int     sleeps = 0;
bool    asleep = false;
double  spike_us = 0.0;
uint64_t read_bytes = 0;
std::map<const void *, uint64_t> read_at;
std::set<std::thread::id> threads;

void begin(const played & p) {
    play = p;
    sleeps = 0;
    asleep = false;
    read_bytes = 0;
    read_at.clear();
    threads.clear();
}

// Replaces the dot product.
void multiply_row(int n, float * out, size_t, const void * weights, size_t, const void *, size_t, int) {
    std::unique_lock<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
    came.notify_all();
    // Uses the system clock, because the steady clock is simulated. Waits in short periods, because
    // a stopped program would otherwise use up the time.
    for (int left = 3000; threads.size() < play.threads_wanted; left--) {
        if (left == 0) {
            die("too few threads take part", threads.size());
        }
        came.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(20));
    }
    if (asleep) {
        asleep = false;
        now_us += play.wake_us + spike_us;
    }
    const auto known = read_at.find(weights);
    const bool cached = known != read_at.end() && read_bytes - known->second < CACHE;
    read_bytes += ggml_row_size(GGML_TYPE_Q4_K, n);
    read_at[weights] = read_bytes;
    now_us += cached ? play.row_us / 10 : play.row_us;
    *out = 0.0f;
}

// Each copy takes its own time when it is waited for. The first copy of each kind takes ten times
// as long.
class played_device : public moe_edge_device {
  public:
    static constexpr double PINNED_US = 1000.0, PAGEABLE_US = 3000.0, FEW_US = 9.0;
    bool pins = true, copies = true;
    std::string failure;

    std::string name() const override { return "played"; }
    void memory(uint64_t * free, uint64_t * total) const override { *free = *total = 0; }
    void * alloc(uint64_t bytes) override { return malloc(bytes); }
    void release(void * memory) override { free(memory); }
    char * alloc_host(uint64_t bytes, bool * pinned) override {
        *pinned = pins;
        return host = static_cast<char *>(malloc(bytes));
    }
    void release_host(char * memory) override { free(memory); }
    moe_edge_ticket copy(int32_t, void *, const void * from, uint64_t bytes, moe_edge_ticket) override {
        const bool locked = from == host && pins;
        took = took_for(bytes < 4096 ? FEW_US : locked ? PINNED_US : PAGEABLE_US);
        return copies ? 1 : 0;
    }
    bool passed(moe_edge_ticket) override { return false; }
    void wait(moe_edge_ticket) override { now_us += took; }
    std::string error() override { return failure; }

  private:
    double took_for(double us) { return known.insert(us).second ? 10 * us : us; }
    char * host = nullptr;
    double took = 0.0;
    std::set<double> known;
};

moe_edge_bandwidths measured(played_device & device, uint64_t bytes, int status, int32_t n_threads = 1) {
    moe_edge_bandwidths found;
    const int is = moe_edge_device_measure(&device, bytes, n_threads, &found);
    if (is != status) {
        die("measuring a device returned the status", is);
    }
    return found;
}

void products() {
    constexpr int64_t N_IN = 2048, N_OUT = 96;
    double each = 0.0, wake = 0.0;
    const auto timed = [&](const played & p, int32_t n_threads) {
        begin(p);
        if (moe_edge_measure_product(GGML_TYPE_Q4_K, N_IN, N_OUT, n_threads, &each, &wake) != 0) {
            die("a product is refused", n_threads);
        }
    };
    timed({ 2.0, 150.0, 9000.0, 0 }, 1);
    expect("an expert", each, 2.0 * N_OUT);
    expect("a wake-up", wake, 150.0);
    timed({ 2.0, 0.0, 0.0, 0 }, 1);
    expect("an expert without wake-ups", each, 2.0 * N_OUT);
    expect("no wake-up", wake, 0.0);
    timed({ 0.0, 150.0, 0.0, 0 }, 1);  // only noise: three experts took as long as one
    expect("an expert that costs nothing", each, 150.0 / 3 / 2);
    expect("a wake-up without work", wake, 150.0 - each);
    timed({ 1.0, 10.0, 0.0, 3 }, 3);
    if (threads.size() != 3) {
        die("more threads than three take part", threads.size());
    }
}

void devices() {
    constexpr uint64_t BYTES = 2 << 20;
    begin({ 2.0, 0.0, 0.0, 0 });
    played_device device;
    const moe_edge_bandwidths found = measured(device, BYTES, 0);
    expect("copying pinned memory", found.pinned_bytes_per_s, BYTES / (played_device::PINNED_US * 1e-6));
    expect("copying pageable memory", found.pageable_bytes_per_s, BYTES / (played_device::PAGEABLE_US * 1e-6));
    expect("a round trip", found.round_trip_us, played_device::FEW_US);
    // weights this small stay in the cache, where a row takes a tenth of the time
    const double n_rows = std::floor((double) BYTES / ggml_row_size(GGML_TYPE_Q4_K, 2048));
    expect("computing on the host", found.compute_bytes_per_s, BYTES / (n_rows * 0.2e-6));

    played_device unpinned;
    unpinned.pins = false;
    const moe_edge_bandwidths slow = measured(unpinned, BYTES, 0);
    if (slow.pinned_bytes_per_s != 0.0) {
        die("pageable memory has a pinned speed", slow.pinned_bytes_per_s);
    }
    expect("copying without pinned memory", slow.pageable_bytes_per_s, BYTES / (played_device::PAGEABLE_US * 1e-6));

    played_device no_copies, lost;
    no_copies.copies = false;
    lost.failure = "lost";
    begin({ 1.0, 0.0, 0.0, 2 });
    measured(device, BYTES, 0, 2);
    if (threads.size() != 2) {
        die("more threads than two compute", threads.size());
    }
    measured(no_copies, BYTES, -1);
    measured(lost, BYTES, -1);
    measured(device, BYTES / 4, -1);
}

}  // namespace

std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
    return time_point(std::chrono::nanoseconds((int64_t) std::llround(now_us * 1000.0)));
}

// Replaces the sleep: advances the simulated clock. The next row then includes the wake-up time.
extern "C" int nanosleep(const timespec * wanted, timespec *) {
    constexpr int TRIES = 7;
    std::lock_guard<std::mutex> lock(mutex);
    now_us += wanted->tv_sec * 1e6 + wanted->tv_nsec / 1e3;
    asleep = true;
    const int at = sleeps++ % TRIES;
    spike_us = at == 1 || at == 4 ? play.spike_us : 0.0;
    return 0;
}

const ggml_type_traits_cpu * ggml_get_type_traits_cpu(ggml_type) {
    static const ggml_type_traits_cpu traits = { nullptr, multiply_row, GGML_TYPE_F32, 1 };
    return &traits;
}

void * moe_edge_buffer_type(void) { return nullptr; }

int main() {
    products();
    devices();
    puts("fine");
}
