// Declares the reads from disk: the files, the queue of reads, and the threads that read slices (expert matrices) part
// by part. The store owns this object and chooses the part that an idle thread reads next. In a simulation, virtual
// time replaces the threads. The store's mutex guards everything here. A thread releases it while it reads.

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

constexpr uint64_t MOE_EDGE_BLOCK = 4096;  // alignment of direct reads, in bytes

// The size in bytes of the parts in which large expert matrices are read. All I/O threads read parts of the most urgent
// matrix, so that it is complete before the next one.
#ifndef MOE_EDGE_PART_BYTES  // tests set a smaller size
#define MOE_EDGE_PART_BYTES (512 << 10)
#endif
constexpr uint64_t MOE_EDGE_PART = MOE_EDGE_PART_BYTES;

inline int32_t moe_edge_parts_of(const moe_edge_slices & s) {
    return std::max<uint64_t>(1, (s.expert_bytes + MOE_EDGE_PART / 2) / MOE_EDGE_PART);
}

// The files that slices are read from.
class moe_edge_files {
  public:
    moe_edge_files() = default;
    ~moe_edge_files();
    moe_edge_files(const moe_edge_files &) = delete;
    moe_edge_files & operator=(const moe_edge_files &) = delete;

    // Opens files for reading. Throws std::runtime_error if a file cannot be opened. direct: bypass the page cache for
    // each file that supports it. simulated: open nothing, and treat every file as endless.
    void open(const char * const * paths, int32_t n, bool direct, bool simulated);
    // Tests whether direct reads into this block of memory work. Some systems cannot read directly into memory that a
    // driver has pinned. Files that fail the test are read through the page cache from now on.
    void probe(char * block);

    int32_t  size() const { return files.size(); }
    uint64_t bytes(int32_t file) const { return files[file].bytes; }
    const std::string & path(int32_t file) const { return files[file].path; }
    bool     direct() const;  // whether all files are read directly

    // Reads one part of a slice (an expert matrix) from its file into a slot. Returns an empty string, or the reason
    // for which the read failed.
    std::string read_part(const moe_edge_slices & s, int32_t expert, char * slot, int32_t part, int32_t parts) const;
    // Returns the contribution of one part to the CRC-32 of its slice (an expert matrix). The XOR of the contributions
    // of all parts is the CRC-32 of the slice.
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

// The expected checksums of slices (expert matrices), by slice number. A slice is checked after its first complete
// read. A slice that has matched its checksum is not checked again.
class moe_edge_checksums {
  public:
    void keep(size_t slice, size_t n_slices, uint32_t checksum);
    bool due(size_t slice) const { return !unchecked.empty() && unchecked[slice]; }
    bool fits(size_t slice, uint32_t checksum);

  private:
    std::vector<uint32_t> checksums;  // [n_slices], empty if no file has checksums
    std::vector<uint8_t>  unchecked;  // [n_slices] 1: the next complete read is compared
};

// The classes of urgency of reads: demand reads come first, then prefetches, then transitions (background changes of
// tier).
enum moe_edge_urgency : int32_t { MOE_EDGE_DEMANDED = 0, MOE_EDGE_AHEAD = 1, MOE_EDGE_TRANSITING = 2 };

// The sort key of a queued read: urgency, order, file offset, cache entry. order: for a demand read, the position of
// its matrix in the order in which a layer computes its matrices. For other reads, a sequence number, so that they keep
// the order of the policy's list. Their file offset is 0.
using moe_edge_read_key = std::tuple<int32_t, int32_t, uint64_t, int32_t>;

class moe_edge_queue {
  public:
    void insert(const moe_edge_read_key & key) { keys.insert(key); }
    void erase(const moe_edge_read_key & key) { keys.erase(key); }
    bool has(const moe_edge_read_key & key) const { return keys.count(key) > 0; }
    bool empty() const { return keys.empty(); }
    size_t  size() const { return keys.size(); }
    int32_t first() const { return std::get<3>(*keys.begin()); }  // the cache entry of the most urgent read
    int32_t first_urgency() const { return std::get<0>(*keys.begin()); }

    // Calls `visit` with the cache entry of each read, the most urgent first, until it returns true.
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
        // Chooses the part of an expert matrix that the calling thread should read next, and describes it in `read`.
        // Returns false if no part could be chosen; the caller may try again. May release the lock for a while. lock:
        // null in a simulation.
        virtual bool begin_read(std::unique_lock<std::mutex> * lock, moe_edge_read & read) = 0;
        // Called after a thread has read the part described by `read`, or has failed to read it. why: the reason of the
        // failure, or an empty string. took_us: the duration of the read in microseconds. crc: the part's contribution
        // to the checksum of its expert matrix, if read.checks is set.
        virtual void end_read(std::unique_lock<std::mutex> * lock, const moe_edge_read & read, const std::string & why,
                              uint64_t took_us, uint32_t crc) = 0;
        // Called after end_read(), and before a simulation advances its clock. The owner must start the reads and
        // copies that are possible now, or wake the threads that do so.
        virtual void wake() = 0;

      protected:
        ~owner() = default;
    };

    moe_edge_reads(owner & user, std::mutex & mutex) : user(user), mutex(mutex) {}
    ~moe_edge_reads() { stop(); }
    moe_edge_reads(const moe_edge_reads &) = delete;
    moe_edge_reads & operator=(const moe_edge_reads &) = delete;

    void start(int32_t n_threads, bool simulated);  // without threads, the owner calls read_one()
    bool read_one(std::unique_lock<std::mutex> & lock);  // reads the most urgent part; false if none could begin
    void stop();  // must be called without holding the mutex

    moe_edge_files files;
    moe_edge_queue queue;  // reads with parts that were not started

    // Records that a thread has started a part of this read.
    void began(const moe_edge_read & read);
    void wake_threads();   // for urgent reads; a simulation starts as many as it can
    void wake_for_transition() { work.notify_one(); }
    bool urgent() const { return !queue.empty() && queue.first_urgency() != MOE_EDGE_TRANSITING; }

    // Limits the reads of transitions (background changes of tier) to this many bytes per second. 0 means no limit.
    void     set_transition_rate(uint64_t bytes_per_s);
    void     hold_transitions(uint64_t bytes);  // sets when the next transition may start, after one of this size
    uint64_t held_until() const { return transition_at; }  // on the clock of now()

    uint64_t now() const;  // microseconds; virtual time in a simulation
    void     wait_for_room(std::unique_lock<std::mutex> & lock, int ms) { work.wait_for(lock, std::chrono::milliseconds(ms)); }

    // ---- simulation
    bool     simulated() const { return simulation != nullptr; }
    void     set_speed(uint64_t bandwidth, uint64_t latency_us);
    uint64_t simulate_for(uint64_t ns);          // returns the new time in nanoseconds
    bool     simulate_next(uint64_t & took_us);  // runs until a read completes; false if no read is in progress

  private:
    void loop();
    bool may_transit() const { return !queue.empty() && !transiting && now() >= transition_at; }
    void simulate_until(uint64_t ns);

    owner &                  user;
    std::mutex &             mutex;
    std::condition_variable  work;
    std::vector<std::thread> threads;
    std::unique_ptr<moe_edge_simulation> simulation;  // replaces the threads
    bool     stopping        = false;
    bool     transiting      = false;  // a thread is reading a transition, or waits until transition_at
    uint64_t transition_rate = 0;      // bytes per second, 0: no limit
    uint64_t transition_at   = 0;  // when the next part of a transition may be read or copied, on the clock of now()
};
