// Makes the grammars of some forms of tool calls stricter, if upstream's grammar allows calls that the tool's schema or
// the parser does not allow.

#pragma once

#include "chat.h"

#include <functional>
#include <string>

// Replaces the right side of the grammar rule with this name by the result of `change`. Each rule is one line of the
// form "NAME ::= RULE".
void moe_edge_change_rule(
    std::string & grammar, const std::string & name, const std::function<std::string(std::string)> & change);

// Changes the grammar of a request. In the forms of MiniCPM5, LFM2 and gemma-4, each call must then contain the
// required arguments under their names. In the forms of GLM, each call must end exactly as the parser expects.
void moe_edge_tighten_calls(common_chat_params & made, const common_chat_templates_inputs & inputs);
