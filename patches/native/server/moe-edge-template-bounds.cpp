// Compiles upstream's template engine so that its work is counted and limited. A chat template comes with a model or
// from a file. It is a program, and upstream would run it without limits.

#include "moe-edge-template-bounds.h"

#include "llama.h"

#include "common/jinja/caps.h"
#include "json.h"
#include "unicode.h"

#include <cctype>
#include <string_view>

namespace {

const size_t MOST_TEMPLATE_BYTES = 512 << 10;
// The most tokens in one {{ }} or {% %} of a template. Upstream runs an expression recursively, so a longer expression
// could exceed the stack.
const size_t MOST_TOKENS = 4096;
const int64_t MOST_DEPTH = 100;
// The largest indentation and field width.
const int64_t MOST_WIDTH = 1024;
const int64_t MOST_NS = 20 * int64_t(1000000000);
const size_t MOST_REASON = 160;

size_t size_of(const jinja::string & text) {
    size_t found = 0;
    for (const auto & part : text.parts) {
        found += part.val.size();
    }
    return found;
}

const jinja::value & argument(const jinja::value & given) {
    const auto * named = jinja::cast_val<jinja::value_kwarg>(given);
    return named ? named->val : given;
}

int64_t size_of(const jinja::value & value) {
    if (jinja::is_val<jinja::value_string>(value)) {
        return int64_t(size_of(value->val_str));
    }
    return jinja::is_val<jinja::value_int>(value) ? value->val_int : 1;
}

// Counts the work of a call of a built-in function before the call starts. The work is estimated from the sizes of the
// arguments.
void count_call(const std::string & name, const std::vector<jinja::value> & given) {
    const bool is_wide = name == "indent" || name == "tojson";
    const bool repeats = name == "indent" || name == "replace" || name == "join";
    int64_t first = 0, largest = 1, all = 0;
    for (size_t i = 0; i < given.size(); i++) {
        const jinja::value & each = argument(given[i]);
        if (is_wide && i > 0 && jinja::is_val<jinja::value_int>(each) && each->val_int > MOST_WIDTH) {
            throw std::runtime_error(name + " expects a width of at most " + std::to_string(MOST_WIDTH));
        }
        int64_t size = std::max<int64_t>(1, size_of(each));
        if (name == "join" && i == 0 && jinja::is_val<jinja::value_array>(each)) {
            for (const auto & element : each->val_arr) {
                all += jinja::is_val<jinja::value_string>(element) ? size_of(element) : 1;
            }
            size = int64_t(each->val_arr.size());
        }
        if (jinja::is_val<jinja::value_int>(each) && !is_wide) {
            size = 1;
        }
        all += size;
        (i == 0 ? first : largest) = std::max(i == 0 ? int64_t(0) : largest, size);
    }
    // Estimate the size of the function's result. The estimate assumes that the largest other argument is inserted once
    // for every eight bytes (or list elements) of the first argument.
    const int64_t made = repeats ? first * std::min<int64_t>(largest, INT32_MAX) / 8 : 0;
    moe_edge_template_step(1 + all / 64, made);
}

// Returns one line with the reason and the position of an error. Upstream's message also quotes the source around the
// error.
std::string one_line(const std::string & said) {
    const std::string mark = "Error: ";
    const size_t reason = said.rfind(mark), place = said.find(" at line ");
    std::string line = reason == std::string::npos ? said : said.substr(reason + mark.size());
    line = line.substr(0, std::min(line.find('\n'), MOST_REASON));
    if (line == "Unexpected token type") {
        line = "a block is not closed";  // upstream reached the end of the text
    }
    if (place != std::string::npos) {
        line += said.substr(place, std::min(said.find(" in source", place), place + MOST_REASON) - place);
    }
    for (char & each : line) {
        each = (unsigned char) each < ' ' ? ' ' : each;
    }
    return line;
}

[[noreturn]] void refuse(const std::string & why) {
    throw moe_edge_refused{ "the chat template " + why };
}

size_t line_of(const std::string & text, size_t position) {
    return 1 + std::count(text.begin(), text.begin() + std::min(position, text.size()), '\n');
}

void check_text(const std::string & text) {
    if (text.size() > MOST_TEMPLATE_BYTES) {
        refuse("has " + std::to_string(text.size()) + " bytes; at most " + std::to_string(MOST_TEMPLATE_BYTES) + " are allowed");
    }
    std::string reason;
    try {
        jinja::lexer lexer;
        const jinja::lexer_result read = lexer.tokenize(text);
        size_t begin = 0;
        for (size_t i = 0; i < read.tokens.size(); i++) {
            const auto & token = read.tokens[i];
            if (token.t == jinja::token::open_expression || token.t == jinja::token::open_statement) {
                begin = i;
            } else if (token.t == jinja::token::text || token.t == jinja::token::comment) {
                begin = i + 1;
            }
            if (i > begin + MOST_TOKENS) {
                refuse("has an expression of more than " + std::to_string(MOST_TOKENS) + " parts in line "
                       + std::to_string(line_of(read.source, token.pos)));
            }
        }
        jinja::parse_from_tokens(read);
        return;
    } catch (const std::exception & failure) {
        reason = one_line(failure.what());
    }
    refuse("is not valid: " + reason);
}

}  // namespace

void moe_edge_template_made(jinja::value_t & made) {
    size_t parts = made.val_arr.size() + made.val_obj.size();
    if (dynamic_cast<jinja::value_tuple_t *>(&made)) {
        // Store the depth of a tuple in its field for integers. The depth is limited because upstream compares tuples
        // recursively.
        made.val_int = 1;
        for (const auto & each : made.val_arr) {
            if (jinja::is_val<jinja::value_tuple>(each)) {
                made.val_int = std::max(made.val_int, each->val_int + 1);
            }
        }
        if (made.val_int > MOST_DEPTH) {
            refuse("is nested too deeply");
        }
    }
    moe_edge_template_step(1 + int64_t(parts), int64_t(size_of(made.val_str)));
}

void moe_edge_template_free(jinja::value_t * value) {
    thread_local std::vector<jinja::value_t *> waiting;
    thread_local bool is_freeing = false;
    moe_edge_template_values(-1);
    if (is_freeing) {
        waiting.push_back(value);
        return;
    }
    is_freeing = true;
    delete value;
    while (!waiting.empty()) {
        value = waiting.back();
        waiting.pop_back();
        delete value;
    }
    is_freeing = false;
}

jinja::func_handler moe_edge_template_function(const std::string & name, const jinja::func_handler & function) {
    return [name, function](const jinja::func_args & args) {
        count_call(name, args.get_args());
        return function(args);
    };
}

moe_edge_bounded moe_edge_template_bounds(std::function<bool()> is_given_up, size_t input_bytes) {
    return moe_edge_bounded(MOE_EDGE_TEMPLATE, std::move(is_given_up), MOST_NS, input_bytes);
}

void moe_edge_template_failed(const std::exception & failure) {
    refuse("failed: " + one_line(failure.what()));
}

void moe_edge_check_template(const llama_model * model, const std::string & given) {
    if (!given.empty()) {
        check_text(given);
        return;
    }
    for (const char * name : { (const char *) nullptr, "tool_use" }) {
        const char * own = llama_model_chat_template(model, name);
        if (own) {
            check_text(own);
        }
    }
}

// Count a step of the template for each pass through a loop, and for each `if` and `try`, in upstream's template engine
// (the sources that are included below). This also counts recursion, because every recursive function contains one of
// these statements.
#define for(...) for (__VA_ARGS__) if (moe_edge_template_step()) {} else
#define while(...) while (moe_edge_template_step() == 0 && (__VA_ARGS__))
#define if(...) if (moe_edge_template_step() == 0 && (__VA_ARGS__))
#define try if (moe_edge_template_step()) {} else try
// Replace std::sort, which would read out of bounds if the values have no consistent order.
#define sort(...) stable_sort(__VA_ARGS__)
// Count the bytes of indentation that the engine writes, which grow with the depth of a value.
#define indent_str() indent_str().substr(moe_edge_template_step(1, indent > 0 ? int64_t(curr_lvl) * indent : 0))
#include "common/jinja/lexer.cpp"
#undef FILENAME
#include "common/jinja/parser.cpp"
#undef FILENAME
// In value.cpp, std::string::erase and replace count one more step for each 256 bytes of the string, because they move
// the bytes after the changed part.
#define erase(...) erase(moe_edge_template_step(1 + str.size() / 256) + __VA_ARGS__)
#define replace(...) replace(moe_edge_template_step(1 + str.size() / 256) + __VA_ARGS__)
#include "common/jinja/value.cpp"
#undef FILENAME
#undef erase
#undef replace
#include "common/jinja/runtime.cpp"
#undef FILENAME
#include "common/jinja/caps.cpp"
#undef FILENAME
// string.cpp is compiled without the macros that count steps. These macros may throw, and one loop in string.cpp is in
// a noexcept function.
#undef for
#undef if
#undef while
// Count the bytes of each part that is added to a text.
#define push_back(part) push_back((moe_edge_template_step(1, sizeof(part) + part.val.size()), part))
#include "common/jinja/string.cpp"
