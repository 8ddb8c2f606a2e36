// Threads that share the loops of this library.
//
// A decode step has hundreds of loops of some microseconds. OpenMP's threads sleep between any two of them once a process
// has more of them than cores, and then a second thread makes a step slower. These wait awake for a while, give the core
// to whoever wants it meanwhile, and then sleep. A loop's parts are claimed one by one: nobody waits for a thread that
// sleeps, or whose core another program has.

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

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
    // body(first, last) for parts of [0, size): each is the rest / divisor. One caller has the team, others run alone.
    template <class Body> void run(long size, long divisor, int num_threads, const Body &body) {
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (num_threads < 2 || size < 2 || !turn.try_lock()) return body(0L, size);
        for (; num_workers_ < num_threads - 1; num_workers_++) std::thread([this] { work(); }).detach();
        auto take = [&] {
            for (long first = next_; first < size; first = next_) {
                long last = first + std::max(1L, (size - first) / divisor);
                if (next_.compare_exchange_weak(first, last)) body(first, last);
            }
        };
        using Take = decltype(take);
        call_ = [](const void *self) { (*static_cast<const Take *>(self))(); };
        take_ = &take;
        next_ = 0;
        num_wanted_ = num_threads - 1;
        open_ = true;
        loop_++;
        if (num_asleep_) {
            std::lock_guard<std::mutex> lock(door_);
            wake_.notify_all();
        }
        take();
        open_ = false;
        while (num_inside_) pause_core();  // with the last parts
    }

  private:
    static constexpr int NUM_PAUSES = 1000;  // before the core is offered to others
    static constexpr auto AWAKE = std::chrono::microseconds(300);

    void work() {
        for (unsigned seen = 0;;) {
            wait(seen);
            seen = loop_;
            num_inside_++;  // then the caller waits, if the loop is still open
            if (open_ && num_wanted_.fetch_sub(1) > 0) call_(take_);
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
    void (*call_)(const void *) = nullptr;
    const void *take_ = nullptr;
    alignas(64) std::atomic<unsigned> loop_{0};
    std::atomic<bool> open_{false};
    std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<long> next_{0};
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

// body(i) for i in [0, size), in parts of consecutive numbers: large ones first, so that threads end together.
template <class Body> inline void parallel_for(long size, int num_threads, const Body &body, long parts_a_thread = 4) {
    team().load()->run(size, num_threads * parts_a_thread, num_threads, [&](long first, long last) {
        for (long i = first; i < last; i++) body(i);
    });
}

}  // namespace
