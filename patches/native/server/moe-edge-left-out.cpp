// Defines stubs for parts that llama.cpp's server refers to and this build does not contain: downloads, and the
// multimodal library with its seventy source files. This server takes only text. A message with an image is refused,
// because no projector is ever loaded. Nothing is downloaded.

#include "build-info.h"
#include "download.h"
#include "mtmd-helper.h"
#include "mtmd.h"

#include <stdexcept>

namespace {

[[noreturn]] void unreachable() {
    throw std::runtime_error("this server takes only text: no images, audio or video");
}

}  // namespace

std::pair<long, std::vector<char>> common_remote_get_content(const std::string &, const common_remote_params &) {
    unreachable();
}

int          llama_build_number() { return 0; }
const char * llama_build_info() { return "b0-moe-edge"; }  // clients expect this form
const char * llama_build_target() { return ""; }
const char * llama_commit() { return ""; }
const char * llama_compiler() { return ""; }
void         llama_print_build_info(const char *, FILE *) {}

mtmd_context_params  mtmd_context_params_default() { return {}; }
mtmd_helper_init_opt mtmd_helper_init_opt_default() { return {}; }
void mtmd_helper_log_set(ggml_log_callback, void *) {}

// Called with objects that are never created.
void mtmd_free(mtmd_context *) {}
void mtmd_batch_free(mtmd_batch *) {}
void mtmd_bitmap_free(mtmd_bitmap *) {}
void mtmd_input_chunk_free(mtmd_input_chunk *) {}
void mtmd_input_chunks_free(mtmd_input_chunks *) {}
void mtmd_helper_video_free(mtmd_helper_video *) {}

bool mtmd_support_vision(const mtmd_context *) { return false; }
bool mtmd_support_audio(const mtmd_context *) { return false; }
bool mtmd_helper_support_video(const mtmd_context *) { return false; }

mtmd_context * mtmd_init_from_file(const char *, const llama_model *, const mtmd_context_params) { return nullptr; }
std::map<ggml_backend_dev_t, size_t> mtmd_get_memory_usage(const char *, mtmd_context_params) { return {}; }

mtmd_batch * mtmd_batch_init(mtmd_context *) { unreachable(); }
int32_t mtmd_batch_add_chunk(mtmd_batch *, const mtmd_input_chunk *) { unreachable(); }
int32_t mtmd_batch_encode(mtmd_batch *) { unreachable(); }
float * mtmd_batch_get_output_embd(mtmd_batch *, const mtmd_input_chunk *) { unreachable(); }
mtmd_input_chunks * mtmd_input_chunks_init() { unreachable(); }
size_t mtmd_input_chunks_size(const mtmd_input_chunks *) { unreachable(); }
const mtmd_input_chunk * mtmd_input_chunks_get(const mtmd_input_chunks *, size_t) { unreachable(); }
mtmd_input_chunk_type mtmd_input_chunk_get_type(const mtmd_input_chunk *) { unreachable(); }
const llama_token * mtmd_input_chunk_get_tokens_text(const mtmd_input_chunk *, size_t *) { unreachable(); }
size_t mtmd_input_chunk_get_n_tokens(const mtmd_input_chunk *) { unreachable(); }
const char * mtmd_input_chunk_get_id(const mtmd_input_chunk *) { unreachable(); }
llama_pos mtmd_input_chunk_get_n_pos(const mtmd_input_chunk *) { unreachable(); }
mtmd_input_chunk * mtmd_input_chunk_copy(const mtmd_input_chunk *) { unreachable(); }
mtmd_input_chunk * mtmd_input_chunk_get_placeholder(const mtmd_input_chunk *) { unreachable(); }
int32_t mtmd_input_chunk_save(const mtmd_input_chunk *, char *, size_t, size_t *) { unreachable(); }
mtmd_input_chunk * mtmd_input_chunk_load(const char *, size_t) { unreachable(); }
int32_t mtmd_tokenize(
    const mtmd_context *, mtmd_input_chunks *, const mtmd_input_text *, const mtmd_bitmap * const *, size_t) {
    unreachable();
}
mtmd_helper_bitmap_wrapper mtmd_helper_bitmap_init_from_buf(
    const mtmd_context *, const unsigned char *, size_t, bool, mtmd_helper_init_opt) {
    unreachable();
}
int32_t mtmd_helper_decode_image_chunk(
    mtmd_context *, llama_context *, const mtmd_input_chunk *, float *, llama_pos, llama_seq_id, int32_t, llama_pos *,
    mtmd_helper_post_decode_callback, void *) {
    unreachable();
}
