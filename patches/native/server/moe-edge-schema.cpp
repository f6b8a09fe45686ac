// Compiles upstream's code for JSON schemas, and for grammars that are made of schemas, so that its work is counted and
// limited. For some schemas, the work would grow exponentially or never end.

#include "moe-edge-bounds.h"
#include "moe-edge-grammar.h"

#include "common.h"
#include "json-schema-to-grammar.h"
#include "json-schema.h"
#include "trie.h"
#include "unicode.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#define contains(key) contains(moe_edge_step_with(key))
#define find(key) find(moe_edge_step_with(key))
#define kind() kind() + moe_edge_step(8)
#define fprintf(...) (void) 0
std::string moe_edge_upstream_schema_to_grammar(const common_json & schema, bool force_gbnf);
std::string moe_edge_upstream_schema_to_grammar(const common_chat_schema_document & schema);
#define json_schema_to_grammar moe_edge_upstream_schema_to_grammar
#define build_grammar moe_edge_upstream_build_grammar
#include "json-schema.cpp"
#include "json-schema-to-grammar.cpp"
#undef json_schema_to_grammar
#undef build_grammar

// Convert schemas for one request at a time (moe_edge_grammar_turn).

std::string json_schema_to_grammar(const common_json & schema, bool force_gbnf) {
    moe_edge_grammar_turn turn;
    return moe_edge_upstream_schema_to_grammar(schema, force_gbnf);
}

std::string json_schema_to_grammar(const common_chat_schema_document & schema) {
    moe_edge_grammar_turn turn;
    return moe_edge_upstream_schema_to_grammar(schema);
}

std::string build_grammar(
        const std::function<void(const common_grammar_builder &)> & add_rules, const common_grammar_options & options) {
    moe_edge_grammar_turn turn;
    return moe_edge_upstream_build_grammar(add_rules, options);
}
