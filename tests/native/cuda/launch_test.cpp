// Tests how experts are grouped into launches. Uses addresses only, no device.

#include "moe-edge-launch.h"

#include "moe-edge-table.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

namespace {

void expect(bool true_one, const std::string & sentence) {
    if (!true_one) {
        fprintf(stderr, "%s\n", sentence.c_str());
        exit(1);
    }
}

const char * at(uint64_t address) { return reinterpret_cast<const char *>(address); }

// Checks that every expert is in exactly one launch that can reach its data, and skipped experts
// come last.
void check(const std::vector<moe_edge_launch_item> & items, const std::vector<moe_edge_launch> & launches) {
    std::map<int32_t, moe_edge_launch_item> left;
    for (const moe_edge_launch_item & e : items) {
        left[e.expert] = e;
    }
    for (const moe_edge_launch & l : launches) {
        expect(l.list.n > 0 && l.list.n <= MOE_EDGE_LAUNCH_EXPERTS, "a launch of too few or too many experts");
        expect(l.list.n_classes <= MOE_EDGE_LAUNCH_CLASSES, "a launch of too many classes");
        int32_t i = 0;
        for (int32_t c = 0; c < l.list.n_classes; c++) {
            const moe_edge_launch_class & k = l.classes[c];
            expect(k.n > 0 && k.first == i && l.list.first[c] == i && l.list.first[c + 1] == i + k.n, "classes are not contiguous");
            const int64_t unit = moe_edge_unit_bytes(k.type);
            for (; i < k.first + k.n; i++) {
                const moe_edge_launch_item & e = left.at(l.list.expert[i]);
                expect(e.type == k.type, "a class of several types");
                expect(l.list.unit[i] >= 0 && (uint64_t) l.list.unit[i] <= MOE_EDGE_REACH_UNITS, "beyond a kernel's reach");
                expect(k.base + l.list.unit[i] * unit == e.data, "the wrong address of an expert");
                if (e.gate) {
                    expect(l.gate.expert[i] == e.expert && l.gate.unit[i] >= 0 && (uint64_t) l.gate.unit[i] <= MOE_EDGE_REACH_UNITS &&
                           k.gate + l.gate.unit[i] * unit == e.gate, "the wrong address of a gate");
                }
                left.erase(e.expert);
            }
        }
        for (; i < l.list.n; i++) {
            expect(left.at(l.list.expert[i]).data == nullptr, "an expert that is not skipped has no class");
            left.erase(l.list.expert[i]);
        }
    }
    expect(left.empty(), "an expert is in no launch");
}

void test_one_class() {
    std::vector<moe_edge_launch_item> items;
    for (int32_t e = 0; e < 40; e++) {
        items.push_back({ e, GGML_TYPE_Q4_K, at(0x10000 + (40 - e) * 144 * 7) });
    }
    const auto launches = moe_edge_plan_launches(items);
    check(items, launches);
    expect(launches.size() == 1 && launches[0].list.n_classes == 1, "one type in one pool must be one class");
    expect(moe_edge_plan_launches({}).empty(), "no experts must need no launch");
}

void test_only_skipped() {
    const std::vector<moe_edge_launch_item> items = { { 3, -1, nullptr }, { 1, GGML_TYPE_Q4_K, nullptr } };
    const auto launches = moe_edge_plan_launches(items);
    check(items, launches);
    expect(launches.size() == 1 && launches[0].list.n_classes == 0 && launches[0].list.first[0] == 0, "skipped experts must have no class");
}

// Pools at a distance that is not a whole number of blocks, or too large, are separate classes.
void test_apart() {
    const std::vector<moe_edge_launch_item> items = {
        { 0, GGML_TYPE_Q4_K, at(0x10000) },
        { 1, GGML_TYPE_Q4_K, at(0x10000 + 144) },
        { 2, GGML_TYPE_Q4_K, at(0x10000 + 256) },  // 256 is not a multiple of 144
        { 3, GGML_TYPE_Q4_K, at(0x10000 + uint64_t(INT32_MAX) * 144) },  // its last blocks are beyond 32 bits
        { 4, GGML_TYPE_Q8_0, at(0x10000) },
        { 5, GGML_TYPE_F16, at(0x10000 + 512) },
        { 6, GGML_TYPE_F16, at(0x10000 + (uint64_t(1) << 33)) },  // floats reach further, in units of 256 bytes
    };
    const auto launches = moe_edge_plan_launches(items);
    check(items, launches);
    expect(launches.size() == 1 && launches[0].list.n_classes == 5, "the number of classes is wrong");
}

void test_random(std::mt19937_64 & random) {
    const ggml_type types[] = { GGML_TYPE_Q4_K, GGML_TYPE_Q2_K, GGML_TYPE_F16, GGML_TYPE_IQ1_M, GGML_TYPE_Q4_0 };
    for (int round = 0; round < 3000; round++) {
        std::vector<moe_edge_launch_item> items;
        const int n = random() % 600, pools = 1 + random() % 4;
        const bool gates = random() % 2;
        for (int32_t e = 0; e < n; e++) {
            if (random() % 6 == 0) {
                items.push_back({ e, -1, nullptr });
                continue;
            }
            const ggml_type type = types[random() % (1 + round % 5)];
            const auto place = [&] {
                const uint64_t pool = 0x100000 + (random() % pools << (20 + random() % 22)) / 256 * 256;
                return at(pool + random() % 5000 * moe_edge_unit_bytes(type));
            };
            items.push_back({ e, type, place(), gates ? place() : nullptr });
        }
        check(items, moe_edge_plan_launches(items));
    }
}

// One launch for each type, and one more for the late experts of one type.
void test_few() {
    const auto q4 = [](int32_t e, bool late) { return moe_edge_launch_item { e, GGML_TYPE_Q4_K, at(0x10000 + e * 144), nullptr, late }; };
    const auto q2 = [](int32_t e, bool late) { return moe_edge_launch_item { e, GGML_TYPE_Q2_K, at(0x90000 + e * 84), nullptr, late }; };
    const moe_edge_launch_item skipped { 9, -1, nullptr };
    const auto experts = [](const std::vector<moe_edge_launch_item> & items) {
        std::string found;  // the experts of each class, classes in the order of their launches
        for (const moe_edge_launch & l : moe_edge_plan_few(items)) {
            for (int32_t c = 0; c < l.list.n_classes; c++) {
                for (int32_t i = l.list.first[c]; i < l.list.first[c + 1]; i++) {
                    found += std::to_string(l.list.expert[i]);
                }
                found += ' ';
            }
        }
        return found;
    };
    expect(experts({}).empty() && experts({ skipped }).empty(), "a launch without experts");
    expect(experts({ q4(1, false), q4(2, false), skipped }) == "12 ", "one type must have one launch");
    expect(experts({ q4(1, true), q4(2, true) }) == "12 ", "late experts only must have one launch");
    expect(experts({ q4(1, true), q4(2, false) }) == "2 1 ", "late experts must come in a second launch");
    expect(experts({ q4(1, false), q2(2, true) }) == "1 2 ", "a late type must come last");
    expect(experts({ q4(1, true), q4(2, false), q2(3, false), q2(4, false), q2(5, true) }) == "34 5 12 ", "one type only may have two launches");
}

void test_table() {
    const std::vector<int32_t> types = { GGML_TYPE_Q4_K, GGML_TYPE_Q2_K };
    const std::vector<const char *> base = { at(0x100000), at(0x900000) };
    std::vector<moe_edge_entry> entries(4);
    entries[0] = { at(0x100000 + 5 * 144), GGML_TYPE_Q4_K, 0 };
    entries[2] = { at(0x900000), GGML_TYPE_Q2_K, 0 };
    entries[3] = { at(0x900000 + 84), GGML_TYPE_Q2_K, 0 };
    std::vector<int32_t> out;
    expect(moe_edge_plan_table(entries, types, base, out), "a valid table is refused");
    expect(out == std::vector<int32_t>({ 0, -1, 1, 1, 5, -1, 0, 1 }), "a table has the wrong content");
    for (const moe_edge_entry wrong : {
             moe_edge_entry{ at(0x100000 + 100), GGML_TYPE_Q4_K, 0 },                        // within a block
             moe_edge_entry{ at(0x100000 - 144), GGML_TYPE_Q4_K, 0 },                        // before the base
             moe_edge_entry{ at(0x100000 + 144), GGML_TYPE_Q6_K, 0 },  // a type that no tier has
             moe_edge_entry{ at(0x100000 + uint64_t(INT32_MAX) * 144), GGML_TYPE_Q4_K, 0 },  // too far
         }) {
        entries[1] = wrong;
        expect(!moe_edge_plan_table(entries, types, base, out), "an invalid table is accepted");
    }
}

}  // namespace

int main() {
    std::mt19937_64 random(1);
    test_one_class();
    test_only_skipped();
    test_apart();
    test_random(random);
    test_few();
    test_table();
    printf("fine\n");
    return 0;
}
