#include "moe-edge-mapped.h"
#include "moe-edge.h"

#include "ggml-backend-impl.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

enum use { CACHE, SCRATCH, WORK };

struct mapping {
    size_t       size;
    use          kind;
    const void * owner;  // the buffer type, or the backend of a work buffer
};

struct mappings {
    std::mutex mutex;
    std::map<char *, mapping> all;  // key: start address
};

struct cells {
    uint64_t used;  // in bytes
    uint64_t end;
};

// The used KV cells of each KV cache. They have a mutex of their own, so that a step need not wait while another thread
// counts resident pages.
struct cells_in_use {
    std::mutex mutex;
    std::map<const void *, cells> all;  // key: start address of the mapping
};

// All memory that this file has mapped, and the KV cells that are in use there. The objects are never destroyed,
// because a context may outlive this library's other static objects.
mappings & known = *new mappings;
cells_in_use & in_use = *new cells_in_use;

const size_t PAGE = sysconf(_SC_PAGESIZE);

// A step with at least LEAST_PROMPT tokens counts as a prompt, which may make a lot of scratch memory resident. The
// next step with few tokens releases that memory. Few means: the prompt has at least FEWER times as many tokens.
constexpr int32_t LEAST_PROMPT = 32;
constexpr int32_t FEWER        = 8;

size_t page_floor(size_t n) { return n / PAGE * PAGE; }
size_t page_ceil(size_t n) { return page_floor(n + PAGE - 1); }

// The largest range of whole pages inside a range of memory.
struct whole_pages {
    char * begin;
    char * end;

    whole_pages(char * data, size_t size)
        : begin(reinterpret_cast<char *>(page_ceil(reinterpret_cast<uintptr_t>(data)))),
          end(std::max(begin, reinterpret_cast<char *>(page_floor(reinterpret_cast<uintptr_t>(data) + size)))) {}

    bool drop() const { return begin == end || madvise(begin, end - begin, MADV_DONTNEED) == 0; }
};

// Maps memory and records the mapping. Returns null if the system refuses.
char * map_pages(size_t size, use kind, const void * owner) {
    void * data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        return nullptr;
    }
    if (kind == CACHE) {
        madvise(data, size, MADV_NOHUGEPAGE);  // otherwise the first token would allocate a huge page for each layer
    }
    std::lock_guard<std::mutex> lock(known.mutex);
    known.all[static_cast<char *>(data)] = { size, kind, owner };
    return static_cast<char *>(data);
}

// Unmaps a mapping that map_pages() returned. Returns false if the address is not the start of such a mapping.
bool unmap_pages(char * data) {
    std::lock_guard<std::mutex> lock(known.mutex);
    const auto it = known.all.find(data);
    if (it == known.all.end()) {
        return false;
    }
    munmap(data, it->second.size);
    known.all.erase(it);
    return true;
}

void drop_owned(const void * owner) {
    std::lock_guard<std::mutex> lock(known.mutex);
    for (const auto & [data, each] : known.all) {
        if (each.owner == owner) {
            whole_pages(data, page_ceil(each.size)).drop();
        }
    }
}

size_t resident_bytes(char * data, size_t size) {
    constexpr size_t PART = 1 << 16;  // pages per query
    std::vector<unsigned char> pages(PART);
    size_t n = 0;
    for (size_t at = 0; at < size; at += PART * PAGE) {
        const size_t part = std::min(PART * PAGE, page_ceil(size) - at);
        if (mincore(data + at, part, pages.data()) == 0) {
            n += std::count_if(pages.begin(), pages.begin() + part / PAGE, [](unsigned char page) { return page & 1; });
        }
    }
    return n * PAGE;
}

template <typename Counts> moe_edge_touched touched_by(Counts counts) {
    moe_edge_touched out = {};
    std::lock_guard<std::mutex> lock(known.mutex);
    for (const auto & [data, each] : known.all) {
        if (counts(each)) {
            uint64_t * const both = each.kind == CACHE ? out.cache : each.kind == SCRATCH ? out.scratch : out.work;
            both[0] += each.size;
            both[1] += resident_bytes(data, each.size);
        }
    }
    std::lock_guard<std::mutex> counting(in_use.mutex);
    for (const auto & [_, each] : in_use.all) {
        out.used += each.used;
        out.cells_end = std::max(out.cells_end, each.end);
    }
    return out;
}

// ---- buffers

void free_buffer(ggml_backend_buffer_t buffer) {
    {
        std::lock_guard<std::mutex> lock(in_use.mutex);
        in_use.all.erase(buffer->context);
    }
    unmap_pages(static_cast<char *>(buffer->context));
}

void clear_buffer(ggml_backend_buffer_t buffer, uint8_t value) {
    char * data = static_cast<char *>(buffer->context);
    if (value != 0 || !whole_pages(data, page_ceil(buffer->size)).drop()) {
        memset(data, value, buffer->size);
    }
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size, use kind) {
    char * data = map_pages(size, kind, type);
    if (!data) {
        return nullptr;
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(data, size);
    buffer->buft              = type;
    buffer->iface.free_buffer = free_buffer;
    buffer->iface.clear       = clear_buffer;
    return buffer;
}

ggml_backend_buffer_t alloc_cache(ggml_backend_buffer_type_t type, size_t size) { return alloc_buffer(type, size, CACHE); }
ggml_backend_buffer_t alloc_scratch(ggml_backend_buffer_type_t type, size_t size) { return alloc_buffer(type, size, SCRATCH); }

// Returns a buffer type like the CPU's, but with this function for allocations.
ggml_backend_buffer_type mapped_type(decltype(ggml_backend_buffer_type_i::alloc_buffer) alloc) {
    ggml_backend_buffer_type type = *ggml_backend_cpu_buffer_type();
    type.iface.alloc_buffer = alloc;
    return type;
}

ggml_backend_buffer_type_t cache_type() {
    static ggml_backend_buffer_type type = mapped_type(alloc_cache);
    return &type;
}

bool has_other_than_zeros(const char * data, size_t size) {
    return std::any_of(data, data + size, [](char each) { return each != 0; });
}

}  // namespace

ggml_backend_buffer_type_t moe_edge_cache_type(ggml_backend_buffer_type_t type) {
    return type == ggml_backend_cpu_buffer_type() ? cache_type() : type;
}

bool moe_edge_in_cache(const ggml_tensor * tensor) {
    return tensor->buffer && tensor->buffer->buft == cache_type();
}

void moe_edge_count_cells(const ggml_tensor * tensor, uint64_t used, uint64_t cells_end) {
    std::lock_guard<std::mutex> lock(in_use.mutex);
    in_use.all[tensor->buffer->context] = { used, cells_end };
}

void moe_edge_drop(const ggml_tensor * tensor, size_t offset, size_t size) {
    if (moe_edge_in_cache(tensor)) {
        whole_pages(static_cast<char *>(tensor->data) + offset, size).drop();
    }
}

bool moe_edge_zero(const ggml_tensor * tensor, size_t offset, size_t size) {
    if (!moe_edge_in_cache(tensor)) {
        return false;
    }
    char * data = static_cast<char *>(tensor->data) + offset;
    const whole_pages inner(data, size);
    if (inner.begin == inner.end || !inner.drop()) {
        if (has_other_than_zeros(data, size)) {
            memset(data, 0, size);
        }
        return true;
    }
    for (const auto & [begin, end] : { std::pair(data, inner.begin), std::pair(inner.end, data + size) }) {
        if (has_other_than_zeros(begin, end - begin)) {
            memset(begin, 0, end - begin);
        }
    }
    return true;
}

moe_edge_scratch::moe_edge_scratch() : own(new ggml_backend_buffer_type(mapped_type(alloc_scratch))) {}
moe_edge_scratch::~moe_edge_scratch() = default;

ggml_backend_buffer_type_t moe_edge_scratch::type(ggml_backend_buffer_type_t type) const {
    return type == ggml_backend_cpu_buffer_type() ? own.get() : type;
}

bool moe_edge_scratch::gives_back(int32_t n_tokens) const {
    return most_tokens >= LEAST_PROMPT && most_tokens >= FEWER * n_tokens;
}

void moe_edge_scratch::step(int32_t n_tokens, ggml_backend_t cpu) {
    if (gives_back(n_tokens)) {
        drop(cpu);
    }
    most_tokens = std::max(most_tokens, n_tokens);
}

void moe_edge_scratch::drop(ggml_backend_t cpu) {
    drop_owned(own.get());
    drop_owned(cpu);
    most_tokens = 0;
}

moe_edge_touched moe_edge_scratch::touched(ggml_backend_t cpu) const {
    return touched_by([&](const mapping & each) { return each.kind == CACHE || each.owner == own.get() || each.owner == cpu; });
}

void moe_edge_fit_work(ggml_backend_t cpu, uint8_t *& data, size_t & size, size_t needed) {
    if (size < needed) {
        moe_edge_free_work(data);
        data = reinterpret_cast<uint8_t *>(map_pages(needed, WORK, cpu));
        size = data ? needed : 0;
    }
}

void moe_edge_free_work(uint8_t * data) {
    if (data && !unmap_pages(reinterpret_cast<char *>(data))) {
        delete[] data;
    }
}

void moe_edge_get_touched(moe_edge_touched * out) {
    *out = touched_by([](const mapping &) { return true; });
}
