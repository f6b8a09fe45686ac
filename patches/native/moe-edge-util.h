// Defines small helpers of the store: error messages, the clock, and rounding to blocks and pages.

#pragma once

#include "moe-edge-reads.h"

#include <chrono>
#include <cstdio>
#include <stdexcept>

namespace moe_edge {

inline const char * const KIND_NAMES[MOE_EDGE_N_KINDS] = { "up", "gate", "gate_up", "down" };

inline uint64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

inline uint64_t block_floor(uint64_t n) { return n / MOE_EDGE_BLOCK * MOE_EDGE_BLOCK; }
inline uint64_t block_ceil(uint64_t n) { return block_floor(n + MOE_EDGE_BLOCK - 1); }

constexpr uint64_t HUGE_PAGE = 2 << 20;

inline uint64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline char * huge_page_floor(char * at) { return reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(at) / HUGE_PAGE * HUGE_PAGE); }
inline char * huge_page_ceil(char * at) { return huge_page_floor(at + HUGE_PAGE - 1); }

template <typename... Args> std::string format(const char * fmt, Args... args) {
    char buf[1024];
    snprintf(buf, sizeof(buf), fmt, args...);
    return buf;
}

template <typename... Args> [[noreturn]] void refuse(const char * fmt, Args... args) {
    throw std::runtime_error(format(fmt, args...));
}

inline void write_error(char * err, size_t size, const std::string & sentence) {
    if (err && size > 0) {
        snprintf(err, size, "%s", sentence.c_str());
    }
}

}  // namespace moe_edge

using namespace moe_edge;
