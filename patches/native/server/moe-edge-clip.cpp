// Includes upstream's clip.cpp with its function clip_init renamed, and defines another clip_init. The new function
// loads only the image encoder of a file. The audio encoder would take memory, and this server refuses audio.

#define clip_init moe_edge_clip_init_all
#include "clip.cpp"
#undef clip_init

#include "moe-edge-encoder.h"

clip_init_result clip_init(const char * path, clip_context_params params) {
    try {
        clip_model_loader loader(path, false, params.progress_callback, params.progress_callback_user_data);
        if (!loader.has_vision) {
            throw std::runtime_error("it contains no image encoder");
        }
        auto encoder = std::make_unique<clip_ctx>(params);
        loader.load_hparams(encoder->model, CLIP_MODALITY_VISION);
        loader.load_tensors(*encoder);
        loader.init_ctx(*encoder);
        auto * backends = ggml_backend_dev_backend_reg(ggml_backend_get_device(encoder->backend_cpu));
        auto * set = ggml_backend_reg_get_proc_address(backends, "ggml_backend_set_abort_callback");
        reinterpret_cast<ggml_backend_set_abort_callback_t>(set)(encoder->backend_cpu, moe_edge_encoding_ends, nullptr);
        return { encoder.release(), nullptr, nullptr };
    } catch (const std::exception & failure) {
        LOG_ERR("%s: %s\n", path, failure.what());
        return { nullptr, nullptr, nullptr };
    }
}

size_t moe_edge_encoder_scratch(clip_ctx * encoder, int width, int height) {
    clip_image_f32 image;
    image.set_size({ width, height }, true, false);
    clip_image_f32_batch batch;
    batch.entries.push_back(image);
    clip_model_loader::warmup(*encoder, batch);
    size_t n_bytes = 0;
    for (const auto & [device, size] : encoder->mem_compute) {
        n_bytes += size;
    }
    return n_bytes;
}
