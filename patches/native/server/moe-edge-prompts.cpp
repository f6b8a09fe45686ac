#include "moe-edge-prompts.h"
#include "moe-edge-images.h"

#include "common.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <utility>

namespace {

// If a slot has fewer tokens than this, its contents are not copied to upstream's cache of earlier prompts. Computing
// these tokens again is faster than copying.
const size_t LEAST_TOKENS = 16;

// the most notes per slot
const size_t MOST_NOTES = 8;

// a position before every sliding window
const llama_pos BEFORE_ALL = -2;

size_t common_prefix(const llama_tokens & a, const llama_tokens & b) {
    const size_t n = std::min(a.size(), b.size());
    return size_t(std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin());
}

// Returns whether every number is a token of the vocabulary, or stands for a token of an image (moe_edge_keys).
bool are_valid(const llama_vocab * vocab, const llama_tokens & tokens) {
    const llama_token n = llama_vocab_n_tokens(vocab);
    return std::all_of(tokens.begin(), tokens.end(), [n](llama_token token) {
        return token != LLAMA_TOKEN_NULL && token < n;
    });
}

// Returns the index of the next control token or image at or after `start`, which ends the text that starts at `start`.
size_t end_of_text(const llama_vocab * vocab, const llama_tokens & tokens, size_t start) {
    while (start < tokens.size() && tokens[start] >= 0 && !llama_vocab_is_control(vocab, tokens[start])) {
        start++;
    }
    return start;
}

std::string text_of(const llama_vocab * vocab, const llama_tokens & tokens, size_t start, size_t end) {
    std::string text;
    for (size_t i = start; i < end; i++) {
        text += common_token_to_piece(vocab, tokens[i], true);
    }
    return text;
}

// Tokenizes a text to `tokens`. Returns false if these tokens do not stand for exactly the same text.
bool tokens_of(const llama_vocab * vocab, const std::string & text, llama_tokens & tokens) {
    if (text.empty()) {
        tokens.clear();
        return true;
    }
    if (validate_utf8(text) != text.size()) {
        return false;
    }
    tokens = common_tokenize(vocab, text, false, false);
    return text_of(vocab, tokens, 0, tokens.size()) == text;
}

bool cannot_be_cut(const llama_model * model) {
    return llama_model_is_recurrent(model) || llama_model_is_hybrid(model) || llama_model_n_swa(model) > 0;
}

// Returns how many tokens of a prompt upstream would reuse. held: the tokens and checkpoints of a slot, or of a copy of
// an earlier prompt. common: length of the common prefix of the prompt and `held`. pos_min: the first position that the
// sequence's memory still has. If the next token needs an earlier position, upstream returns to a checkpoint. It then
// reuses only the tokens before the checkpoint.
size_t spared_of(const server_prompt & held, size_t common, size_t n_prompt, llama_pos pos_min, int32_t n_window) {
    if (common == 0) {
        return 0;
    }
    const llama_pos next   = held.tokens.pos_next(int64_t(common));  // an image may have fewer positions than tokens
    const llama_pos needed = std::max(0, next - n_window - (common < n_prompt ? 0 : 1));
    size_t          n      = common;
    if (pos_min >= needed) {
        const auto found = std::find_if(held.checkpoints.rbegin(), held.checkpoints.rend(), [&](const auto & each) {
            return each.pos_max <= next && (each.pos_min < needed || each.pos_min == 0);
        });
        n = 0;
        if (found != held.checkpoints.rend()) {
            const llama_pos back = std::min(next, std::max(found->pos_min + 1, found->pos_max));
            n = std::min(held.tokens.size_up_to_pos(back), size_t(found->n_tokens));
        }
    }
    return std::min(n, n_prompt - 1);  // the logits of the last token are needed
}

}  // namespace

llama_tokens moe_edge_as_held(const llama_vocab * vocab, const llama_tokens & prompt, const llama_tokens & held) {
    size_t done = common_prefix(prompt, held), at = done;
    llama_tokens whole = prompt;
    if (at == held.size() || done == prompt.size() || !are_valid(vocab, prompt) || !are_valid(vocab, held)) {
        return whole;
    }
    while (done < whole.size() && at < held.size()) {
        if (whole[done] == held[at]) {
            done++;
            at++;
            continue;
        }
        const size_t end = end_of_text(vocab, whole, done), held_end = end_of_text(vocab, held, at);
        if (held_end == at) {
            break;
        }
        const std::string text = text_of(vocab, whole, done, end), held_text = text_of(vocab, held, at, held_end);
        llama_tokens rest;
        if (text != held_text) {
            // A slot lacks the last token of its answer, which was sampled but never computed. So at the end of `held`,
            // a piece of text may lack its end.
            const bool starts = held_end == held.size() && text.compare(0, held_text.size(), held_text) == 0;
            if (!starts || !tokens_of(vocab, text.substr(held_text.size()), rest)) {
                break;
            }
        }
        llama_tokens made(held.begin() + at, held.begin() + held_end);
        made.insert(made.end(), rest.begin(), rest.end());
        whole.erase(whole.begin() + done, whole.begin() + end);
        whole.insert(whole.begin() + done, made.begin(), made.end());
        done += held_end - at;
        at = held_end;
    }
    return whole;
}

moe_edge_prompts::moe_edge_prompts(llama_context * context, int32_t n_slots, int32_t most_checkpoints)
    : has_part(cannot_be_cut(llama_get_model(context))),
      context(context),
      vocab(llama_model_get_vocab(llama_get_model(context))),
      n_window(llama_model_n_swa(llama_get_model(context))),
      most_checkpoints(size_t(std::max(0, most_checkpoints))),
      states(n_slots) {}

uint64_t moe_edge_prompts::keep(uint64_t n_bytes) {
    if (!copies) {
        return 0;
    }
    copies->limit_size = std::max<uint64_t>(1, n_bytes);  // 0 would mean no limit
    copies->update();
    return copies->size();
}

moe_edge_prompts::comparison moe_edge_prompts::compare(
        const llama_tokens & prompt, const server_prompt & held, int32_t n_ctx, llama_pos pos_min) const {
    const llama_tokens tokens = moe_edge_keys(held.tokens);
    comparison made { moe_edge_as_held(vocab, prompt, tokens), 0, 0 };
    if (made.prompt.size() >= size_t(n_ctx)) {
        made.prompt = prompt;
    }
    made.common = common_prefix(made.prompt, tokens);
    const bool continues = made.common == tokens.size() && made.common < made.prompt.size();
    made.spared = spared_of(held, made.common, made.prompt.size(), continues ? BEFORE_ALL : pos_min, n_window);
    return made;
}

moe_edge_prompts::choice moe_edge_prompts::choose(const moe_edge_slot & slot, const llama_tokens & prompt) const {
    const llama_pos pos_min = llama_memory_seq_pos_min(llama_get_memory(context), slot.number);
    const comparison live = compare(prompt, slot.prompt, slot.n_ctx, pos_min);
    choice made { live, live, {} };
    if (copies) {
        made.copy = copies->states.end();
        for (auto it = copies->states.begin(); it != copies->states.end(); ++it) {
            const size_t n = it->prompt.tokens.size();
            // The first position (pos_min) that the copy contains is unknown. If the model's memory may drop old
            // positions (has_part), assume that the copy contains only its last position, n - 1.
            comparison each = compare(prompt, it->prompt, slot.n_ctx, has_part ? llama_pos(n) - 1 : 0);
            if (n <= size_t(slot.n_ctx) && each.spared > made.best.spared) {
                made.best = std::move(each);
                made.copy = it;
            }
        }
    }
    return made;
}

// Returns whether a prompt belongs to another conversation than the slot's contents. If so, the prompt neither
// continues that conversation nor repeats its last turn. common: length of the common prefix of the prompt and the
// slot's tokens.
bool moe_edge_prompts::is_another(const moe_edge_slot & slot, size_t common) const {
    const slot_state & state = states[slot.number];
    const bool is_again = common + 1 >= state.prompt_end || (state.turn > 0 && state.turn <= common);
    return common < slot.prompt.tokens.size() && !is_again;
}

moe_edge_match moe_edge_prompts::match(const moe_edge_slot & slot, const llama_tokens & prompt) const {
    if (prompt.empty()) {
        return { 0, is_another(slot, 0) };
    }
    const choice made = choose(slot, prompt);
    const bool is_copy = copies && made.copy != copies->states.end();
    return { made.best.spared, is_copy || is_another(slot, made.live.common) };
}

bool moe_edge_prompts::take_continues(int32_t slot) {
    return std::exchange(states[slot].continues, false);
}

void moe_edge_prompts::place(const moe_edge_slot & slot, server_task & task) {
    slot_state & state = states[slot.number];
    state.continues = false;
    if (!slot.prompt.tokens.empty()) {
        note(slot.number, slot.prompt.tokens.size());
    }
    const llama_tokens asked = moe_edge_keys(task.tokens);
    if (asked.empty() || asked.size() >= size_t(slot.n_ctx) || !are_valid(vocab, asked)) {
        return;  // upstream refuses such a request
    }
    if (!task.params.cache_prompt) {
        put_away(slot, 0);
        state = {};
        state.prompt_end = asked.size();
        return;
    }
    choice made = choose(slot, asked);
    if (copies && made.copy != copies->states.end()) {
        std::list<server_prompt_cache_state> taken;
        taken.splice(taken.begin(), copies->states, made.copy);
        server_prompt_cache_state & copy = taken.front();
        const llama_tokens live = moe_edge_keys(slot.prompt.tokens);
        const std::vector<noted> copy_notes = copies_notes[&copy];
        if (common_prefix(live, moe_edge_keys(copy.prompt.tokens)) < live.size()) {
            put_away(slot, copy.size());
        }
        const size_t n = copy.prompt.tokens.size();
        const bool is_whole = made.best.common == n;
        state = {};
        state.notes = copy_notes;
        if (!bring(slot, copy, is_whole)) {
            place(slot, task);  // the copy is lost, so choose again
            return;
        }
        if (!is_whole) {
            copies->states.splice(copies->states.end(), taken);
            copies_notes[&copies->states.back()] = copy_notes;
        }
        state.turn = is_whole ? n : 0;
        go_back(slot.number, made.best.spared);
    } else {
        if (is_another(slot, made.live.common)) {
            put_away(slot, 0);
        }
        const bool is_turn = made.live.common + 1 >= state.prompt_end && made.live.prompt.size() != state.prompt_end;
        if (made.live.spared < slot.prompt.tokens.size()) {
            go_back(slot.number, made.live.spared);
        }
        if (is_turn) {
            state.turn = made.live.common;
        } else if (state.turn > made.live.common) {
            state.turn = 0;
        }
    }
    const llama_tokens & prompt = made.best.prompt;
    state.prompt_end = prompt.size();
    state.is_filed   = false;
    state.continues  = made.best.common == slot.prompt.tokens.size() && made.best.common < prompt.size();
    if (prompt != asked) {
        task.tokens = moe_edge_with_images(prompt, task.tokens);
    }
}

// Copies the contents of a slot to the cache of earlier prompts, before another conversation replaces them. Does
// nothing if the contents came from a file. taken_bytes: size of another copy, which the caller has taken from the
// cache to load it into the slot. Its bytes still count towards the limit of the cache.
void moe_edge_prompts::put_away(const moe_edge_slot & slot, size_t taken_bytes) {
    const size_t limit = copies ? copies->limit_size : 0;
    if (limit <= taken_bytes || slot.prompt.tokens.size() < LEAST_TOKENS || states[slot.number].is_filed) {
        return;
    }
    const size_t size = llama_state_seq_get_size_ext(context, slot.number, LLAMA_STATE_SEQ_FLAGS_NONE);
    copies->limit_size = limit - taken_bytes;
    server_prompt_cache_state * made = copies->alloc(slot.prompt, size, 0);
    copies->limit_size = std::min(limit, copies->limit_size + taken_bytes);
    for (auto it = copies_notes.begin(); it != copies_notes.end();) {
        const auto is_this = [&](const server_prompt_cache_state & each) { return &each == it->first; };
        const bool is_there = std::any_of(copies->states.begin(), copies->states.end(), is_this);
        it = is_there ? std::next(it) : copies_notes.erase(it);
    }
    if (made) {
        llama_state_seq_get_data_ext(context, made->data.main.data(), size, slot.number, LLAMA_STATE_SEQ_FLAGS_NONE);
        copies_notes[made] = states[slot.number].notes;
    }
}

void moe_edge_prompts::note(int32_t slot, size_t n_tokens) {
    if (!notes.note) {
        return;
    }
    auto & known = states[slot].notes;
    while (!known.empty() && known.back().n_tokens >= n_tokens) {
        known.pop_back();
    }
    const int64_t number = notes.note(notes.user, slot);
    if (number < 0) {
        return;
    }
    const auto drop = [this](const int64_t * each) {
        notes.drop(notes.user, *each);
        delete each;
    };
    known.push_back({ n_tokens, std::shared_ptr<const int64_t>(new int64_t(number), drop) });
    if (known.size() > MOST_NOTES) {
        known.erase(known.begin() + 1);
    }
}

// Restores the caller's state of a sequence (such as a policy's state) to the time when the sequence had n_tokens
// tokens. Recalls the latest note (a saved state) that was made with at most n_tokens + 1 tokens. The `+ 1` is allowed,
// because upstream computes the last token of a prompt again.
void moe_edge_prompts::go_back(int32_t slot, size_t n_tokens) {
    auto & known = states[slot].notes;
    while (!known.empty() && known.back().n_tokens > n_tokens + 1) {
        known.pop_back();
    }
    if (n_tokens > 0 && !known.empty()) {
        notes.recall(notes.user, slot, *known.back().number);
    }
}

bool moe_edge_prompts::bring(const moe_edge_slot & slot, server_prompt_cache_state & copy, bool is_whole) {
    const auto & data = copy.data.main;
    if (llama_state_seq_set_data_ext(context, data.data(), data.size(), slot.number, 0) != data.size()) {
        forget(slot);
        return false;
    }
    slot.prompt = is_whole ? std::move(copy.prompt) : copy.prompt.clone();
    return true;
}

void moe_edge_prompts::forget(const moe_edge_slot & slot) {
    llama_memory_seq_rm(llama_get_memory(context), slot.number, -1, -1);
    slot.prompt.clear();
    states[slot.number] = {};
}

size_t moe_edge_prompts::save(
        const moe_edge_slot & slot, const char * path, std::vector<moe_edge_server_mark> & marks) const {
    const llama_tokens tokens = moe_edge_packed(slot.prompt.tokens);
    const size_t n_bytes = llama_state_seq_save_file(context, path, slot.number, tokens.data(), tokens.size());
    if (n_bytes == 0 || slot.prompt.checkpoints.empty()) {
        return n_bytes;
    }
    const std::unique_ptr<FILE, int (*)(FILE *)> file(fopen(path, "r+b"), fclose);
    if (!file || fseek(file.get(), long(n_bytes), SEEK_SET) != 0) {
        return 0;
    }
    uint64_t at = n_bytes;
    for (const auto & each : slot.prompt.checkpoints) {
        const auto & data = each.data_tgt;
        if (fwrite(data.data(), 1, data.size(), file.get()) != data.size()) {
            return 0;
        }
        marks.push_back({ at, data.size(), int32_t(each.n_tokens), each.pos_min, each.pos_max });
        at += data.size();
    }
    return fflush(file.get()) == 0 ? n_bytes : 0;
}

bool moe_edge_prompts::restore(
        const moe_edge_slot & slot, const char * path, const std::vector<moe_edge_server_mark> & marks) {
    forget(slot);
    try {
        size_t n = 0;
        if (llama_state_seq_load_file(context, path, slot.number, nullptr, 0, &n) == 0) {
            return false;
        }
        llama_tokens stored(std::max<size_t>(1, n));
        if (llama_state_seq_load_file(context, path, slot.number, stored.data(), stored.size(), &n) == 0) {
            throw std::runtime_error("there is not enough space for it");
        }
        stored.resize(n);
        server_tokens tokens = moe_edge_unpacked(std::move(stored), slot.prompt.tokens.has_mtmd);
        if (tokens.size() > size_t(slot.n_ctx) || !tokens.validate(context)) {
            throw std::runtime_error("it does not fit");
        }
        const std::unique_ptr<FILE, int (*)(FILE *)> file(fopen(path, "rb"), fclose);
        const size_t first = marks.size() - std::min(marks.size(), most_checkpoints);
        for (size_t i = first; i < marks.size(); i++) {
            const moe_edge_server_mark & mark = marks[i];
            common_prompt_checkpoint made;
            // If the positions of a checkpoint are unknown, infer them from its number of tokens. With a sliding
            // window, the first position is set two positions before the window. Upstream could ignore a checkpoint
            // with a later first position (see spared_of).
            const llama_pos begin = n_window > 0 ? std::max(0, mark.n_tokens - n_window - 2) : mark.n_tokens - 1;
            made.update_pos(mark.n_tokens, mark.pos_max < 0 ? begin : mark.pos_min,
                            mark.pos_max < 0 ? mark.n_tokens - 1 : mark.pos_max);
            made.data_tgt.resize(mark.n_bytes);
            if (!file || fseek(file.get(), long(mark.offset), SEEK_SET) != 0 ||
                fread(made.data_tgt.data(), 1, mark.n_bytes, file.get()) != mark.n_bytes) {
                throw std::runtime_error("it ends early");
            }
            slot.prompt.checkpoints.push_back(std::move(made));
        }
        slot.prompt.tokens = std::move(tokens);
    } catch (const std::exception &) {
        forget(slot);
        return false;
    }
    states[slot.number].turn     = slot.prompt.tokens.size();
    states[slot.number].is_filed = true;
    return true;
}
