// A store on a device: from the files into the host tier, from there to the device.
//
// Who asks for a slice that the host tier has, enqueues the copy itself. Copies that nobody
// waits for yet are enqueued by a thread of their own, a few at a time, so that a demand copy
// has few of them before it and a stale one can be taken back.

#include "moe-edge-util.h"

#include <algorithm>
#include <map>

namespace {

// Copies to a device have no priorities: a demand copy waits for those that are under way. So that is bounded
// by time, and in bytes where the link's speed is not known. One copy always goes.
constexpr double   AHEAD_COPY_S     = 0.5e-3;
constexpr uint64_t AHEAD_COPY_BYTES = 8 << 20;

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
                    c.least      = 2;  // one is read while the other one is copied
                }
            }
        }
    }
    std::vector<moe_edge_host_tier::size_class> classes;
    for (auto & [size, c] : by_size) {
        c.least = std::min(c.least, c.n_slices);  // of one expert there is nothing else to read
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
    most_ahead_bytes = config.copy_bytes_per_s > 0.0 ? (uint64_t) (config.copy_bytes_per_s * AHEAD_COPY_S) : AHEAD_COPY_BYTES;
    open_in_place(config);
    copy_thread = std::thread([this] { copy_loop(); });
}

// The most urgent of the loads whose bytes the host tier has.
void moe_edge_store::start_copy() {
    const int32_t cell = std::get<3>(*copies.begin());
    copies.erase(copies.begin());
    auto & c = cells[cell];
    c.started = c.finished = c.parts;
    if (c.background && !c.was_read) {
        hold_transitions(slice_of(cell, c.loading).expert_bytes);
    }
    stats.host_hits[phase] += !c.was_read;
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
        const uint64_t now = clock_us();
        const int32_t cell = std::get<3>(*copies.begin());
        const auto & next = slice_of(cell, cells[cell].loading);
        if (cells[cell].background && !cells[cell].was_read && now < transition_at) {
            copy_cv.wait_for(lock, std::chrono::microseconds(transition_at - now));
        } else if (const moe_edge_ticket oldest = ahead_before(next.expert_bytes); oldest != 0) {
            lock.unlock();
            device->wait(oldest);
            lock.lock();
        } else {
            start_copy();
            wake();
        }
    }
}

// Of copies that nobody waits for, the oldest one under way, where one more of so many bytes would be too
// much; else 0.
moe_edge_ticket moe_edge_store::ahead_before(uint64_t bytes) {
    while (!ahead_copies.empty() && device->passed(ahead_copies.front().first)) {
        ahead_copy_bytes -= ahead_copies.front().second;
        ahead_copies.pop_front();
    }
    return ahead_copies.empty() || ahead_copy_bytes + bytes <= most_ahead_bytes ? 0 : ahead_copies.front().first;
}

// Enqueues the copy of a load whose bytes are in its host slot.
void moe_edge_store::transfer(int32_t cell) {
    auto & c = cells[cell];
    const auto & s = slice_of(cell, c.loading);
    auto & pool = pool_of(cell, c.loading);
    auto & slot = pool.slots[c.loading_slot];
    const int32_t lane = c.ahead || c.background ? MOE_EDGE_LANE_PREFETCH : MOE_EDGE_LANE_DEMAND;
    const char * from = host->data(c.host_slot) + (s.offset + expert_of(cell) * s.expert_bytes) % MOE_EDGE_BLOCK;
    c.ticket = device->copy(lane, pool.memory + c.loading_slot * pool.slot_bytes, from, s.expert_bytes, slot.after);
    if (c.ticket == 0) {
        const std::string why = device->error();
        c.broken    = true;
        failed_read = name_of(cell, c.loading) + ": " + (why.empty() ? device->name() + " refused the copy" : why);
        return;
    }
    c.copied    = true;
    slot.behind = slot.after;
    slot.after  = c.ticket;
    host->feeds(c.host_slot, lane, c.ticket);
    drop_host(cell);
    stats.copy_bytes[phase] += s.expert_bytes;
    if (lane == MOE_EDGE_LANE_PREFETCH) {
        ahead_copies.emplace_back(c.ticket, s.expert_bytes);
        ahead_copy_bytes += s.expert_bytes;
    }
}

// Whether a load is complete for somebody who does not wait for its ticket.
bool moe_edge_store::landed(int32_t cell) const {
    const auto & c = cells[cell];
    return c.arrived() && (!c.copied || device->passed(c.ticket));
}

// The read to go on with, which has a host slot: the most urgent one, or one that has begun and
// holds the slot that this one needs. -1 if it has waited for a copy from such a slot to end; then
// what is most urgent may have changed.
int32_t moe_edge_store::reserve_host(std::unique_lock<std::mutex> & lock) {
    const int32_t cell = most_urgent();
    auto & c = cells[cell];
    if (!staged(cell, c.loading)) {
        return cell;
    }
    if (c.host_slot < 0) {
        c.host_slot = host->reserve(slice_id(cell, c.loading), host_class(cell, c.loading));
    }
    if (c.host_slot >= 0) {
        return cell;
    }
    for (const auto & key : reads) {
        const int32_t other = std::get<3>(key);
        if (cells[other].host_slot >= 0 && host_class(other, cells[other].loading) == host_class(cell, c.loading)) {
            return other;
        }
    }
    const moe_edge_ticket ticket = host->blocked_by(host_class(cell, c.loading));
    if (ticket != 0) {
        lock.unlock();
        device->wait(ticket);
        lock.lock();
    } else {
        work_cv.wait_for(lock, std::chrono::milliseconds(10));  // all are being filled, or held for a copy
    }
    return -1;
}

void moe_edge_store::drop_host(int32_t cell) {
    auto & c = cells[cell];
    if (c.host_slot >= 0) {
        host->drop(c.host_slot);
        c.host_slot = -1;
    }
}

void moe_edge_store::check_device() {
    const std::string why = device->error();
    if (!why.empty()) {
        fail_locked(device->name() + " is lost: " + why);
    }
}

// At a step boundary: whether nothing can change the tables until the next one. That is so where
// nobody decides during a step, and every expert is there as good as it will be asked for.
void moe_edge_store::fix_tables() {
    const bool same = tables_fixed && fixed_changes == table_changes;
    bool fixed = !asks(phase) && !directed && !exact_tiers && !failed && !split;
    for (size_t i = 0; !same && fixed && i < cells.size(); i++) {
        const auto & c = cells[i];
        const bool there = c.tier != NO_TIER && c.tier <= default_tier && (c.loading == NO_TIER || c.background);
        fixed = there || !has_kind(layer_of(i), kind_of(i));
    }
    if (!fixed) {
        collect_counts();  // of the steps that nobody watched
    }
    tables_fixed = fixed;
    if (!tables_fixed || same) {
        return;
    }
    for (auto * m : all_matrices) {  // none without a device
        for (auto & entry : m->table) {
            device->wait(entry.ticket);
            entry.ticket = 0;
        }
    }
    fixed_changes = table_changes;
}
