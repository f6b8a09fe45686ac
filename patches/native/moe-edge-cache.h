// What a cache gives back when cells of it are removed.

#pragma once

#include "moe-edge-mapped.h"

#include <numeric>

// Lives while cells are removed. Where many were, pages that hold nothing but free cells are given
// back. cells: of each stream; layers: with their keys and values of each stream.
template <typename Cells, typename Layers> class moe_edge_removal {
  public:
    // transposed: the values of all cells lie together for each of their dimensions.
    moe_edge_removal(const Cells & cells, const Layers & layers, bool transposed)
        : cells(cells), layers(layers), transposed(transposed), used_before(used()) {}
    moe_edge_removal(const moe_edge_removal &) = delete;

    ~moe_edge_removal() {
        if (used_before - used() >= MANY) {
            for (size_t stream = 0; stream < cells.size(); stream++) {
                drop(stream);
            }
        }
    }

  private:
    static constexpr uint32_t MANY = 256;

    uint32_t used() const {
        return std::accumulate(cells.begin(), cells.end(), 0u, [](uint32_t n, const auto & each) { return n + each.get_used(); });
    }

    // All runs of many free cells, old ones too: dropping what is not there costs next to nothing.
    void drop(size_t stream) const {
        const auto & own = cells[stream];
        for (uint32_t begin = 0, end; begin < own.size(); begin = end + 1) {
            for (end = begin; end < own.size() && own.is_empty(end);) {
                end++;
            }
            if (end - begin >= MANY) {
                drop(stream, begin, end);
            }
        }
    }

    void drop(size_t stream, size_t begin, size_t end) const {
        for (const auto & layer : layers) {
            const ggml_tensor * k = layer.k_stream[stream];
            const ggml_tensor * v = layer.v_stream[stream];
            moe_edge_drop(k, begin * k->nb[1], (end - begin) * k->nb[1]);
            if (v && !transposed) {
                moe_edge_drop(v, begin * v->nb[1], (end - begin) * v->nb[1]);
            } else if (v) {
                for (int64_t row = 0; row < v->ne[0]; row++) {
                    moe_edge_drop(v, (row * v->ne[1] + begin) * v->nb[0], (end - begin) * v->nb[0]);
                }
            }
        }
    }

    const Cells &  cells;
    const Layers & layers;
    const bool     transposed;
    const uint32_t used_before;
};
