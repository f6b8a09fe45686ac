// Manages the KV cells of a cache that several sequences share: chooses the cells of new tokens, counts the used cells,
// and releases memory when cells are removed.

#pragma once

#include "moe-edge-mapped.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <vector>

// The number of adjacent KV cells that a sequence receives at a time (a run of cells). Because they are adjacent,
// removing the sequence can free whole memory pages.
constexpr uint32_t MOE_EDGE_CELL_RUN = 256;

// Chooses a KV cell for each token of a batch, in the order of the tokens, and appends the cells to `taken`. Each
// sequence continues with the cell after its last one, or at the start of a free run of MOE_EDGE_CELL_RUN cells.
// Returns false if llama.cpp should choose the cells instead, for example because no run is free.
template <typename Cells, typename Layers, typename Batch>
bool moe_edge_take_runs(const Cells & cells, const Layers & layers, const Batch & batch, std::vector<uint32_t> & taken) {
    const bool is_alone = batch.n_seqs_unq == 1 && cells.seq_pos_get(batch.seq_id_unq[0]).size() == cells.get_used();
    if (is_alone || layers.empty() || !moe_edge_in_cache(layers[0].k)) {
        return false;
    }
    std::vector<bool> is_taken(cells.size());
    const auto is_free = [&](uint32_t cell) { return cell < cells.size() && cells.is_empty(cell) && !is_taken[cell]; };
    const auto all_free = [&](uint32_t cell) {
        uint32_t end = cell;
        while (end < cell + MOE_EDGE_CELL_RUN && is_free(end)) {
            end++;
        }
        return end == cell + MOE_EDGE_CELL_RUN;
    };
    std::map<int32_t, uint32_t> next;  // next cell of each sequence
    for (uint32_t i = 0; i < batch.n_tokens; i++) {
        const int32_t seq        = batch.seq_id[i][0];
        const auto &  held       = cells.seq_pos_get(seq);
        const auto [at, is_new]  = next.try_emplace(seq, held.empty() ? 0 : held.rbegin()->second + 1);
        uint32_t & cell          = at->second;
        if (cell % MOE_EDGE_CELL_RUN == 0 || !is_free(cell)) {
            for (cell = 0; cell < cells.size() && !all_free(cell);) {
                cell += MOE_EDGE_CELL_RUN;
            }
            if (cell >= cells.size()) {
                taken.clear();
                return false;
            }
        }
        is_taken[cell] = true;
        taken.push_back(cell++);
    }
    return true;
}

// Created before KV cells are added or removed, and destroyed afterwards. If many cells were removed in between, the
// destructor releases the memory pages that hold only free cells. It also reports the used cells to
// moe_edge_count_cells(). cells: the cells of each stream of the KV cache. layers: the layers, with their K and V
// tensors of each stream.
template <typename Cells, typename Layers> class moe_edge_cells_change {
  public:
    // Stores how many cells are used now, so that the destructor can tell how many were removed. transposed: whether a
    // row of the V tensor holds one dimension of all cells, instead of all dimensions of one cell.
    moe_edge_cells_change(const Cells & cells, const Layers & layers, bool transposed)
        : cells(cells), layers(layers), transposed(transposed), used_before(used()) {}
    moe_edge_cells_change(const moe_edge_cells_change &) = delete;

    ~moe_edge_cells_change() {
        const uint32_t used_now = used();
        if (used_before >= used_now + MOE_EDGE_CELL_RUN) {
            for (size_t stream = 0; stream < cells.size(); stream++) {
                drop(stream);
            }
        }
        count(used_now);
    }

  private:
    uint32_t used() const {
        return std::accumulate(cells.begin(), cells.end(), 0u, [](uint32_t n, const auto & each) { return n + each.get_used(); });
    }

    void count(uint64_t n_used) const {
        const ggml_tensor * ours = nullptr;
        uint64_t cell_bytes = 0;
        for (const auto & layer : layers) {
            for (const ggml_tensor * each : { layer.k, layer.v }) {
                if (each && moe_edge_in_cache(each)) {
                    ours = each;
                    cell_bytes += each->nb[1];
                }
            }
        }
        uint32_t end = 0;
        for (const auto & each : cells) {
            end = std::max(end, each.used_max_p1());
        }
        if (ours) {
            moe_edge_count_cells(ours, n_used * cell_bytes, end);
        }
    }

    // Releases the memory pages of all runs of at least MOE_EDGE_CELL_RUN free cells in a stream. Releasing pages that
    // were released before costs almost nothing.
    void drop(size_t stream) const {
        const auto & own = cells[stream];
        for (uint32_t begin = 0, end; begin < own.size(); begin = end + 1) {
            for (end = begin; end < own.size() && own.is_empty(end);) {
                end++;
            }
            if (end - begin >= MOE_EDGE_CELL_RUN) {
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
