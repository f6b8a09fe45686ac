#include "moe-edge-cells.h"

#include <stdexcept>

namespace {

using purpose = moe_edge_purpose;
using stage   = moe_edge_stage;
using fate    = moe_edge_fate;

void require(bool legal, const char * what) {
    if (!legal) {
        throw std::logic_error(std::string("cells: ") + what);
    }
}

}  // namespace

moe_edge_load moe_edge_load::into_slot(int8_t tier, moe_edge_purpose purpose, int32_t order, int32_t slot) {
    require(purpose == purpose::DEMAND || purpose == purpose::TRANSITION, "only a request or a transition begins with a slot");
    moe_edge_load load(tier, purpose, order);
    load.to = slot;
    return load;
}

moe_edge_load moe_edge_load::ahead(int8_t tier, moe_edge_purpose purpose, int32_t order, const moe_edge_claim & claim) {
    require(purpose == purpose::AHEAD || purpose == purpose::AFTER_USE, "only a prefetch begins without a slot");
    moe_edge_load load(tier, purpose, order);
    load.to = claim;
    return load;
}

moe_edge_load moe_edge_load::in_place_of_slot(int8_t tier) { return { tier, purpose::COMPUTE, 0 }; }

void moe_edge_load::reads_parts(int32_t parts) {
    require(at == stage::QUEUED && left == 0 && parts > 0, "a load begins twice");
    left = parts;
}

void moe_edge_load::finds(int32_t in_host_slot) {
    require(at == stage::QUEUED && left == 0 && in_host_slot >= 0, "a load begins twice");
    at      = stage::FOUND;
    in_host = in_host_slot;
    left    = in_place() ? 0 : 1;
}

void moe_edge_load::take_slot(int32_t slot) {
    require(slotless(), "a load that has a slot takes a second slot");
    to = slot;
}

void moe_edge_load::touch(uint64_t now) {
    require(slotless(), "a load that asks for no slot is touched");
    auto & claim = std::get<moe_edge_claim>(to);
    claim.passing  = false;
    claim.asked_at = now;
}

void moe_edge_load::ask() {
    if (in_place()) {
        return;
    }
    why = purpose::DEMAND;
    if (slotless()) {
        std::get<moe_edge_claim>(to).list = MOE_EDGE_NO_LIST;
    }
}

void moe_edge_load::reserve(int32_t in_host_slot) {
    require(in_host < 0 && (at == stage::QUEUED || at == stage::READING) && in_host_slot >= 0, "a load takes a slot of the host tier twice");
    in_host = in_host_slot;
}

int32_t moe_edge_load::let_host_go() {
    const int32_t held = in_host;
    in_host = -1;
    return held;
}

int32_t moe_edge_load::start_part(int32_t parts) {
    require((at == stage::QUEUED || at == stage::READING) && left > 0 && left <= parts, "there is no part left to read");
    require(in_host >= 0 || has_slot(), "there is nowhere to read to");
    at = stage::READING;
    running++;
    return parts - left--;
}

void moe_edge_load::finish_part(uint32_t crc) {
    require(at == stage::READING && running > 0, "a part ends that did not begin");
    running--;
    sum ^= crc;
}

void moe_edge_load::fetched() {
    require(at == stage::READING && arrived() && good() && in_host >= 0 && !awaited(), "a load waits for its copy before it was read");
    at   = stage::FETCHED;
    left = 1;
}

void moe_edge_load::leave_copies() {
    require(in_host_tier() && left == 1, "a copy's turn comes twice");
    left = 0;
}

void moe_edge_load::copy_enqueued() {
    require(at != stage::COPIED && arrived() && good() && in_host >= 0 && has_slot(), "a load is copied that is not there");
    at = stage::COPIED;
}

void moe_edge_load::give_up() {
    if (entire()) {
        end = left > 0 ? fate::CUT : fate::UNWANTED;
    }
    left = 0;
}

void moe_edge_load::revoke() {
    require(why == purpose::TRANSITION, "a load that is no transition is revoked");
    why = purpose::DEMAND;
    give_up();
}

void moe_edge_load::fail() {
    require(at != stage::QUEUED && at != stage::COPIED, "a load fails of which nothing is under way");
    left = 0;
    end  = fate::FAILED;
}

std::string moe_edge_load::check(bool staged) const {
    const bool holds = in_host >= 0;
    if (in_place() != std::holds_alternative<std::monostate>(to) || (in_place() && !staged)) {
        return "a load and its destination do not match";
    }
    if (!staged && (holds || at > stage::READING)) {
        return "a load without a host tier has something there";
    }
    if (at == stage::QUEUED && (left == 0 || running > 0 || holds || end != fate::USED || sum != 0)) {
        return "a load was not begun, and yet it was";
    }
    if (at != stage::READING && running > 0) {
        return "a thread reads what is not to be read";
    }
    if (at != stage::QUEUED && at != stage::COPIED && staged && !holds) {
        return "a load has lost its bytes in the host tier";
    }
    if (in_host_tier() && left > 1) {
        return "a copy has parts";
    }
    if (at == stage::FETCHED && (in_place() || left == 0) && end != fate::FAILED) {
        return "a load that waits for its copy is in no queue";
    }
    if (at == stage::FOUND && left == 0 && !in_place() && end != fate::FAILED) {
        return "a load that was found is in no queue";
    }
    if (at == stage::COPIED && (holds || left > 0 || !has_slot() || end == fate::FAILED)) {
        return "a copy is under way from nowhere or to nowhere";
    }
    if (end != fate::USED && left > 0) {
        return "a load that comes to nothing is still in a queue";
    }
    if (end != fate::USED && arrived() && !(in_transition() && end == fate::FAILED)) {
        return "a load that came to nothing is still there";
    }
    if (in_transition() && !has_slot()) {
        return "a transition has no slot";
    }
    if (slotless() && (arrived() || (!staged && (at != stage::QUEUED || !ahead())))) {
        return "a load has no slot";
    }
    if (slotless() && claim().list == MOE_EDGE_NO_LIST && !awaited()) {
        return "a prefetch asks for a slot like a request";
    }
    return {};
}

void moe_edge_cell::wait() {
    require(!in_line && asked, "a cell waits twice, or for nothing");
    in_line = true;
}

void moe_edge_cell::begin(const moe_edge_load & load) {
    require(!bringing, "a second load begins");
    bringing = load;
}

void moe_edge_cell::end() {
    require(bringing.has_value(), "there is no load to end");
    bringing.reset();
}

void moe_edge_cell::publish() {
    require(bringing && bringing->arrived() && bringing->good() && bringing->has_slot(), "a load is published before it has arrived");
    require(!resident(), "two versions are resident");
    of_tier = bringing->tier();
    in_slot = bringing->slot();
    bringing.reset();
}

void moe_edge_cell::move(int32_t slot) {
    require(resident() && slot >= 0 && slot != in_slot, "a version that is not resident is moved, or one is moved to its own slot");
    in_slot = slot;
}

void moe_edge_cell::drop() {
    require(resident(), "a version that is not resident is dropped");
    of_tier = NO_TIER;
    in_slot = -1;
}

std::string moe_edge_cell::check(bool staged) const {
    if (resident() != (in_slot >= 0)) {
        return "it is resident nowhere, or nothing is";
    }
    if (!bringing) {
        return {};
    }
    if (in_transition() && !resident()) {
        return "a transition from nothing";
    }
    if (resident() && bringing->tier() == of_tier) {
        return "a resident version is loaded again";
    }
    // A load that has arrived must have become the resident version, or must have been discarded. Three loads may still
    // exist:
    // - A transition (a background change of tier). It waits for the next step boundary.
    // - A load with serves(). Host threads compute with its bytes.
    // - A good load into a slot, while an op of this step needs the resident tier that the load would replace.
    if (bringing->arrived() && !in_transition() && !serves() && !(pinned() && satisfied() && bringing->has_slot() && bringing->good())) {
        return "a load that has arrived is not acted upon";
    }
    return bringing->check(staged);
}
