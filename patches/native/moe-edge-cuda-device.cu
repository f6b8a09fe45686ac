#include "moe-edge-cuda-device.h"
#include "moe-edge-launch.h"

#include "../ggml/src/ggml-cuda/common.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr size_t   RING         = 512;  // tickets of a CUDA stream that may be pending at the same time
constexpr uint64_t PINNED_PIECE = 1ull << 30;  // bytes that are pinned with one call of the driver

// Returns the most bytes of host memory that may be pinned: a fraction of the machine's memory, because pinned memory
// cannot be swapped out.
static uint64_t most_pinned() {
    return (uint64_t) sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 4 * 3;
}

// Called by ggml when it is about to abort the process. Explains to the user the two frequent causes: the device has
// failed, or its memory is full.
static void on_abort(const char * message) {
    const bool full = cudaPeekAtLastError() == cudaErrorMemoryAllocation;
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) {
        fprintf(stderr, "The GPU has failed (%s): start the program again, or use --device cpu.\n", cudaGetErrorString(status));
    } else if (full) {
        fprintf(stderr, "The GPU's memory is full: end other programs that use it, or give a smaller --vram.\n");
    } else {
        fprintf(stderr, "%s\n", message);
        return;
    }
    fflush(stderr);
    _exit(1);
}

// Copies the counts of routed tokens to `out` and sets them to 0. An op may be counting at the same time.
__global__ void take_counts(uint32_t * counts, uint32_t * out, const int32_t n) {
    const int32_t i = blockIdx.x*blockDim.x + threadIdx.x;
    if (i < n) {
        out[i] = atomicExch(counts + i, 0u);
    }
}

// Returns the number of a ticket within its lane, which is one CUDA stream. The top byte of a ticket is the number of
// the lane.
static uint64_t number_of(moe_edge_ticket ticket) { return ticket << 8 >> 8; }

// Returns whether every expert has the same tier in the device tables of both matrices.
static bool same_tiers(const moe_edge_matrix & a, const moe_edge_matrix & b) {
    const std::vector<int32_t> & of_a = moe_edge_cuda_table_of(a)->host;
    const std::vector<int32_t> & of_b = moe_edge_cuda_table_of(b)->host;
    return of_a.size() == of_b.size() && std::equal(of_a.begin(), of_a.begin() + of_a.size()/2, of_b.begin());
}

}  // namespace

moe_edge_cuda_table * moe_edge_cuda_table_of(const moe_edge_matrix & m) {
    return static_cast<moe_edge_cuda_table *>(m.executor.get());
}

moe_edge_cuda_tables::~moe_edge_cuda_tables() {
    device.release(memory);
    device.release_host(reinterpret_cast<char *>(host));
}

moe_edge_cuda_device * moe_edge_cuda_device::get(int index) {
    static std::mutex guard;
    static moe_edge_cuda_device * devices[GGML_CUDA_MAX_DEVICES] = {};
    std::lock_guard<std::mutex> lock(guard);
    if (index < 0 || index >= ggml_cuda_info().device_count) {
        return nullptr;
    }
    if (!devices[index]) {
        ggml_set_abort_callback(on_abort);
        devices[index] = new moe_edge_cuda_device(index);
    }
    return devices[index];
}

moe_edge_cuda_device::moe_edge_cuda_device(int index)
    : index(index), physical(ggml_cuda_info().devices[index].physical_device) {}

bool moe_edge_cuda_device::check(cudaError_t status, const char * what) {
    if (status == cudaSuccess) {
        return true;
    }
    (void) cudaGetLastError();
    std::lock_guard<std::mutex> lock(mutex);
    if (failure.empty()) {
        failure = std::string(what) + ": " + cudaGetErrorString(status) + "; start the program again, or without a GPU";
    }
    lost = true;
    return false;
}

bool moe_edge_cuda_device::make_current() {
    return check(cudaSetDevice(physical), "it cannot be selected");
}

bool moe_edge_cuda_device::start() {
    if (lost || !make_current()) {
        return false;
    }
    cudaError_t status = cudaSuccess;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (started) {
            return true;
        }
        started = true;
        int least    = 0;
        int greatest = 0;
        status = cudaDeviceGetStreamPriorityRange(&least, &greatest);
        for (int i = 0; i < MOE_EDGE_N_LANES && status == cudaSuccess; i++) {
            status = cudaStreamCreateWithPriority(&lanes[i].stream, cudaStreamNonBlocking,
                                                  i == MOE_EDGE_LANE_DEMAND ? greatest : least);
        }
        int same_address = 0;
        if (status == cudaSuccess) {
            status = cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, physical);
        }
        reads_host = same_address != 0;
    }
    return check(status, "its copy streams cannot be made");
}

std::string moe_edge_cuda_device::name() const {
    cudaDeviceProp properties = {};
    if (cudaGetDeviceProperties(&properties, physical) != cudaSuccess) {
        (void) cudaGetLastError();
        return "CUDA" + std::to_string(index);
    }
    return properties.name;
}

void moe_edge_cuda_device::memory(uint64_t * free, uint64_t * total) const {
    size_t free_bytes  = 0;
    size_t total_bytes = 0;
    if (cudaSetDevice(physical) != cudaSuccess || cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
        (void) cudaGetLastError();
    }
    *free  = free_bytes;
    *total = total_bytes;
}

void * moe_edge_cuda_device::alloc(uint64_t bytes) {
    if (!start()) {
        return nullptr;
    }
    void * memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        (void) cudaGetLastError();  // the allocation does not fit, which is not a failure of the device
        return nullptr;
    }
    // Clear the memory. Kernels also read the padding after an expert, which must not contain a NaN.
    if (!check(cudaMemset(memory, 0, bytes), "its memory cannot be cleared") ||
        !check(cudaDeviceSynchronize(), "its memory cannot be cleared")) {
        return nullptr;
    }
    return memory;
}

void moe_edge_cuda_device::release(void * memory) {
    if (memory && make_current()) {
        check(cudaFree(memory), "its memory cannot be freed");
    }
}

// Allocates host memory and pins it with CUDA, piece by piece. If the driver refuses a piece, the earlier pieces stay
// pinned.
char * moe_edge_cuda_device::alloc_host(uint64_t bytes, bool * is_pinned) {
    *is_pinned = false;
    const uint64_t page = sysconf(_SC_PAGESIZE);
    bytes = (bytes + page - 1) / page * page;
    void * memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    madvise(memory, bytes, MADV_DONTFORK);  // direct reads and copy-on-write do not work together
    auto * at = static_cast<char *>(memory);
    const bool usable = start();
    std::lock_guard<std::mutex> lock(mutex);
    mapped[at] = bytes;
    uint64_t done = 0;
    while (usable && done < bytes) {
        const uint64_t piece = std::min(PINNED_PIECE, bytes - done);
        if (pinned_bytes + piece > most_pinned() ||
            cudaHostRegister(at + done, piece, cudaHostRegisterPortable | cudaHostRegisterMapped) != cudaSuccess) {
            (void) cudaGetLastError();
            break;
        }
        pinned[at + done] = piece;
        pinned_bytes += piece;
        done += piece;
    }
    *is_pinned = done == bytes;
    return at;
}

void moe_edge_cuda_device::release_host(char * memory) {
    if (!memory) {
        return;
    }
    std::vector<char *> pieces;
    uint64_t bytes;
    {
        std::lock_guard<std::mutex> lock(mutex);
        const auto it = mapped.find(memory);
        if (it == mapped.end()) {
            return;
        }
        bytes = it->second;
        mapped.erase(it);
        for (auto piece = pinned.lower_bound(memory); piece != pinned.end() && piece->first < memory + bytes;) {
            pieces.push_back(const_cast<char *>(piece->first));
            pinned_bytes -= piece->second;
            piece = pinned.erase(piece);
        }
    }
    for (char * piece : pieces) {
        if (make_current()) {
            check(cudaHostUnregister(piece), "host memory cannot be unpinned");
        }
    }
    munmap(memory, bytes);
}

moe_edge_cuda_exchange & moe_edge_cuda_device::exchange_of(uint64_t bytes) {
    if (exchange.bytes < bytes) {
        wait(exchange.last);
        if (exchange.memory) {
            release_host(exchange.memory);
        }
        exchange.memory = alloc_host(bytes, &exchange.pinned);
        exchange.bytes  = exchange.memory ? bytes : 0;
    }
    return exchange;
}

bool moe_edge_cuda_device::is_pinned(const void * memory, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto * at  = static_cast<const char *>(memory);
    const auto * end = at + bytes;
    auto piece = pinned.upper_bound(at);
    if (piece == pinned.begin()) {
        return false;
    }
    for (--piece; at < end; ++piece) {
        if (piece == pinned.end() || at < piece->first || at >= piece->first + piece->second) {
            return false;
        }
        at = piece->first + piece->second;
    }
    return true;
}

bool moe_edge_cuda_device::copy_pieces(cudaStream_t stream, void * to, const void * from, uint64_t bytes) {
    std::vector<uint64_t> pieces;
    {
        std::lock_guard<std::mutex> lock(mutex);
        const auto * at = static_cast<const char *>(from);
        for (uint64_t left = bytes; left > 0; left -= pieces.back(), at += pieces.back()) {
            const auto after = pinned.upper_bound(at);
            const auto * end = after == pinned.end() ? at + left : after->first;
            if (after != pinned.begin() && at < std::prev(after)->first + std::prev(after)->second) {
                end = std::prev(after)->first + std::prev(after)->second;
            }
            pieces.push_back(std::min<uint64_t>(left, end - at));
        }
    }
    for (int32_t times = copy_times; times > 0; times--) {
        uint64_t done = 0;
        for (const uint64_t piece : pieces) {
            if (!check(cudaMemcpyAsync(static_cast<char *>(to) + done, static_cast<const char *>(from) + done, piece,
                                       cudaMemcpyHostToDevice, stream), "a copy to it failed")) {
                return false;
            }
            done += piece;
        }
    }
    return true;
}

bool moe_edge_cuda_device::has_passed(lane & l, uint64_t number) {
    if (number <= l.passed || lost) {
        return true;
    }
    if (number > l.recorded) {
        return false;
    }
    if (!make_current()) {  // otherwise, a thread without a selected device would initialize the first device
        return true;
    }
    const cudaError_t status = cudaEventQuery(l.events[number % RING]);
    if (status == cudaErrorNotReady) {
        (void) cudaGetLastError();  // otherwise, the next launch would report this status as its own failure
        return false;
    }
    if (check(status, "a query of its work failed")) {
        l.passed = number;
    }
    return true;
}

bool moe_edge_cuda_device::record_on(lane & l, uint64_t number) {
    if (l.events.empty()) {
        l.events.resize(RING);
        for (cudaEvent_t & event : l.events) {
            if (!check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "an event cannot be made")) {
                l.events.clear();
                return false;
            }
        }
    }
    if (number > RING && l.passed < number - RING) {
        if (!check(cudaEventSynchronize(l.events[number % RING]), "its work failed")) {
            return false;
        }
        l.passed = number - RING;
    }
    if (!check(cudaEventRecord(l.events[number % RING], l.stream), "an event cannot be recorded")) {
        return false;
    }
    l.recorded = number;
    return true;
}

moe_edge_ticket moe_edge_cuda_device::copy(int32_t lane_index, void * to, const void * from, uint64_t bytes,
                                           moe_edge_ticket after) {
    if (!start()) {
        return 0;
    }
    lane & l = lanes[lane_index];
    const bool direct = is_pinned(from, bytes) && is_recorded(after);
    if (direct) {
        order(l.stream, after);
    }
    std::lock_guard<std::mutex> lock(l.mutex);
    const uint64_t number = ++l.issued;
    if (direct && l.recorded + 1 == number) {
        return copy_pieces(l.stream, to, from, bytes) && record_on(l, number) ? ticket_of(l, number) : 0;
    }
    l.jobs.push_back({ to, from, bytes, after });
    if (!l.pageable.joinable()) {
        l.pageable = std::thread([this, &l] { run_jobs(l); });
    }
    l.changed.notify_all();
    return ticket_of(l, number);
}

bool moe_edge_cuda_device::is_recorded(moe_edge_ticket ticket) {
    if (ticket == 0 || lost) {
        return true;
    }
    lane & l = lane_of(ticket);
    std::lock_guard<std::mutex> lock(l.mutex);
    return number_of(ticket) <= l.recorded;
}

void moe_edge_cuda_device::run_jobs(lane & l) {
    if (!make_current()) {
        return;
    }
    std::unique_lock<std::mutex> lock(l.mutex);
    for (;;) {
        l.changed.wait(lock, [&] { return !l.jobs.empty(); });
        const job j = l.jobs.front();
        lock.unlock();
        order(l.stream, j.after);
        const bool copied = !lost && copy_pieces(l.stream, j.to, j.from, j.bytes);
        lock.lock();
        l.jobs.pop_front();
        if (!copied || !record_on(l, l.recorded + 1)) {
            l.recorded = l.issued;
            l.jobs.clear();
        }
        l.changed.notify_all();
    }
}

moe_edge_ticket moe_edge_cuda_device::record(cudaStream_t stream) {
    if (!start()) {
        return 0;
    }
    size_t at = MOE_EDGE_N_LANES;
    {
        std::lock_guard<std::mutex> lock(mutex);
        while (at < lanes.size() && lanes[at].stream != stream) {
            at++;
        }
        for (size_t i = MOE_EDGE_N_LANES; at == lanes.size() && i < lanes.size(); i++) {
            if (!lanes[i].stream) {
                lanes[i].stream = stream;
                at = i;
            }
        }
    }
    if (at == lanes.size()) {
        // No lane is free, and a stream without a lane can get no ticket (a point in its work). Wait for the stream's
        // work here instead. Ticket 0 then tells the caller that the work is done.
        check(cudaStreamSynchronize(stream), "its work failed");
        return 0;
    }
    lane & l = lanes[at];
    std::lock_guard<std::mutex> lock(l.mutex);
    const uint64_t number = ++l.issued;
    return record_on(l, number) ? ticket_of(l, number) : 0;
}

void moe_edge_cuda_device::order(cudaStream_t stream, moe_edge_ticket ticket) {
    if (ticket == 0 || !make_current()) {
        return;
    }
    lane & l = lane_of(ticket);
    const uint64_t number = number_of(ticket);
    if (l.stream == stream) {
        return;
    }
    std::unique_lock<std::mutex> lock(l.mutex);
    l.changed.wait(lock, [&] { return lost || l.recorded >= number; });
    // Keep the mutex locked until the stream's wait for the event is enqueued. Otherwise another thread could reuse the
    // event for later work.
    if (!has_passed(l, number)) {
        check(cudaStreamWaitEvent(stream, l.events[number % RING], 0), "an event cannot be waited for");
    }
}

bool moe_edge_cuda_device::passed(moe_edge_ticket ticket) {
    if (ticket == 0 || lost) {
        return true;
    }
    lane & l = lane_of(ticket);
    std::lock_guard<std::mutex> lock(l.mutex);
    return has_passed(l, number_of(ticket));
}

void moe_edge_cuda_device::wait(moe_edge_ticket ticket) {
    if (passed(ticket) || !make_current()) {
        return;
    }
    lane & l = lane_of(ticket);
    const uint64_t number = number_of(ticket);
    cudaEvent_t event;
    {
        std::unique_lock<std::mutex> lock(l.mutex);
        l.changed.wait(lock, [&] { return lost || l.recorded >= number; });
        if (has_passed(l, number)) {
            return;
        }
        event = l.events[number % RING];
    }
    // Another thread may have reused this event for later work of the same CUDA stream. Waiting for the later work is
    // also correct, because it ends after the work of `ticket`.
    check(cudaEventSynchronize(event), "its work failed");
}

void moe_edge_cuda_device::wait_awake(moe_edge_ticket ticket) {
    while (!passed(ticket)) {
        std::this_thread::yield();
    }
}

void moe_edge_cuda_device::expect_scratch(uint64_t bytes, int32_t pieces) {
    expected_pieces = pieces;
    expected = bytes;
    if (bytes == 0) {
        std::lock_guard<std::mutex> lock(mutex);
        for (auto & [ctx, b] : backends) {
            b.filled = 0;
        }
    }
}

void moe_edge_cuda_device::fill_pool(ggml_backend_cuda_context & ctx) {
    const uint64_t bytes = expected;
    {
        std::lock_guard<std::mutex> lock(mutex);
        uint64_t & filled = backends[&ctx].filled;
        if (bytes <= filled) {
            return;
        }
        filled = bytes;
    }
    ggml_cuda_pool_alloc<char> piece(ctx.pool(), bytes);
    ggml_cuda_pool_alloc<char> other(ctx.pool());
    if (expected_pieces > 1) {
        other.alloc(bytes);
    }
}

bool moe_edge_cuda_device::begin_graph(const ggml_backend_cuda_context & ctx) {
    moe_edge_cuda_backend & backend = backend_of(ctx);
    backend.plan.ids = nullptr;
    const uint64_t now = pool_frees;
    return std::exchange(backend.frees, now) != now;
}

moe_edge_cuda_backend & moe_edge_cuda_device::backend_of(const ggml_backend_cuda_context & ctx) {
    std::lock_guard<std::mutex> lock(mutex);
    return backends[&ctx];
}

char * moe_edge_cuda_device::routed_memory(ggml_backend_cuda_context & ctx, uint64_t bytes) {
    moe_edge_cuda_backend & backend = backend_of(ctx);
    if (backend.routed_bytes < bytes) {
        check(cudaStreamSynchronize(ctx.stream()), "its work failed");  // the last node may still use the memory
        release_host(backend.routed);
        backend.routed       = alloc_host(bytes, &backend.routed_pinned);
        backend.routed_bytes = backend.routed ? bytes : 0;
    }
    return backend.routed;
}

void moe_edge_cuda_device::add_ticket(std::vector<moe_edge_ticket> & list, moe_edge_ticket ticket) {
    for (moe_edge_ticket & other : list) {
        if (other >> 56 == ticket >> 56) {
            other = std::max(other, ticket);
            return;
        }
    }
    if (ticket != 0) {
        list.push_back(ticket);
    }
}

// Frees the state of a backend. Also frees the lanes of its CUDA streams, so that other streams can use them. A freed
// lane continues to count its tickets upwards, so that no ticket is used twice.
void moe_edge_cuda_device::forget(const ggml_backend_cuda_context & ctx) {
    char *    routed    = backend_of(ctx).routed;
    int32_t * table_ids = backend_of(ctx).table_ids;
    {
        std::lock_guard<std::mutex> lock(mutex);
        backends.erase(&ctx);
        for (size_t i = MOE_EDGE_N_LANES; i < lanes.size(); i++) {
            lane & l = lanes[i];
            const auto & own = ctx.streams[ctx.device];
            if (l.stream && std::find(std::begin(own), std::end(own), l.stream) != std::end(own)) {
                (void) cudaStreamSynchronize(l.stream);
                std::lock_guard<std::mutex> held(l.mutex);
                l.passed = l.issued;
                l.stream = nullptr;
            }
        }
    }
    release_host(routed);
    release(table_ids);
}

std::string moe_edge_cuda_device::error() {
    std::lock_guard<std::mutex> lock(mutex);
    return failure;
}

// Returns true for the float types, and for all quantized types for which upstream's kernel MMVQ has a dot product.
bool moe_edge_cuda_device::computes(int32_t type) const {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            return true;
        case GGML_TYPE_Q8_1:
        case GGML_TYPE_Q8_K:
        case GGML_TYPE_TQ1_0:
        case GGML_TYPE_TQ2_0:
            return false;
        default:
            return ggml_is_quantized((ggml_type) type);
    }
}

bool moe_edge_cuda_device::make_tables(moe_edge_matrix * const * matrices, int32_t n) {
    if (n == 0 || moe_edge_cuda_table_of(*matrices[0])) {
        return n > 0;
    }
    size_t n_words = 0;
    for (int32_t i = 0; i < n; i++) {
        n_words += matrices[i]->table.size() * (matrices[i]->kind == MOE_EDGE_DOWN ? 4 : 2);
    }
    const auto all = std::make_shared<moe_edge_cuda_tables>(*this);
    bool is_pinned = false;
    all->memory = static_cast<int32_t *>(alloc(n_words * sizeof(int32_t)));
    all->host   = all->memory ? reinterpret_cast<int32_t *>(alloc_host(n_words * sizeof(int32_t), &is_pinned)) : nullptr;
    if (!all->host) {
        return false;
    }
    // Put the counts first: how many tokens were routed to each expert of each layer, in the order of the layers. Then
    // comes space of the same size, to which take_counts() moves the counts. The host can thus read them with one
    // transfer.
    auto * counts = reinterpret_cast<uint32_t *>(all->memory);
    auto * entries = all->memory + n_words;
    for (int32_t i = 0; i < n; i++) {
        moe_edge_matrix & m = *matrices[i];
        auto table = std::make_shared<moe_edge_cuda_table>();
        table->all = all;
        if (m.kind == MOE_EDGE_DOWN) {
            table->counts = counts;
            counts += m.table.size();
        }
        entries -= 2*m.table.size();
        table->entries = entries;
        m.executor = table;
        for (int32_t j = 0; j < n; j++) {
            if (matrices[j]->layer == m.layer && matrices[j]->kind == MOE_EDGE_DOWN) {
                table->down = matrices[j];
            }
        }
    }
    return true;
}

void moe_edge_cuda_device::step_boundary(moe_edge_matrix * const * matrices, int32_t n, bool fixed) {
    bool changed = !fixed;
    bool in_use  = false;
    for (int32_t i = 0; i < n; i++) {
        if (moe_edge_cuda_table * t = moe_edge_cuda_table_of(*matrices[i])) {
            changed = changed || t->version != matrices[i]->version;
            in_use  = in_use || t->usable;
            t->usable = false;
        }
    }
    // Wait for the device before the tables change, because ops of the last step may still read them.
    if (changed && in_use && make_current()) {
        check(cudaDeviceSynchronize(), "its work failed");
    }
    if (!fixed || !start() || !make_tables(matrices, n)) {
        return;
    }
    // Find the range from the first to the last changed entry, to copy it with one transfer.
    int32_t * first = nullptr;
    int32_t * last  = nullptr;
    for (int32_t i = 0; i < n; i++) {
        const moe_edge_matrix & m = *matrices[i];
        moe_edge_cuda_table & t = *moe_edge_cuda_table_of(m);
        if (t.version != m.version || t.host.empty()) {
            std::vector<int32_t> entries;
            t.version = m.version;
            t.reached = moe_edge_plan_table(m.table, m.types, m.base, entries);
            if (t.reached && entries != t.host) {
                std::copy(entries.begin(), entries.end(), t.all->host + (t.entries - t.all->memory));
                first = first ? std::min(first, t.entries) : t.entries;
                last  = std::max(last, t.entries + entries.size());
            }
            t.host.swap(entries);
        }
    }
    if (first) {
        const moe_edge_cuda_tables & all = *moe_edge_cuda_table_of(*matrices[0])->all;
        const cudaStream_t stream = lanes[MOE_EDGE_LANE_DEMAND].stream;
        check(cudaMemcpyAsync(first, all.host + (first - all.memory), (last - first) * sizeof(int32_t), cudaMemcpyHostToDevice, stream),
              "a table cannot be copied to it") && check(cudaStreamSynchronize(stream), "a table cannot be copied to it");
    }
    for (int32_t i = 0; i < n; i++) {
        moe_edge_cuda_table & t = *moe_edge_cuda_table_of(*matrices[i]);
        t.usable = t.reached && !lost;
    }
    // Disable the tables of gate and up for this step if an expert has different tiers in them. An op that fuses gate
    // and up requires the same tier.
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = i + 1; j < n && matrices[j]->layer == matrices[i]->layer; j++) {
            if (matrices[i]->kind != MOE_EDGE_DOWN && matrices[j]->kind != MOE_EDGE_DOWN &&
                !same_tiers(*matrices[i], *matrices[j])) {
                moe_edge_cuda_table_of(*matrices[i])->usable = false;
                moe_edge_cuda_table_of(*matrices[j])->usable = false;
            }
        }
    }
}

bool moe_edge_cuda_device::counts(moe_edge_matrix * const * matrices, int32_t n, uint32_t * out) {
    const moe_edge_cuda_table * first = n > 0 ? moe_edge_cuda_table_of(*matrices[0]) : nullptr;
    if (!first || !start()) {
        return false;
    }
    const size_t n_expert = matrices[0]->table.size();
    const size_t total    = n_expert * n;
    for (int32_t i = 0; i < n; i++) {
        if (moe_edge_cuda_table_of(*matrices[i])->counts != first->counts + i*n_expert) {
            return false;
        }
    }
    // The counts of all n matrices, [n, n_expert], begin at first->counts, and space for a copy follows. Ops may be
    // counting meanwhile, so the kernel copies and resets each count with one atomic operation.
    std::vector<uint32_t> read(total);
    uint32_t * copied = first->counts + total;
    const cudaStream_t stream = lanes[MOE_EDGE_LANE_DEMAND].stream;
    take_counts<<<(total + 255) / 256, 256, 0, stream>>>(first->counts, copied, (int32_t) total);
    if (!check(cudaMemcpyAsync(read.data(), copied, total * sizeof(uint32_t), cudaMemcpyDeviceToHost, stream),
               "counts cannot be read back") ||
        !check(cudaStreamSynchronize(stream), "counts cannot be read back")) {
        return false;
    }
    for (size_t i = 0; i < total; i++) {
        out[i] += read[i];
    }
    return true;
}
