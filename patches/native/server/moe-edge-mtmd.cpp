// Compiles upstream's multimodal library, and adds the measurement of what images need.

#include "mtmd.cpp"

#include "moe-edge-encoder.h"

#include <cmath>

// The shapes of images (width / height) for which the need is measured. The largest need of all shapes counts.
static const double SHAPES[] = { 1.0, 1.5, 0.66, 4.0, 0.25, 16.0, 0.0625 };

moe_edge_images moe_edge_images_of(const std::string & path, int min_tokens, int max_tokens, int64_t most_pixels) {
    mtmd_context_params params = mtmd_context_params_default();
    params.use_gpu          = false;
    params.warmup           = false;
    params.image_min_tokens = min_tokens;
    params.image_max_tokens = max_tokens;
    mtmd_context context(path.c_str(), nullptr, params, true);
    moe_edge_images out = {};
    out.n_embd = clip_n_mmproj_embd(context.ctx_v);
    for (const auto & [device, size] : clip_get_mem_usage(context.ctx_v)) {
        out.weights += size;
    }
    int64_t largest = 0;
    clip_image_size worst = {};
    for (const double shape : SHAPES) {
        clip_image_u8 image;
        const double height = std::sqrt(double(most_pixels) / shape);
        image.set_size({ std::max(1, int(height * shape)), std::max(1, int(height)) }, true);
        auto prepared = context.image_preproc->preprocess(image);
        auto & parts = prepared.entries;
        if (prepared.has_overview()) {
            parts.push_back(prepared.overview);
        }
        int64_t n_pixels = 0;
        int32_t n_tokens = 0;
        for (const auto & part : parts) {
            const int64_t n_part = int64_t(part.nx()) * part.ny();
            const int32_t n_part_tokens = clip_n_output_tokens(context.ctx_v, &part);
            n_pixels += n_part;
            n_tokens += n_part_tokens;
            out.part_tokens = std::max(out.part_tokens, n_part_tokens);
            if (n_part > largest) {
                largest = n_part;
                worst   = part.get_size();
            }
        }
        out.n_tokens = std::max(out.n_tokens, n_tokens);
        out.prepared = std::max(out.prepared, uint64_t(n_pixels) * 3 * sizeof(float));
    }
    const clip_hparams & hparams = *clip_get_hparams(context.ctx_v);
    out.min_pixels = hparams.image_min_pixels > 0 ? hparams.image_min_pixels : 0;
    out.scratch    = moe_edge_encoder_scratch(context.ctx_v, worst.width, worst.height);
    out.is_whole = mtmd_decode_use_non_causal(&context, nullptr);
    return out;
}
