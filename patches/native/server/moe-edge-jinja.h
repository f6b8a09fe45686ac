// Includes the headers of upstream's template engine so that the engine's work is counted. CMakeLists.txt includes this
// file first in every source.
//
// mk_val, which creates the values of a template, is replaced. Live values are counted, and they are freed one at a
// time instead of recursively. Each pass through a loop in runtime.h counts as a step.

#pragma once

#include "moe-edge-bounds.h"

// Include the standard headers first, so that the macros below do not change them.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

// Suppress warnings about static functions in these headers that some sources do not use.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"

#define mk_val moe_edge_upstream_mk_val
#include "common/jinja/value.h"
#undef mk_val

// Called for each new value of a template. Counts the value, and refuses a tuple that is nested too deeply.
void moe_edge_template_made(jinja::value_t & made);

// Frees a value of a template. The values inside it are freed after it instead of recursively, so that a long chain of
// values needs little stack.
void moe_edge_template_free(jinja::value_t * value);

// Wraps a built-in function of templates. Each call first counts its work, which is estimated from the sizes of the
// arguments.
jinja::func_handler moe_edge_template_function(const std::string & name, const jinja::func_handler & function);

namespace jinja {

template <typename T, typename... Args>
std::shared_ptr<typename extract_pointee<T>::type> mk_val(Args &&... args) {
    using made_t = typename extract_pointee<T>::type;
    moe_edge_template_values(1);
    std::shared_ptr<made_t> made(new made_t(std::forward<Args>(args)...), moe_edge_template_free);
    if constexpr (std::is_same_v<made_t, value_func_t>) {
        made->val_func = moe_edge_template_function(made->name, made->val_func);
    }
    moe_edge_template_made(*made);
    return made;
}

// Checks the arguments of divisibleby, the only built-in function with two integers. Dividing by 0 or -1 could crash
// the process.
template <> inline void func_args::ensure_vals<value_int, value_int>(bool, bool) const {
    ensure_count(2);
    ensure_val<value_int>(args[0]);
    ensure_val<value_int>(args[1]);
    if (args[1]->val_int == 0 || args[1]->val_int == -1) {
        throw std::runtime_error("divisibleby expects a number other than 0 and -1");
    }
}

}  // namespace jinja

#include "common/jinja/lexer.h"

#define for(...) for (__VA_ARGS__) if (moe_edge_template_step()) {} else
#include "common/jinja/runtime.h"
#undef for

#include "common/jinja/parser.h"
#pragma GCC diagnostic pop
