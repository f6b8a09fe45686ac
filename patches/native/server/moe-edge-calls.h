// The grammar of tool calls in forms whose grammars are looser than a tool's schema, or than their parser.

#pragma once

#include "chat.h"

#include <functional>
#include <string>

// Replaces the right side of a rule of a grammar, each of which has a line of its own: "NAME ::= RULE".
void moe_edge_change_rule(
    std::string & grammar, const std::string & name, const std::function<std::string(std::string)> & change);

// Makes calls have the arguments that a tool requires, under their names, in the forms of MiniCPM5, LFM2 and gemma-4; and
// makes calls of the forms of GLM end where the parser reads their end.
void moe_edge_tighten_calls(common_chat_params & made, const common_chat_templates_inputs & inputs);
