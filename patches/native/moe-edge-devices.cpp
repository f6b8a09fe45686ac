#include "moe-edge-devices.h"
#include "moe-edge-host-device.h"
#include "moe-edge-util.h"
#include "moe-edge-workers.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>

namespace {

struct known_device {
    moe_edge_device *          device = nullptr;
    ggml_backend_buffer_type_t placeholders = nullptr;
    std::unique_ptr<moe_edge_device> owned = nullptr;  // CUDA devices belong to their backend
};

struct known_devices {
    std::mutex mutex;
    std::map<std::string, known_device> by_name;
};

// The devices that were opened. The object is never destroyed, because work may still use a device when the process
// ends.
known_devices & known = *new known_devices;

// Returns the number in a name that consists of this prefix and up to 9 digits. Returns -1 for any other name.
int32_t number_after(const std::string & name, const std::string & prefix) {
    const std::string digits = name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : "";
    const bool number = !digits.empty() && digits.size() <= 9 && digits.find_first_not_of("0123456789") == std::string::npos;
    return number ? std::stoi(digits) : -1;
}

known_device open_device(const std::string & name) {
    const int32_t delay = name == "host" ? 0 : number_after(name, "host:");
    if (delay >= 0) {
        auto host = std::make_unique<moe_edge_host_device>(delay);
        auto * device = host.get();
        return { device, static_cast<ggml_backend_buffer_type_t>(moe_edge_buffer_type()), std::move(host) };
    }
    const int32_t index = number_after(name, "cuda");
    if (index < 0) {
        refuse("there is no device '%s': the names of devices are cuda0, cuda1, ... and host", name.c_str());
    }
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("CUDA");
    if (!reg) {
        refuse("device %s: this build has no CUDA: run `make build GPU=cuda`", name.c_str());
    }
    using find_device = moe_edge_device * (*)(int);
    using find_type   = ggml_backend_buffer_type_t (*)(int);
    const auto device_of = reinterpret_cast<find_device>(ggml_backend_reg_get_proc_address(reg, "moe_edge_device"));
    const auto type_of   = reinterpret_cast<find_type>(ggml_backend_reg_get_proc_address(reg, "moe_edge_buffer_type"));
    const int32_t n = ggml_backend_reg_dev_count(reg);
    if (index >= n || !device_of || !type_of) {
        refuse("device %s: %d CUDA devices are usable on this machine", name.c_str(), device_of && type_of ? n : 0);
    }
    known_device found;
    found.device       = device_of(index);
    found.placeholders = type_of(index);
    if (!found.device || !found.placeholders) {
        refuse("device %s: it cannot be opened", name.c_str());
    }
    return found;
}

// Runs `work` three times and returns the shortest duration in seconds. Returns infinity if a run returns false.
template <typename F> double best_seconds(F && work) {
    double best = INFINITY;
    for (int i = 0; i < 3; i++) {
        const auto t0 = std::chrono::steady_clock::now();
        if (!work()) {
            return INFINITY;
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - t0;
        best = std::min(best, took.count());
    }
    return best;
}

double copy_seconds(moe_edge_device & device, void * to, const void * from, uint64_t bytes) {
    return best_seconds([&] {
        const moe_edge_ticket ticket = device.copy(MOE_EDGE_LANE_DEMAND, to, from, bytes, 0);
        device.wait(ticket);
        return ticket != 0 && device.error().empty();
    });
}

double compute_seconds(const void * weights, uint64_t bytes, int32_t n_threads) {
    constexpr int64_t N_IN = 2048;
    const std::vector<float> x(N_IN, 1.0f);
    std::vector<float> out(bytes / ggml_row_size(GGML_TYPE_Q4_K, N_IN));
    const moe_edge_product product = { weights, GGML_TYPE_Q4_K, N_IN, (int64_t) out.size(), { x.data() }, { out.data() } };
    moe_edge_workers workers(n_threads);
    return best_seconds([&] {
        workers.multiply({ product });
        return true;
    });
}

// Measures how long host threads take to compute experts of one shape after a cache miss. Before each measurement the
// threads sleep, and the weights are in no CPU cache.
struct product_timing {
    static constexpr uint64_t ARENA = 64 << 20;  // larger than most CPU caches
    static constexpr int32_t  FEW = 1, MANY = 3, TRIES = 7;

    const ggml_type      type;
    const int64_t        n_in, n_out;
    const uint64_t       expert_bytes = n_out * ggml_row_size(type, n_in);
    const uint64_t       n_experts    = std::max<uint64_t>(MANY, ARENA / expert_bytes);
    std::vector<char>    weights      = std::vector<char>(n_experts * expert_bytes, 1);
    std::vector<float>   x            = std::vector<float>(n_in, 1.0f);
    std::vector<float>   out          = std::vector<float>(MANY * n_out);
    uint64_t             next         = 0;

    // Measures n experts several times and returns the median time in microseconds.
    double of(moe_edge_workers & workers, int32_t n) {
        std::vector<double> took;
        for (int32_t i = 0; i < TRIES; i++) {
            std::vector<moe_edge_product> products;
            for (int32_t e = 0; e < n; e++, next++) {
                products.push_back({ weights.data() + next % n_experts * expert_bytes, type, n_in, n_out, { x.data() }, { out.data() + e * n_out } });
            }
            std::this_thread::sleep_for(std::chrono::microseconds(300));  // until the threads sleep
            const auto t0 = std::chrono::steady_clock::now();
            workers.multiply(products);
            took.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count());
        }
        std::nth_element(took.begin(), took.begin() + TRIES / 2, took.end());
        return took[TRIES / 2];
    }
};

}  // namespace

int moe_edge_measure_product(int32_t type, int64_t n_in, int64_t n_out, int32_t n_threads, double * each_us, double * wake_us) {
    if (type < 0 || type >= GGML_TYPE_COUNT || n_in < 1 || n_out < 1 || n_threads < 1 || n_threads > 1024) {
        return -1;
    }
    ggml_cpu_init();
    const auto as = static_cast<ggml_type>(type);
    const auto * traits = ggml_get_type_traits_cpu(as);
    const auto block = ggml_blck_size(as);
    if (block == 0 || n_in % block != 0 || !traits->vec_dot || (traits->vec_dot_type != GGML_TYPE_F32 && !ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float)) {
        return -1;
    }
    product_timing timing { as, n_in, n_out };
    moe_edge_workers workers(n_threads);
    const double few  = timing.of(workers, timing.FEW);
    const double many = timing.of(workers, timing.MANY);
    // Each additional expert takes at least half of the mean time, so that noise in the measurement cannot make it
    // free.
    *each_us = std::max((many - few) / (timing.MANY - timing.FEW), many / timing.MANY / 2);
    *wake_us = std::max(0.0, few - *each_us);
    return 0;
}

bool moe_edge_is_placeholder_type(ggml_backend_buffer_type_t type) {
    if (type == moe_edge_buffer_type()) {
        return true;
    }
    std::lock_guard<std::mutex> lock(known.mutex);
    return std::any_of(known.by_name.begin(), known.by_name.end(),
        [type](const auto & each) { return each.second.placeholders == type; });
}

ggml_backend_buffer_type_t moe_edge_placeholder_type(const moe_edge_device * device) {
    std::lock_guard<std::mutex> lock(known.mutex);
    for (const auto & [name, each] : known.by_name) {
        if (each.device == device) {
            return each.placeholders;
        }
    }
    return static_cast<ggml_backend_buffer_type_t>(moe_edge_buffer_type());
}

void * moe_edge_device_find(const char * name, char * err, size_t err_size) {
    std::lock_guard<std::mutex> lock(known.mutex);
    const auto it = known.by_name.find(name);
    if (it != known.by_name.end()) {
        return it->second.device;
    }
    try {
        return known.by_name.emplace(name, open_device(name)).first->second.device;
    } catch (const std::exception & e) {
        write_error(err, err_size, e.what());
        return nullptr;
    }
}

int moe_edge_device_describe(void * device, moe_edge_device_info * out) {
    const auto & d = *static_cast<moe_edge_device *>(device);
    *out = {};
    snprintf(out->name, sizeof(out->name), "%s", d.name().c_str());
    d.memory(&out->free_bytes, &out->total_bytes);
    return 0;
}

int moe_edge_device_copy_times(void * device, int32_t times) {
    if (times < 1) {
        return -1;
    }
    static_cast<moe_edge_device *>(device)->copy_times = times;
    return 0;
}

void * moe_edge_device_buffer_type(void * device) {
    return moe_edge_placeholder_type(static_cast<moe_edge_device *>(device));
}

int moe_edge_device_measure(void * device, uint64_t bytes, int32_t n_threads, moe_edge_bandwidths * out) {
    auto & d = *static_cast<moe_edge_device *>(device);
    *out = {};
    bool pinned = false;
    void * to = d.alloc(bytes);
    char * page_locked = d.alloc_host(bytes, &pinned);
    std::unique_ptr<char[]> pageable(new (std::nothrow) char[bytes]);
    bool ok = bytes >= 1 << 20 && n_threads > 0 && to && page_locked && pageable;
    if (ok) {
        memset(page_locked, 1, bytes);
        memset(pageable.get(), 1, bytes);
        const double locked = copy_seconds(d, to, page_locked, bytes);
        const double plain  = copy_seconds(d, to, pageable.get(), bytes);
        const double few    = copy_seconds(d, to, page_locked, 64);
        ok = std::isfinite(locked + plain + few) && d.error().empty();
        if (ok) {
            out->pinned_bytes_per_s   = pinned ? bytes / locked : 0.0;
            out->pageable_bytes_per_s = bytes / plain;
            out->round_trip_us        = few * 1e6;
            out->compute_bytes_per_s  = bytes / compute_seconds(page_locked, bytes, n_threads);
        }
    }
    if (to) {
        d.release(to);
    }
    if (page_locked) {
        d.release_host(page_locked);
    }
    return ok ? 0 : -1;
}
