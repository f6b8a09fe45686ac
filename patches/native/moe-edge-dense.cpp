// Multiplies dense matrices with the tokens of a prompt. Upstream stores these matrices in the CPU's own layout
// (interleaved rows) and has kernels for that layout. For many tokens, upstream's tiled kernel is faster. This file
// makes such products use the tiled kernel.

#include "moe-edge-cpu.h"
#include "moe-edge-layout.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "repack.h"
#include "traits.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

constexpr size_t ALIGN = 64;

size_t padded(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

class dense_traits : public ggml::cpu::tensor_traits {
  public:
    dense_traits(ggml::cpu::tensor_traits & upstream, const moe_edge_kernels & kernels) : upstream(upstream), kernels(kernels) {}

  private:
    // The parts of the op's work buffer: first the converted activations, then one workspace for each thread.
    struct layout {
        size_t act_size, own, own_size;

        layout(const ggml_tensor * op) {
            const ggml_tensor * w = op->src[0];
            act_size = ggml_row_size(ggml_get_type_traits_cpu(w->type)->vec_dot_type, w->ne[0]);
            own      = padded(act_size * op->src[1]->ne[1]);
            own_size = padded(moe_edge_tiles_size());
        }
    };

    bool has_tiles(const ggml_tensor * op) const {
        const ggml_tensor * x = op->src[1];
        return op->op == GGML_OP_MUL_MAT && x->type == GGML_TYPE_F32 && x->ne[1] >= moe_edge_tiles_from(kernels) &&
            x->ne[2] == 1 && x->ne[3] == 1 && x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
    }

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        if (!has_tiles(op)) {
            return upstream.work_size(n_threads, op, size);
        }
        size_t theirs = 0;  // size for the reference kernels, which may be selected later
        upstream.work_size(n_threads, op, theirs);
        const layout at(op);
        size = std::max(theirs, at.own + n_threads * at.own_size + ALIGN);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (params->use_ref || !has_tiles(op)) {
            return upstream.compute_forward(params, op);
        }
        const ggml_tensor * w = op->src[0];
        const ggml_tensor * x = op->src[1];
        const layout at(op);
        char * acts = reinterpret_cast<char *>(padded(reinterpret_cast<uintptr_t>(params->wdata)));
        char * own  = acts + at.own + params->ith * at.own_size;

        const auto from_float = ggml_get_type_traits_cpu(ggml_get_type_traits_cpu(w->type)->vec_dot_type)->from_float;
        for (int64_t t = params->ith; t < x->ne[1]; t += params->nth) {
            from_float(reinterpret_cast<const float *>(static_cast<const char *>(x->data) + t*x->nb[1]), acts + t*at.act_size,
                       x->ne[0]);
        }
        const int64_t n_rows = moe_edge_tiles_rows(w->ne[1], params->nth);
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);

        thread_local std::vector<const void *> inputs;
        thread_local std::vector<float *> out;
        inputs.clear();
        out.clear();
        for (int64_t t = 0; t < x->ne[1]; t++) {
            inputs.push_back(acts + t*at.act_size);
            out.push_back(reinterpret_cast<float *>(static_cast<char *>(op->data) + t*op->nb[1]));
        }
        for (int64_t row = params->ith * n_rows; row < w->ne[1]; row = ggml_threadpool_chunk_add(params->threadpool, 1) * n_rows) {
            moe_edge_tiles(w->type, w->data, w->ne[0], row, std::min(row + n_rows, w->ne[1]), inputs.data(), inputs.size(),
                out.data(), own);
        }
        return true;
    }

    ggml::cpu::tensor_traits & upstream;
    const moe_edge_kernels &   kernels;
};

}  // namespace

void moe_edge_tiles_for_prompts(ggml_tensor * tensor) {
    if (!tensor->buffer || tensor->buffer->buft != ggml_backend_cpu_repack_buffer_type() || !tensor->extra || ggml_n_dims(tensor) != 2) {
        return;
    }
    const auto * kernels = moe_edge_kernels_of(tensor->type, tensor->ne[0], tensor->ne[1]);
    if (!kernels || moe_edge_tiles_from(*kernels) == INT64_MAX) {
        return;
    }
    // Upstream computes all matrices of one type and layout with one traits object. Create an object of our own for
    // each of upstream's objects, and keep it until the process ends.
    static std::mutex mutex;
    static std::map<void *, std::unique_ptr<dense_traits>> traits;
    std::lock_guard<std::mutex> lock(mutex);
    auto & ours = traits[tensor->extra];
    if (!ours) {
        ours = std::make_unique<dense_traits>(*static_cast<ggml::cpu::tensor_traits *>(tensor->extra), *kernels);
    }
    tensor->extra = ours.get();
}
