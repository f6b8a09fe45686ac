// Declares functions for grammars that clients send, with limits on their work.

#pragma once

#include "llama.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct common_params_sampling;

extern "C" {

// Creates a sampler for a grammar. Upstream's sampling calls this function instead of that of llama.h. The function and
// its sampler throw std::invalid_argument if the grammar is invalid or takes too much work. Only the request with this
// grammar fails then.
llama_sampler * moe_edge_sampler_init_grammar(const llama_vocab * vocab, const char * text, const char * root);
// Creates a sampler for a grammar that takes effect when one of these patterns or tokens occurs in the answer.
llama_sampler * moe_edge_sampler_init_grammar_lazy_patterns(
    const llama_vocab * vocab, const char * text, const char * root, const char ** patterns, size_t n_patterns,
    const llama_token * tokens, size_t n_tokens);

}

// Returns whether the calling thread is the decode thread of a server that is stopping.
bool moe_edge_server_ends();

// Returns whether a grammar accepts a text from its beginning to its end. Throws std::invalid_argument if the grammar
// is invalid.
bool moe_edge_grammar_matches(const std::string & grammar, const std::string & text);

// A lock that a thread must hold while it reads a schema or a grammar, which may take half a second. Reading therefore
// occupies only one core, and answers continue on the others. Throws std::invalid_argument if the request is cancelled
// while its thread waits for the lock.
class moe_edge_grammar_turn {
  public:
    moe_edge_grammar_turn();

  private:
    static std::recursive_timed_mutex & turn();
    std::unique_lock<std::recursive_timed_mutex> lock;
};

// Keeps a grammar in memory that was read before its request was queued.
using moe_edge_prepared_grammar = std::shared_ptr<const void>;

// Reads the grammar of a request before its tasks are queued, and appends it to `made`. While `made` exists, the decode
// thread copies this grammar instead of reading it again. Throws std::invalid_argument if the grammar is invalid, if it
// takes too much work, or if the request is cancelled.
void moe_edge_prepare_grammar(
    const llama_model * model, common_params_sampling sampling, const std::function<bool()> & is_given_up,
    std::vector<moe_edge_prepared_grammar> & made);
