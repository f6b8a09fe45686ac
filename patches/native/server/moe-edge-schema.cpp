// Upstream's JSON schemas and the grammars that it makes of them, with the steps counted: its work grows with the
// third power of an object's optional properties, and with the power of nested lists of types; and references that
// lead to themselves have no end in `allOf`. What it says of patterns of a client, it says to a log.

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

// One request at a time converts its schemas.

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
