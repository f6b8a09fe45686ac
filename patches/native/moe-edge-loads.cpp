// Implements loads of experts into slots: from the request to the complete load, including evictions. All functions
// require the store's mutex.

#include "moe-edge-store.h"
#include "moe-edge-util.h"

#include "ggml.h"

#include <algorithm>

namespace {

// The position of each matrix kind in the order in which a layer computes its matrices.
constexpr int32_t KIND_RANK[MOE_EDGE_N_KINDS] = { /* up */ 1, /* gate */ 0, /* gate_up */ 0, /* down */ 2 };

}  // namespace

// ---- slots

// Marks an entry as used now. Also marks the slot into which it is being loaded, so that the LRU order does not depend
// on the speed of the disk.
void moe_edge_store::touch(int32_t cell) {
    auto & c = cells[cell];
    if (auto * load = c.load()) {
        if (load->has_slot()) {
            pool_of(cell, load->tier()).use(load->slot(), ++clock);
        } else if (load->slotless()) {
            load->touch(++clock);
        }
    }
    if (c.resident()) {
        pool_of(cell, c.tier()).use(c.slot(), ++clock);
    }
}

// Returns whether the resident tier of an entry may be evicted. It may if no op of this step needs the entry, and if
// its expert is not in transition (a background change of tier).
bool moe_edge_store::may_go(int32_t cell) const { return !cells[cell].pinned() && !in_transition(cell); }

// Returns the complete slot of a pool that should be evicted first, or -1 if no slot may be evicted. Slots of streaming
// requests (of long prompts) come first, and then the least recently used slot. A prefetch does not evict experts of
// its own prefetch list.
int32_t moe_edge_store::least_useful(const moe_edge_pool & pool, const moe_edge_claim & claim) const {
    const auto oldest = [&](bool of_passing) {
        return pool.oldest([&](const moe_edge_pool::slot & s) {
            return s.passing == of_passing && may_go(s.cell) && !cells[s.cell].foreseen_since(claim.list);
        });
    };
    const int32_t slot = pool.has_passing() ? oldest(true) : -1;
    return slot < 0 && (!claim.passing || pool.may_pass()) ? oldest(false) : slot;
}

// Takes a slot of a pool for an entry: a free slot, or otherwise the slot of another entry that is evicted. Returns -1
// if no slot can be taken.
int32_t moe_edge_store::take_slot(moe_edge_pool & pool, int32_t cell, const moe_edge_claim & claim) {
    const bool request = claim.list == MOE_EDGE_NO_LIST;
    while (!pool.has_free()) {
        int32_t slot = least_useful(pool, claim);
        if (slot < 0 && request && revoke(pool)) {
            continue;
        }
        // As a last resort, evict an entry that waits for a better tier than its resident tier. The resident tier is of
        // no use to this step.
        if (slot < 0 && request && pool.mixed) {
            slot = pool.oldest([&](const moe_edge_pool::slot & s) { return cells[s.cell].lacks() && !in_transition(s.cell); });
        }
        if (slot < 0) {
            return -1;
        }
        evict(pool[slot].cell);
    }
    stats.slot_bytes_in_use += pool.slot_bytes;
    stats.slot_bytes_peak = std::max(stats.slot_bytes_peak, stats.slot_bytes_in_use);
    return pool.take(cell, claim);
}

// Removes the resident tier of an entry.
void moe_edge_store::drop_tier(int32_t cell) {
    auto & c    = cells[cell];
    auto & pool = pool_of(cell, c.tier());
    stats.prefetch_wasted += pool[c.slot()].prefetched;
    if (host && !pool[c.slot()].passing) {
        host->touch(slice_id(cell, c.tier()));
    }
    set_entry(cell, {});
    pool.give(c.slot());
    stats.slot_bytes_in_use -= pool.slot_bytes;
    c.drop();
}

void moe_edge_store::set_entry(int32_t cell, const moe_edge_entry & entry) {
    auto & m = matrices[layer_of(cell)][kind_of(cell)];
    m.table[expert_of(cell)] = entry;
    m.version++;
    table_changes++;
    stats.table_writes++;
}

void moe_edge_store::point_to_slot(int32_t cell) {
    const auto & c    = cells[cell];
    const auto & pool = pool_of(cell, c.tier());
    const bool copied = staged(cell, c.tier());
    set_entry(cell, { pool.data(c.slot()) + (copied ? 0 : offset_in_block(cell, c.tier())), slice_of(cell, c.tier()).type,
        copied ? pool[c.slot()].after : 0 });
}

void moe_edge_store::evict(int32_t cell) {
    drop_tier(cell);
    update_resident(cell);
    stats.evictions++;
}

void moe_edge_store::serve_waiting(moe_edge_pool & pool) {
    while (pool.awaited()) {
        const int32_t cell = pool.first_waiting();
        auto & c = cells[cell];
        if (c.lacks() && !c.load() && !try_load(cell, c.want(), c.passing())) {
            return;
        }
        c.served();
        pool.served();
    }
}

void moe_edge_store::serve_waiting(const moe_edge_matrix & m) {
    for (int32_t t = 0; t < n_tiers; t++) {
        serve_waiting(pools[slices[m.layer][m.kind][t].group]);
    }
}

void moe_edge_store::update_resident(int32_t cell) {
    const int32_t layer  = layer_of(cell);
    const int32_t expert = expert_of(cell);
    uint8_t worst = 0, none = 0;
    for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
        if (has_kind(layer, k)) {
            const auto & c = cells[cell_index(layer, k, expert)];
            worst = std::max<uint8_t>(worst, c.resident() ? c.tier() : MOE_EDGE_ABSENT);
            none |= !c.resident() << k;
        }
    }
    resident[(size_t) layer * n_expert + expert] = worst;
    missing[(size_t) layer * n_expert + expert]  = none;
}

// ---- queues

moe_edge_read_key moe_edge_store::read_key(int32_t cell) const {
    const auto & load = *cells[cell].load();
    const auto & s    = slice_of(cell, load.tier());
    return load.in_transition() ? moe_edge_read_key(MOE_EDGE_TRANSITING, load.order(), 0, cell)
         : rigid                ? moe_edge_read_key(MOE_EDGE_DEMANDED, load.order(), 0, cell)
         : load.ahead()         ? moe_edge_read_key(MOE_EDGE_AHEAD, load.order(), 0, cell)
                                : moe_edge_read_key(MOE_EDGE_DEMANDED, KIND_RANK[kind_of(cell)], s.offset + expert_of(cell) * s.expert_bytes, cell);
}

void moe_edge_store::enqueue(int32_t cell) { queue_of(*cells[cell].load()).insert(read_key(cell)); }

void moe_edge_store::dequeue(int32_t cell) {
    if (cells[cell].load()->queued()) {
        queue_of(*cells[cell].load()).erase(read_key(cell));
    }
}

// ---- start of a load

// Starts a load: from the host tier if it contains the bytes, otherwise from disk.
void moe_edge_store::start_load(int32_t cell, moe_edge_load load) {
    const int32_t found = staged(cell, load.tier()) ? host->find(slice_id(cell, load.tier()), passes_for(cell, load)) : -1;
    if (found >= 0) {
        load.finds(found);
    } else {
        load.reads_parts(moe_edge_parts_of(slice_of(cell, load.tier())));
    }
    cells[cell].begin(load);
    if (load.queued()) {
        enqueue(cell);
    }
}

bool moe_edge_store::try_load(int32_t cell, int32_t tier, bool passing, moe_edge_purpose purpose) {
    const int32_t slot = take_slot(pool_of(cell, tier), cell, { clock + 1, MOE_EDGE_NO_LIST, passing });
    if (slot < 0) {
        return false;
    }
    clock++;
    const int32_t order = purpose == moe_edge_purpose::TRANSITION ? transition_seq++ : rigid ? ahead_seq++ : 0;
    start_load(cell, moe_edge_load::into_slot(tier, purpose, order, slot));
    return true;
}

// Queues a prefetch. The prefetch takes its slot only when its read starts, so that a cancelled prefetch evicts
// nothing.
void moe_edge_store::load_ahead(int32_t cell, int32_t tier, bool passing, moe_edge_purpose purpose) {
    start_load(cell, moe_edge_load::ahead(tier, purpose, ahead_seq++, { ++clock, n_lists, passing }));
}

void moe_edge_store::load_or_wait(int32_t cell) {
    auto & c    = cells[cell];
    auto & pool = pool_of(cell, c.want());
    if (!c.waiting() && (pool.awaited() || !try_load(cell, c.want(), c.passing()))) {
        c.wait();
        pool.wait(cell);
    }
}

// Takes a slot for a load that has none yet. Returns false if no slot can be taken, or if other entries have waited
// longer for a slot.
bool moe_edge_store::claim_slot(int32_t cell) {
    auto & load = *cells[cell].load();
    auto & pool = pool_of(cell, load.tier());
    const int32_t slot = !load.ahead() && pool.awaited() ? -1 : take_slot(pool, cell, load.claim());
    if (slot < 0) {
        return false;
    }
    load.take_slot(slot);
    return true;
}

// Returns whether only streaming requests (of long prompts, which need nearly all experts) asked for this load. The LRU
// order of the host tier does not count such a load as a use of the expert.
bool moe_edge_store::passes_for(int32_t cell, const moe_edge_load & load) {
    return load.in_place() ? cells[cell].passing() : load.slotless() ? load.claim().passing : pool_of(cell, load.tier())[load.slot()].passing;
}

// ---- end of a load

// Cancels a read that has not started.
void moe_edge_store::cancel_read(int32_t cell) {
    dequeue(cell);
    stats.prefetch_cancelled += cells[cell].load()->purpose() == moe_edge_purpose::AHEAD;
    discard_load(cell);
}

// Cancels a load that is being read. Parts that threads are reading now are read to their end, and then the load is
// discarded.
void moe_edge_store::abandon(int32_t cell) {
    auto & load = *cells[cell].load();
    dequeue(cell);
    load.give_up();
    if (load.arrived()) {
        settle(cell);  // no thread is working on it
    }
}

// Ends a load without a result, and releases the slots that it holds.
void moe_edge_store::free_load(int32_t cell) {
    auto & load = *cells[cell].load();
    auto & pool = pool_of(cell, load.tier());
    drop_host(cell);
    if (load.in_place()) {
        host->take_back(host_class(cell, load.tier()));
    } else if (load.has_slot()) {
        pool.give(load.slot());
        stats.slot_bytes_in_use -= pool.slot_bytes;
    }
    cells[cell].end();
}

// Ends a load without a result. Its slot goes to the next cache entry that waits for a slot of the same pool.
void moe_edge_store::discard_load(int32_t cell) {
    auto & pool = pool_of(cell, cells[cell].load()->tier());
    free_load(cell);
    serve_waiting(pool);
}

// Continues a load whose parts are all done: copies it to the device, makes its tier the resident one (publishes it),
// or discards it. A load that must wait for an op or for the next step does not change.
void moe_edge_store::settle(int32_t cell) {
    auto & c    = cells[cell];
    auto & load = *c.load();
    if (staged(cell, load.tier()) && !load.copied() && load.good() && !load.in_place()) {
        if (!load.awaited() && !load.in_host_tier() && ahead_in_flight() != 0) {
            // Treat the load like one whose bytes were found in the host tier. The copy thread copies it in its turn.
            load.fetched();
            enqueue(cell);
            copy_cv.notify_one();
            return;
        }
        if (!load.slotless() || claim_slot(cell)) {
            transfer(cell);
        } else {
            load.give_up();  // the host tier keeps the bytes
            stats.prefetch_cancelled += load.purpose() == moe_edge_purpose::AHEAD;
        }
    }
    if (load.in_transition() || c.serves()) {
        return;
    }
    if (load.good() && !load.in_place()) {
        if (!c.pinned() || !c.satisfied()) {
            publish(cell);
        }
        return;
    }
    const bool failed_to_load = load.has_failed();
    discard_load(cell);
    if (c.lacks() && !c.load()) {  // discard_load() may have started its next load
        if (failed_to_load) {
            fail_locked(failed_read.empty() ? "an expert could not be read" : failed_read);
        } else {
            load_or_wait(cell);
        }
    }
}

// Makes the bytes of a complete load the resident bytes of its entry. Bytes in another precision (tier) that were
// resident before are dropped. From now on, the expert table of the matrix points to the loaded bytes.
void moe_edge_store::publish(int32_t cell) {
    auto & c = cells[cell];
    moe_edge_pool * freed = nullptr;
    if (c.resident()) {
        stats.promotions += c.load()->tier() < c.tier();
        freed = &pool_of(cell, c.tier());
        drop_tier(cell);
    }
    const bool foreseen = c.load()->purpose() == moe_edge_purpose::AHEAD && !c.pinned();
    c.publish();
    auto & pool = pool_of(cell, c.tier());
    pool.complete(c.slot(), foreseen);
    point_to_slot(cell);
    update_resident(cell);

    if (c.lacks()) {
        load_or_wait(cell);  // the step needs a better tier than the loaded one
    }
    if (freed) {
        serve_waiting(*freed);
    }
    if (!c.pinned()) {
        serve_waiting(pool);  // the loaded entry may be evicted for a waiting one
    }
}

// ---- reads

// Fills `read` with the next part that a thread should read. Returns false if nothing can be read now.
bool moe_edge_store::begin_read(std::unique_lock<std::mutex> * lock, moe_edge_read & read) {
    const int32_t cell = host ? reserve_host(*lock) : reads.queue.first();
    if (cell < 0) {
        return false;
    }
    auto & load = *cells[cell].load();
    const int32_t tier = load.tier();
    // A prefetch into a slot in host memory takes the slot only when its read starts.
    if (!staged(cell, tier) && load.slotless() && !claim_slot(cell)) {
        cancel_read(cell);
        return false;
    }
    const auto & s      = slice_of(cell, tier);
    const int32_t parts = moe_edge_parts_of(s);
    char * to = load.host_slot() >= 0 ? host->data(load.host_slot()) : pool_of(cell, tier).data(load.slot());
    const bool checks = !reads.simulated() && checksums.due(slice_id(cell, tier));
    read = { cell, tier, &s, expert_of(cell), load.start_part(parts), parts, load.in_transition(), to, checks };
    if (read.part == 0) {
        (load.in_transition() ? stats.transition_bytes : load.ahead() ? stats.prefetch_bytes[phase] : stats.demand_bytes[phase]) += s.expert_bytes;
    }
    reads.began(read);
    if (!load.queued()) {
        reads.queue.erase(read_key(cell));
    }
    return true;
}

// Called after a thread has read one part of an expert matrix, or has failed to read it. After the last part, converts
// the matrix to the CPU's own layout if its slot needs that layout.
void moe_edge_store::end_read(std::unique_lock<std::mutex> * lock, const moe_edge_read & read, const std::string & why,
                              uint64_t took_us, uint32_t crc) {
    auto & load = *cells[read.cell].load();
    if (lock && why.empty() && load.in_last_part() && load.entire() && matrices[layer_of(read.cell)][kind_of(read.cell)].kernels[read.tier]) {
        lock->unlock();
        lay_out(read);
        lock->lock();
    }
    stats.read_us += took_us;
    load.finish_part(crc);
    if (!why.empty()) {
        break_load(read, name_of(read.cell, read.tier) + ": " + why);
    }
    if (!load.arrived()) {
        return;
    }
    if (read.checks && load.entire()) {
        compare(read);
    }
    if (staged(read.cell, read.tier) && load.entire()) {
        host->complete(load.host_slot(), passes_for(read.cell, load));
    }
    settle(read.cell);
    done_cv.notify_all();
}

// Handles a failed part of a load: its other parts are not read, and the load fails.
void moe_edge_store::break_load(const moe_edge_read & read, const std::string & sentence) {
    auto & load = *cells[read.cell].load();
    if (!load.has_failed()) {
        failed_read = sentence;
        dequeue(read.cell);
        load.fail();
    }
}

// Compares the checksum of an expert matrix that was completely read with the expected one. The load fails if they
// differ.
void moe_edge_store::compare(const moe_edge_read & read) {
    if (checksums.fits(slice_id(read.cell, read.tier), cells[read.cell].load()->crc())) {
        return;
    }
    const auto & s = *read.slices;
    break_load(read, format("%s: tensor blk.%d.ffn_%s_exps.weight (%s): offset %llu: expert %d is damaged: its checksum differs",
        reads.files.path(s.file).c_str(), il[layer_of(read.cell)], KIND_NAMES[kind_of(read.cell)], ggml_type_name((ggml_type) s.type),
        (unsigned long long) (s.offset + read.expert * s.expert_bytes), read.expert));
}

void moe_edge_store::lay_out(const moe_edge_read & read) const {
    const auto & kernels = *matrices[layer_of(read.cell)][kind_of(read.cell)].kernels[read.tier];
    moe_edge_interleave(kernels, row_length(*read.slices), read.slices->interleaved_rows, read.slot + offset_in_block(read.cell, read.tier));
}

std::string moe_edge_store::name_of(int32_t cell, int32_t tier) const {
    const auto & s = slice_of(cell, tier);
    return format("%s: expert %d of layer %d (%s, %s)", reads.files.path(s.file).c_str(), expert_of(cell), il[layer_of(cell)],
        KIND_NAMES[kind_of(cell)], ggml_type_name((ggml_type) s.type));
}

void moe_edge_store::wake() {
    while (!unserved.empty()) {
        moe_edge_pool & pool = *unserved.back();
        unserved.pop_back();
        serve_waiting(pool);
    }
    if (owed_bytes > 0 && !tables_fixed) {
        fit();
    }
    while (!copies.empty() && copies.first_urgency() == MOE_EDGE_DEMANDED) {
        start_copy();
    }
    if (!copies.empty()) {
        copy_cv.notify_one();
    }
    reads.wake_threads();
}

uint64_t moe_edge_store::wait_done(std::unique_lock<std::mutex> & lock, int ms) {
    uint64_t took_us = 0;
    if (!reads.simulated()) {
        const uint64_t t0 = now_us();
        if (in_turn) {
            work_in_turn(lock);
        } else {
            done_cv.wait_for(lock, std::chrono::milliseconds(ms));
        }
        return now_us() - t0;
    }
    if (!reads.simulate_next(took_us)) {
        fail_locked("the simulation waits for an expert that no thread reads");
    }
    return took_us;
}
