#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "team.h"

namespace KIND {

namespace {

// One expert's rows, by num_threads threads.
void feed_forward(const Experts& e, const ExpertRows& p, int64_t expert, int num_threads) {
    const int64_t first = p.bounds[expert], rows = p.bounds[expert + 1] - first;
    multiply(e.gate_up[expert],
             {p.gathered + first * e.hidden, rows, e.hidden, p.inner + first * e.inner, e.inner, false, Then::SWIGLU},
             num_threads);
    multiply(e.down[expert],
             {p.inner + first * e.inner, rows, e.inner, p.made + first * e.hidden, e.hidden, true, Then::NOTHING},
             num_threads);
}

}  // namespace

bool experts(const Experts& e, const ExpertRows& p, int num_threads) {
    const int64_t pairs = p.rows * p.per_row;
    std::fill(p.bounds, p.bounds + e.count + 1, 0);
    for (int64_t n = 0; n < pairs; ++n) {
        if (p.experts[n] < 0 || p.experts[n] >= e.count) return false;
        ++p.bounds[p.experts[n] + 1];
    }
    for (int64_t expert = 0; expert < e.count; ++expert) p.bounds[expert + 1] += p.bounds[expert];
    std::vector<int64_t> next(p.bounds, p.bounds + e.count), chosen;
    for (int64_t n = 0; n < pairs; ++n) {
        p.places[n] = next[p.experts[n]]++;
        std::memcpy(p.gathered + p.places[n] * e.hidden, p.x + n / p.per_row * e.hidden, e.hidden * sizeof(bf16));
    }
    for (int64_t expert = 0; expert < e.count; ++expert)
        if (p.bounds[expert] < p.bounds[expert + 1]) chosen.push_back(expert);

    // Whole experts are shared out where there are enough for all threads: two waits in all, rather than two an expert.
    constexpr int64_t EACH = 4;  // experts of a thread, so that the last one to end is not waited for long
    if (int64_t(chosen.size()) >= EACH * num_threads)
        share_out(num_threads, chosen.size(), [&](int64_t first, int64_t last, bool) {
            for (int64_t n = first; n < last; ++n) feed_forward(e, p, chosen[n], 1);
        });
    else
        for (int64_t expert : chosen) feed_forward(e, p, expert, num_threads);

    constexpr int64_t LEAST_NUMBERS = 16384;  // summed by a thread: waking another costs more than fewer
    const int64_t unit = std::max<int64_t>(1, LEAST_NUMBERS / std::max<int64_t>(1, p.per_row * e.hidden));
    share_out(num_threads, (p.rows + unit - 1) / unit, [&](int64_t first, int64_t last, bool) {
        for (int64_t row = first * unit; row < std::min(p.rows, last * unit); ++row) {
            const int64_t* places = p.places + row * p.per_row;
            const float* weights = p.weights + row * p.per_row;
            bf16* y = p.y + row * e.hidden;
            int64_t i = 0;
            for (; i + LANES <= e.hidden; i += LANES) {
                Lanes sum = mul(same(weights[0]), load(p.made + places[0] * e.hidden + i));
                for (int64_t n = 1; n < p.per_row; ++n)
                    sum = add(sum, mul(same(weights[n]), load(p.made + places[n] * e.hidden + i)));
                store(y + i, sum);
            }
            for (; i < e.hidden; ++i) {
                float sum = weights[0] * p.made[places[0] * e.hidden + i];
                for (int64_t n = 1; n < p.per_row; ++n) {
                    const float one = weights[n] * p.made[places[n] * e.hidden + i];
                    sum = sum + one;
                }
                y[i] = round(sum);
            }
        }
    });
    return true;
}

}  // namespace KIND
