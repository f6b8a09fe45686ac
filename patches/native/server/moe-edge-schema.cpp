// Upstream's JSON schemas and the grammars that it makes of them, with the steps counted: its work grows with the
// third power of an object's optional properties, and with the power of nested lists of types; and references that
// lead to themselves have no end in `allOf`. What it says of patterns of a client, it says to a log.

#include "moe-edge-bounds.h"

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
#include "json-schema.cpp"
#include "json-schema-to-grammar.cpp"
