// Preloaded library: writes the two best tokens of each sampled position to the file BEST_LOGITS.
//
// A line has: best token, its logit, second best token, its logit.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

// Functions of llama.cpp.
const void * llama_get_model(const void * context);
const void * llama_model_get_vocab(const void * model);
int32_t llama_vocab_n_tokens(const void * vocab);

float * llama_get_logits_ith(void * context, int32_t i) {
    float * (*original)(void *, int32_t) = dlsym(RTLD_NEXT, "llama_get_logits_ith");
    float * logits = original(context, i);
    const char * path = getenv("BEST_LOGITS");
    FILE * file = path ? fopen(path, "a") : NULL;
    if (!logits || !file) {
        return logits;
    }
    int32_t n_tokens = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    int32_t best = 0, second = 1;
    for (int32_t token = 1; token < n_tokens; token++) {
        if (logits[token] > logits[best]) {
            second = best;
            best = token;
        } else if (token == 1 || logits[token] > logits[second]) {
            second = token;
        }
    }
    fprintf(file, "%d %.9g %d %.9g\n", best, logits[best], second, logits[second]);
    fclose(file);
    return logits;
}
