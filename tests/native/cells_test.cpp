// Explores every state of a load that its functions can reach, in any order, and the calls that
// they refuse.
//
// Prints one line. At the first violation it prints a message and exits with 1.

#include "moe-edge-cells.h"
#include "stress.h"

#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr int32_t PARTS = 3;

// A load, and the numbers of its begun and ended parts, which the load itself does not expose.
struct counted_load {
    moe_edge_load load;
    int32_t begun = 0, ended = 0;

    void start_part() {
        load.start_part(PARTS);
        begun++;
    }
    void finish_part() {
        load.finish_part(0x5a);
        ended++;
    }
};

using fingerprint = std::tuple<int, int, int, int, int, bool, bool, bool, bool, bool, bool>;

fingerprint of(const counted_load & counted) {
    const auto & load = counted.load;
    return { (int) load.purpose(), (int) load.stage(), (int) load.fate(), counted.begun, counted.ended, load.queued(), load.in_last_part(),
        load.arrived(), load.has_slot(), load.slotless(), load.host_slot() >= 0 };
}

// Stage, fate, whether bytes were read, and whether a thread works on the load.
using situation = std::tuple<moe_edge_stage, moe_edge_fate, bool, bool>;

situation situation_of(const counted_load & counted) {
    return { counted.load.stage(), counted.load.fate(), counted.begun > 0, counted.begun > counted.ended };
}

// All situations that can occur.
std::set<situation> situations(bool staged) {
    using stage = moe_edge_stage;
    using fate  = moe_edge_fate;
    std::set<situation> out = { { stage::QUEUED, fate::USED, false, false }, { stage::QUEUED, fate::CUT, false, false } };
    for (const fate end : { fate::USED, fate::UNWANTED, fate::CUT, fate::FAILED }) {
        out.insert({ { stage::READING, end, true, false }, { stage::READING, end, true, true } });
        if (staged) {
            out.insert({ { stage::FOUND, end, false, false }, { stage::FETCHED, end, true, false } });
        }
    }
    if (staged) {
        for (const fate end : { fate::USED, fate::UNWANTED }) {
            out.insert({ { stage::COPIED, end, false, false }, { stage::COPIED, end, true, false } });
        }
    }
    return out;
}

// Compares a load with the counts. Returns "" if they agree.
std::string compare(const counted_load & counted) {
    const auto & load  = counted.load;
    const bool reading = load.stage() == moe_edge_stage::READING;
    if (reading && load.good() && load.queued() != (counted.begun < PARTS)) {
        return "a part is missing, or there is one too many";
    }
    if (reading && !load.queued() && load.arrived() != (counted.begun == counted.ended)) {
        return "a thread of the load is not counted";
    }
    if (load.stage() > moe_edge_stage::READING && counted.ended != (counted.begun > 0 ? PARTS : 0)) {
        return "the load continues before it was read";
    }
    return {};
}

// The calls of a store on a load, which may refuse them. staged: loads go through a host cache.
std::vector<std::function<void(counted_load &)>> actions(bool staged) {
    std::vector<std::function<void(counted_load &)>> out = {
        [=](counted_load & counted) {
            auto & load = counted.load;
            if (staged && load.host_slot() < 0) {
                load.reserve(1);
            } else if (!staged && load.slotless()) {
                load.take_slot(2);
            }
            counted.start_part();
        },
        [](counted_load & counted) { counted.finish_part(); },
    };
    std::vector<std::function<void(moe_edge_load &)>> others = {
        [](moe_edge_load & load) { load.touch(9); },
        [](moe_edge_load & load) { load.take_slot(2); },
        [=](moe_edge_load & load) {
            load.ask();
            if (!staged && load.slotless()) {
                load.take_slot(2);
            }
        },
        [](moe_edge_load & load) { load.give_up(); },
        [](moe_edge_load & load) { load.revoke(); },
        [](moe_edge_load & load) { load.fail(); },
    };
    if (staged) {
        others.push_back([](moe_edge_load & load) { load.fetched(); });
        others.push_back([](moe_edge_load & load) { load.leave_copies(); });
        others.push_back([](moe_edge_load & load) {
            load.copy_enqueued();
            load.let_host_go();
        });
    }
    for (const auto & act : others) {
        out.push_back([=](counted_load & counted) { act(counted.load); });
    }
    return out;
}

std::vector<moe_edge_load> beginnings(bool staged, bool found) {
    using purpose = moe_edge_purpose;
    const moe_edge_claim claim = { 5, 3, true };
    std::vector<moe_edge_load> out = {
        moe_edge_load::into_slot(1, purpose::DEMAND, 0, 2), moe_edge_load::into_slot(1, purpose::TRANSITION, 4, 2),
        moe_edge_load::ahead(1, purpose::AHEAD, 4, claim),
    };
    if (staged) {
        out.push_back(moe_edge_load::ahead(1, purpose::AFTER_USE, 4, claim));
        out.push_back(moe_edge_load::in_place_of_slot(1));
    }
    for (auto & load : out) {
        if (found) {
            load.finds(1);
        } else {
            load.reads_parts(PARTS);
        }
    }
    return out;
}

// Checks a load after every sequence of calls. A load that has arrived is not checked, because the
// store acts on it at once.
size_t explore(bool staged) {
    std::set<fingerprint> seen;
    std::set<situation>   came;
    std::vector<counted_load> open;
    size_t refused = 0;
    const auto meet = [&](const counted_load & counted) {
        if (seen.insert(of(counted)).second) {
            open.push_back(counted);
        }
    };
    for (const bool found : { false, true }) {
        for (const auto & load : staged || !found ? beginnings(staged, found) : std::vector<moe_edge_load>()) {
            meet({ load });
        }
    }
    while (!open.empty()) {
        const counted_load counted = open.back();
        open.pop_back();
        came.insert(situation_of(counted));
        const std::string wrong = counted.load.arrived() ? std::string() : counted.load.check(staged);
        for (const auto & what : { wrong, compare(counted) }) {
            if (!what.empty()) {
                die("a load reaches an invalid state:  " + what);
            }
        }
        for (const auto & act : actions(staged)) {
            counted_load next = counted;
            if (refuses([&] { act(next); })) {
                refused++;
            } else {
                meet(next);
            }
        }
    }
    if (refused == 0) {
        die("a load refuses nothing");
    }
    if (came != situations(staged)) {
        die("the reached situations are not the expected ones");
    }
    return seen.size();
}

void read_parts(moe_edge_load & load) {
    for (int32_t part = 0; part < PARTS; part++) {
        if (load.start_part(PARTS) != part) {
            die("the parts of a read are not in order");
        }
    }
    for (int32_t part = 0; part < PARTS; part++) {
        load.finish_part(1u << part);
    }
    if (!load.arrived() || load.crc() != 7) {
        die("a read whose parts are done has not arrived");
    }
}

// On a device: prefetched bytes wait in the host cache, and bytes in the host cache are copied or
// used in place.
void run_host_tier() {
    auto load = moe_edge_load::ahead(1, moe_edge_purpose::AHEAD, 4, { 5, 3, true });
    load.reads_parts(PARTS);
    load.reserve(8);
    read_parts(load);
    const bool none = !load.in_host_tier() && !load.queued();
    load.fetched();
    const bool waits = load.in_host_tier() && load.queued() && load.untouched() && !load.arrived();
    load.leave_copies();
    load.take_slot(2);
    load.copy_enqueued();
    const bool copied = load.copied() && load.arrived() && !load.queued() && load.let_host_go() == 8 && load.check(true).empty();

    auto found = moe_edge_load::into_slot(1, moe_edge_purpose::DEMAND, 0, 2);
    auto here  = moe_edge_load::in_place_of_slot(1);
    found.finds(8);
    here.finds(8);
    const bool apart = found.queued() && found.untouched() && !here.queued() && here.arrived() && here.in_place();
    if (!none || !waits || !copied || !apart || !refuses([&] { found.copy_enqueued(); }) || !refuses([&] { here.leave_copies(); })) {
        die("a load on a device is wrong");
    }
}

void run_load() {
    auto load = moe_edge_load::ahead(1, moe_edge_purpose::AHEAD, 4, { 5, 3, true });
    load.reads_parts(PARTS);
    const bool early = load.untouched() && load.slotless() && load.claim().list == 3 && !load.awaited();
    load.touch(9);
    load.ask();
    const bool asked = load.awaited() && load.claim().asked_at == 9 && !load.claim().passing && load.claim().list == MOE_EDGE_NO_LIST;
    load.take_slot(2);
    load.start_part(PARTS);
    load.give_up();
    const bool cut = load.fate() == moe_edge_fate::CUT && !load.queued() && !load.arrived() && load.in_last_part();
    load.fail();
    load.finish_part(0);
    if (!early || !asked || !cut || !load.arrived() || !load.has_failed() || load.entire()) {
        die("a load that is asked for, given up and fails is wrong");
    }
    auto whole = moe_edge_load::into_slot(0, moe_edge_purpose::DEMAND, 0, 1);
    whole.reads_parts(1);
    whole.start_part(1);
    whole.give_up();
    if (whole.fate() != moe_edge_fate::UNWANTED || !whole.entire()) {
        die("a load given up in its last part is not read to its end");
    }
    if (!refuses([] { moe_edge_load::into_slot(0, moe_edge_purpose::COMPUTE, 0, 1); }) ||
        !refuses([] { moe_edge_load::ahead(0, moe_edge_purpose::DEMAND, 0, {}); }) ||
        !refuses([&] { whole.reads_parts(2); })) {
        die("an invalid load is accepted");
    }
}

void run_cell() {
    moe_edge_cell cell;
    if (!refuses([&] { cell.publish(); }) || !refuses([&] { cell.end(); }) || !refuses([&] { cell.drop(); }) || !refuses([&] { cell.move(1); }) || !refuses([&] { cell.wait(); })) {
        die("an empty cell accepts a call");
    }
    const bool first = cell.decide(1, true), again = cell.decide(1, false);
    cell.wait();
    if (!first || again || !cell.lacks() || cell.passing() || !cell.waiting() || !refuses([&] { cell.wait(); })) {
        die("a request of a cell is wrong");
    }
    auto load = moe_edge_load::into_slot(1, moe_edge_purpose::DEMAND, 0, 6);
    load.reads_parts(PARTS);
    cell.begin(load);
    if (!refuses([&] { cell.begin(load); }) || !refuses([&] { cell.publish(); })) {
        die("a cell has two loads, or publishes a running one");
    }
    read_parts(*cell.load());
    if (cell.check(false).empty()) {
        die("a load that has arrived is not handled");
    }
    cell.publish();
    if (cell.load() || cell.tier() != 1 || cell.slot() != 6 || !cell.satisfied() || cell.lacks() || !cell.check(false).empty()) {
        die("a published load is not resident");
    }
    auto better = moe_edge_load::into_slot(0, moe_edge_purpose::DEMAND, 0, 3);
    better.reads_parts(PARTS);
    read_parts(better);
    cell.begin(better);  // waits for the op that reads the other version
    if (!cell.check(false).empty() || !refuses([&] { cell.publish(); })) {
        die("two versions of a cell are resident");
    }
    cell.release();
    if (cell.check(false).empty()) {
        die("a promotion is not published when its op is done");
    }
    cell.drop();
    cell.publish();
    cell.forget_request();
    cell.foresee(4);
    if (cell.tier() != 0 || cell.waiting() || !cell.foreseen_since(4) || cell.foreseen_since(5) || cell.foreseen_since(MOE_EDGE_NO_LIST)) {
        die("a promotion leaves a request");
    }
}

}  // namespace

int main() {
    run_load();
    run_host_tier();
    run_cell();
    const size_t direct = explore(false), staged = explore(true);
    printf("cells: %zu states of a load, %zu with a host tier\n", direct, staged);
    return 0;
}
