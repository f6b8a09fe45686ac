// The parts of upstream's library "common" that its test-llama-archs.cpp uses. That library is not
// built here. Models are made and saved without it. Only upstream's comparisons, which are not run,
// decode batches.

#pragma once

#include "llama.h"

#include <cstdlib>

struct common_batch {
    common_batch(llama_context *) {}
    void clear() { std::abort(); }
    void add(llama_token, llama_pos, llama_seq_id, bool) { std::abort(); }
    llama_batch_ext * get() { std::abort(); }
};

inline void  common_init() {}
inline int   common_log_get_verbosity(ggml_log_level) { return 0; }
inline void  common_log_set_verbosity_thold(int) {}
inline void *common_log_main() { return nullptr; }
inline void  common_log_flush(void *) {}
