// Threads that share the loops of this library.
//
// A decode step has hundreds of loops of some microseconds. OpenMP's threads sleep between any two of them once a process
// has more of them than cores, and then a second thread makes a step slower. These wait awake for a while, give the core
// to whoever wants it meanwhile, and then sleep. Each thread has an equal share of consecutive numbers: what it prefetches
// beyond one of them is its own. When it has finished, it takes half of what is left to another: nobody waits for a
// thread that sleeps, or whose core another program has.

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

inline void pause_core() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    // body(i) for i in [0, size). One caller has the team, others run alone.
    template <class Body> void run(long size, int num_threads, const Body &body) {
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (num_threads < 2 || size < 2 || !turn.try_lock()) {
            for (long i = 0; i < size; i++) body(i);
            return;
        }
        for (; num_workers_ < num_threads - 1; num_workers_++) std::thread([this] { work(); }).detach();
        if (int(shares_.size()) < num_threads) shares_ = std::vector<Share>(num_threads);
        for (int t = 0; t < num_threads; t++) shares_[t].left = range(size * t / num_threads, size * (t + 1) / num_threads);
        auto take = [&](int self) {
            for (long i; (i = next(self, num_threads)) >= 0;) body(i);
        };
        using Take = decltype(take);
        call_ = [](const void *take, int self) { (*static_cast<const Take *>(take))(self); };
        take_ = &take;
        num_wanted_ = num_threads - 1;
        open_ = true;
        loop_++;
        if (num_asleep_) {
            std::lock_guard<std::mutex> lock(door_);
            wake_.notify_all();
        }
        take(0);
        open_ = false;
        while (num_inside_) pause_core();  // with the last parts
    }

  private:
    static constexpr int NUM_PAUSES = 1000;  // before the core is offered to others
    static constexpr auto AWAKE = std::chrono::microseconds(300);

    struct alignas(64) Share {
        std::atomic<uint64_t> left;  // a `range`
    };

    static uint64_t range(long first, long last) { return uint64_t(first) << 32 | uint64_t(last); }

    // A number that thread `self` claims: the first one of its share, or half of what is left to another; -1: none is left.
    long next(int self, int num_threads) {
        for (int t = 0; t < num_threads; t++) {
            auto &share = shares_[(self + t) % num_threads].left;
            for (uint64_t left = share;;) {
                long first = left >> 32, last = uint32_t(left), begin = t ? last - (last - first + 1) / 2 : first;
                if (first >= last) break;
                if (!share.compare_exchange_weak(left, t ? range(first, begin) : range(first + 1, last))) continue;
                if (t) shares_[self].left = range(begin + 1, last);
                return begin;
            }
        }
        return -1;
    }

    void work() {
        for (unsigned seen = 0;;) {
            wait(seen);
            seen = loop_;
            num_inside_++;  // then the caller waits, if the loop is still open
            if (int self; open_ && (self = num_wanted_.fetch_sub(1)) > 0) call_(take_, self);
            num_inside_--;
        }
    }

    void wait(unsigned seen) {
        for (int i = 0; i < NUM_PAUSES; i++) {
            if (loop_ != seen) return;
            pause_core();
        }
        for (auto until = std::chrono::steady_clock::now() + AWAKE; std::chrono::steady_clock::now() < until;) {
            if (loop_ != seen) return;
            sched_yield();
        }
        std::unique_lock<std::mutex> lock(door_);
        num_asleep_++;
        wake_.wait(lock, [&] { return loop_ != seen; });
        num_asleep_--;
    }

    std::mutex turn_, door_;
    std::condition_variable wake_;
    int num_workers_ = 0;
    void (*call_)(const void *, int) = nullptr;
    const void *take_ = nullptr;
    alignas(64) std::atomic<unsigned> loop_{0};
    std::atomic<bool> open_{false};
    std::atomic<int> num_asleep_{0};
    std::vector<Share> shares_;
    alignas(64) std::atomic<int> num_inside_{0}, num_wanted_{0};
};

// Never destroyed: its threads outlive static objects. A forked process makes its own.
inline std::atomic<Team *> &team() {
    static std::atomic<Team *> instance = [] {
        pthread_atfork(nullptr, nullptr, [] { team() = new Team; });
        return new Team;
    }();
    return instance;
}

// body(i) for i in [0, size).
template <class Body> inline void parallel_for(long size, int num_threads, const Body &body) {
    team().load()->run(size, num_threads, body);
}

}  // namespace
