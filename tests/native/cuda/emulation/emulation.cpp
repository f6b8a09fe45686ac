// The implementation of cuda_runtime.h.
//
// Kernels: the threads of a block are fibers. They switch at __syncthreads, at warp operations, and
// sometimes before an atomic operation or a fence, in an order that changes with each launch. The
// process aborts with the kernel's name if threads wait for others that never arrive, or if lanes of
// a warp meet in different operations. It also aborts if a launch uses more threads or shared memory
// than a GPU has.
//
// Several blocks of a launch run concurrently, each with its own shared memory. After each round of
// a block's threads another block continues. Blocks start in an order that changes with each
// launch. Between two points where fibers switch, a thread runs alone. A load that is not aligned
// to its type aborts, as on a GPU (the compiler's check, see build.py).
//
// Memory: the host must not touch device memory. If the CPU has protection keys, a host thread that
// does so aborts. Kernels must not get pointers to memory that is not pinned, or to another
// device's memory. New device memory and shared memory hold NaN. Upstream's kernels read past the
// end of their data by less than SLACK bytes. These bytes are NaN too, followed by an inaccessible
// page. Writes before or after an allocation are detected when it is freed. Copies are checked
// against their allocations.
//
// Streams: each has a thread and a queue. Copies from pinned memory read it when they run, other
// copies when they are enqueued, as in CUDA. A blocking copy from pageable memory returns before
// its bytes have arrived. While a stream is captured, it must not be synchronized or queried, nor
// the device or an event of the capture. Pageable memory must not be copied in a capture. The
// default stream must not be used if it would wait for the captured stream. Memory must not be
// allocated or freed, unless the capture is relaxed. Every thread has a current device, and uses
// streams and events of that device only. With MOE_EMU_DELAY_US=N a stream sleeps at random, up to
// N us per task, so that the order of unsynchronized work varies.
//
//   MOE_EMU_SEED=N    order of fibers and delays (default 1)
//   MOE_EMU_BLOCKS=N  concurrent blocks of a launch (default 4, at most 16)
//   MOE_EMU_VRAM=N    device memory in bytes (default 4 GiB)
//   MOE_EMU_DEVICES=N number of devices (default 1), each with this memory
//   MOE_EMU_MODULE=N  device memory that each kernel takes at its first launch (default 0)
//   MOE_EMU_FAIL=N    the Nth kernel accesses invalid memory, and every later call fails (default never)
//   MOE_EMU_FULL=N    the Nth allocation and all later ones fail (default never)
//   MOE_EMU_SAME_ADDRESS=0  kernels cannot use the host's address of pinned memory (default 1)
//   MOE_EMU_COUNT=1   count the host's calls (moe_emu_counts), see below (default 0)
//   MOE_EMU_CC=NNN    compute capability (default MOE_EMU_DEFAULT_CC)

// Only with MOE_EMU_COUNT=1: makes every run count the same calls. A kernel completes before its
// launch returns. A copy completes only when the host waits for it, when moe_emu_counts() is
// called, or when a kernel is launched. The kernel's stream must be the copy's, or wait for its
// event.

#include "cublas_v2.h"
#include "cuda_bf16.h"
#include "cuda_runtime.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <csignal>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef MOE_EMU_DEFAULT_CC
#define MOE_EMU_DEFAULT_CC 890
#endif

uint3 threadIdx, blockIdx;
dim3  blockDim, gridDim;

namespace moe_emu {

namespace {

constexpr int    WARP        = 32;
constexpr int    MAX_THREADS = 1024;
constexpr size_t STACK       = 256 << 10;
constexpr size_t MAX_SHARED  = 160 << 10;
constexpr size_t MAX_NAMED   = 48 << 10;  // static shared memory
constexpr int    MAX_BLOCKS  = 16;
constexpr size_t GUARD       = 64;
constexpr size_t SLACK       = 64 << 10;
constexpr size_t SPARSE      = 1 << 30;  // allocations of this size are neither filled with NaN nor backed in full
constexpr unsigned char POISON = 0xff, CANARY = 0xa5;

uint64_t setting(const char * name, uint64_t otherwise) {
    const char * text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}

const int most_blocks = std::clamp<int>(setting("MOE_EMU_BLOCKS", 4), 1, MAX_BLOCKS);

std::atomic<uint64_t> delay_us{ setting("MOE_EMU_DELAY_US", 0) };

// calls of the host, see moe_emu_counts()
const bool counting = setting("MOE_EMU_COUNT", 0) != 0;
struct {
    std::atomic<uint64_t> kernels { 0 }, graphs { 0 }, waits { 0 }, copies[2] = {}, bytes[2] = {};  // to the device, to the host
} counted;

std::mt19937_64 seeded() {
    static std::atomic<uint64_t> n{ 0 };
    return std::mt19937_64(setting("MOE_EMU_SEED", 1) * 1000003 + n++);
}

}  // namespace

// ---- devices ----

constexpr int MAX_DEVICES = 8;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<cudaError_t> sticky { cudaSuccess };  // for all devices: after an error nothing else is known about them

cudaError_t failed(cudaError_t e) {
    last_error = e;
    return e;
}

// Returns an error from the calling function if the device is lost.
#define MOE_EMU_LOST() \
    if (const cudaError_t e = sticky.load(); e != cudaSuccess) { \
        return failed(e); \
    }

[[noreturn]] void misused(const char * what) {
    fprintf(stderr, "emulated GPU: %s\n", what);
    abort();
}

// Returns the protection key of device memory, or -1 if the CPU has none.
int device_key() {
    static const int key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    return key;
}

// An object that lets its thread access device memory while the object exists.
struct on_device {
    on_device() {
        if (device_key() >= 0 && depth++ == 0) {
            pkey_set(device_key(), 0);
        }
    }
    ~on_device() {
        if (device_key() >= 0 && --depth == 0) {
            pkey_set(device_key(), PKEY_DISABLE_ACCESS);
        }
    }
    static thread_local int depth;
};
thread_local int on_device::depth = 0;

namespace {

// ---- fibers ----

enum state : uint8_t { READY, IN_WARP, IN_BLOCK, DONE };

struct fiber {
    uint3  thread;
    void * stack_pointer;
    state  now;
};

struct warp {
    unsigned int alive = 0, arrived = 0, mask = 0, met = 0;
    int          kind = 0;
    unsigned char given[WARP][WARP_VALUE];
    unsigned char seen[WARP][WARP_VALUE];
};

// A block that is running.
struct running {
    uint3         index;
    fiber         fibers[MAX_THREADS];
    warp          warps[MAX_THREADS / WARP];
    char *        stacks;
    int           n_alive, n_in_block, votes, votes_before;
    alignas(1024) unsigned char shared[MAX_SHARED + GUARD];
    alignas(1024) unsigned char named[MAX_NAMED];
};

std::mutex   device;  // one kernel at a time
const char * kernel_name = "";
running *    blocks;  // the running blocks, including `now`
running *    now;
char *       stacks;
int          n_threads, current;
uint64_t     n_launches;  // the launch to which the offsets of shared variables belong
size_t       named_bytes;  // of this launch's blocks
uint64_t     pauses;
void *       scheduler;
std::function<void()> * body;

[[noreturn]] void fail(const char * what) {
    fprintf(stderr, "emulated GPU: kernel %s, block (%u, %u, %u), thread %d of %d: %s\n", kernel_name,
        blockIdx.x, blockIdx.y, blockIdx.z, current, n_threads, what);
    abort();
}

#if defined(__x86_64__)
// Saves the registers that a call preserves, and switches stacks.
extern "C" void moe_emu_switch(void ** from, void * to);
asm(R"(
    .text
    .type moe_emu_switch, @function
    .local moe_emu_switch
moe_emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov  %rsp, (%rdi)
    mov  %rsi, %rsp
    pop  %r15
    pop  %r14
    pop  %r13
    pop  %r12
    pop  %rbx
    pop  %rbp
    ret
    .size moe_emu_switch, . - moe_emu_switch
)");

void * fresh_stack(char * top, void (*entry)()) {
    auto ** p = reinterpret_cast<void **>(top);
    *--p = nullptr;  // aligns the stack as after a call
    *--p = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) {
        *--p = nullptr;
    }
    return p;
}
#else
constexpr int OUTSIDE_FIBERS = MAX_BLOCKS * MAX_THREADS;
ucontext_t contexts[OUTSIDE_FIBERS + 1];

void moe_emu_switch(void ** from, void * to) {
    auto index = [](void * p) { return p == nullptr ? OUTSIDE_FIBERS : static_cast<int>(static_cast<ucontext_t *>(p) - contexts); };
    (void) from;
    static int active = OUTSIDE_FIBERS;
    const int old = active;
    active = index(to);
    swapcontext(&contexts[old], &contexts[active]);
}

void * fresh_stack(char * top, void (*entry)()) {
    ucontext_t & c = contexts[(top - stacks) / STACK - 1];
    getcontext(&c);
    c.uc_stack.ss_sp   = top - STACK + 4096;
    c.uc_stack.ss_size = STACK - 4096;
    c.uc_link          = nullptr;
    makecontext(&c, entry, 0);
    return &c;
}
#endif

void yield() {
    moe_emu_switch(&now->fibers[current].stack_pointer, scheduler);
}

void finish_block_barrier() {
    if (now->n_in_block == 0 || now->n_in_block < now->n_alive) {
        return;
    }
    for (int i = 0; i < n_threads; i++) {
        if (now->fibers[i].now == IN_BLOCK) {
            now->fibers[i].now = READY;
        }
    }
    now->n_in_block   = 0;
    now->votes_before = now->votes;
    now->votes        = 0;
}

void finish_warp(warp & w, int first) {
    if (w.arrived == 0 || (w.mask & w.alive) != w.arrived) {
        return;
    }
    memcpy(w.seen, w.given, sizeof(w.seen));
    for (int i = 0; i < WARP; i++) {
        if (w.arrived >> i & 1) {
            now->fibers[first + i].now = READY;
        } else {
            memset(w.seen[i], POISON, WARP_VALUE);
        }
    }
    w.met     = w.arrived;
    w.arrived = 0;
}

void fiber_main() {
    (*body)();
    now->fibers[current].now = DONE;
    warp & w = now->warps[current / WARP];
    w.alive &= ~(1u << current % WARP);
    now->n_alive--;
    finish_warp(w, current / WARP * WARP);
    finish_block_barrier();
    yield();
    abort();
}

void begin_block(uint3 index, size_t shared, const std::vector<uint3> & threads) {
    now->index      = index;
    now->n_alive    = n_threads;
    now->n_in_block = now->votes = 0;
    memset(now->shared, POISON, shared);
    memset(now->shared + shared, CANARY, GUARD);
    memset(now->named, POISON, named_bytes);
    for (int i = 0; i < n_threads; i += WARP) {
        warp & w  = now->warps[i / WARP];
        const int lanes = std::min(WARP, n_threads - i);
        w.alive   = lanes == WARP ? ~0u : (1u << lanes) - 1;
        w.arrived = 0;
    }
    for (int i = 0; i < n_threads; i++) {
        now->fibers[i] = { threads[i], fresh_stack(now->stacks + (i + 1) * STACK, fiber_main), READY };
    }
}

// Runs each ready thread of the block once, or sometimes only some of the threads.
void run_round(std::mt19937_64 & random) {
    const uint64_t chance = random();
    const int  start    = static_cast<int>((chance >> 32) % n_threads);
    const bool backward = chance & 1;
    const int  n        = (chance >> 1) % 4 == 0 ? 1 + static_cast<int>((chance >> 3 & 0xffff) % n_threads) : n_threads;
    bool ran = false;
    blockIdx = now->index;
    for (int i = 0; i < n_threads && (i < n || !ran); i++) {
        const int j = (start + (backward ? n_threads - i : i)) % n_threads;
        if (now->fibers[j].now == READY) {
            ran       = true;
            current   = j;
            threadIdx = now->fibers[j].thread;
            moe_emu_switch(&scheduler, now->fibers[j].stack_pointer);
        }
    }
    if (!ran) {
        fail("threads wait for others that never arrive");
    }
}

std::atomic<uint64_t> pinned_limit { UINT64_MAX };  // bytes of one allocation
std::atomic<int64_t> refuse_pin { 0 };  // number of the next pin that is refused; 0: none

std::mutex counts_lock;
std::map<std::string, uint64_t> launch_counts;

// Returns whether this is the first call for `name`.
bool count(const char * name) {
    std::lock_guard<std::mutex> counting(counts_lock);
    return launch_counts[name]++ == 0;
}

void run_kernel(const char * name, dim3 grid, dim3 block, size_t shared, std::function<void()> & thread) {
    static const uint64_t fails = setting("MOE_EMU_FAIL", 0);
    static std::atomic<uint64_t> ran { 0 };
    if (sticky != cudaSuccess) {
        return;
    }
    if (++ran == fails) {
        sticky = cudaErrorIllegalAddress;
        return;
    }
    std::lock_guard<std::mutex> lock(device);
    static std::mt19937_64 random = seeded();
    kernel_name = name;
    n_threads   = static_cast<int>(block.x * block.y * block.z);
    current     = 0;
    if (n_threads < 1 || n_threads > MAX_THREADS || shared > MAX_SHARED || grid.y > 65535 || grid.z > 65535 || grid.x * grid.y * grid.z == 0) {
        fail("impossible launch");
    }
    if (!stacks) {
        const size_t bytes = STACK * MAX_THREADS * most_blocks;
        stacks = static_cast<char *>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        for (size_t at = 0; at < bytes; at += STACK) {
            mprotect(stacks + at, 4096, PROT_NONE);
        }
        blocks = new running[most_blocks];
        for (int i = 0; i < most_blocks; i++) {
            blocks[i].stacks = stacks + STACK * MAX_THREADS * i;
        }
    }
    body = &thread;
    std::vector<uint3> threads(n_threads);
    for (unsigned int i = 0; i < threads.size(); i++) {
        threads[i] = { i % block.x, i / block.x % block.y, i / (block.x * block.y) };
    }
    blockDim = block;
    gridDim  = grid;
    n_launches++;
    named_bytes = 0;
    pauses      = random() | 1;
    const uint64_t n_blocks = (uint64_t) grid.x * grid.y * grid.z;
    uint64_t stride = random() % n_blocks + 1;
    while (std::gcd(stride, n_blocks) != 1) {
        stride++;
    }
    uint64_t at = random() % n_blocks, n_begun = 0;
    auto begin_next = [&](running & b) {
        now = &b;
        begin_block({ (unsigned int) (at % grid.x), (unsigned int) (at / grid.x % grid.y), (unsigned int) (at / grid.x / grid.y) }, shared, threads);
        at = (at + stride) % n_blocks;
        n_begun++;
    };
    std::vector<running *> under_way;
    for (int i = 0; i < most_blocks && n_begun < n_blocks; i++) {
        begin_next(blocks[i]);
        under_way.push_back(now);
    }
    while (!under_way.empty()) {
        running *& which = under_way[random() % under_way.size()];
        now = which;
        run_round(random);
        if (now->n_alive > 0) {
            continue;
        }
        for (size_t j = shared; j < shared + GUARD; j++) {
            if (now->shared[j] != CANARY) {
                fail("wrote past its shared memory");
            }
        }
        if (n_begun < n_blocks) {
            begin_next(*now);
        } else {
            which = under_way.back();
            under_way.pop_back();
        }
    }
    kernel_name = "";
}

}  // namespace

void * dynamic_shared() { return now->shared; }

void * named_shared(shared_place & place, size_t bytes, size_t align) {
    if (place.launch != n_launches) {
        const size_t first = (named_bytes + align - 1) / align * align;
        if (first + bytes > MAX_NAMED) {
            fail("more static shared memory than a GPU has");
        }
        place = { n_launches, first };
        for (running * b = blocks; b < blocks + most_blocks; b++) {  // some blocks begin later
            memset(b->named + named_bytes, POISON, first + bytes - named_bytes);
        }
        named_bytes = first + bytes;
    }
    return now->named + place.at;
}

void pause() {
    pauses = pauses * 6364136223846793005u + 1442695040888963407u;
    if (pauses >> 61 == 0) {
        yield();
    }
}

int lane() { return current % WARP; }

void barrier() { barrier_count(0); }

int barrier_count(int predicate) {
    now->votes += predicate;
    now->n_in_block++;
    now->fibers[current].now = IN_BLOCK;
    finish_block_barrier();
    const int before = now->votes_before;
    if (now->fibers[current].now != READY) {
        yield();
        return now->votes_before;
    }
    pause();
    return before;
}

warp_values meet(int kind, unsigned int mask, const void * value, size_t bytes) {
    warp & w = now->warps[current / WARP];
    const int lane = current % WARP;
    if (!(mask >> lane & 1)) {
        fail("a lane calls a warp operation whose mask excludes it");
    }
    if (w.arrived == 0) {
        w.kind = kind;
        w.mask = mask;
    } else if (w.kind != kind || w.mask != mask) {
        fail("lanes of a warp meet in different operations");
    }
    memcpy(w.given[lane], value ? value : "", bytes);
    w.arrived |= 1u << lane;
    now->fibers[current].now = IN_WARP;
    finish_warp(w, current / WARP * WARP);
    if (now->fibers[current].now != READY) {
        yield();
    }
    return w.seen;
}

unsigned int lanes_met() { return now->warps[current / WARP].met; }

// ---- streams and events ----

struct stream;

struct moment {
    std::mutex lock;
    std::condition_variable changed;
    uint64_t recorded = 0, passed = 0;
    bool captured = false;  // the last record went into a graph
    stream * on   = nullptr;  // stream of the last record, and its task there
    uint64_t task = 0;
    int queries   = 0;  // queries since the record that found it not passed
    std::chrono::steady_clock::time_point at;

    void wait(uint64_t n);
};

struct event {
    std::shared_ptr<moment> m = std::make_shared<moment>();
    int device = current_device;
};

using task = std::function<void()>;

struct graph {
    std::vector<task> tasks;
};
struct graph_exec {
    std::vector<task> tasks;
};

struct stream {
    int device = current_device;
    bool blocking = false;  // the default stream waits for it
    bool strict = false;  // its capture forbids calls that may wait for the device
    std::mutex lock;
    std::condition_variable changed;
    std::deque<task> queue;
    uint64_t asked = 0, done = 0;
    uint64_t due   = counting ? 0 : UINT64_MAX;  // tasks up to this one must complete now
    uint64_t known = 0;  // the host has waited for tasks up to this one
    bool stop = false;
    std::unique_ptr<graph> capture;
    std::thread worker{ [this] { work(); } };

    void work() {
        std::mt19937_64 random = seeded();
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            changed.wait(held, [&] { return stop || (!queue.empty() && done < due); });
            if (queue.empty()) {
                return;
            }
            task next = std::move(queue.front());
            queue.pop_front();
            held.unlock();
            const uint64_t most = delay_us.load();
            if (most && random() % 3 == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
            }
            {
                const on_device device;
                next();
            }
            next = nullptr;
            held.lock();
            done++;
            changed.notify_all();
        }
    }

    void add(task t) {
        std::lock_guard<std::mutex> held(lock);
        if (capture) {
            capture->tasks.push_back(std::move(t));
            return;
        }
        queue.push_back(std::move(t));
        asked++;
        changed.notify_all();
    }

    bool capturing() {
        std::lock_guard<std::mutex> held(lock);
        return capture != nullptr;
    }

    uint64_t last_task() {
        std::lock_guard<std::mutex> held(lock);
        return asked;
    }

    void drain() {
        std::unique_lock<std::mutex> held(lock);
        if (capture) {
            fprintf(stderr, "emulated GPU: a captured stream is synchronized\n");
            abort();
        }
        const uint64_t n = asked;
        want(n);
        changed.wait(held, [&] { return done >= n; });
    }

    // Counts a wait of the host for task n, unless an earlier wait covered it.
    void host_waits(uint64_t n) {
        std::lock_guard<std::mutex> held(lock);
        counted.waits += n > known;
        known = std::max(known, n);
    }

    // Waits for all tasks of the stream.
    void synchronize() {
        uint64_t n;
        {
            std::lock_guard<std::mutex> held(lock);
            n = asked;
        }
        host_waits(n);
        drain();
    }

    // Lets tasks up to n complete. The caller holds the lock.
    void want(uint64_t n) {
        if (counting && due < n) {
            due = n;
            changed.notify_all();
        }
    }

    // Must be called after a kernel or a graph was launched.
    void computes() {
        if (counting && !capturing()) {
            drain();
        }
    }

    void end() {
        {
            std::lock_guard<std::mutex> held(lock);
            stop = true;
            due  = UINT64_MAX;
            changed.notify_all();
        }
        worker.join();
    }
};

void moment::wait(uint64_t n) {
    std::unique_lock<std::mutex> held(lock);
    if (counting && passed < n && on) {
        stream & where = *on;
        const uint64_t until = task;
        held.unlock();
        {
            std::lock_guard<std::mutex> other(where.lock);
            where.want(until);
        }
        held.lock();
    }
    changed.wait(held, [&] { return passed >= n; });
}

namespace {

// The state of the whole emulation. It is never destroyed, because a backend may free its memory at
// the end of the process.
struct world {
    std::mutex lock;
    std::set<stream *> streams;
    stream * plain[MAX_DEVICES] = {};
    stream * per_thread[MAX_DEVICES] = {};

    struct allocation {
        char * map;
        size_t map_bytes, bytes, padded;
        int    device;
    };
    std::map<uintptr_t, allocation> memory;
    std::map<uintptr_t, size_t> pinned;
    size_t used[MAX_DEVICES] = {}, total = setting("MOE_EMU_VRAM", 4ull << 30), most_used = 0;
};

world & the() {
    static world * w = new world;
    return *w;
}

stream * resolve(cudaStream_t s) {
    world & w = the();
    if (s != nullptr && s != cudaStreamLegacy && s != cudaStreamPerThread) {
        return s;
    }
    std::lock_guard<std::mutex> held(w.lock);
    for (stream * other : w.streams) {
        if (s != cudaStreamPerThread && other->blocking && other->device == current_device && other->capturing()) {
            misused("work goes to the default stream while a stream that it waits for is captured");
        }
    }
    stream *& which = (s == cudaStreamPerThread ? w.per_thread : w.plain)[current_device];
    if (!which) {
        which = new stream;
        w.streams.insert(which);
    }
    return which;
}

std::vector<stream *> all_streams() {
    std::lock_guard<std::mutex> held(the().lock);
    return { the().streams.begin(), the().streams.end() };
}

// Aborts if a stream is being captured for which `wrong` returns true.
template <typename F> void not_while_captured(const char * what, F && wrong) {
    for (stream * s : all_streams()) {
        if (s->capturing() && wrong(*s)) {
            misused(what);
        }
    }
}

void not_while_strict(const char * what) {
    not_while_captured(what, [](const stream & s) { return s.strict; });
}

void drain_all() {
    for (stream * s : all_streams()) {
        if (!s->capturing()) {
            s->drain();
        }
    }
}

enum where { PAGEABLE, PINNED, ON_DEVICE, OUTSIDE };

// Returns in which kind of memory a range of bytes is. OUTSIDE means that it starts in an
// allocation or in a piece of pinned memory, and ends outside of it.
where locate(const void * p, size_t bytes) {
    world & w = the();
    const auto at = reinterpret_cast<uintptr_t>(p);
    std::lock_guard<std::mutex> held(w.lock);
    auto it = w.memory.upper_bound(at);
    if (it != w.memory.begin()) {
        --it;
        if (at < it->first + it->second.padded) {
            return at + bytes <= it->first + it->second.padded ? ON_DEVICE : OUTSIDE;
        }
    }
    auto host = w.pinned.upper_bound(at);
    if (host != w.pinned.begin()) {
        --host;
        if (at < host->first + host->second) {
            return at + bytes <= host->first + host->second ? PINNED : OUTSIDE;
        }
    }
    return PAGEABLE;
}

// Takes the device memory that a kernel's module needs at the first launch (MOE_EMU_MODULE).
void load_module() {
    static const size_t bytes = setting("MOE_EMU_MODULE", 0);
    world & w = the();
    std::lock_guard<std::mutex> held(w.lock);
    size_t & used = w.used[current_device];
    used += std::min(bytes, w.total - used);
    w.most_used = std::max(w.most_used, used);
}

int device_of(const void * p) {
    std::lock_guard<std::mutex> held(the().lock);
    const auto it = the().memory.upper_bound(reinterpret_cast<uintptr_t>(p));
    return it == the().memory.begin() ? -1 : std::prev(it)->second.device;
}

[[noreturn]] void bad_copy(const char * what, const void * to, const void * from, size_t bytes) {
    fprintf(stderr, "emulated GPU: copy of %zu bytes from %p to %p: %s\n", bytes, from, to, what);
    abort();
}

cudaError_t copy_2d(void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t s) {
    MOE_EMU_LOST();
    if (width == 0 || height == 0) {
        return cudaSuccess;
    }
    const size_t to_bytes = to_pitch * (height - 1) + width, from_bytes = from_pitch * (height - 1) + width;
    const where  target = locate(to, to_bytes), source = locate(from, from_bytes);
    const bool to_device   = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (target == OUTSIDE || source == OUTSIDE) {
        bad_copy("leaves its allocation", to, from, to_bytes);
    }
    if (kind != cudaMemcpyDefault && (to_device != (target == ON_DEVICE) || from_device != (source == ON_DEVICE))) {
        bad_copy("the direction does not fit the memory", to, from, to_bytes);
    }
    auto move = [=](const void * data, size_t pitch) {
        for (size_t y = 0; y < height && sticky == cudaSuccess; y++) {
            memcpy(static_cast<char *>(to) + y * to_pitch, static_cast<const char *>(data) + y * pitch, width);
        }
    };
    stream * on = resolve(s);
    if ((source == PAGEABLE || target == PAGEABLE) && on->capturing()) {
        misused("a copy from or to pageable memory is captured");
    }
    if (to_device != from_device || kind == cudaMemcpyDefault) {
        const int way = target == ON_DEVICE ? 0 : 1;
        counted.copies[way]++;
        counted.bytes[way] += width * height;
    }
    if (source == PAGEABLE) {
        auto staged = std::make_shared<std::vector<char>>(width * height);
        for (size_t y = 0; y < height; y++) {
            memcpy(staged->data() + y * width, static_cast<const char *>(from) + y * from_pitch, width);
        }
        on->add([=] { move(staged->data(), width); });
    } else {
        on->add([=] { move(from, from_pitch); });
    }
    if (target == PAGEABLE) {
        on->synchronize();
        MOE_EMU_LOST();
    }
    return cudaSuccess;
}

// Signal handler: prints which kernel accessed invalid memory.
void on_fault(int signal, siginfo_t * info, void *) {
    char line[256];
    constexpr int KEY_ERROR = 4;  // SEGV_PKUERR
    int n = 0;
    if (signal == SIGSEGV && info->si_code == KEY_ERROR) {
        n = snprintf(line, sizeof(line), "emulated GPU: the host touched %p, which is memory of the device\n", info->si_addr);
    } else if (kernel_name[0]) {
        n = snprintf(line, sizeof(line), "emulated GPU: kernel \"%s\", block (%u, %u, %u), thread %d: %s %p\n", kernel_name, blockIdx.x,
            blockIdx.y, blockIdx.z, current, signal == SIGILL ? "an access that is not aligned, at" : "accessed invalid memory at",
            info->si_addr);
    }
    (void) !write(2, line, n);
    ::signal(signal, SIG_DFL);
}

[[maybe_unused]] const bool watching = [] {
    // The signal handler has a stack of its own, because the stack of a fiber may have overflowed.
    static char stack[64 << 10];
    (void) stack;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags     = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    sigaction(SIGILL, &action, nullptr);
    return true;
}();

}  // namespace

namespace {
thread_local const char * next_name = nullptr;
}

void naming(const char * kernel) { next_name = kernel; }

void launch(const char * kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t s, std::function<void()> thread) {
    if (const char * name = std::exchange(next_name, nullptr)) {
        kernel = name;
    }
    if (sticky != cudaSuccess) {
        last_error = sticky;
        return;
    }
    stream * on = resolve(s);
    if (on->device != current_device) {
        misused("a kernel is launched into a stream of another device than the thread's current one");
    }
    if (count(kernel)) {
        load_module();
    }
    on->add([=]() mutable {
        counted.kernels++;
        run_kernel(kernel, grid, block, shared, thread);
    });
    on->computes();
}

bool same_address() {
    static const bool same = setting("MOE_EMU_SAME_ADDRESS", 1) != 0;
    return same;
}

void check_pointer(const char * kernel, const void * p) {
    const where w = locate(p, 1);
    if (w == PINNED && !same_address()) {
        fprintf(stderr, "emulated GPU: kernel %s is given %p, which is the host's address of pinned memory\n", kernel, p);
        abort();
    }
    if (p && (w == PAGEABLE || w == OUTSIDE || (w == ON_DEVICE && device_of(p) != current_device))) {
        fprintf(stderr, "emulated GPU: kernel %s is given %p, which is %s\n", kernel, p,
            w == ON_DEVICE ? "memory of another device" : "neither the device's memory nor pinned");
        abort();
    }
}

void no_ptx() {
    fail("uses instructions that are not emulated");
}

}  // namespace moe_emu

extern "C" {
// Aborts the process with the name of a function that was not compiled. The linker uses this
// instead of the missing function.
[[noreturn]] void moe_emu_missing(const char * name) {
    fprintf(stderr, "emulated GPU: %s was not compiled\n", name);
    abort();
}

// For tests, found by dlsym.
__attribute__((visibility("default"))) void moe_emu_set_delay_us(uint64_t most) { moe_emu::delay_us = most; }
__attribute__((visibility("default"))) uint64_t moe_emu_launches(const char * kernel) {
    std::lock_guard<std::mutex> counting(moe_emu::counts_lock);
    const auto it = moe_emu::launch_counts.find(kernel);
    return it == moe_emu::launch_counts.end() ? 0 : it->second;
}
__attribute__((visibility("default"))) void moe_emu_limit_pinned(uint64_t bytes) { moe_emu::pinned_limit = bytes; }
__attribute__((visibility("default"))) void moe_emu_refuse_pin(int64_t nth) { moe_emu::refuse_pin = nth; }
__attribute__((visibility("default"))) uint64_t moe_emu_used_bytes() {
    std::lock_guard<std::mutex> held(moe_emu::the().lock);
    return moe_emu::the().used[0];
}
// Returns the counts so far: [kernels, graph launches, waits of the host, copies to the device,
// their bytes, copies to the host, their bytes]. Completes all enqueued work first.
__attribute__((visibility("default"))) void moe_emu_counts(uint64_t * out) {
    moe_emu::drain_all();
    const auto & c = moe_emu::counted;
    const uint64_t all[] = { c.kernels, c.graphs, c.waits, c.copies[0], c.bytes[0], c.copies[1], c.bytes[1] };
    std::copy(std::begin(all), std::end(all), out);
}
__attribute__((visibility("default"))) uint64_t moe_emu_peak_bytes() { return moe_emu::the().most_used; }
}

// Stubs for upstream's flash attention: our library is built without it, and upstream's source does
// not compile here.
struct ggml_tensor;
bool ggml_cuda_flash_attn_ext_supported(int, const ggml_tensor *) { return false; }

using namespace moe_emu;

// ---- errors, devices ----

const char * cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:               return "no error";
        case cudaErrorInvalidValue:     return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNotReady:         return "device not ready";
        case cudaErrorIllegalAddress:   return "an illegal memory access was encountered";
        default:                        return "error of the emulated GPU";
    }
}
const char * cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaGetLastError() {
    MOE_EMU_LOST();
    return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() { return sticky != cudaSuccess ? sticky.load() : last_error; }

cudaError_t cudaGetDeviceCount(int * count) { *count = (int) setting("MOE_EMU_DEVICES", 1); return cudaSuccess; }
cudaError_t cudaGetDevice(int * d) { *d = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
    MOE_EMU_LOST();
    if (d < 0 || d >= std::min<int>(setting("MOE_EMU_DEVICES", 1), MAX_DEVICES)) {
        return failed(cudaErrorInvalidDevice);
    }
    current_device = d;
    return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp * p, int) {
    *p = {};
    const auto cc = static_cast<int>(setting("MOE_EMU_CC", MOE_EMU_DEFAULT_CC));
    snprintf(p->name, sizeof(p->name), "emulated GPU");
    p->totalGlobalMem         = the().total;
    p->sharedMemPerBlock      = 48 << 10;
    p->sharedMemPerBlockOptin = 96 << 10;
    p->sharedMemPerMultiprocessor = 96 << 10;
    p->warpSize               = WARP;
    p->major                  = cc / 100;
    p->minor                  = cc % 100 / 10;
    p->multiProcessorCount    = 4;
    p->maxThreadsPerBlock     = MAX_THREADS;
    p->asyncEngineCount       = 2;
    p->canMapHostMemory       = 1;
    p->concurrentKernels      = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attribute, int d) {
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, d);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:       *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor:       *value = p.minor; break;
        case cudaDevAttrMultiProcessorCount:          *value = p.multiProcessorCount; break;
        case cudaDevAttrAsyncEngineCount:             *value = p.asyncEngineCount; break;
        case cudaDevAttrCanMapHostMemory:             *value = 1; break;
        case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = same_address(); break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
        case cudaDevAttrCooperativeLaunch:            *value = 0; break;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char * id, int length, int d) { snprintf(id, length, "0000:%02x:00.0", d); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int * least, int * greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
    not_while_captured("the device is synchronized while one of its streams is captured", [](const stream & s) { return s.device == current_device; });
    drain_all();
    MOE_EMU_LOST();
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int * can, int, int) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return failed(cudaErrorNotSupported); }
cudaError_t cudaDeviceDisablePeerAccess(int) { return failed(cudaErrorNotSupported); }
cudaError_t cudaDriverGetVersion(int * version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int * version) { *version = CUDART_VERSION; return cudaSuccess; }

// ---- memory ----

cudaError_t cudaMemGetInfo(size_t * free, size_t * total) {
    MOE_EMU_LOST();
    std::lock_guard<std::mutex> held(the().lock);
    constexpr size_t STEP = 2 << 20;
    *free  = (the().total - the().used[current_device]) / STEP * STEP;
    *total = the().total;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void ** memory, size_t bytes) {
    MOE_EMU_LOST();
    constexpr size_t PAGE = 4096, UNIT = 256;
    *memory = nullptr;
    if (bytes == 0) {
        return cudaSuccess;
    }
    not_while_strict("memory is allocated while a stream is captured");
    static const uint64_t full = setting("MOE_EMU_FULL", UINT64_MAX);
    static std::atomic<uint64_t> asked { 0 };
    if (++asked >= full) {
        return failed(cudaErrorMemoryAllocation);
    }
    const size_t padded = (bytes + UNIT - 1) / UNIT * UNIT, inner = (padded + SLACK + PAGE - 1) / PAGE * PAGE;
    world & w = the();
    std::lock_guard<std::mutex> held(w.lock);
    size_t & used = w.used[current_device];
    if (used + padded > w.total) {
        return failed(cudaErrorMemoryAllocation);
    }
    const size_t all = inner + 2 * PAGE;
    void * map = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        return failed(cudaErrorMemoryAllocation);
    }
    char * base = static_cast<char *>(map);
    char * data = base + PAGE + inner - padded - SLACK;
    const bool sparse = padded >= SPARSE;
    memset(base + PAGE, POISON, sparse ? data - base - PAGE : inner);
    if (sparse) {
        memset(data + bytes, POISON, padded - bytes + SLACK);
    }
    if (device_key() >= 0) {
        pkey_mprotect(base + PAGE, inner, PROT_READ | PROT_WRITE, device_key());
    }
    mprotect(base, PAGE, PROT_NONE);
    mprotect(base + PAGE + inner, PAGE, PROT_NONE);
    w.memory[reinterpret_cast<uintptr_t>(data)] = { base, all, bytes, padded, current_device };
    used += padded;
    w.most_used = std::max(w.most_used, used);
    *memory = data;
    return cudaSuccess;
}

cudaError_t cudaMallocManaged(void ** memory, size_t bytes) { return cudaMalloc(memory, bytes); }

cudaError_t cudaFree(void * memory) {
    if (!memory) {
        return cudaSuccess;
    }
    not_while_strict("memory is freed while a stream is captured");
    drain_all();
    world & w = the();
    std::lock_guard<std::mutex> held(w.lock);
    const auto it = w.memory.find(reinterpret_cast<uintptr_t>(memory));
    if (it == w.memory.end()) {
        fprintf(stderr, "emulated GPU: %p is freed, but was not allocated\n", memory);
        abort();
    }
    const auto & a = it->second;
    const auto * data = static_cast<unsigned char *>(memory);
    auto check = [&](const unsigned char * from, const unsigned char * to, const char * side) {
        if (!std::all_of(from, to, [](unsigned char c) { return c == POISON; })) {
            fprintf(stderr, "emulated GPU: something wrote %s an allocation of %zu bytes\n", side, a.bytes);
            abort();
        }
    };
    const on_device device;
    check(reinterpret_cast<unsigned char *>(a.map) + 4096, data, "before");
    check(data + a.bytes, data + a.padded + SLACK, "past");
    w.used[a.device] -= a.padded;
    munmap(a.map, a.map_bytes);
    w.memory.erase(it);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void ** memory, size_t bytes) {
    not_while_strict("host memory is pinned while a stream is captured");
    *memory = bytes && bytes <= pinned_limit ? aligned_alloc(4096, (bytes + 4095) / 4096 * 4096) : nullptr;
    if (bytes && !*memory) {
        return failed(cudaErrorMemoryAllocation);
    }
    if (bytes) {
        memset(*memory, POISON, bytes);
        std::lock_guard<std::mutex> held(the().lock);
        the().pinned[reinterpret_cast<uintptr_t>(*memory)] = bytes;
    }
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void ** memory, size_t bytes, unsigned int) { return cudaMallocHost(memory, bytes); }
cudaError_t cudaFreeHost(void * memory) {
    if (!memory) {
        return cudaSuccess;
    }
    drain_all();
    {
        std::lock_guard<std::mutex> held(the().lock);
        if (the().pinned.erase(reinterpret_cast<uintptr_t>(memory)) == 0) {
            fprintf(stderr, "emulated GPU: host memory %p is freed, but was not allocated\n", memory);
            abort();
        }
    }
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void * memory, size_t bytes, unsigned int) {
    MOE_EMU_LOST();
    not_while_strict("host memory is pinned while a stream is captured");
    if (bytes > pinned_limit || refuse_pin.fetch_sub(1) == 1) {
        return failed(cudaErrorMemoryAllocation);
    }
    std::lock_guard<std::mutex> held(the().lock);
    return the().pinned.emplace(reinterpret_cast<uintptr_t>(memory), bytes).second ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void * memory) {
    drain_all();
    std::lock_guard<std::mutex> held(the().lock);
    return the().pinned.erase(reinterpret_cast<uintptr_t>(memory)) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void ** d, void * host, unsigned int) {
    *d = host;
    return locate(host, 1) == PINNED ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes * out, const void * memory) {
    *out = {};
    const where w = locate(memory, 1);
    out->type = w == ON_DEVICE ? cudaMemoryTypeDevice : w == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->devicePointer = w == PAGEABLE ? nullptr : const_cast<void *>(memory);
    out->hostPointer   = w == ON_DEVICE ? nullptr : const_cast<void *>(memory);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
    return copy_2d(to, bytes, from, bytes, bytes, 1, kind, s);
}
cudaError_t cudaMemcpy(void * to, const void * from, size_t bytes, cudaMemcpyKind kind) {
    not_while_strict("a blocking copy while a stream is captured");
    constexpr uint64_t LATE = 50;  // times the longest delay: a graph has begun by then
    // A copy from pageable memory to the device returns when its bytes have been read, although
    // they may not have arrived.
    const bool returns = locate(from, bytes) == PAGEABLE && locate(to, bytes) == ON_DEVICE;
    if (returns) {
        resolve(nullptr)->add([] { std::this_thread::sleep_for(std::chrono::microseconds(LATE * delay_us)); });
    }
    const cudaError_t e = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    if (!returns) {
        resolve(nullptr)->synchronize();
    }
    return e;
}
cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t s) {
    count("cudaMemcpy2DAsync");
    return copy_2d(to, to_pitch, from, from_pitch, width, height, kind, s);
}
cudaError_t cudaMemcpyPeerAsync(void * to, int, const void * from, int, size_t bytes, cudaStream_t s) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, s);
}
cudaError_t cudaMemsetAsync(void * to, int value, size_t bytes, cudaStream_t s) {
    if (bytes && locate(to, bytes) != ON_DEVICE) {
        bad_copy("a memset outside device memory", to, nullptr, bytes);
    }
    MOE_EMU_LOST();
    resolve(s)->add([=] {
        constexpr size_t PAGE = 4096;
        auto * first = static_cast<char *>(to);
        auto * last  = first + bytes;
        if (value == 0 && bytes >= SPARSE) {  // released pages read as zero
            auto * begin = first + (PAGE - reinterpret_cast<uintptr_t>(first) % PAGE) % PAGE;
            auto * end   = last - reinterpret_cast<uintptr_t>(last) % PAGE;
            madvise(begin, end - begin, MADV_DONTNEED);
            memset(first, 0, begin - first);
            first = end;
        }
        memset(first, value, last - first);
    });
    return cudaSuccess;
}
cudaError_t cudaMemset(void * to, int value, size_t bytes) {
    const cudaError_t e = cudaMemsetAsync(to, value, bytes, nullptr);
    resolve(nullptr)->drain();
    return e;
}

// ---- streams, events, graphs ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t * s, unsigned int flags) {
    MOE_EMU_LOST();
    *s = new stream;
    (*s)->blocking = !(flags & cudaStreamNonBlocking);
    std::lock_guard<std::mutex> held(the().lock);
    the().streams.insert(*s);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t * s) { return cudaStreamCreateWithFlags(s, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t * s, unsigned int flags, int) { return cudaStreamCreateWithFlags(s, flags); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    if (s->capturing()) {
        misused("a stream is destroyed while it is captured");
    }
    s->drain();
    {
        std::lock_guard<std::mutex> held(the().lock);
        the().streams.erase(s);
    }
    s->end();  // not deleted, so that a stale handle never names a new stream
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    resolve(s)->synchronize();
    MOE_EMU_LOST();
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    stream * on = resolve(s);
    if (on->capturing()) {
        misused("a captured stream is queried");
    }
    std::lock_guard<std::mutex> held(on->lock);
    return on->done == on->asked ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned int) {
    MOE_EMU_LOST();
    stream * on = resolve(s);
    const bool capturing = on->capturing();
    std::lock_guard<std::mutex> held(e->m->lock);
    if (e->m->recorded && capturing != e->m->captured) {
        fprintf(stderr, "emulated GPU: a wait crosses the border of a capture\n");
        abort();
    }
    on->add([m = e->m, n = e->m->recorded] { m->wait(n); });
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void * argument) {
    resolve(s)->add([=] {
        if (device_key() >= 0) {
            pkey_set(device_key(), PKEY_DISABLE_ACCESS);  // the function runs on the host
        }
        function(argument);
        if (device_key() >= 0) {
            pkey_set(device_key(), 0);
        }
    });
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus * status) {
    stream * on = resolve(s);
    *status = on->capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
    MOE_EMU_LOST();
    if (s == nullptr || s == cudaStreamLegacy) {
        misused("the default stream is captured");
    }
    stream * on = resolve(s);
    std::lock_guard<std::mutex> held(on->lock);
    if (on->capture) {
        misused("a stream that is captured already is captured again");
    }
    on->strict  = mode != cudaStreamCaptureModeRelaxed;
    on->capture = std::make_unique<graph>();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t * g) {
    stream * on = resolve(s);
    std::lock_guard<std::mutex> held(on->lock);
    if (!on->capture) {
        misused("a capture ends that was not begun");
    }
    *g = on->capture.release();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t * e, cudaGraph_t g, cudaGraphNode_t *, char *, size_t) {
    *e = new graph_exec{ g->tasks };
    return cudaSuccess;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t e, cudaGraph_t g, cudaGraphNode_t *, cudaGraphExecUpdateResult * result) {
    e->tasks = g->tasks;
    *result  = cudaGraphExecUpdateSuccess;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
    MOE_EMU_LOST();
    stream * on = resolve(s);
    count("cudaGraphLaunch");
    counted.graphs++;
    for (const task & t : e->tasks) {
        on->add(t);
    }
    on->computes();
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { delete g; return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { delete e; return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t * e, unsigned int) { *e = new event; return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t * e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    MOE_EMU_LOST();
    stream * on = resolve(s);
    if (on->device != e->device) {
        misused("an event is recorded in a stream of another device");
    }
    const bool capturing = on->capturing();
    uint64_t n;
    {
        std::lock_guard<std::mutex> held(e->m->lock);
        n = ++e->m->recorded;
        e->m->captured = capturing;
    }
    on->add([m = e->m, n] {
        std::lock_guard<std::mutex> held(m->lock);
        m->passed = std::max(m->passed, n);
        m->at     = std::chrono::steady_clock::now();
        m->changed.notify_all();
    });
    if (counting && !capturing) {
        const uint64_t task = on->last_task();
        std::lock_guard<std::mutex> held(e->m->lock);
        e->m->on      = on;
        e->m->task    = task;
        e->m->queries = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    MOE_EMU_LOST();
    if (e->device != current_device) {
        misused("a thread with another current device queries an event, which initialises that device");
    }
    std::unique_lock<std::mutex> held(e->m->lock);
    if (e->m->captured) {
        misused("an event of a capture is queried");
    }
    constexpr int MANY = 100;
    if (counting && e->m->passed < e->m->recorded && ++e->m->queries > MANY) {  // the host polls in a loop
        held.unlock();
        return cudaEventSynchronize(e);
    }
    return e->m->passed >= e->m->recorded ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    uint64_t n, task;
    stream * on;
    {
        std::lock_guard<std::mutex> held(e->m->lock);
        if (e->m->captured) {
            misused("an event of a capture is synchronized");
        }
        n = e->m->recorded;
        on = e->m->on;
        task = e->m->task;
    }
    if (counting && on && n > 0) {
        on->host_waits(task);
    }
    e->m->wait(n);
    MOE_EMU_LOST();
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float * ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = std::chrono::duration<float, std::milli>(to->m->at - from->m->at).count();
    return cudaSuccess;
}

// ---- cuBLAS: column-major C = alpha op(A) op(B) + beta C ----

namespace {

float load(const void * p, cudaDataType_t type, size_t i) {
    switch (type) {
        case CUDA_R_16F:  return static_cast<const half *>(p)[i];
        case CUDA_R_16BF: return static_cast<const nv_bfloat16 *>(p)[i];
        default:          return static_cast<const float *>(p)[i];
    }
}

void store(void * p, cudaDataType_t type, size_t i, float v) {
    switch (type) {
        case CUDA_R_16F:  static_cast<half *>(p)[i] = half(v); break;
        case CUDA_R_16BF: static_cast<nv_bfloat16 *>(p)[i] = nv_bfloat16(v); break;
        default:          static_cast<float *>(p)[i] = v;
    }
}

struct gemm {
    cublasOperation_t op_a, op_b;
    int m, n, k, lda, ldb, ldc;
    cudaDataType_t type_a, type_b, type_c;
    float alpha, beta;

    void run(const void * a, const void * b, void * c) const {
        if (sticky != cudaSuccess) {
            return;
        }
        for (int j = 0; j < n; j++) {
            for (int i = 0; i < m; i++) {
                double sum = 0;
                for (int l = 0; l < k; l++) {
                    const size_t at_a = op_a == CUBLAS_OP_N ? i + static_cast<size_t>(l) * lda : l + static_cast<size_t>(i) * lda;
                    const size_t at_b = op_b == CUBLAS_OP_N ? l + static_cast<size_t>(j) * ldb : j + static_cast<size_t>(l) * ldb;
                    sum += static_cast<double>(load(a, type_a, at_a)) * load(b, type_b, at_b);
                }
                const size_t at = i + static_cast<size_t>(j) * ldc;
                store(c, type_c, at, static_cast<float>(alpha * sum) + (beta == 0 ? 0 : beta * load(c, type_c, at)));
            }
        }
    }
};

float scale(const void * p, cublasComputeType_t compute) {
    return load(p, compute == CUBLAS_COMPUTE_16F ? CUDA_R_16F : CUDA_R_32F, 0);
}

}  // namespace

cublasStatus_t cublasCreate(cublasHandle_t * h) { *h = new moe_emu_cublas; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasDestroy(cublasHandle_t h) { delete h; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s) { h->stream = s; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void * alpha,
    const void * a, cudaDataType_t type_a, int lda, const void * b, cudaDataType_t type_b, int ldb, const void * beta,
    void * c, cudaDataType_t type_c, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t) {
    const gemm g{ op_a, op_b, m, n, k, lda, ldb, ldc, type_a, type_b, type_c, scale(alpha, compute), scale(beta, compute) };
    count("cublasGemmEx");
    resolve(h->stream)->add([=] {
        counted.kernels++;
        g.run(a, b, c);
    });
    resolve(h->stream)->computes();
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSgemm(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const float * alpha,
    const float * a, int lda, const float * b, int ldb, const float * beta, float * c, int ldc) {
    return cublasGemmEx(h, op_a, op_b, m, n, k, alpha, a, CUDA_R_32F, lda, b, CUDA_R_32F, ldb, beta, c, CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void * alpha,
    const void * a, cudaDataType_t type_a, int lda, long long stride_a, const void * b, cudaDataType_t type_b, int ldb, long long stride_b, const void * beta,
    void * c, cudaDataType_t type_c, int ldc, long long stride_c, int count, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    auto size = [](cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; };
    for (int i = 0; i < count; i++) {
        cublasGemmEx(h, op_a, op_b, m, n, k, alpha, static_cast<const char *>(a) + i * stride_a * size(type_a), type_a, lda,
            static_cast<const char *>(b) + i * stride_b * size(type_b), type_b, ldb, beta,
            static_cast<char *>(c) + i * stride_c * size(type_c), type_c, ldc, compute, algorithm);
    }
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmBatchedEx(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void * alpha,
    const void * const a[], cudaDataType_t type_a, int lda, const void * const b[], cudaDataType_t type_b, int ldb, const void * beta,
    void * const c[], cudaDataType_t type_c, int ldc, int count, cublasComputeType_t compute, cublasGemmAlgo_t) {
    const gemm g{ op_a, op_b, m, n, k, lda, ldb, ldc, type_a, type_b, type_c, scale(alpha, compute), scale(beta, compute) };
    // Follow the arrays of pointers on the stream's thread, because the arrays are in device
    // memory.
    resolve(h->stream)->add([=] {
        counted.kernels++;
        for (int i = 0; i < count; i++) {
            g.run(a[i], b[i], c[i]);
        }
    });
    resolve(h->stream)->computes();
    return CUBLAS_STATUS_SUCCESS;
}
