// Limits the work of upstream's code for grammars, and makes samplers of grammars. Upstream has no limits of its own: a
// short rule can take it practically forever. If a grammar is invalid, this file reports the reason.

#include "moe-edge-grammar.h"
#include "moe-edge-bounds.h"

#include "common.h"
#include "sampling.h"

#include "llama-grammar.h"
#include "llama-impl.h"
#include "llama-sampler.h"
#include "llama-vocab.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

template <typename... Rest> [[noreturn]] static void refuse(const char * format, Rest... rest) {
    throw std::invalid_argument(::format(format, rest...));
}

// Turn errors of upstream's grammar code into exceptions. LLAMA_LOG_ERROR throws std::invalid_argument. fprintf, which
// upstream calls in catch blocks, throws the caught error again. size and pop_back also count steps.
#undef LLAMA_LOG_ERROR
#undef LLAMA_LOG_DEBUG
#define LLAMA_LOG_ERROR(...) refuse(__VA_ARGS__)
#define LLAMA_LOG_DEBUG(...) (void) 0
#define fprintf(...) throw
#define size() size() + moe_edge_step()
#define pop_back() pop_back(), moe_edge_step(64)
#include "llama-grammar.cpp"
#undef fprintf
#undef size
#undef pop_back

namespace {

// The most elements that a grammar may have after its repetitions are expanded. Each element may become a rule of about
// 250 bytes.
const uint64_t MOST_REPEATED = 1 << 16;
// The largest number of repetitions that upstream respects. Upstream treats a larger maximum as no limit.
const uint64_t MOST_TIMES = MAX_REPETITION_THRESHOLD;
// The most CPU time, in nanoseconds, for reading a grammar, or for applying it to one token. Other answers wait
// meanwhile.
const int64_t MOST_NS = 500000000;
// The most CPU time, in nanoseconds, for applying a grammar to the first token of an answer. A request that needs more
// is refused before it is queued. Later tokens would take about as long, and delay other answers.
const int64_t MOST_FIRST_NS = 100000000;
const size_t MOST_REASON = 160;

const char * end_of(const char * at, char closing) {
    while (*at && *at != closing) {
        at += *at == '\\' && at[1] ? 2 : 1;
    }
    return at;
}

uint64_t number_at(const char *& at) {
    uint64_t found = 0;
    for (; *at >= '0' && *at <= '9'; at++) {
        found = std::min<uint64_t>(10 * found + (*at - '0'), UINT32_MAX);
    }
    return found;
}

// Throws std::invalid_argument if the repetitions in a grammar expand to too many elements, or if a repetition has a
// minimum above its maximum. Upstream would take too long for such a grammar.
void check_repetitions(const char * text) {
    uint64_t symbol = 1, all = 0;  // number of elements
    for (const char * at = text; *at; at++) {
        if (*at == '#') {
            at += strcspn(at, "\r\n");
        } else if (*at == '"' || *at == '[') {
            const char * end = end_of(at + 1, *at == '"' ? '"' : ']');
            symbol = std::max<uint64_t>(1, end - at - 1);
            at = end;
        } else if (*at == '*' || *at == '+' || *at == '?') {
            all += symbol;
        } else if (*at == '{') {
            const auto space = [&] { at += strspn(at, " \t"); };
            at++;
            space();
            const uint64_t least = number_at(at);
            space();
            uint64_t most = least;
            if (*at == ',') {
                at++;
                space();
                most = *at >= '0' && *at <= '9' ? number_at(at) : UINT64_MAX;
            }
            if (most < least) {
                throw std::invalid_argument("a repetition has a minimum above its maximum");
            }
            symbol *= std::max<uint64_t>(1, std::min(most > MOST_TIMES ? least : most, MOST_TIMES));
            all += symbol;
            space();
        } else if (!isspace(static_cast<unsigned char>(*at))) {
            symbol = 1;
        }
        if (all > MOST_REPEATED || symbol > MOST_REPEATED) {
            throw std::invalid_argument("its repetitions expand to more than 65536 elements");
        }
        if (!*at) {
            return;
        }
    }
}

// Returns one sentence which says that the grammar is refused for this reason. Shortens the reason, because upstream's
// reasons quote the rest of the grammar.
std::string sentence(std::string reason) {
    const std::string ours = "the grammar ";
    reason = reason.substr(0, MOST_REASON);
    for (char & each : reason) {
        each = each >= ' ' && each <= '~' ? each : ' ';
    }
    return reason.compare(0, ours.size(), ours) == 0 ? reason : "the grammar is refused: " + reason;
}

// The list to which this thread adds the grammars of its request before it queues the request. Null at other times.
thread_local std::vector<moe_edge_prepared_grammar> * preparing = nullptr;
thread_local const std::function<bool()> * preparing_given_up = nullptr;

template <typename Work> auto bounded(const Work & work, int64_t most_ns = MOST_NS) -> decltype(work()) {
    moe_edge_bounded counted(MOE_EDGE_GRAMMAR, preparing ? *preparing_given_up : moe_edge_server_ends, most_ns);
    try {
        return work();
    } catch (const std::exception & error) {
        throw std::invalid_argument(sentence(error.what()));
    }
}

struct freed {
    void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); }
};

using grammar_ptr = std::unique_ptr<llama_grammar, freed>;

// Returns a copy of a grammar with all its stacks. Much faster than upstream's own function.
grammar_ptr copy_of(const llama_grammar & from) {
    grammar_ptr made(new llama_grammar{
        from.vocab, from.rules, from.stacks, from.partial_utf8, from.lazy, from.awaiting_trigger, from.trigger_buffer,
        from.trigger_buffer_positions, from.trigger_tokens, from.trigger_patterns });
    std::map<const llama_grammar_element *, size_t> begins;
    for (size_t i = 0; i < from.rules.size(); i++) {
        begins[from.rules[i].data()] = i;
    }
    for (auto & stack : made->stacks) {
        for (auto & element : stack) {
            const auto & [begin, rule] = *std::prev(begins.upper_bound(element));
            element = made->rules[rule].data() + (element - begin);
        }
    }
    return made;
}

// A grammar, with the text and the settings from which it was read. Samplers copy the grammar instead of reading the
// text again, which may take half a second.
struct origin {
    const llama_vocab *      vocab;
    std::string              text, root;
    bool                     lazy;
    std::vector<std::string> patterns;
    std::vector<llama_token> tokens;
    grammar_ptr              first;

    bool is_like(const origin & other) const {
        return vocab == other.vocab && text == other.text && root == other.root && lazy == other.lazy &&
            patterns == other.patterns && tokens == other.tokens;
    }

    void read() {
        first.reset(bounded([&] {
            std::vector<const char *> texts;
            for (const std::string & each : patterns) {
                texts.push_back(each.c_str());
            }
            check_repetitions(text.c_str());
            llama_grammar * made = llama_grammar_init_impl(
                vocab, text.c_str(), root.c_str(), lazy, texts.data(), texts.size(), tokens.data(), tokens.size());
            if (!made) {
                throw std::invalid_argument("it cannot be read");
            }
            return made;
        }));
    }
};

using origin_ptr = std::shared_ptr<const origin>;

// The grammars of all queued and running requests. The decode thread looks here for a grammar that the thread of a
// request has already read.
class known_grammars {
  public:
    origin_ptr find(const origin & asked) {
        std::lock_guard<std::mutex> lock(mutex);
        origin_ptr found;
        const auto is_over = [&](const std::weak_ptr<const origin> & each) {
            const origin_ptr held = each.lock();
            if (held && !found && held->is_like(asked)) {
                found = held;
            }
            return !held;
        };
        all.erase(std::remove_if(all.begin(), all.end(), is_over), all.end());
        return found;
    }

    void add(const origin_ptr & made) {
        std::lock_guard<std::mutex> lock(mutex);
        all.push_back(made);
    }

  private:
    std::mutex mutex;
    std::vector<std::weak_ptr<const origin>> all;
};

known_grammars known;

struct grammar {
    origin_ptr  from;
    grammar_ptr now;

    explicit grammar(origin_ptr origin) : from(std::move(origin)) { begin(); }

    void begin() { now = copy_of(*from->first); }
};

// The grammar of the sampler that moe_edge_prepare_grammar has created on this thread. Valid until that function frees
// the sampler.
thread_local grammar * prepared = nullptr;

// Does the work for the first token of an answer: checks every token of the vocabulary. Throws std::invalid_argument if
// this takes too long.
void try_first_token(const llama_grammar & grammar) {
    std::vector<llama_token_data> tokens(grammar.vocab->n_tokens());
    for (size_t i = 0; i < tokens.size(); i++) {
        tokens[i] = { llama_token(i), 0.0f, 0.0f };
    }
    llama_token_data_array all = { tokens.data(), tokens.size(), -1, false };
    bounded([&] { llama_grammar_apply_impl(grammar, &all); }, MOST_FIRST_NS);
}

grammar & of(const llama_sampler * sampler) {
    return *static_cast<grammar *>(sampler->ctx);
}

void accept(llama_sampler * sampler, llama_token token) {
    grammar & asked = of(sampler);
    bounded([&] {
        const auto & stacks = asked.now->stacks;
        const bool may_end = std::any_of(stacks.begin(), stacks.end(), [](const auto & each) { return each.empty(); });
        if (!may_end && !asked.now->awaiting_trigger && asked.from->vocab->is_eog(token)) {
            throw std::invalid_argument("no token of the model can continue the text");  // upstream would abort the process
        }
        llama_grammar_accept_impl(*asked.now, token);
    });
}

llama_sampler_i * functions() {
    static llama_sampler_i all = [] {
        llama_sampler_i made = {};
        made.name   = [](const llama_sampler *) { return "grammar"; };
        made.accept = accept;
        made.apply  = [](llama_sampler * sampler, llama_token_data_array * candidates) {
            bounded([&] { llama_grammar_apply_impl(*of(sampler).now, candidates); });
        };
        made.reset  = [](llama_sampler * sampler) { of(sampler).begin(); };
        made.clone  = [](const llama_sampler * sampler) {
            auto made = std::make_unique<grammar>(of(sampler).from);
            made->now = copy_of(*of(sampler).now);
            return llama_sampler_init(functions(), made.release());
        };
        made.free = [](llama_sampler * sampler) { delete &of(sampler); };
        return made;
    }();
    return &all;
}

llama_sampler * init(origin && asked) {
    origin_ptr found = known.find(asked);
    if (!found) {
        auto made = std::make_shared<origin>(std::move(asked));
        made->read();
        found = made;
        known.add(found);
    }
    auto * made = new grammar(found);
    if (preparing) {
        preparing->push_back(found);
        prepared = made;
    }
    return llama_sampler_init(functions(), made);
}

}  // namespace

llama_sampler * moe_edge_sampler_init_grammar(const llama_vocab * vocab, const char * text, const char * root) {
    return init({ vocab, text, root, false, {}, {}, nullptr });
}

llama_sampler * moe_edge_sampler_init_grammar_lazy_patterns(
        const llama_vocab * vocab, const char * text, const char * root, const char ** patterns, size_t n_patterns,
        const llama_token * tokens, size_t n_tokens) {
    return init({ vocab, text, root, true, { patterns, patterns + n_patterns }, { tokens, tokens + n_tokens }, nullptr });
}

moe_edge_grammar_turn::moe_edge_grammar_turn() : lock(turn(), std::defer_lock) {
    while (!lock.try_lock_for(std::chrono::milliseconds(10))) {
        moe_edge_check_given_up();
    }
}

std::recursive_timed_mutex & moe_edge_grammar_turn::turn() {
    static std::recursive_timed_mutex made;
    return made;
}

void moe_edge_prepare_grammar(
        const llama_model * model, common_params_sampling sampling, const std::function<bool()> & is_given_up,
        std::vector<moe_edge_prepared_grammar> & made) {
    if (common_grammar_value(sampling.grammar).empty()) {
        return;
    }
    moe_edge_grammar_turn turn;
    preparing = &made;
    preparing_given_up = &is_given_up;
    try {
        const common_sampler_ptr sampler(common_sampler_init(model, sampling));
        try_first_token(*prepared->now);
    } catch (...) {
        preparing = nullptr;
        throw;
    }
    preparing = nullptr;
}

bool moe_edge_grammar_matches(const std::string & grammar_text, const std::string & text) {
    return bounded([&] {
        check_repetitions(grammar_text.c_str());
        std::unique_ptr<llama_grammar, freed> made(
            llama_grammar_init_impl(nullptr, grammar_text.c_str(), "root", false, nullptr, 0, nullptr, 0));
        if (!made) {
            throw std::invalid_argument("it cannot be read");
        }
        try {
            llama_grammar_accept_str(*made, text);
        } catch (const std::runtime_error &) {
            return false;  // no rule continues with one of the characters
        }
        const auto & stacks = made->stacks;
        return std::any_of(stacks.begin(), stacks.end(), [](const auto & each) { return each.empty(); });
    });
}
