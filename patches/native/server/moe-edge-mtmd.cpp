// Includes upstream's multimodal library (mtmd.cpp), and adds a function that measures the memory and the tokens that
// images need.

#include "mtmd.cpp"

#include "moe-edge-encoder.h"

#include <cmath>

// The sizes of the images that moe_edge_images_of measures. Their shapes (width / height) range from 1 / MOST_SHAPE to
// MOST_SHAPE, in N_SHAPES steps. Each shape is measured with N_SIZES different numbers of pixels. The largest results
// count.
static const double MOST_SHAPE = 64;
static const int    N_SHAPES = 384, N_SIZES = 4;

static std::vector<clip_image_size> sizes_to_measure(double most_pixels) {
    std::vector<clip_image_size> out;
    for (int i = 0; i <= N_SHAPES; i++) {
        const double shape = std::pow(MOST_SHAPE, 2.0 * i / N_SHAPES - 1.0);
        for (int size = 0; size < N_SIZES; size++) {
            const double height = std::sqrt(most_pixels / std::pow(16.0, size) / shape);
            out.push_back({ std::max(1, int(height * shape)), std::max(1, int(height)) });
        }
    }
    return out;
}

moe_edge_images moe_edge_images_of(const std::string & path, int max_tokens, int64_t most_pixels) {
    mtmd_context_params params = mtmd_context_params_default();
    params.use_gpu          = false;
    params.warmup           = false;
    params.image_max_tokens = max_tokens;
    mtmd_context context(path.c_str(), nullptr, params, true);
    moe_edge_images out = {};
    out.n_embd = clip_n_mmproj_embd(context.ctx_v);
    for (const auto & [device, size] : clip_get_mem_usage(context.ctx_v)) {
        out.weights += size;
    }
    int64_t largest = 0;
    clip_image_size worst = {};
    for (const clip_image_size & size : sizes_to_measure(double(most_pixels))) {
        clip_image_u8 image;
        image.set_size(size, true);
        auto prepared = context.image_preproc->preprocess(image);
        auto & parts = prepared.entries;
        if (prepared.has_overview()) {
            parts.push_back(prepared.overview);
        }
        int64_t n_pixels = 0;
        for (const auto & part : parts) {
            const int64_t n_part = int64_t(part.nx()) * part.ny();
            n_pixels += n_part;
            out.part_tokens = std::max(out.part_tokens, clip_n_output_tokens(context.ctx_v, &part));
            if (n_part > largest) {
                largest = n_part;
                worst   = part.get_size();
            }
        }
        out.prepared = std::max(out.prepared, uint64_t(n_pixels) * 3 * sizeof(float));
    }
    const clip_hparams & hparams = *clip_get_hparams(context.ctx_v);
    out.min_pixels = hparams.image_min_pixels > 0 ? hparams.image_min_pixels : 0;
    if (hparams.image_max_pixels > 0) {
        const int side = hparams.patch_size * hparams.n_merge;
        out.part_tokens = std::max(out.part_tokens, hparams.image_max_pixels / (side * side));
    }
    out.scratch  = moe_edge_encoder_scratch(context.ctx_v, worst.width, worst.height);
    out.is_whole = mtmd_decode_use_non_causal(&context, nullptr);
    return out;
}
