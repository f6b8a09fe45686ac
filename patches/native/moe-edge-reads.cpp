#include "moe-edge-reads.h"
#include "moe-edge-crc32.h"
#include "moe-edge-util.h"

#include <algorithm>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

// The file offsets for reading one part of a slice (an expert matrix). [first, last): the slice. [begin, end): this
// part, in whole blocks of 4096 bytes. block0: the start of the block that contains `first`. A memory slot contains the
// file's bytes from block0 on, so the part goes to the slot's byte begin - block0.
struct slice_span {
    uint64_t first, last, block0, begin, end;

    slice_span(const moe_edge_slices & s, int32_t expert, int32_t part, int32_t parts)
        : first(s.offset + expert * s.expert_bytes), last(first + s.expert_bytes), block0(block_floor(first)) {
        const uint64_t step = block_ceil((block_ceil(last) - block0 + parts - 1) / parts);
        begin = block0 + part * step;
        end   = std::min(begin + step, block_ceil(last));
    }
};

// Returns whether this file can be read with O_DIRECT, by reading its first block into `block`.
bool direct_works(int fd, void * block) { return block && pread(fd, block, MOE_EDGE_BLOCK, 0) > 0; }

}  // namespace

// ---- files

moe_edge_files::~moe_edge_files() {
    for (const auto & f : files) {
        if (f.fd >= 0) {
            close(f.fd);
        }
    }
}

void moe_edge_files::open(const char * const * paths, int32_t n, bool direct, bool simulated) {
    const std::unique_ptr<void, decltype(&free)> block(aligned_alloc(MOE_EDGE_BLOCK, MOE_EDGE_BLOCK), free);
    for (int32_t i = 0; i < n; i++) {
        auto & f = files.emplace_back();
        f.path  = paths[i];
        f.bytes = UINT64_MAX;
        if (simulated) {
            continue;
        }
        if (direct) {
            f.fd = ::open(f.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
            f.direct = f.fd >= 0 && direct_works(f.fd, block.get());
            if (f.fd >= 0 && !f.direct) {
                close(f.fd);
                f.fd = -1;
            }
        }
        if (f.fd < 0) {
            f.fd = ::open(f.path.c_str(), O_RDONLY | O_CLOEXEC);
        }
        struct stat st;
        if (f.fd < 0 || fstat(f.fd, &st) != 0) {
            refuse("%s: cannot be opened: %s", f.path.c_str(), strerror(errno));
        }
        f.bytes = st.st_size;
    }
}

void moe_edge_files::probe(char * block) {
    for (auto & f : files) {
        if (!f.direct || direct_works(f.fd, block)) {
            continue;
        }
        close(f.fd);
        f.fd     = ::open(f.path.c_str(), O_RDONLY | O_CLOEXEC);
        f.direct = false;
        if (f.fd < 0) {
            refuse("%s: cannot be opened: %s", f.path.c_str(), strerror(errno));
        }
    }
}

bool moe_edge_files::direct() const {
    return std::all_of(files.begin(), files.end(), [](const file & f) { return f.direct; });
}

std::string moe_edge_files::read_part(const moe_edge_slices & s, int32_t expert, char * slot, int32_t part, int32_t parts) const {
    const auto & f = files[s.file];
    const auto [first, last, block0, begin, end] = slice_span(s, expert, part, parts);
    const uint64_t needed = std::min(end, last);

    uint64_t at = f.direct ? begin : std::max(begin, first);
    while (at < needed) {
        const ssize_t n = pread(f.fd, slot + (at - block0), (f.direct ? end : needed) - at, at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return format("read of %llu bytes at offset %llu failed: %s", (unsigned long long) s.expert_bytes,
                (unsigned long long) first, strerror(errno));
        }
        // A direct read that ends in the middle of a block has reached the end of the file.
        if (n == 0 || (f.direct && n % MOE_EDGE_BLOCK != 0 && at + n < needed)) {
            return format("the file ends at offset %llu, before the expert's end at %llu: it was truncated",
                (unsigned long long) (at + n), (unsigned long long) last);
        }
        at += n;
    }
    return {};
}

uint32_t moe_edge_files::part_crc(const moe_edge_slices & s, int32_t expert, const char * slot, int32_t part, int32_t parts) {
    const slice_span span(s, expert, part, parts);
    const uint64_t begin = std::max(span.begin, span.first), end = std::min(span.end, span.last);
    return begin >= end ? 0 : moe_edge_crc32_before(moe_edge_crc32(0, slot + (begin - span.block0), end - begin), span.last - end);
}

void moe_edge_checksums::keep(size_t slice, size_t n_slices, uint32_t checksum) {
    checksums.resize(n_slices);
    unchecked.resize(n_slices);
    checksums[slice] = checksum;
    unchecked[slice] = 1;
}

bool moe_edge_checksums::fits(size_t slice, uint32_t checksum) {
    const bool same = checksums[slice] == checksum;
    unchecked[slice] = !same;
    return same;
}

// ---- threads

void moe_edge_reads::start(int32_t n_threads, bool simulated) {
    if (simulated) {
        simulation = std::make_unique<moe_edge_simulation>(n_threads);
        return;
    }
    for (int32_t i = 0; i < n_threads; i++) {
        threads.emplace_back([this] { loop(); });
    }
}

void moe_edge_reads::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    work.notify_all();
    for (auto & thread : threads) {
        thread.join();
    }
    threads.clear();
}

void moe_edge_reads::loop() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        work.wait(lock, [this] { return stopping || urgent() || (!queue.empty() && !transiting); });
        if (stopping) {
            return;
        }
        if (!urgent()) {
            const uint64_t time = now();
            if (time < transition_at) {
                transiting = true;  // only one thread waits for the next transition
                work.wait_for(lock, std::chrono::microseconds(transition_at - time));
                transiting = false;
                continue;
            }
        }
        read_one(lock);
    }
}

bool moe_edge_reads::read_one(std::unique_lock<std::mutex> & lock) {
    moe_edge_read read;
    if (queue.empty() || !user.begin_read(&lock, read)) {
        return false;
    }
    lock.unlock();
    const uint64_t t0 = now_us();
    const std::string why = files.read_part(*read.slices, read.expert, read.slot, read.part, read.parts);
    const uint64_t t1 = now_us();
    const uint32_t crc = read.checks && why.empty()
        ? moe_edge_files::part_crc(*read.slices, read.expert, read.slot, read.part, read.parts) : 0;
    lock.lock();

    user.end_read(&lock, read, why, t1 - t0, crc);
    transiting &= !read.background;
    user.wake();
    return true;
}

void moe_edge_reads::began(const moe_edge_read & read) {
    if (read.background) {
        transiting = true;
        hold_transitions(read.slices->expert_bytes / read.parts);
    }
}

// Wakes the I/O threads if an urgent read is queued. Every read is urgent except those of transitions (background
// changes of tier). In a simulation, starts all reads that can start.
void moe_edge_reads::wake_threads() {
    if (!simulation) {
        if (urgent()) {
            work.notify_all();
        }
        return;
    }
    while (simulation->has_idle_thread() && (urgent() || may_transit())) {
        moe_edge_read read;
        if (!user.begin_read(nullptr, read)) {
            continue;
        }
        const uint64_t bytes = read.slices->expert_bytes;
        // Divide the bytes so that the parts differ by at most one byte and add up to the whole size.
        simulation->start(read, bytes * (read.part + 1) / read.parts - bytes * read.part / read.parts);
    }
}

void moe_edge_reads::set_transition_rate(uint64_t bytes_per_s) {
    transition_rate = bytes_per_s;
    transition_at   = 0;
    work.notify_all();
}

void moe_edge_reads::hold_transitions(uint64_t bytes) {
    transition_at = transition_rate == 0 ? 0 : now() + bytes * 1000000 / transition_rate;
}

uint64_t moe_edge_reads::now() const { return simulation ? simulation->now() / 1000 : now_us(); }

// ---- simulation in virtual time

void moe_edge_reads::set_speed(uint64_t bandwidth, uint64_t latency_us) {
    if (simulation) {
        simulation->set_speed(bandwidth, latency_us);
    }
}

void moe_edge_reads::simulate_until(uint64_t ns) {
    for (;;) {
        user.wake();
        // held: a transition (a background change of tier) is queued, and only its rate limit delays it. next: the time
        // from which the limit allows it, in nanoseconds.
        const bool held = !queue.empty() && !urgent() && !transiting && simulation->has_idle_thread();
        const uint64_t next = held ? transition_at * 1000 : UINT64_MAX;
        if (simulation->busy() && simulation->next_done() <= std::min(next, ns)) {
            uint64_t took_ns = 0;
            const moe_edge_read read = simulation->finish(took_ns);
            user.end_read(nullptr, read, {}, took_ns / 1000, 0);
            transiting &= !read.background;
        } else if (next <= ns) {
            simulation->set_now(next);
        } else {
            break;
        }
    }
    simulation->set_now(ns);
}

uint64_t moe_edge_reads::simulate_for(uint64_t ns) {
    simulate_until(simulation->now() + ns);
    return simulation->now();
}

bool moe_edge_reads::simulate_next(uint64_t & took_us) {
    if (!simulation->busy()) {
        return false;
    }
    const uint64_t before = simulation->now() / 1000;
    simulate_until(simulation->next_done());
    took_us = simulation->now() / 1000 - before;
    return true;
}
