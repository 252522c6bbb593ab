#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace KIND {

namespace {

// A waiting thread spins for a while, because waking it takes as long as many of the jobs. If other programs need the
// CPU, spinning takes their time and wastes this process's share. How long a thread spins depends on the share of its
// time in which it did not get a CPU.
//
//     lost share    spins up to
//     up to 1/50    AWAKE             longer than the gap between steps
//     up to 1/3     AWAKE_IF_SHARED   longer than a job; the server's other threads run in the gap between steps
//     above         AWAKE_IF_BUSY     about as long as the pieces' ends are apart if all threads run
constexpr int64_t AWAKE = 2'000'000;          // ns, as all of these
constexpr int64_t AWAKE_IF_SHARED = 200'000;
constexpr int64_t AWAKE_IF_BUSY = 5'000;
constexpr int64_t BUSY_FOR = 1'000'000'000;   // a thread that often sleeps loses little time, however busy the CPUs
constexpr int64_t WINDOW = 30'000'000;        // time awake of one measurement: several time slices
constexpr int64_t BETWEEN_LOOKS = 20'000;

int64_t now(clockid_t clock = CLOCK_MONOTONIC) {
    timespec t;
    clock_gettime(clock, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    asm volatile("isb" ::: "memory");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// Decides between spinning and sleeping, by the share of its time that this thread lost to other programs.
class Waiter {
   public:
    // Spins until `is_over`, or until sleeping is better; the caller then sleeps.
    template <typename Over>
    bool wait(const Over& is_over) {
        const int64_t begun = now();
        if (!counted_to) count_from(begun);
        for (int64_t time = begun, look = begun + AWAKE_IF_BUSY; time - begun < AWAKE; time = now()) {
            for (int n = 0; n < 8; ++n) {
                if (is_over()) return true;
                pause();
            }
            if (time < look) continue;
            look = time + BETWEEN_LOOKS;
            count(time);
            if (time < busy_until || (time < shared_until && time - begun > AWAKE_IF_SHARED)) break;
        }
        counted_to = 0;  // time asleep is not lost
        return false;
    }

   private:
    int64_t busy_until = 0, shared_until = 0;
    int64_t counted_to = 0, used_then = 0;  // when time was last counted, and the CPU time used until then; 0: asleep
    int64_t passed = 0, used = 0;           // in this window

    void count_from(int64_t time) { counted_to = time, used_then = now(CLOCK_THREAD_CPUTIME_ID); }

    void count(int64_t time) {
        const int64_t since = counted_to, used_before = used_then;
        count_from(time);
        passed += counted_to - since, used += used_then - used_before;
        if (passed < WINDOW) return;
        const int64_t lost = passed - used;
        if (lost > passed / 3) busy_until = time + BUSY_FOR;
        if (lost > passed / 50) shared_until = time + BUSY_FOR;
        passed = used = 0;
    }
};

// The remaining units of one thread's part, both bounds in one word: a successful exchange takes a piece.
class Part {
   public:
    void set(int64_t first, int64_t last) { word.store(joined(first, last), std::memory_order_release); }

    // Takes half of the remaining units, from the front or the end; returns false if none remain.
    bool take(bool from_front, int64_t* first, int64_t* last) {
        uint64_t seen = word.load(std::memory_order_acquire);
        for (;;) {
            const int64_t front = int64_t(seen >> 32), end = int64_t(seen & UINT32_MAX);
            if (front >= end) return false;
            const int64_t some = (end - front + 1) / 2;
            *first = from_front ? front : end - some, *last = *first + some;
            const uint64_t left = from_front ? joined(*last, end) : joined(front, *first);
            // The word may belong to another job by now; the piece is then one of that job.
            if (word.compare_exchange_weak(seen, left, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
        }
    }

   private:
    std::atomic<uint64_t> word{0};
    static uint64_t joined(int64_t first, int64_t last) { return uint64_t(first) << 32 | uint64_t(last); }
};

struct alignas(128) Member {
    Part part;
    std::atomic<uint32_t> bell{0};  // number of the last job that this member was woken for
    std::atomic<uint32_t> is_asleep{0};
};

class Team {
   public:
    static constexpr int MOST = 1024;

    void share_out(int num_threads, int64_t count, Piece piece, const void* job) {
        num_threads = int(std::min<int64_t>(grow(num_threads), count));
        this->piece = piece, this->job = job, ++number;
        left.store(uint32_t(count), std::memory_order_relaxed);
        seats.store(num_threads, std::memory_order_release);
        for (int n = 0; n < num_threads; ++n) members[n]->part.set(count * n / num_threads, count * (n + 1) / num_threads);
        for (int n = 1; n < num_threads; ++n) {
            Member& other = *members[n];
            other.bell.store(number, std::memory_order_seq_cst);
            if (other.is_asleep.load(std::memory_order_seq_cst)) wake(other.bell);
        }
        help(0);
        static thread_local Waiter waiter;
        if (waiter.wait([&] { return !left.load(std::memory_order_acquire); })) return;
        is_caller_asleep.store(1, std::memory_order_seq_cst);
        for (uint32_t some; (some = left.load(std::memory_order_seq_cst));) sleep_while(left, some);
        is_caller_asleep.store(0, std::memory_order_relaxed);
    }

    std::mutex turn;

   private:
    // A taken piece belongs to the current job, which cannot end before it is done; so read these after a take.
    Piece piece = nullptr;
    const void* job = nullptr;
    uint32_t number = 0;
    alignas(128) std::atomic<uint32_t> left{0};     // unfinished units
    std::atomic<uint32_t> is_caller_asleep{0};
    std::atomic<int> seats{0};                       // members of the job
    int size = 0;                                    // started members
    std::unique_ptr<Member> members[MOST];           // the caller is the first

    // Starts members up to the wanted number; returns how many there are.
    int grow(int wanted) {
        for (; size < std::min(wanted, MOST); ++size) {
            members[size] = std::make_unique<Member>();
            if (size && !start(size)) break;
        }
        return std::min(size, wanted);
    }

    // Starts a helper that blocks all signals, which are the program's. Returns false if no thread can be started.
    bool start(int n) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool started = true;
        try {
            std::thread([this, n] {
                pthread_setname_np(pthread_self(), "space-helper");
                live(n, *members[n]);
            }).detach();
        } catch (const std::system_error&) {
            started = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }

    // Does what remains of the job, this member's own part first.
    void help(int own) {
        const int num_parts = seats.load(std::memory_order_acquire);
        uint32_t last_number = 0, num_done = 0;
        bool is_first = true;
        for (int n = 0; n < num_parts;) {
            int64_t first, last;
            if (!members[(own + n) % num_parts]->part.take(n == 0, &first, &last)) {
                ++n;
                continue;
            }
            const bool fresh = is_first || number != last_number;
            is_first = false, last_number = number;
            piece(job, first, last, fresh);
            num_done = uint32_t(last - first);
            if (left.fetch_sub(num_done, std::memory_order_seq_cst) == num_done &&
                is_caller_asleep.load(std::memory_order_seq_cst))
                wake(left);
        }
    }

    void live(int own, Member& me) {
        Waiter waiter;
        for (uint32_t known = 0;;) {
            auto called = [&] { return me.bell.load(std::memory_order_acquire) != known; };
            while (!called()) {
                if (waiter.wait(called)) break;
                me.is_asleep.store(1, std::memory_order_seq_cst);
                if (me.bell.load(std::memory_order_seq_cst) == known) sleep_while(me.bell, known);
                me.is_asleep.store(0, std::memory_order_relaxed);
            }
            known = me.bell.load(std::memory_order_acquire);
            help(own);
        }
    }
};

// Never destroyed: its threads may be asleep in it when the process ends. A forked child has none of these threads.
Team* team = new Team;
const int on_fork = pthread_atfork(nullptr, nullptr, [] { team = new Team; });

}  // namespace

void share_out(int num_threads, int64_t count, Piece piece, const void* job) {
    if (count <= 0) return;
    if (num_threads > 1 && count > 1 && count <= UINT32_MAX) {
        if (std::unique_lock turn(team->turn, std::try_to_lock); turn) return team->share_out(num_threads, count, piece, job);
    }
    piece(job, 0, count, true);
}

}  // namespace KIND
