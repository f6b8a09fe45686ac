// Chooses the number of threads with which a context decodes. All threads meet at hundreds of barriers per token. If
// another process occupies a core, every barrier waits for the thread that has no core, and fewer threads are faster.
//
// Therefore fewer threads are tried for some steps if threads often wait for a core, and later more threads. The faster
// number is kept. On an idle machine all threads are used.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

class moe_edge_threads {
  public:
    explicit moe_edge_threads(int32_t most) : most_(most), usual_(most) {}

    int32_t most() const { return most_; }

    // Returns the number of threads for the next step, which has n_tokens tokens. A step with many tokens gets all
    // threads: it has few barriers per token, so every core helps.
    int32_t count(int32_t n_tokens) const { return n_tokens > FEW_TOKENS ? most_ : tried_ > 0 ? tried_ : usual_; }

    // Records a step of n_tokens tokens that took `us` microseconds and ended at now_us. delay_us: returns for how many
    // microseconds the compute threads have waited for a core so far, as a sum over all threads. It returns a negative
    // number if the kernel does not report the time.
    void step(int32_t n_tokens, uint64_t us, uint64_t now_us, const std::function<int64_t()> & delay_us) {
        if (n_tokens != n_tokens_) {  // steps of different sizes are not comparable
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
    static constexpr uint64_t STRETCH_US    = 30000;    // a few time slices
    static constexpr int32_t  LEAST_STEPS = 5;          // steps differ by the experts that must be read
    static constexpr double   SHARED        = 0.125;    // mean number of threads waiting for a core
    static constexpr double   GAIN          = 0.05;     // least improvement that justifies a change
    static constexpr uint64_t LEAST_HOLD_US = 250000;   // between two tries; doubles after each failed try
    static constexpr uint64_t MOST_HOLD_US  = 2000000;
    static constexpr uint64_t MOST_BUSY_HOLD_US = 8000000;  // the maximum while threads constantly wait for cores

    void begin() {
        us_ = 0;
        n_steps_ = 0;
    }

    // Evaluates a period of steps with the same number of threads, and chooses the number for the next period. step_us:
    // mean duration of a step. waiting: mean number of threads that waited for a core.
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
    int32_t  tried_    = 0;     // number of threads tried in this period; 0: the usual number
    bool     fewer_    = true;  // on a busy machine, try fewer threads next; otherwise more
    double   usual_us_ = 0;     // mean step time of the last period with the usual number
    uint64_t hold_us_  = LEAST_HOLD_US;
    uint64_t tried_at_us_ = 0;  // end of the latest try
    int64_t  delay_us_ = -1;    // total of delay_us() at the start of this period
    int32_t  n_tokens_ = 0;     // tokens per step in this period
    uint64_t us_       = 0;
    int32_t  n_steps_  = 0;
};
