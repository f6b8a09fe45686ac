// Implements loads of a store on a device. Slices (expert matrices) are read from files into the host tier, and copied
// from there to the device.
//
// A copy that an op waits for is enqueued immediately. A separate thread enqueues the other copies one at a time, so
// that an op's copy waits for few of them.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include <algorithm>
#include <map>

namespace {

std::vector<moe_edge_host_tier::size_class> host_classes(const moe_edge_config & config, std::vector<int32_t> * class_of) {
    std::map<uint64_t, moe_edge_host_tier::size_class> by_size;
    std::vector<uint64_t> sizes;
    for (int32_t l = 0; l < config.n_layers; l++) {
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            for (int32_t t = 0; t < config.n_tiers; t++) {
                const auto & s = config.layers[l].slices[k][t];
                uint64_t & slot_bytes = sizes.emplace_back(0);
                const bool grouped = s.group >= 0 && s.group < config.n_groups;
                const bool on_host = grouped && config.groups[s.group].place != MOE_EDGE_MISS_COPY;
                for (int32_t e = 0; s.expert_bytes > 0 && !on_host && e < config.n_expert; e++) {
                    slot_bytes = std::max(slot_bytes, moe_edge_slot_bytes(s.offset + e * s.expert_bytes, s.expert_bytes));
                }
                if (slot_bytes > 0) {
                    auto & c = by_size[slot_bytes];
                    c.slot_bytes = slot_bytes;
                    c.n_slices  += config.n_expert;
                    c.least      = 2;  // one is read while the other is copied
                }
            }
        }
    }
    std::vector<moe_edge_host_tier::size_class> classes;
    for (auto & [size, c] : by_size) {
        c.least = std::min(c.least, c.n_slices);  // with a single expert, there is nothing else to read
        classes.push_back(c);
    }
    for (size_t i = 0; class_of && i < sizes.size(); i++) {
        class_of->push_back(std::distance(by_size.begin(), by_size.lower_bound(sizes[i])));
    }
    return classes;
}

}  // namespace

uint64_t moe_edge_host_least_bytes(const moe_edge_config * config) {
    return moe_edge_host_tier::least_bytes(host_classes(*config, nullptr));
}

void moe_edge_store::open_device(const moe_edge_config & config) {
    if (config.flags & MOE_EDGE_SIMULATED) {
        refuse("store: a simulated store has no device");
    }
    host = std::make_unique<moe_edge_host_tier>(*device, config.host_bytes, host_classes(config, &size_classes),
        n_layers * MOE_EDGE_N_KINDS * n_expert * n_tiers);
    stats.host_bytes  = host->bytes();
    stats.host_pinned = host->is_pinned();
    for (auto & of_layer : matrices) {
        for (auto & m : of_layer) {
            if (has_kind(m.layer, m.kind)) {
                m.device = device;
                all_matrices.push_back(&m);
            }
        }
        down_matrices.push_back(&of_layer[MOE_EDGE_DOWN]);
    }
    open_in_place(config);
    if (!in_turn) {
        copy_thread = std::thread([this] { copy_loop(); });
    }
}

// Takes the most urgent copy from the queue of copies and starts it.
void moe_edge_store::start_copy() {
    const int32_t cell = copies.first();
    auto & load = *cells[cell].load();
    const bool found = load.stage() == moe_edge_stage::FOUND;
    dequeue(cell);
    load.leave_copies();
    if (load.in_transition() && found) {
        reads.hold_transitions(slice_of(cell, load.tier()).expert_bytes);
    }
    stats.host_hits[phase] += found;
    settle(cell);
    done_cv.notify_all();
}

void moe_edge_store::copy_loop() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        copy_cv.wait(lock, [this] { return stopping || !copies.empty(); });
        if (stopping) {
            return;
        }
        const uint64_t now  = reads.now();
        const int32_t cell  = copies.first();
        const auto & load   = *cells[cell].load();
        // Limit the rate of a transition (a background change of tier) here only if nothing was read from disk, because
        // the rate of reads is limited elsewhere.
        const bool by_rate  = load.in_transition() && load.stage() == moe_edge_stage::FOUND;
        if (by_rate && now < reads.held_until()) {
            copy_cv.wait_for(lock, std::chrono::microseconds(reads.held_until() - now));
        } else if (const moe_edge_ticket before = ahead_in_flight(); before != 0) {
            lock.unlock();
            device->wait(before);
            lock.lock();
        } else {
            start_copy();
            wake();
        }
    }
}

// Does all queued reads on the calling thread, and enqueues all queued copies without waiting for the device to end
// them.
void moe_edge_store::work_in_turn(std::unique_lock<std::mutex> & lock) {
    for (;;) {
        if (!copies.empty()) {
            start_copy();
            wake();
        } else if (!reads.read_one(lock)) {
            return;
        }
    }
}

// Returns the ticket of the prefetch copy that is in flight on the device, or 0 if there is no such copy.
moe_edge_ticket moe_edge_store::ahead_in_flight() {
    return device->passed(ahead_copy) ? 0 : ahead_copy;
}

// Enqueues the copy of a load from the host tier to the device. If the device refuses the copy, the load fails.
void moe_edge_store::transfer(int32_t cell) {
    auto & load = *cells[cell].load();
    auto & pool = pool_of(cell, load.tier());
    const int32_t lane   = load.awaited() ? MOE_EDGE_LANE_DEMAND : MOE_EDGE_LANE_PREFETCH;
    const uint64_t bytes = slice_of(cell, load.tier()).expert_bytes;
    const char * from = host->data(load.host_slot()) + offset_in_block(cell, load.tier());
    const moe_edge_ticket ticket = device->copy(lane, pool.data(load.slot()), from, bytes, pool[load.slot()].after);
    if (ticket == 0) {
        const std::string why = device->error();
        failed_read = name_of(cell, load.tier()) + ": " + (why.empty() ? device->name() + " refused the copy" : why);
        load.fail();
        return;
    }
    load.copy_enqueued();
    pool.copied(load.slot(), ticket);
    host->feeds(load.host_slot(), lane, ticket);
    drop_host(cell);
    stats.copy_bytes[phase] += bytes;
    if (lane == MOE_EDGE_LANE_PREFETCH) {
        ahead_copy = ticket;
    }
}

// Returns whether all bytes of a load have arrived in their slot. For a slot on a device, the copy must have ended.
bool moe_edge_store::landed(int32_t cell) const {
    const auto & load = *cells[cell].load();
    return load.arrived() && (!load.copied() || device->passed(pools[slice_of(cell, load.tier()).group][load.slot()].after));
}

// Returns the cache entry whose queued read a thread should do next. A read for the device first reserves a slot of the
// host tier, a cache in host memory. If no slot is free, waits until one may be free, and returns -1. The caller then
// tries again.
int32_t moe_edge_store::reserve_host(std::unique_lock<std::mutex> & lock) {
    const int32_t cell = reads.queue.first();
    auto & load = *cells[cell].load();
    if (!staged(cell, load.tier())) {
        return cell;
    }
    const int32_t size_class = host_class(cell, load.tier());
    if (load.host_slot() < 0) {
        const int32_t slot = host->reserve(slice_id(cell, load.tier()), size_class);
        if (slot >= 0) {
            load.reserve(slot);
        }
    }
    if (load.host_slot() >= 0) {
        return cell;
    }
    int32_t begun = -1;
    reads.queue.each([&](int32_t other) {
        const auto & of_other = *cells[other].load();
        const bool holds = of_other.host_slot() >= 0 && host_class(other, of_other.tier()) == size_class;
        begun = holds ? other : -1;
        return holds;
    });
    if (begun >= 0) {
        return begun;
    }
    const moe_edge_ticket ticket = host->blocked_by(size_class);
    if (ticket != 0) {
        lock.unlock();
        device->wait(ticket);
        lock.lock();
    } else {
        reads.wait_for_room(lock, 10);  // all slots are being filled or held for a copy
    }
    return -1;
}

void moe_edge_store::drop_host(int32_t cell) {
    const int32_t held = cells[cell].load()->let_host_go();
    if (held >= 0) {
        host->drop(held);
    }
}

void moe_edge_store::check_device() {
    const std::string why = device->error();
    if (!why.empty()) {
        fail_locked(device->name() + " is lost: " + why);
    }
}

// Decides whether the expert tables are static, which means that they do not change during the new step. They are
// static only if every expert is resident in the default tier or a better one. They are not static if the route
// callback is called in this step, or if a caller of moe_edge_apply has chosen tiers.
void moe_edge_store::fix_tables() {
    const bool same = tables_fixed && fixed_changes == table_changes;
    bool fixed = !asks(phase) && !directed && !exact_tiers && !failed && !split;
    for (size_t i = 0; !same && fixed && i < cells.size(); i++) {
        const auto & c = cells[i];
        const bool there = c.as_good_as(default_tier) && (!c.load() || c.in_transition());
        fixed = there || !has_kind(layer_of(i), kind_of(i));
    }
    if (!fixed) {
        collect_counts();  // counts of the steps without a route hook
    }
    tables_fixed = fixed;
    if (!tables_fixed || same) {
        return;
    }
    for (auto * m : all_matrices) {  // empty without a device
        for (auto & entry : m->table) {
            device->wait(entry.ticket);
            entry.ticket = 0;
        }
    }
    fixed_changes = table_changes;
}
