// Tests reads of a file by threads and in virtual time, with an owner that only keeps a queue.
//
//   reads_test DIR
//
// Prints a line for each part. At the first violation it prints a message and exits with 1.

#include "moe-edge-crc32.h"
#include "moe-edge-reads.h"
#include "stress.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

namespace {

constexpr int32_t  EXPERTS = 12;
constexpr uint64_t BYTES   = 11000;  // three parts, and not a whole number of blocks
constexpr uint64_t SLOT    = 4 * MOE_EDGE_BLOCK;

unsigned char byte_at(int32_t expert, uint64_t i) { return (expert * 131 + i * 2654435761u) >> 7; }

moe_edge_slices slices_of() {
    moe_edge_slices s = {};
    s.offset       = 100;
    s.expert_bytes = BYTES;
    return s;
}

std::string write_file(const std::string & dir, uint64_t bytes) {
    const std::string path = dir + "/reads.bin";
    FILE * f = fopen(path.c_str(), "wb");
    if (!f) {
        die("cannot write " + path);
    }
    for (uint64_t i = 0; i < bytes; i++) {
        fputc(i < 100 ? 0 : byte_at((i - 100) / BYTES, (i - 100) % BYTES), f);
    }
    fclose(f);
    return path;
}

// Every read has its own slot. Only the owner uses the key.
struct reader final : moe_edge_reads::owner {
    std::mutex mutex;
    std::condition_variable ended;
    const moe_edge_slices slices = slices_of();
    const int32_t parts = moe_edge_parts_of(slices);
    std::map<int32_t, moe_edge_read_key> keys;
    std::map<int32_t, int32_t> begun, done;  // number of parts, by expert
    std::map<int32_t, uint32_t> crcs;
    std::vector<int32_t> order;  // in which reads began
    std::vector<uint64_t> at;  // start times of their first parts
    std::vector<std::string> failed;
    const std::unique_ptr<char, decltype(&free)> memory { (char *) aligned_alloc(MOE_EDGE_BLOCK, EXPERTS * SLOT), free };
    moe_edge_reads reads { *this, mutex };

    char * slot(int32_t expert) const { return memory.get() + expert * SLOT; }

    void ask(int32_t expert, int32_t urgency, int32_t turn) {
        const moe_edge_read_key key(urgency, turn, 0, expert);
        keys[expert] = key;
        reads.queue.insert(key);
    }

    bool begin_read(std::unique_lock<std::mutex> *, moe_edge_read & read) override {
        const int32_t expert = reads.queue.first();
        read = { expert, 0, &slices, expert, begun[expert]++, parts, reads.queue.first_urgency() == MOE_EDGE_TRANSITING,
            slot(expert), true };
        if (read.part == 0) {
            order.push_back(expert);
            at.push_back(reads.now());
        }
        reads.began(read);
        if (begun[expert] == parts) {
            reads.queue.erase(keys[expert]);
        }
        return true;
    }

    void end_read(std::unique_lock<std::mutex> *, const moe_edge_read & read, const std::string & why, uint64_t, uint32_t crc) override {
        done[read.expert]++;
        crcs[read.expert] ^= crc;
        if (!why.empty()) {
            failed.push_back(why);
        }
        ended.notify_all();
    }

    void wake() override { reads.wake_threads(); }

    void wait_for(int32_t n_parts) {
        std::unique_lock<std::mutex> lock(mutex);
        const auto all = [&] {
            int32_t n = 0;
            for (const auto & [expert, of_it] : done) {
                n += of_it;
            }
            return n >= n_parts;
        };
        while (!all()) {
            if (ended.wait_for(lock, std::chrono::seconds(120)) == std::cv_status::timeout) {
                die("reads do not end");
            }
        }
    }
};

// Several threads read parts of several slices. All bytes and the combined checksums of the parts
// must be correct.
void run_bytes(const std::string & dir, bool direct, int32_t threads) {
    const std::string path = write_file(dir, 100 + EXPERTS * BYTES);
    const char * name = path.c_str();
    reader r;
    r.reads.files.open(&name, 1, direct, false);
    {
        std::lock_guard<std::mutex> lock(r.mutex);
        for (int32_t e = 0; e < EXPERTS; e++) {
            r.ask(e, e % 3, EXPERTS - e);
        }
        r.reads.start(threads, false);
        r.wake();
    }
    r.wait_for(EXPERTS * r.parts);
    r.reads.stop();
    if (r.parts != 3 || !r.failed.empty()) {
        die(r.failed.empty() ? "a slice has the wrong number of parts" : r.failed[0]);
    }
    const std::vector<int32_t> expected = { 9, 6, 3, 0, 10, 7, 4, 1, 11, 8, 5, 2 };
    if (r.order != expected) {
        die("reads do not begin in the order of urgency");
    }
    for (int32_t e = 0; e < EXPERTS; e++) {
        const char * bytes = r.slot(e) + (100 + e * BYTES) % MOE_EDGE_BLOCK;
        for (uint64_t i = 0; i < BYTES; i++) {
            if ((unsigned char) bytes[i] != byte_at(e, i)) {
                die("wrong byte " + std::to_string(i) + " of expert " + std::to_string(e));
            }
        }
        if (r.done[e] != r.parts || r.crcs[e] != moe_edge_crc32(0, bytes, BYTES)) {
            die("the combined checksum of the parts is wrong");
        }
    }
}

void run_truncated(const std::string & dir) {
    const std::string path = write_file(dir, 100 + 3 * BYTES - 5000);
    const char * name = path.c_str();
    reader r;
    r.reads.files.open(&name, 1, false, false);
    r.reads.start(2, false);
    {
        std::lock_guard<std::mutex> lock(r.mutex);
        r.ask(2, MOE_EDGE_DEMANDED, 0);
        r.wake();
    }
    r.wait_for(r.parts);
    r.reads.stop();
    const bool told = !r.failed.empty() && r.failed[0].find("truncated") != std::string::npos;
    if (!told || r.crcs.size() != 1) {
        die("a truncated file was not detected");
    }
    moe_edge_files none;
    const char * missing = "/nowhere/at/all";
    try {
        none.open(&missing, 1, true, false);
        die("a missing file was opened");
    } catch (const std::runtime_error & e) {
        if (!strstr(e.what(), missing)) {
            die("the error does not name the file");
        }
    }
}

// Transitions are read one part at a time, at their rate. More urgent reads run in between.
void run_rate() {
    reader r;
    const char * name = "simulated";
    r.reads.files.open(&name, 1, false, true);
    r.reads.start(2, true);
    std::lock_guard<std::mutex> lock(r.mutex);
    r.reads.set_speed(0, 10);
    r.reads.set_transition_rate(BYTES * 1000);  // one per millisecond
    r.ask(0, MOE_EDGE_TRANSITING, 0);
    r.ask(1, MOE_EDGE_TRANSITING, 1);
    r.wake();
    if (r.begun[0] != 1 || r.begun[1] != 0) {
        die("two parts of transitions are read at the same time");
    }
    r.reads.simulate_for(100 * 1000);
    r.ask(2, MOE_EDGE_AHEAD, 0);
    r.ask(3, MOE_EDGE_DEMANDED, 0);
    r.wake();
    const bool first = r.begun[3] == 2;
    r.reads.simulate_for(50 * 1000);
    if (!first || r.done[3] != 3 || r.done[2] != 3 || r.begun[0] != 1) {
        die("an urgent read does not precede a waiting transition");
    }
    r.reads.simulate_for(1850 * 1000);
    if (r.order != std::vector<int32_t>({ 0, 3, 2, 1 }) || r.at[3] < 999 || r.at[3] > 1001 || r.done[1] != 3) {
        die("transitions exceed or miss their rate");
    }
    r.ask(4, MOE_EDGE_DEMANDED, 0);
    r.wake();
    uint64_t took_us = 0;
    if (!r.reads.simulate_next(took_us) || took_us != 10 || r.reads.simulate_for(0) != 2010 * 1000) {
        die("the virtual time is wrong");
    }
    while (r.reads.simulate_next(took_us)) {
    }
    if (r.done[4] != 3) {
        die("a read in virtual time does not end");
    }
}

// At 1 byte per nanosecond and a latency of 5 us, with two threads.
void run_virtual_time() {
    reader r;
    const char * name = "simulated";
    r.reads.files.open(&name, 1, false, true);
    r.reads.start(2, true);
    std::lock_guard<std::mutex> lock(r.mutex);
    r.reads.set_speed(1000000000, 5);
    r.ask(0, MOE_EDGE_DEMANDED, 0);
    r.wake();
    r.reads.simulate_for(8665);
    const int32_t before = r.done[0];
    r.reads.simulate_for(1);
    const int32_t one = r.done[0];
    uint64_t took_us = 0;
    while (r.reads.simulate_next(took_us)) {
    }
    // the latencies of the first two parts overlap; the third part begins when the first is done,
    // after 8,666 ns
    const uint64_t end = r.reads.simulate_for(0);
    if (before != 0 || one != 1 || r.done[0] != 3 || end != 8666 + 5000 + 3667) {
        die("a read in virtual time takes " + std::to_string(end) + " ns");
    }
}

void run_queue() {
    moe_edge_queue queue;
    queue.insert({ MOE_EDGE_TRANSITING, 0, 0, 1 });
    queue.insert({ MOE_EDGE_AHEAD, 7, 0, 2 });
    queue.insert({ MOE_EDGE_AHEAD, 3, 0, 3 });
    queue.insert({ MOE_EDGE_DEMANDED, 1, 900, 4 });
    queue.insert({ MOE_EDGE_DEMANDED, 1, 800, 5 });
    std::vector<int32_t> all, ahead;
    queue.each([&](int32_t cell) {
        all.push_back(cell);
        return cell == 2;
    });
    queue.each_ahead([&](int32_t cell) { ahead.push_back(cell); });
    if (all != std::vector<int32_t>({ 5, 4, 3, 2 }) || ahead != std::vector<int32_t>({ 3, 2 }) || queue.first() != 5 ||
        queue.first_urgency() != MOE_EDGE_DEMANDED || queue.size() != 5) {
        die("the queue has the wrong order");
    }
    moe_edge_checksums checksums;
    const bool none = checksums.due(1);
    checksums.keep(1, 3, 77);
    const bool due = checksums.due(1) && !checksums.due(0), wrong = checksums.fits(1, 78) || !checksums.due(1);
    if (none || !due || wrong || !checksums.fits(1, 77) || checksums.due(1)) {
        die("a slice is not compared until its checksum fits");
    }
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        die("usage: reads_test DIR");
    }
    for (const bool direct : { false, true }) {
        run_bytes(argv[1], direct, 1);
        run_bytes(argv[1], direct, 4);
    }
    run_truncated(argv[1]);
    run_rate();
    run_virtual_time();
    run_queue();
    printf("reads: all bytes, in their order and at their rate\n");
    return 0;
}
