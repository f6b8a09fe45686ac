// Groups experts into kernel launches for the CUDA executor. The experts of one launch (a class) have the same type,
// and are near the same address in memory, the base. A kernel finds an expert by its distance from the base, counted in
// blocks. This file contains no CUDA code.

#pragma once

#include "ggml.h"
#include "moe-edge.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

constexpr int32_t MOE_EDGE_LAUNCH_EXPERTS = 256;
constexpr int32_t MOE_EDGE_LAUNCH_CLASSES = 8;

// The largest distance between an expert and the base address of its kernel launch, in blocks. Kernels count blocks in
// 32 bits, so the limit leaves a margin for the blocks within the expert.
constexpr uint64_t MOE_EDGE_REACH_UNITS = INT32_MAX - (1 << 26);

// Returns the number of bytes of a block, for experts of this type. Kernels find an expert by its distance from a base
// address, counted in such blocks. For float types, the result is the alignment of experts instead.
inline int64_t moe_edge_unit_bytes(int32_t type) {
    return ggml_is_quantized((ggml_type) type) ? (int64_t) ggml_type_size((ggml_type) type) : MOE_EDGE_DEVICE_ALIGN;
}

struct moe_edge_launch_item {
    int32_t      expert;
    int32_t      type;
    const char * data;            // null: skipped
    const char * gate = nullptr;  // the same expert's gate, of the same type, if it is fused
    bool         late = false;    // its bytes have not arrived yet
};

struct moe_edge_launch_class {
    int32_t      type  = -1;
    int32_t      first = 0;  // index of its first expert in the list
    int32_t      n     = 0;
    const char * base  = nullptr;
    const char * gate  = nullptr;
};

// The experts of up to MOE_EDGE_LAUNCH_CLASSES kernel launches. A class is the experts of one launch. With this list,
// the kernel remap_list finds the launch of each expert that the router has selected. It receives the list by value, so
// that no table must be copied to the device first.
struct moe_edge_launch_list {
    int32_t  n_classes = 0;
    int32_t  n         = 0;
    uint32_t indexed   = 0;  // bit c: kernels find the experts of class c by their indices in the class
    int32_t  first[MOE_EDGE_LAUNCH_CLASSES + 1] = {};  // the last entry is the start of the skipped experts
    int32_t  expert[MOE_EDGE_LAUNCH_EXPERTS];
    int32_t  unit[MOE_EDGE_LAUNCH_EXPERTS];            // distance from the base of the class, in units
};

struct moe_edge_launch {
    moe_edge_launch_list list;
    moe_edge_launch_list gate;  // the gates of the same experts; only used if they are fused
    moe_edge_launch_class classes[MOE_EDGE_LAUNCH_CLASSES];
};

inline std::vector<moe_edge_launch> moe_edge_plan_launches(std::vector<moe_edge_launch_item> items) {
    const auto place = [](const moe_edge_launch_item & e) {
        const uint64_t unit = e.data ? moe_edge_unit_bytes(e.type) : 1;
        // skipped experts come last
        return std::make_tuple(e.data == nullptr, e.type, (uintptr_t) e.data % unit, (uintptr_t) e.gate % unit,
                               (uintptr_t) e.data);
    };
    std::sort(items.begin(), items.end(), [&](const moe_edge_launch_item & a, const moe_edge_launch_item & b) {
        return place(a) < place(b);
    });

    std::vector<moe_edge_launch> launches;
    const char * gate_end = nullptr;  // end of the gates in the class being filled
    for (const moe_edge_launch_item & e : items) {
        moe_edge_launch * l = launches.empty() ? nullptr : &launches.back();
        if (!l || l->list.n == MOE_EDGE_LAUNCH_EXPERTS) {
            launches.emplace_back();
            l = &launches.back();
        }
        if (e.data) {
            const uint64_t unit  = moe_edge_unit_bytes(e.type);
            const uint64_t reach = MOE_EDGE_REACH_UNITS * unit;
            moe_edge_launch_class * c = l->list.n_classes > 0 ? &l->classes[l->list.n_classes - 1] : nullptr;
            const char * gate_low  = c ? std::min(c->gate, e.gate) : e.gate;
            const char * gate_high = c ? std::max(gate_end, e.gate) : e.gate;
            const bool fits = c && c->type == e.type && ((uintptr_t) e.data - (uintptr_t) c->base) % unit == 0 &&
                ((uintptr_t) e.gate - (uintptr_t) gate_low) % unit == 0 &&
                ((uintptr_t) c->gate - (uintptr_t) gate_low) % unit == 0 &&
                (uint64_t) (e.data - c->base) <= reach && (uint64_t) (gate_high - gate_low) <= reach;
            if (!fits) {
                if (l->list.n_classes == MOE_EDGE_LAUNCH_CLASSES) {
                    launches.emplace_back();
                    l = &launches.back();
                }
                c = &l->classes[l->list.n_classes++];
                *c = { e.type, l->list.n, 0, e.data, e.gate };
                gate_low = gate_high = e.gate;
            }
            c->gate  = gate_low;
            gate_end = gate_high;
            c->n++;
        }
        l->list.expert[l->list.n] = e.expert;
        l->list.n++;
    }

    // Compute the distance of each expert from its base address after all classes are complete. Adding an expert to a
    // class can change the base address of the gate matrices.
    size_t at = 0;
    for (moe_edge_launch & l : launches) {
        for (int32_t c = 0; c < l.list.n_classes; c++) {
            l.list.first[c] = l.classes[c].first;
        }
        const int32_t n_used = l.list.n_classes == 0 ? 0
            : l.classes[l.list.n_classes - 1].first + l.classes[l.list.n_classes - 1].n;
        l.list.first[l.list.n_classes] = n_used;
        l.gate = l.list;
        int32_t c = 0;
        for (int32_t i = 0; i < l.list.n; i++, at++) {
            const moe_edge_launch_item & e = items[at];
            if (i >= n_used) {
                l.list.unit[i] = l.gate.unit[i] = -1;
                continue;
            }
            while (i >= l.list.first[c + 1]) {
                c++;
            }
            const int64_t unit = moe_edge_unit_bytes(e.type);
            l.list.unit[i] = (int32_t) ((e.data - l.classes[c].base) / unit);
            l.gate.unit[i] = (int32_t) ((e.gate - l.classes[c].gate) / unit);
        }
    }
    return launches;
}

// Groups the experts of a product with few tokens into kernel launches. A launch must wait until the bytes of all its
// experts have arrived. Launches without late experts therefore come first. All experts of a type share a launch if
// they are close enough in memory. One type is an exception: its late experts have a separate launch. It is the type
// with the most arrived experts among those that also have late experts. Skipped experts are in no launch.
inline std::vector<moe_edge_launch> moe_edge_plan_few(const std::vector<moe_edge_launch_item> & items) {
    std::map<int32_t, std::array<int, 2>> n_of_type;  // arrived and late experts
    for (const moe_edge_launch_item & e : items) {
        if (e.data) {
            n_of_type[e.type][e.late]++;
        }
    }
    int32_t divided = -1;
    for (const auto & [type, n] : n_of_type) {
        if (n[0] > 0 && n[1] > 0 && (divided < 0 || n[0] > n_of_type[divided][0])) {
            divided = type;
        }
    }
    std::vector<moe_edge_launch> launches;
    for (const bool late : { false, true }) {
        std::vector<moe_edge_launch_item> wave;
        for (const moe_edge_launch_item & e : items) {
            const bool waits = e.type == divided ? e.late : n_of_type[e.type][1] > 0;
            if (e.data && waits == late) {
                wave.push_back(e);
            }
        }
        for (moe_edge_launch & l : moe_edge_plan_launches(std::move(wave))) {
            launches.push_back(l);
        }
    }
    return launches;
}

// Writes the device table of one matrix to `out`, [2, n_expert]. The first row contains the tier of each expert, or -1
// if the expert has no data. The second row contains the distance of each expert from the base address of its tier, in
// blocks. types, base: the type and the base address of each tier. Returns false if an expert is too far from the base
// address.
template <typename Entry>
bool moe_edge_plan_table(const std::vector<Entry> & entries, const std::vector<int32_t> & types,
                         const std::vector<const char *> & base, std::vector<int32_t> & out) {
    const size_t n = entries.size();
    out.assign(2*n, -1);
    for (size_t e = 0; e < n; e++) {
        const auto * data = static_cast<const char *>(entries[e].data);
        if (!data) {
            continue;
        }
        // Find the tier of this entry. Two tiers may have the same type. The entry then belongs to the first of them
        // from whose base address it can be reached.
        bool found = false;
        for (size_t t = 0; t < types.size() && !found; t++) {
            const uint64_t unit = moe_edge_unit_bytes(types[t]);
            if (types[t] != entries[e].type || t >= base.size() || !base[t] || data < base[t]) {
                continue;
            }
            const uint64_t bytes = data - base[t];
            found = bytes % unit == 0 && bytes <= MOE_EDGE_REACH_UNITS * unit;
            if (found) {
                out[e]     = (int32_t) t;
                out[n + e] = (int32_t) (bytes / unit);
            }
        }
        if (!found) {
            return false;
        }
    }
    return true;
}
