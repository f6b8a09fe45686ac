// Reads: the files, in what order slices are read from them, and the threads that do it, part by part.
//
// The owner has the loads. It puts a key of each into the queue, begins the most urgent one when a thread is free, and is
// told when a part has ended. In the place of the threads there may be a simulation, in virtual time. All of this
// is guarded by the owner's mutex, which a thread gives up while it reads.

#pragma once

#include "moe-edge-transport.h"
#include "moe-edge.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

constexpr uint64_t MOE_EDGE_BLOCK = 4096;  // unit of direct reads

// Large slices are read in parts of about this size, so that all I/O threads work on the
// most urgent expert and it is complete while the next one is still being read.
#ifndef MOE_EDGE_PART_BYTES  // tests read small slices in parts too
#define MOE_EDGE_PART_BYTES (512 << 10)
#endif
constexpr uint64_t MOE_EDGE_PART = MOE_EDGE_PART_BYTES;

inline int32_t moe_edge_parts_of(const moe_edge_slices & s) {
    return std::max<uint64_t>(1, (s.expert_bytes + MOE_EDGE_PART / 2) / MOE_EDGE_PART);
}

// The files that slices are read from, and where in them.
class moe_edge_files {
  public:
    moe_edge_files() = default;
    ~moe_edge_files();
    moe_edge_files(const moe_edge_files &) = delete;
    moe_edge_files & operator=(const moe_edge_files &) = delete;

    // Raises std::runtime_error for one that cannot be opened. direct: past the system's cache where a file can be read
    // so. simulated: nothing is opened, and a file has no end.
    void open(const char * const * paths, int32_t n, bool direct, bool simulated);
    // Memory that a driver has pinned is not what every system reads into directly: files that cannot be read to
    // this block are read as others are from now on.
    void probe(char * block);

    int32_t  size() const { return files.size(); }
    uint64_t bytes(int32_t file) const { return files[file].bytes; }
    const std::string & path(int32_t file) const { return files[file].path; }
    bool     direct() const;  // all of them

    // Reads one part of a slice into its slot, which begins with the slice's first block; empty, or why it failed.
    std::string read_part(const moe_edge_slices & s, int32_t expert, char * slot, int32_t part, int32_t parts) const;
    // What a part that was read brings to the CRC-32 of its slice: those of all parts together are that, by ^.
    static uint32_t part_crc(const moe_edge_slices & s, int32_t expert, const char * slot, int32_t part, int32_t parts);

  private:
    struct file {
        std::string path;
        int         fd     = -1;
        bool        direct = false;
        uint64_t    bytes  = 0;
    };
    std::vector<file> files;
};

// Checksums of slices by number. Each slice is compared until it fits, once in a process: what was
// written wrong is found then, and what is read again costs nothing more.
class moe_edge_checksums {
  public:
    void keep(size_t slice, size_t n_slices, uint32_t checksum);
    bool due(size_t slice) const { return !unchecked.empty() && unchecked[slice]; }
    bool fits(size_t slice, uint32_t checksum);

  private:
    std::vector<uint32_t> checksums;  // [n_slices], empty where no file has any
    std::vector<uint8_t>  unchecked;  // [n_slices] 1: its next complete read is compared
};

// Demand before prefetch before transitions.
enum moe_edge_urgency : int32_t { MOE_EDGE_DEMANDED = 0, MOE_EDGE_AHEAD = 1, MOE_EDGE_TRANSITING = 2 };

// Order of reads: urgency, then the kind that is computed first (demand) or the policy's order (the
// others), then the file offset, then the cell. On a rigid link demand and prefetch have one order,
// in which they were asked for.
using moe_edge_read_key = std::tuple<int32_t, int32_t, uint64_t, int32_t>;

class moe_edge_queue {
  public:
    void insert(const moe_edge_read_key & key) { keys.insert(key); }
    void erase(const moe_edge_read_key & key) { keys.erase(key); }
    bool has(const moe_edge_read_key & key) const { return keys.count(key) > 0; }
    bool empty() const { return keys.empty(); }
    size_t  size() const { return keys.size(); }
    int32_t first() const { return std::get<3>(*keys.begin()); }  // the cell of the most urgent one
    int32_t first_urgency() const { return std::get<0>(*keys.begin()); }

    // The cells in their order; until a visit returns true.
    template <typename F> void each(F && visit) const {
        for (const auto & key : keys) {
            if (visit(std::get<3>(key))) {
                return;
            }
        }
    }
    template <typename F> void each_ahead(F && visit) const {
        for (auto it = keys.lower_bound({ MOE_EDGE_AHEAD, 0, 0, 0 }); it != keys.end() && std::get<0>(*it) == MOE_EDGE_AHEAD; ++it) {
            visit(std::get<3>(*it));
        }
    }

  private:
    std::set<moe_edge_read_key> keys;
};

class moe_edge_reads {
  public:
    struct owner {
        // The most urgent read, or one that has to go before it, begins a part: false if it cannot, and what is most urgent
        // may have changed. lock: may be given up meanwhile; null in a simulation.
        virtual bool begin_read(std::unique_lock<std::mutex> * lock, moe_edge_read & read) = 0;
        // why: empty where it did not fail. crc: of the part, where read.checks.
        virtual void end_read(std::unique_lock<std::mutex> * lock, const moe_edge_read & read, const std::string & why,
                              uint64_t took_us, uint32_t crc) = 0;
        // There may be reads to start, and what else hung on those that ended.
        virtual void wake() = 0;

      protected:
        ~owner() = default;
    };

    moe_edge_reads(owner & whose, std::mutex & mutex) : whose(whose), mutex(mutex) {}
    ~moe_edge_reads() { stop(); }
    moe_edge_reads(const moe_edge_reads &) = delete;
    moe_edge_reads & operator=(const moe_edge_reads &) = delete;

    void start(int32_t n_threads, bool simulated);  // without threads, the owner calls read_one()
    bool read_one(std::unique_lock<std::mutex> & lock);  // reads the most urgent part; false if none could begin
    void stop();  // without the mutex

    moe_edge_files files;
    moe_edge_queue queue;  // reads with parts that have not begun

    // A part of this read begins: what a thread needs for it is complete.
    void began(const moe_edge_read & read);
    void wake_threads();   // for what is urgent; a simulation begins what it can
    void wake_for_transition() { work.notify_one(); }
    bool urgent() const { return !queue.empty() && queue.first_urgency() != MOE_EDGE_TRANSITING; }

    // Transitions move so many bytes a second, 0: no limit. They are read one part at a time, so that
    // the other threads are there for what is urgent.
    void     set_transition_rate(uint64_t bytes_per_s);
    void     hold_transitions(uint64_t bytes);  // so many move now, from wherever they are: when may the next ones?
    uint64_t held_until() const { return transition_at; }  // in now()

    uint64_t now() const;  // microseconds, virtual ones in a simulation
    void     wait_for_room(std::unique_lock<std::mutex> & lock, int ms) { work.wait_for(lock, std::chrono::milliseconds(ms)); }

    // ---- simulation
    bool     simulated() const { return simulation != nullptr; }
    void     set_speed(uint64_t bandwidth, uint64_t latency_us);
    uint64_t simulate_for(uint64_t ns);          // returns what the clock then says
    bool     simulate_next(uint64_t & took_us);  // until a read is done; false where none is under way

  private:
    void loop();
    bool may_transit() const { return !queue.empty() && !transiting && now() >= transition_at; }
    void simulate_until(uint64_t ns);

    owner &                  whose;
    std::mutex &             mutex;
    std::condition_variable  work;
    std::vector<std::thread> threads;
    std::unique_ptr<moe_edge_simulation> simulation;  // in the place of the threads
    bool     stopping        = false;
    bool     transiting      = false;  // a thread is on a transition, or waits for transition_at
    uint64_t transition_rate = 0;      // bytes per second, 0: no limit
    uint64_t transition_at   = 0;      // when their next part may be read or copied, in now()
};
