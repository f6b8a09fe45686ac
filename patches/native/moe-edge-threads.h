// With how many threads a context decodes: as many as find a core.
//
// Threads that compute a token meet at hundreds of barriers. Where other processes take cores, each barrier ends
// with the thread that waits longest for one, and fewer threads are faster. So where threads are often ready without
// a core, a stretch of steps is tried with fewer, and where they are not, one with more; what was faster stays.
// An idle machine is never tried on. Threads that read for the model take cores as well, and then fewer that compute are
// slower: so with fewer than all, tries with more go on however often threads wait.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

class moe_edge_threads {
  public:
    explicit moe_edge_threads(int32_t most) : most_(most), usual_(most) {}

    int32_t most() const { return most_; }

    // Of the next step, of n_tokens. With many tokens barriers are few, and every core helps.
    int32_t count(int32_t n_tokens) const { return n_tokens > FEW_TOKENS ? most_ : tried_ > 0 ? tried_ : usual_; }

    // A step of n_tokens took us and ended at now_us. delay_us says how long all threads that compute have been ready
    // without a core, since ever; it is asked once a stretch. Below 0 where the kernel does not say, and then all
    // threads compute.
    void step(int32_t n_tokens, uint64_t us, uint64_t now_us, const std::function<int64_t()> & delay_us) {
        if (n_tokens != n_tokens_) {  // steps that do not compare
            n_tokens_ = n_tokens;
            tried_    = 0;
            delay_us_ = -1;
            begin();
        }
        if (most_ < 2 || n_tokens > FEW_TOKENS) {
            return;
        }
        us_ += us;
        n_steps_++;
        const bool enough = us_ >= STRETCH_US && n_steps_ >= LEAST_STEPS;
        const bool lost   = tried_ > 0 && us_ >= LEAST_STEPS * usual_us_;
        if (!enough && !lost) {
            return;
        }
        const int64_t delay = delay_us();
        if (delay >= 0 && delay_us_ >= 0) {
            judge(double(us_) / n_steps_, double(std::max<int64_t>(0, delay - delay_us_)) / us_, now_us);
        }
        delay_us_ = delay;
        begin();
    }

  private:
    static constexpr int32_t  FEW_TOKENS    = 16;
    static constexpr uint64_t STRETCH_US    = 30000;    // some time slices
    static constexpr int32_t  LEAST_STEPS = 5;          // they differ by what has to be read
    static constexpr double   SHARED        = 0.125;    // threads that wait for a core, in the mean
    static constexpr double   GAIN          = 0.05;     // what a change has to bring
    static constexpr uint64_t LEAST_HOLD_US = 250000;   // between two tries; twice as long after each that failed
    static constexpr uint64_t MOST_HOLD_US  = 2000000;
    static constexpr uint64_t MOST_BUSY_HOLD_US = 8000000;  // the same where threads wait for cores all the while

    void begin() {
        us_ = 0;
        n_steps_ = 0;
    }

    // A stretch with as many threads: microseconds of a step, and how many threads waited for a core.
    void judge(double step_us, double waiting, uint64_t now_us) {
        if (tried_ > 0) {
            const bool better = step_us < (1 - GAIN) * usual_us_;
            fewer_   = better ? tried_ < usual_ : !fewer_;
            usual_   = better ? tried_ : usual_;
            hold_us_ = better ? LEAST_HOLD_US : std::min(2 * hold_us_, MOST_BUSY_HOLD_US);
            tried_   = 0;
            tried_at_us_ = now_us;
            return;
        }
        usual_us_ = step_us;
        const bool busy = waiting > SHARED;
        if (now_us < tried_at_us_ + std::min(hold_us_, busy ? MOST_BUSY_HOLD_US : MOST_HOLD_US)) {
            return;
        }
        if (busy && usual_ > 1 && (fewer_ || usual_ == most_)) {
            tried_ = std::max(1, usual_ - std::max(1, (int32_t) std::lround(waiting)));
        } else if (usual_ < most_) {
            tried_ = std::min(most_, 2 * usual_);
        } else {
            hold_us_ = LEAST_HOLD_US;
        }
    }

    const int32_t most_;
    int32_t  usual_;
    int32_t  tried_    = 0;     // in this stretch; 0: the usual number
    bool     fewer_    = true;  // is what a busy machine is tried on with next; else more
    double   usual_us_ = 0;     // of a step, in the last stretch with the usual number
    uint64_t hold_us_  = LEAST_HOLD_US;
    uint64_t tried_at_us_ = 0;  // when the latest try ended
    int64_t  delay_us_ = -1;    // where this stretch began
    int32_t  n_tokens_ = 0;     // of the steps of this stretch
    uint64_t us_       = 0;
    int32_t  n_steps_  = 0;
};
