// Implements loads of a store on a device: slices are read from files into the host tier, and copied from there to the
// device.
//
// If the host tier already has a requested slice, the requesting thread enqueues the copy itself. A separate thread
// enqueues copies that no op waits for, one at a time. A demand copy therefore waits for few others, and copies that
// are no longer needed can be cancelled.

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
        // Limit the rate of a transition (a background change of tier) only if the host tier already had its bytes.
        // Otherwise the read from disk was limited.
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

// Does all queued reads and copies on the calling thread. It does not wait for the device to end the copies, so that
// the counters do not depend on the device's speed. Several prefetch copies may therefore be in flight.
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

// Returns the ticket of the prefetch copy that is in flight, or 0 if there is none. At most one prefetch copy is in
// flight at a time. Copies have no priorities, so a demand copy waits for the copies that were enqueued before it.
moe_edge_ticket moe_edge_store::ahead_in_flight() {
    return device->passed(ahead_copy) ? 0 : ahead_copy;
}

// Enqueues the copy to the device of a load whose bytes are in the host tier. If the device refuses it, the load fails.
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

// Returns whether all bytes of a load are complete, on the device too, so that a reader need not wait.
bool moe_edge_store::landed(int32_t cell) const {
    const auto & load = *cells[cell].load();
    return load.arrived() && (!load.copied() || device->passed(pools[slice_of(cell, load.tier()).group][load.slot()].after));
}

// Finds a read that can go on because it has a slot of the host tier, and returns its cache entry. The most urgent read
// gets a slot if one can be reserved. If not, a read that already has a slot is continued. If no read has a slot, the
// function waits until a slot may be free and returns -1; the caller then tries again.
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

// Decides at a step boundary whether the expert tables are static, which means that they do not change before the next
// step boundary. They are static if no policy decides in this step and every expert is resident in the tier that will
// be requested, or in a better one.
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
