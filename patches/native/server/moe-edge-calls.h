// Stricter grammars for forms of tool calls whose upstream grammar allows more than the tool's schema or the parser.

#pragma once

#include "chat.h"

#include <functional>
#include <string>

// Replaces the right side of a rule in a grammar. Each rule is one line of the form "NAME ::= RULE".
void moe_edge_change_rule(
    std::string & grammar, const std::string & name, const std::function<std::string(std::string)> & change);

// For the forms of MiniCPM5, LFM2 and gemma-4, makes calls contain the required arguments under their names. For the
// forms of GLM, makes calls end exactly at the end that the parser expects.
void moe_edge_tighten_calls(common_chat_params & made, const common_chat_templates_inputs & inputs);
