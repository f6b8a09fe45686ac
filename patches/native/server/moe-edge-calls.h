// Declares functions that make the grammars of tool calls stricter. Some of upstream's grammars allow calls that the
// tool's schema or the parser does not allow.

#pragma once

#include "chat.h"

#include <functional>
#include <string>

// Replaces the right side of the grammar rule with this name by the result of `change`. Each rule is one line of the
// form "NAME ::= RULE".
void moe_edge_change_rule(
    std::string & grammar, const std::string & name, const std::function<std::string(std::string)> & change);

// Makes the grammar of a request's tool calls stricter. In the forms of MiniCPM5, LFM2 and gemma-4, a call must contain
// all required arguments. In the forms of GLM, a call must end exactly as the parser expects.
void moe_edge_tighten_calls(common_chat_params & made, const common_chat_templates_inputs & inputs);
